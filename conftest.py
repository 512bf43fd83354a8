"""Compiled programs of a file are let go after it: a process that keeps those of all files runs out
of memory maps and crashes.
"""

import gc

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _let_programs_go():
    yield
    jax.clear_caches()
    gc.collect()
