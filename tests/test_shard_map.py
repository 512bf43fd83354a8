"""Under `jax.shard_map`, with its checks on, an expectation is still an ordinary JAX function."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
CASES = [
    "call",
    "call_unchecked",
    "own_theta",
    "gradient_inside",
    "gradient_inside_of_its_own",
    "gradient_outside",
    "vmap_inside",
    "vmap_outside",
    "sad_gradient",
    "sad_gradients_of_many",
    "sad_by_score_is_refused",
]


@functools.cache
def found(devices: int):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(HERE / "support" / "shard_map_cases.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_shard_map(case):
    got, wanted = found(2)[case]
    assert np.any(np.asarray(wanted) != 0), "there is something to compare"
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_every_case_is_looked_at():
    assert sorted(found(2)) == sorted(CASES)
