"""The command line: what it says at once, and with what is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import diffmh
from diffmh_command import main


@pytest.mark.parametrize("arguments", [["--help"], ["reproduce", "--help"], ["--version"]])
def test_it_answers_without_loading_jax(arguments):
    code = f"""
import sys
from diffmh_command import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0
print("loaded:", [name for name in ("jax", "numpy", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("loaded: []"), done.stdout + done.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diffmh {diffmh.__version__}\n"


def test_no_command_is_a_request_for_help(capsys):
    assert main([]) == 0
    assert "reproduce" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["paint"], ["reproduce", "--seed", "one"]])
def test_what_is_not_understood(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "invalid" in capsys.readouterr().err


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "diffmh", "--version"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"diffmh {diffmh.__version__}\n"
