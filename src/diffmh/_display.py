"""How results show themselves: numbers in a line for `repr`, a table in HTML for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

# Numbers of an array in a line, and rows of a table.
_IN_LINE, _ROWS = 4, 24


def named(name: str, parts: dict[str, str]) -> str:
    """`Name(part=text, ...)`, on several lines if one is too long."""
    joined = ", ".join(f"{part}={text}" for part, text in parts.items())
    if len(name) + len(joined) + 2 <= 100:
        return f"{name}({joined})"
    lines = "".join(f"    {part}={text},\n" for part, text in parts.items())
    return f"{name}(\n{lines})"


def numbers(tree: Any) -> str:
    """A pytree of arrays with their numbers, a few of each."""
    texts = jax.tree.map(lambda leaf: Plain(_array(np.asarray(leaf))), tree)
    return str(texts)


class Plain(str):
    """A string that prints without quotes inside a container."""

    def __repr__(self) -> str:
        return str(self)


def _array(values: np.ndarray) -> str:
    if values.ndim == 0:
        return f"{values[()]:.5g}"
    shown = ", ".join(f"{value:.5g}" for value in values.ravel()[:_IN_LINE])
    rest = f", … {values.size:,} in all" if values.size > _IN_LINE else ""
    return f"[{shown}{rest}]"


def number_with_error(value: float, error: float) -> str:
    """`value ± error` with two significant digits of the error."""
    if not math.isfinite(value) or not math.isfinite(error) or error == 0:
        return f"{value:.6g} ± {error:.2g}"
    digits = 1 - math.floor(math.log10(error))
    if not -3 <= digits <= 8:
        return f"{value:.4g} ± {error:.2g}"
    return f"{value:.{max(0, digits)}f} ± {error:.{max(0, digits)}f}"


class Entry:
    """One number of a result, with the error and the interval that it has."""

    def __init__(self, name: str, value: float, error: float, ends: tuple[float, float]):
        self.name, self.value, self.error, self.ends = name, value, error, ends

    def cells(self) -> tuple[str, str, str]:
        low, high = self.ends
        digits = 2 if not self.error > 0 else max(0, min(8, 1 - math.floor(math.log10(self.error))))
        between = f"{low:.{digits}f} … {high:.{digits}f}"
        return self.name, number_with_error(self.value, self.error), between


def entries(tree: Any, error: Any, ends: Any, root: str) -> list[Entry]:
    """Every number of a pytree, named as Python would index it."""
    found = []
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(tree),
        jax.tree.leaves(error),
        jax.tree.leaves(ends),
        strict=True,
    )
    for (path, leaf), wrong, end in leaves:
        values, errors, end = (np.asarray(part) for part in (leaf, wrong, end))
        for index in np.ndindex(values.shape):
            place = f"[{', '.join(map(str, index))}]" if index else ""
            name = root + jax.tree_util.keystr(path) + place
            low, high = map(float, end[index])
            found.append(Entry(name, float(values[index]), float(errors[index]), (low, high)))
    return found


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; of many rows the first, with a last one that says how many there are."""
    rows = list(rows)
    left_out = len(rows) - _ROWS
    look = "text-align:left;padding-right:1.2em"
    cell = lambda kind, text: f"<{kind} style='{look}'>{html.escape(text)}</{kind}>"

    def line(kind, cells):
        return "<tr>" + "".join(cell(kind, text) for text in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows[:_ROWS])
    if left_out > 0:
        body += line("td", (f"… and {left_out:,} more", *[""] * (len(heads) - 1)))
    return f"<table>{line('th', heads)}{body}</table>"


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    return "".join(f"<p style='margin:0.3em 0;{style}'>{html.escape(line)}</p>" for line in lines)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = lambda line: (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
    return ["  ".join(padded(line)).rstrip() for line in lines]
