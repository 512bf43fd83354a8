"""Second derivatives, the evidence, reused draws, curves and pairs that must meet, against the
options of the core: every pair of options together. Ways of calling agree under the same key, and
with closed forms; `--thorough` has more kernels and tools.
"""

from __future__ import annotations

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
from tool_rows import attempt_tool, check_tool
from tools_table import FACTORS, array

HERE = pathlib.Path(__file__).parent


def name(row: Row) -> str:
    return " ".join(str(row[factor]) for factor in FACTORS)


def pytest_generate_tests(metafunc):
    config = metafunc.config
    found, part = array(config.getoption("--thorough")), config.getoption("--part")
    if "row" in metafunc.fixturenames:
        rows = in_part([row for row in found.rows if not row["mesh"]], part)
        metafunc.parametrize("row", rows, ids=name)
    if "rows_on_a_mesh" in metafunc.fixturenames:
        rows = in_part([row for row in found.rows if row["mesh"]], part)
        metafunc.parametrize("rows_on_a_mesh", [rows], ids=[f"{len(rows)} rows"])
    if "refusal" in metafunc.fixturenames:
        refusals = dict(in_part([(name(one[0]), one) for one in found.refusals], part))
        metafunc.parametrize("refusal", refusals.values(), ids=refusals)


def test_row(row: Row):
    check_tool(row)


@pytest.mark.thorough
def test_rows_on_a_mesh(rows_on_a_mesh: list[Row]):
    """In one process: the number of devices is fixed when JAX starts."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "mesh_rows.py"), "tools"],
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
        attempt_tool(row, two if row["mesh"] else None)
