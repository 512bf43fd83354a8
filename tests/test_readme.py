"""The README's code runs, in order, as a reader would run it; and what it quotes of `make demo` is what the demo computes."""

import pathlib
import re

import jax

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_code_of_the_readme():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    report = names["probabilities"].run(0.4, jax.random.key(0))
    quoted = f"{report.value[0]:.4f} ± {report.value_error[0]:.4f} | **{report.gradient[0]:.4f} ± {report.gradient_error[0]:.4f}**"
    assert quoted.replace("-", "−") in README
