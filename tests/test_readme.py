"""The README's code runs, in order, as a reader would run it; and what it quotes of `make
example` is what the demo computes.
"""

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
    number = r"([−\d.]+) ± ([\d.]+)"
    quoted = re.search(rf"\| diffmh \| {number} \| \*\*{number}\*\* \|", README)
    assert quoted is not None
    value, value_error, slope, slope_error = (
        float(text.replace("−", "-")) for text in quoted.groups()
    )
    # Another processor may round another way and flip a decision: the same numbers to within their
    # own errors.
    assert (
        abs(value - report.value[0]) < value_error and abs(slope - report.gradient[0]) < slope_error
    )
    samples = re.search(r"effective samples ([\d,]+)", README)
    assert samples is not None
    entropy = names["entropy"].run(0.4, jax.random.key(0))
    assert abs(float(samples[1].replace(",", "")) / entropy.effective_samples - 1) < 0.01
