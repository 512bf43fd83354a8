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
    quoted = re.search(r"mu +mu_scale +([\d.]+) +([\d.]+) ", README)
    assert quoted is not None
    row = names["table"]["mu", "mu_scale"]
    assert row.trusted and abs(row.derivative - float(quoted[1])) < 4 * float(quoted[2])
    assert abs(row.derivative - 0.76234) < 4 * row.error  # exactly, by quadrature


def test_a_model_comes_first():
    """Eight schools from NumPyro to a table in 12 lines; the table and the density's code begin
    within 45 lines.
    """
    first, second = re.finditer(r"```python\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for line in first[1].splitlines() if line.strip()]
    assert len(lines) <= 12 and "numpyro" in lines[0] and lines[-1] == "print(table)"
    assert README[: second.start()].count("\n") < 45


def test_it_takes_two_screens():
    assert len(README.splitlines()) <= 90


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []
