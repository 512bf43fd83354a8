"""Rows whose chains are shared out over devices: what the tests of the tables run in one process of
two devices, `python mesh_rows.py [tools]`. Takes rows as JSON on its input, and gives what went
wrong in each.
"""

from __future__ import annotations

import json
import sys
import traceback

import jax
from rows import check
from tool_rows import check_tool


def outcome(check, row) -> str:
    mesh = jax.make_mesh((jax.device_count(),), ("chains",))
    try:
        check(row, mesh)
    except Exception:
        return traceback.format_exc()[-3000:]
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 2
    check = check_tool if sys.argv[1:] == ["tools"] else check
    print(json.dumps([outcome(check, row) for row in json.load(sys.stdin)]))
