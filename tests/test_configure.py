"""`diffmh.configure`: the switch of XLA for small loops."""

import os
import subprocess
import sys

import jax
import pytest

import diffmh
from diffmh.runs.configure import small_loops_are_on

SWITCH = "xla_cpu_small_while_loop_byte_threshold"
OPTIONS = "--xla_backend_extra_options="


@pytest.fixture
def not_started(monkeypatch):
    """As if JAX had not been used yet."""
    monkeypatch.setattr("diffmh.jaxprs.compat.backend_has_started", lambda: False)


@pytest.mark.parametrize(
    ("flags", "on", "off"),
    [
        ("", f"{OPTIONS}{SWITCH}=65536", ""),
        ("--xla_a=1", f"--xla_a=1 {OPTIONS}{SWITCH}=65536", "--xla_a=1"),
        (f"{OPTIONS}b=2,c --xla_a", f"--xla_a {OPTIONS}b=2,c,{SWITCH}=65536", None),
    ],
)
def test_other_flags_stay(flags, on, off, monkeypatch, not_started):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert not small_loops_are_on()
    diffmh.configure(small_loops=True)
    assert os.environ["XLA_FLAGS"] == on
    assert small_loops_are_on()
    diffmh.configure(small_loops=False)
    assert os.environ["XLA_FLAGS"] == (f"--xla_a {OPTIONS}b=2,c" if off is None else off)


def test_too_late(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(RuntimeError, match=f"before JAX is used.*{SWITCH}=65536"):
        diffmh.configure(small_loops=True)
    assert os.environ["XLA_FLAGS"] == ""
    # What is so already is no change.
    diffmh.configure(small_loops=False)


def test_it_is_a_flag():
    with pytest.raises(TypeError, match=r"configure\(small_loops=...\)"):
        diffmh.configure(small_loops="yes")  # pyright: ignore


def test_xla_sees_it():
    """XLA ends the process over a setting that it cannot read: so it has been told."""
    program = (
        "import os, diffmh\n"
        "import diffmh.runs.configure as module\n"
        "module._BYTES = 'not a number'\n"
        "diffmh.configure(small_loops=True)\n"
        "import jax, jax.numpy as jnp\n"
        "print(jax.lax.fori_loop(0, jnp.int32(3), lambda i, x: x + i, 0))\n"
    )
    environment = {**os.environ, "XLA_FLAGS": ""}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert found.returncode != 0 or "not a number" in found.stderr
