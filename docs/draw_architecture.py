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

# From what a user writes (left) to what a user gets (right): rooms that stand on the path.
LAYERS = (
    ("core", "proposals"),
    ("couplings",),
    ("kernels", "estimators"),
    ("reports",),
    ("_expectation", "_compose"),
    ("sad", "models", "adapters"),
    ("tools",),
    ("plots",),
    ("reproduce",),
)
# Those that serve all rooms to their right would hide the path: `jaxprs`, `base`, `fast`,
# `analysis`, `runs`. An edge that follows from two others is left out as well.


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


def reduced() -> set[tuple[str, str]]:
    """The imports between rooms of the picture, without those that others imply."""
    shown = {name for layer in LAYERS for name in layer}
    direct = {(a, b) for a, b in imports() if a != b and {a, b} <= shown}
    reach = set(direct)
    for middle in shown:
        reach |= {(a, d) for a, b in reach for c, d in reach if b == middle == c}
    return {
        (a, b)
        for a, b in direct
        if not any((a, c) in direct and (c, b) in reach for c in shown - {a, b})
    }


def picture() -> str:
    known = [name for layer in LAYERS for name in layer if _exists(name)]
    lines = ["flowchart LR"]
    for number, layer in enumerate(LAYERS):
        inside = [name for name in layer if _exists(name)]
        lines += [f"  subgraph L{number}[ ]", *(f"    {name}" for name in inside), "  end"]
    edges = sorted((b, a) for a, b in reduced() if a in known and b in known)
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
        for user, used in sorted(reduced())
        if user in places and used in places
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
