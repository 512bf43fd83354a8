"""Shapes live in annotations and are checked here: a tour of the library, `sad` included, with
jaxtyping's annotations run by beartype.

The whole suite runs so with `make test-types`.
"""

import pathlib
import subprocess
import sys

TOUR = pathlib.Path(__file__).parent / "support" / "annotations_tour.py"
RUN = f"""
import runpy, sys
from jaxtyping import install_import_hook

sys.path.insert(0, {str(TOUR.parent)!r})
install_import_hook("diffmh", "beartype.beartype")
runpy.run_path({str(TOUR)!r}, run_name="__main__")
"""


def test_shapes_as_annotated():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checked: " in done.stdout, "the annotations were not run"
