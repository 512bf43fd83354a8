"""Chains shared out over devices: the same numbers on 1, 2 and 4 of them."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import diffmh
from diffmh._sharding import check_mesh
from diffmh.models import gaussian

HERE = pathlib.Path(__file__).parent


@functools.cache
def found(devices: int) -> dict[str, list[float]]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(HERE / "sharding_cases.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("devices", [2, 4])
def test_numbers_do_not_depend_on_devices(devices):
    one, several = found(1), found(devices)
    assert one.keys() == several.keys()
    for name in one:
        np.testing.assert_allclose(several[name], one[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_chains_are_those_without_a_mesh(devices):
    """Bit for bit: a device's share is no other sampler."""
    import sharding_cases

    plain = diffmh.expectation(
        sharding_cases.MEAN.simulation.f,
        sharding_cases.MEAN.simulation.kernel,
        init=sharding_cases.start,
        num_samples=10,
        num_chains=8,
    )
    wanted = plain.per_chain(0.5, sharding_cases.KEY, 1.2)
    np.testing.assert_array_equal(found(devices)["each chain"], np.ravel(wanted))


def test_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(ValueError, match="axis named 'chains'"):
        diffmh.expectation(
            lambda theta, x: x, gaussian.sampler(), init=0.0, num_samples=5, mesh=mesh
        )
    with pytest.raises(TypeError, match=r"must be a `jax\.sharding\.Mesh`, got int"):
        check_mesh(2, 8)  # pyright: ignore


def test_chains_that_cannot_be_shared_out():
    mesh = Mesh(np.array(jax.devices()[:1] * 3), ("chains",))
    with pytest.raises(ValueError, match="`num_chains=8` must be a multiple of the 3 devices"):
        check_mesh(mesh, 8)
