"""docs/architecture.md shows the code as it is."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def test_the_picture_is_that_of_the_code():
    script = ROOT / "docs" / "draw_architecture.py"
    found = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
