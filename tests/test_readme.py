"""The README's code runs, in order, as a reader would run it; and what it quotes of `make
example` is what the demo computes.
"""

import pathlib
import re

import jax

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_code_of_the_readme():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
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
    assert abs(names["path"].last - 1.066) < 0.2


def test_it_takes_two_screens():
    assert len(README.splitlines()) <= 90


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
