"""Everything that is published says the same."""

from __future__ import annotations

import importlib.util
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


def test_a_release_knows_its_home():
    """PyPI shows the README by itself: no link in it may be relative to a checkout."""
    spec = importlib.util.spec_from_file_location("home", ROOT / ".github" / "home.py")
    assert spec is not None and spec.loader is not None
    home = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(home)
    readme = home.absolute((ROOT / "README.md").read_text(), "someone/diffmh", "v1.2.3")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 5 and all(link.startswith("https://") for link in links)
    picture = "https://raw.githubusercontent.com/someone/diffmh/v1.2.3/docs/figures/branching.png"
    assert f"({picture})" in readme
    project = home.with_urls((ROOT / "pyproject.toml").read_text(), "someone/diffmh")
    urls = tomllib.loads(project)["project"]["urls"]
    assert urls["Homepage"] == "https://github.com/someone/diffmh" and len(urls) == 4
