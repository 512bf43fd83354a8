"""Rows whose chains are shared out over devices: what `test_covering.py` runs in one process of
two devices. Takes rows as JSON on its input, and gives what went wrong in each.
"""

from __future__ import annotations

import json
import sys
import traceback

import jax
from rows import check


def outcome(row) -> str:
    mesh = jax.make_mesh((jax.device_count(),), ("chains",))
    try:
        check(row, mesh)
    except Exception:
        return traceback.format_exc()[-3000:]
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 2
    print(json.dumps([outcome(row) for row in json.load(sys.stdin)]))
