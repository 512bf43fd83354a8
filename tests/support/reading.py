"""Pages, docstrings and messages drawn for a reading round: `python tests/support/reading.py 2026`.

A reader with fresh eyes writes five questions for each page, answers them from the page alone,
checks the answers against the source, and lists the sentences that had to be read twice.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.Module


def pages() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def docstrings(module: ast.Module, path: str) -> Iterator[tuple[str, str]]:
    """Docstrings of public modules, classes and functions of more than one line, by place."""
    for node in ast.walk(module):
        if isinstance(node, _DEFINITIONS) and not getattr(node, "name", "").startswith("_"):
            text = ast.get_docstring(node)
            if text and "\n" in text:
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def messages(module: ast.Module, path: str) -> Iterator[tuple[str, str]]:
    """Texts of errors and warnings, with `{...}` where values stand, by place."""
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            call = node
        else:
            continue
        text = "".join(map(_text, call.args[:1]))
        if len(text) > 40:
            yield f"{path}:{node.lineno}", text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return f"{{{ast.unparse(node).strip('{}')}}}" if isinstance(node, ast.FormattedValue) else "{…}"


def main(seed: int) -> None:
    drawn = random.Random(seed)
    print("\n".join(drawn.sample(pages(), 10)))
    parsed = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in sorted((ROOT / "src").rglob("*.py"))
    }
    for kind in (docstrings, messages):
        found = [each for path, module in parsed.items() for each in kind(module, path)]
        for place, text in drawn.sample(found, 20):
            print(f"\n== {place}\n{text}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
