"""`import diffmh` in a fresh interpreter: what it loads, and what it leaves for later."""

from __future__ import annotations

import subprocess
import sys

# Slow to load, or not there without an extra: who needs one imports it where it is used.
LATER = (
    "scipy.stats",
    "scipy.optimize",
    "matplotlib",
    "optax",
    "tqdm",
    "arviz_base",
    "xarray",
)


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_import_loads_only_what_every_user_needs():
    loaded = fresh(f"import sys, diffmh; print([name for name in {LATER} if name in sys.modules])")
    assert loaded == "[]"
