"""Every pair of options together, and the triples that have gone wrong before: each way of calling
agrees with `jacfwd` of each chain, and that with exact answers. `--thorough` has all triples, of
which `--part i/n` runs a part.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from arrays import Refused, Row, in_part
from jax.sharding import Mesh
from options import FACTORS, array
from rows import attempt, check

HERE = pathlib.Path(__file__).parent
# Programs of so many rows are kept at a time.
KEPT_ROWS = 20


def name(row: Row) -> str:
    return " ".join(str(row[factor]) for factor in FACTORS)


def pytest_generate_tests(metafunc):
    config = metafunc.config
    thorough, part = config.getoption("--thorough"), config.getoption("--part")
    found = array(thorough)
    if "row" in metafunc.fixturenames:
        rows = in_part([row for row in found.rows if not row["mesh"]], part)
        metafunc.parametrize("row", rows, ids=name)
    if "rows_on_a_mesh" in metafunc.fixturenames:
        rows = in_part([row for row in found.rows if row["mesh"]], part)
        metafunc.parametrize("rows_on_a_mesh", [rows], ids=[f"{len(rows)} rows"])
    if "refusal" in metafunc.fixturenames:
        refusals = in_part(found.refusals, part)
        metafunc.parametrize("refusal", refusals, ids=lambda refusal: name(refusal[0]))


@pytest.fixture
def _few_programs(request, run_rows=[0]):  # noqa: B006
    yield
    run_rows[0] += 1
    if run_rows[0] % KEPT_ROWS == 0:
        jax.clear_caches()
        gc.collect()


@pytest.mark.usefixtures("_few_programs")
def test_row(row: Row, request):
    check(row, thorough=request.config.getoption("--thorough"))


def test_rows_on_a_mesh(rows_on_a_mesh: list[Row]):
    """In one process: the number of devices is fixed when JAX starts."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "mesh_rows.py")],
        input=json.dumps(rows_on_a_mesh),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = zip(rows_on_a_mesh, json.loads(done.stdout.splitlines()[-1]), strict=True)
    failed = [f"{name(row)}:\n{outcome}" for row, outcome in outcomes if outcome]
    assert not failed, "\n".join(failed)


def test_refusal(refusal: tuple[Row, Refused]):
    row, rule = refusal
    two = Mesh(np.array(jax.devices()[:1] * 2), ("chains",))
    with pytest.raises(rule.error, match=rule.message):
        attempt(row, two if row["mesh"] else None)
