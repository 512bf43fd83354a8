"""What is published says the same everywhere."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

import diffmh

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        ("recipe/recipe.yaml", r'^  version: "(\S+)"$'),
        ("CHANGELOG.md", r"^## (\d\S*?),? "),
    ],
)
def test_one_version(name, pattern):
    found = re.search(pattern, (ROOT / name).read_text(), flags=re.MULTILINE)
    assert found is not None and found[1] == diffmh.__version__


def test_the_conda_recipe_needs_what_the_package_needs():
    text = (ROOT / "recipe/recipe.yaml").read_text()
    run = re.search(r"  run:\n((?:    - .*\n)+)", text)
    assert run is not None
    needed = {line.removeprefix("    - ").replace(" ", "") for line in run[1].splitlines()}
    python = "python" + PROJECT["requires-python"]
    assert needed == {python, *(line.replace(" ", "") for line in PROJECT["dependencies"])}


def test_every_version_of_python_that_is_tested_is_named():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    tested = set(re.findall(r'python: "(3\.\d+)"', workflow))
    named = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if ":: 3." in line}
    assert tested == named and f">={min(tested)}" == PROJECT["requires-python"]
