"""Several hosts, as processes of this machine: the numbers of one process; nothing that they do not
do together; and one that dies ends the other in words, and the run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import diffmh
from diffmh.base.validate import concrete
from diffmh.models import gaussian

HERE = pathlib.Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "multihost.py"
SAMPLES = 20_000


def started(*line: object, **options) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, line)]
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, **options
    )


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The results of each of two processes."""
    coordinator, directory = free_address(), tmp_path_factory.mktemp("hosts")
    pair = [
        started(HERE / "support" / "hosts_cases.py", coordinator, n, directory) for n in range(2)
    ]
    outputs = [process.communicate(timeout=400) for process in pair]
    for process, (_, errors) in zip(pair, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_the_first_decides(together):
    assert [one["leads"] for one in together] == [True, False]
    assert [one["each"] for one in together] == [[7, 8], [7, 8]]
    assert [one["agreed"] for one in together] == [7, 7]
    assert [one["alone"] for one in together] == [[False, 7], [False, 8]]


def test_every_host_has_all_draws(together):
    options = {"init": 0.0, "num_samples": 5, "num_chains": 4}
    wanted = diffmh.sample(gaussian.sampler(), 0.5, jax.random.key(0), **options)
    for one in together:
        np.testing.assert_allclose(one["draws"], wanted.posterior.x.values, rtol=1e-6)


@pytest.mark.parametrize(
    "name, first, second",
    [
        ("the same", "nothing", "nothing"),
        ("another theta", "must be the same on all hosts", "must be the same on all hosts"),
        ("another key", "must be the same on all hosts", "must be the same on all hosts"),
        ("draws on disk", "is for one host", "is for one host"),
        ("ascent on disk", "is for one host", "is for one host"),
        ("a directory of each", "not all hosts see the same", "not all hosts see the same"),
        ("first cannot", "files that are not checkpoints", "first host could not open it"),
        ("shared", "nothing", "nothing"),
    ],
)
def test_refused_on_all(together, name, first, second):
    assert first in together[0][name] and second in together[1][name]


def has_checkpoint(directory: pathlib.Path) -> bool:
    return any(directory.glob("0*.diffmh"))


def cut_down(directory: pathlib.Path, number: int, how: signal.Signals) -> str:
    """Stops one of two processes once there is a checkpoint; what the other says at its end."""
    line = [EXAMPLE, "--coordinator", free_address(), "--num-samples", SAMPLES, "--seconds", 0]
    pair = [started(*line, "--checkpoint", directory, "--process", n) for n in range(2)]
    victim, survivor = pair[number], pair[1 - number]
    try:
        while not has_checkpoint(directory):
            assert all(process.poll() is None for process in pair), victim.communicate()
            time.sleep(0.01)
        victim.send_signal(how)
        began = time.monotonic()
        _, errors = survivor.communicate(timeout=100)
        assert time.monotonic() - began < 60
        assert survivor.returncode != 0
        return errors
    finally:
        for process in pair:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoint"
    return directory, cut_down(directory, 1, signal.SIGKILL)


def test_a_host_that_dies_ends_the_other_in_words(interrupted):
    _, errors = interrupted
    assert "a host of `mesh` no longer answers" in errors
    assert "Start the same script again on all hosts, or on fewer" in errors


@pytest.mark.thorough
@pytest.mark.parametrize("number, how", [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_first_dies_or_one_falls_silent(number, how, tmp_path):
    """Who hears it first, we or JAX's own watch, is chance."""
    errors = cut_down(tmp_path / "checkpoint", number, how)
    assert "no longer answers" in errors or "another task died" in errors


def test_one_process_goes_on_where_two_were_cut_down(interrupted, tmp_path, monkeypatch):
    directory, _ = interrupted
    copy = shutil.copytree(directory, tmp_path / "checkpoint")
    compiled, firsts = sys.modules["diffmh.core.compiled"], []
    advance = compiled._advance

    def noted(*given):
        if concrete(given[2]):
            firsts.append(int(given[2]))
        return advance(*given)

    monkeypatch.setattr(compiled, "_advance", noted)
    options = {"init": 0.0, "num_samples": SAMPLES, "num_chains": 64}
    mean = diffmh.expectation(lambda theta, x: x, gaussian.sampler(), **options)
    resumed = mean.run(0.5, jax.random.key(0), checkpoint=copy)
    assert firsts[0] > 0
    monkeypatch.undo()
    whole = mean.run(0.5, jax.random.key(0))
    np.testing.assert_allclose(resumed.gradient, whole.gradient, rtol=1e-5)
    np.testing.assert_allclose(resumed.value, whole.value, rtol=1e-5)


def test_two_processes_go_on_and_find_the_numbers_of_one(interrupted):
    """The example as it stands, from the checkpoint of the run that was cut down."""
    directory, _ = interrupted
    process = started(EXAMPLE, "--num-samples", SAMPLES, "--checkpoint", directory)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    rows = re.findall(r"^(\w[\w ]*?) +(-?[\d.]+) +(-?[\d.]+) +[\d.e+-]+$", output, re.MULTILINE)
    assert {"value", "gradient", "gradient of another key"} <= {name for name, _, _ in rows}
    two, one = (np.array([float(row[i]) for row in rows]) for i in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-5)
