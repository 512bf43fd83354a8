"""The display of results: numbers in a line for `repr`, an HTML table for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

# The numbers of an array shown in a line without and with errors, and the rows of a table.
_IN_LINE, _WITH_ERRORS, _ROWS = 4, 12, 24


def named(name: str, parts: dict[str, str], warnings: Sequence[str] = ()) -> str:
    """`Name(part=text, ...)`, on several lines if one is too long, with the number of warnings if
    there are any.
    """
    if warnings:
        parts = {**parts, "warnings": f"{len(warnings)}: print it"}
    joined = ", ".join(f"{part}={text}" for part, text in parts.items())
    if len(name) + len(joined) + 2 <= 100:
        return f"{name}({joined})"
    lines = "".join(f"    {part}={text},\n" for part, text in parts.items())
    return f"{name}(\n{lines})"


class Plain(str):
    """A string that prints without quotes inside a container."""

    def __repr__(self) -> str:
        return str(self)


def numbers(tree: Any) -> str:
    """A pytree of arrays, showing a few numbers of each."""
    return _in_its_form(lambda leaf: _leaf("{:.5g}".format, _IN_LINE, leaf), tree)


def with_errors(value: Any, error: Any) -> str:
    """`1.234 ± 0.005` at each leaf, arrays element by element, in the structure of the tree."""
    return _in_its_form(
        lambda *leaves: _leaf(number_with_error, _WITH_ERRORS, *leaves), value, error
    )


def _in_its_form(show: Callable[..., str], *trees: Any) -> str:
    return str(jax.tree.map(lambda *leaves: Plain(show(*leaves)), *trees))


def _leaf(show: Callable[..., str], most: int, *leaves: Any) -> str:
    arrays = [np.asarray(leaf) for leaf in leaves]
    texts = first_few(show, most, *arrays)
    return f"[{texts}]" if arrays[0].ndim else texts


def first_few(show: Callable[..., str], most: int, *arrays: np.ndarray) -> str:
    """The first entries of arrays side by side, and the total number if some are left out."""
    columns = [array.ravel()[:most].tolist() for array in arrays]
    shown = ", ".join(show(*entry) for entry in zip(*columns, strict=True))
    return shown + (f", … {arrays[0].size:,} in all" if arrays[0].size > most else "")


def number_with_error(value: float, error: float) -> str:
    """`value ± error` with two significant digits of the error."""
    if not math.isfinite(value) or not math.isfinite(error) or error == 0:
        return f"{value:.6g} ± {error:.2g}"
    # The value has as many decimals as its error; more digits would be noise.
    digits = _digits(error)
    # Numbers with more digits than these are easier to read with an exponent.
    if not -3 <= digits <= 8:
        return f"{value:.4g} ± {error:.2g}"
    return f"{value:.{max(0, digits)}f} ± {error:.{max(0, digits)}f}"


def _digits(error: float) -> int:
    """The number of decimals that shows two significant digits of the error."""
    return 1 - math.floor(math.log10(error))


class Entry(NamedTuple):
    """One number of a tree, or a sequence of it along the leading axes."""

    name: str
    values: np.ndarray


def entries(tree: Any, root: str | None = None, leading: int = 0) -> list[Entry]:
    """Every entry of every leaf, with its Python index; `leading` axes are kept as values. Without
    a root, names have dots, and that of a single array is `f`.

    >>> import numpy as np
    >>> [entry.name for entry in entries({"a": np.zeros(2), "b": 0.0}, "theta")]
    ["theta['a'][0]", "theta['a'][1]", "theta['b']"]
    >>> [entry.name for entry in entries({"a": np.zeros(2), "b": 0.0})]
    ['a[0]', 'a[1]', 'b']
    """
    found = []
    # In the order of `jax.tree.leaves`, so entries of trees of one structure correspond.
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values = np.asarray(leaf)
        if root is None:
            base = jax.tree_util.keystr(path, simple=True, separator=".") or "f"
        else:
            base = root + jax.tree_util.keystr(path)
        for index in np.ndindex(values.shape[leading:]):
            found.append(Entry(base + place(index), values[(..., *index)]))
    return found


def place(index: tuple[int, ...]) -> str:
    """`[1, 2]`, as a Python index; empty for a scalar."""
    return f"[{', '.join(map(str, index))}]" if index else ""


def rows_with_intervals(tree: Any, error: Any, interval: Any, root: str) -> list[tuple[str, ...]]:
    """For each number of a tree, its name, the number with its error, and its interval."""
    ends = jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf), -1, 0), interval)
    rows = []
    for (name, value), (_, wrong), (_, limits) in zip(
        entries(tree, root), entries(error, root), entries(ends, root, leading=1), strict=True
    ):
        digits = max(0, min(8, _digits(float(wrong)))) if wrong > 0 else 2
        between = " … ".join(f"{float(end):.{digits}f}" for end in limits)
        rows.append((name, number_with_error(float(value), float(wrong)), between))
    return rows


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of the first rows; a last row says how many more there are."""

    def line(kind, cells):
        look = "text-align:left;padding-right:1.2em"
        texts = (f"<{kind} style='{look}'>{html.escape(text)}</{kind}>" for text in cells)
        return f"<tr>{''.join(texts)}</tr>"

    rows = list(rows)
    body = "".join(line("td", row) for row in rows[:_ROWS])
    if len(rows) > _ROWS:
        body += line("td", (f"… and {len(rows) - _ROWS:,} more", *[""] * (len(heads) - 1)))
    return f"<table>{line('th', heads)}{body}</table>"


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    return "".join(f"<p style='margin:0.3em 0;{style}'>{html.escape(line)}</p>" for line in lines)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
