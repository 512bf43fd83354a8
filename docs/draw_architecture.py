"""Draws the picture of docs/architecture.md from the imports of the code.

`python docs/draw_architecture.py` writes it there; with `--check` it only says whether the picture
is that of the code.
"""

from __future__ import annotations

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "diffmh"
BEGIN, END = "<!-- drawn by draw_architecture.py -->\n```mermaid\n", "```\n<!-- end -->"

# Left to right. A module that starts with an underscore serves all and is left out of the picture.
LAYERS = (
    ("values", "parameters", "decisions", "intervals"),
    ("proposals", "couplings"),
    ("kernel", "kernels"),
    ("alternatives", "controls", "estimators"),
    ("bar", "checkpoint", "course"),
    ("counts", "method", "simulation", "chain", "loop", "running"),
    ("agreement", "findings", "report", "until"),
    ("comparison", "expectation", "compose"),
    ("trace", "check", "compare", "optimise", "sample", "draws", "adapt", "tune"),
    ("models", "sad"),
    ("adapters", "sensitivity", "plots"),
    ("reproduce", "cli"),
)


def room(path: pathlib.Path) -> str:
    """The module or package, directly below diffmh, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports() -> set[tuple[str, str]]:
    """Pairs of rooms, the first of which imports the second when it is loaded."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        depth = len(path.relative_to(PACKAGE).parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == depth:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {(room(path), name.split(".")[0]) for name in names if name}
    return found


def picture() -> str:
    known = [name for layer in LAYERS for name in layer if _exists(name)]
    lines = ["flowchart LR"]
    for number, layer in enumerate(LAYERS):
        inside = [name for name in layer if _exists(name)]
        lines += [f"  subgraph L{number}[ ]", *(f"    {name}" for name in inside), "  end"]
    edges = sorted((b, a) for a, b in imports() if a in known and b in known and a != b)
    return "\n".join([*lines, *(f"  {used} --> {user}" for used, user in edges)]) + "\n"


def drawing() -> str:
    """The same for the site, as SVG in the page's own colours: layers from top to bottom."""
    wide, high, places = 64, 58, {}
    boxes = []
    for row, layer in enumerate(LAYERS):
        inside = [name for name in layer if _exists(name)]
        for i, name in enumerate(inside):
            x, y = 280 + (i - (len(inside) - 1) / 2) * (wide + 5), 20 + row * high
            places[name] = x, y
            boxes.append(
                f'<rect x="{x - wide / 2}" y="{y - 12}" width="{wide}" height="24" rx="4"/>'
                f'<text x="{x}" y="{y + 3.5}">{name}</text>'
            )
    edges = [
        f'<path d="M{x0} {y0 + 12}C{x0} {y0 + 34} {x1} {y1 - 34} {x1} {y1 - 12}"/>'
        for user, used in sorted(imports())
        if user != used and user in places and used in places
        for (x0, y0), (x1, y1) in [(places[used], places[user])]
        if y0 < y1
    ]
    size = f'viewBox="0 0 560 {20 + len(LAYERS) * high - 20}"'
    parts = f'<g class="edges">{"".join(edges)}</g><g class="rooms">{"".join(boxes)}</g>'
    return f'<svg class="architecture" role="img" aria-label="imports" {size}>{parts}</svg>'


def _exists(name: str) -> bool:
    return (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    drawn, after = rest.split(END, 1)
    if "--check" in sys.argv:
        sys.exit(0 if drawn == picture() else "docs/architecture.md: the picture is not the code's")
    PAGE.write_text(before + BEGIN + picture() + END + after)


if __name__ == "__main__":
    main()
