"""Chains, draws and replicates shared out over devices: the same numbers on any number of them."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import sharding_cases
from jax.sharding import Mesh

import diffmh
from diffmh import sad
from diffmh.models import gaussian
from diffmh.runs.devices import check_shares

HERE = pathlib.Path(__file__).parent


@functools.cache
def found(devices: int, *given: str) -> dict[str, list[float]]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(HERE / "support" / "sharding_cases.py"), *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_numbers_do_not_depend_on_devices(devices):
    one, several = found(1), found(devices)
    assert one.keys() == several.keys()
    for name in one:
        np.testing.assert_allclose(several[name], one[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_keys_per_device_would_be_seen():
    mistaken = found(4, "mistake")["each chain"]
    assert 0 < np.mean(np.isclose(mistaken, found(1)["each chain"])) < 0.5


@pytest.mark.parametrize("devices", [1, 4])
def test_chains_are_those_without_a_mesh(devices):
    """Bit for bit: a device's share is no other sampler."""
    plain = diffmh.expectation(
        sharding_cases.MEAN.simulation.f,
        sharding_cases.KERNEL,
        init=sharding_cases.start,
        num_samples=10,
        num_chains=8,
    )
    wanted = plain.per_chain(0.5, sharding_cases.KEY, 1.2)
    np.testing.assert_array_equal(found(devices)["each chain"], np.ravel(wanted))


WITHOUT = {"draws": sharding_cases.drawn, "sad": sharding_cases.replicates}


@pytest.mark.parametrize("name", ["draws", pytest.param("sad", marks=pytest.mark.thorough)])
def test_others_are_those_without_a_mesh(name):
    wanted = np.concatenate([np.ravel(leaf) for leaf in WITHOUT[name](None)])
    np.testing.assert_allclose(found(4)[name], wanted, rtol=1e-6, atol=1e-6)


def test_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(ValueError, match=r"`expectation\(mesh=.* axis named 'chains'"):
        diffmh.expectation(
            lambda theta, x: x, gaussian.sampler(), init=0.0, num_samples=5, mesh=mesh
        )
    with pytest.raises(ValueError, match=r"`sad.expectation\(mesh=.* axis named 'chains'"):
        sad.expectation(sharding_cases.program, mesh=mesh)
    with pytest.raises(ValueError, match=r"`sample\(mesh=.* axis named 'chains'"):
        options = {"init": 0.0, "num_samples": 5, "mesh": mesh}
        diffmh.sample(gaussian.sampler(), 0.5, jax.random.key(0), **options)
    with pytest.raises(TypeError, match=r"must be a `jax\.sharding\.Mesh`, got int"):
        check_shares(2, 8)  # pyright: ignore


def test_chains_that_cannot_be_shared_out():
    mesh = Mesh(np.array(jax.devices()[:1] * 3), ("chains",))
    with pytest.raises(ValueError, match="`num_chains=8` must be a multiple of the 3 devices"):
        check_shares(mesh, 8)


PAGE = (HERE.parent / "docs" / "devices.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_code_of_the_page():
    """In order; where it speaks of several hosts, as the only one of them."""
    assert len(BLOCKS) == 3
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    who = f"coordinator, num_processes, process_id = {address!r}, 1, 0\n"
    connect, _ = BLOCKS[2].split("mesh =", 1)
    # A process joins the others before it does anything else, and once.
    lines = ["import os, jax\n", who, connect, *BLOCKS[:2], BLOCKS[2].removeprefix(connect)]
    lines.append("print(value, gradient, draws.posterior.sizes['chain'], replicates.value)")
    code = "".join(lines)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    value, gradient, chains, share = map(float, done.stdout.splitlines()[-1].split())
    assert abs(value - 0.5) < 0.1 and abs(gradient - 1.0) < 0.2
    assert chains == 64 and abs(share - 0.3) < 0.25
