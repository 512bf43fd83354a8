"""Sensitivity: a table of derivatives to print, index, sort and turn into a data frame."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, overload

import numpy as np

from ..base import validate
from ..base.extras import needing
from ..base.validate import Checked
from ..reports import display
from ..reports.report import Report

MARK = "!"


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """The derivative of one quantity with respect to one hyperparameter, its standard error and its
    interval, and the change that ten per cent more of the hyperparameter makes, in the quantity's
    units and in posterior standard deviations.

    `quantity` is the name that f gives it, for its mean; `sd(name)` and `q05(name)` for others, of
    which `statistic` is the first part. A row is `trusted` unless there is a `doubt`, which says
    why and what to do.
    """

    quantity: str
    hyperparameter: str
    derivative: float
    error: float
    low: float
    high: float
    per_ten_percent: float
    in_deviations: float
    trusted: bool = True
    doubt: str = ""
    statistic: str = "mean"

    @property
    def array(self) -> str:
        """The name of the quantity that this one is an entry of: `sd(b)` for `sd(b[0])`."""
        return re.sub(r"\[[^\[\]]*\](?=\)?$)", "", self.quantity)

    def __str__(self) -> str:
        estimate = display.number_with_error(self.derivative, self.error)
        name = self.quantity if self.statistic != "mean" else f"E[{self.quantity}]"
        mark = "" if self.trusted else f"  {MARK} {self.doubt}"
        return f"d {name} / d {self.hyperparameter} = {estimate}{mark}"


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The result of `diffmh.sensitivity`: print it, or draw it with `diffmh.plots.sensitivity`.

    - `rows`: in the order of the quantities, the strongest hyperparameter first.
    - `report`: the run behind them, `level` that of the intervals, `draws` the draws.
    - `table["tau"]`: the rows of that quantity (of an array, all of its entries) or
      hyperparameter, as a table; `table["tau", "tau_scale"]`: the one row; `table[0]`,
      `table[:3]` by place; `len(table)`; iteration.
    - `sorted("in_deviations")`, `trusted`, `to_dataframe()`.

    Rows that cannot be trusted are marked with `!`, and the lines below the table say why and what
    to do.
    """

    rows: tuple[SensitivityRow, ...]
    report: Report
    level: float
    draws: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SensitivityRow]:
        return iter(self.rows)

    @overload
    def __getitem__(self, at: int) -> SensitivityRow: ...
    @overload
    def __getitem__(self, at: tuple[str, str]) -> SensitivityRow: ...
    @overload
    def __getitem__(self, at: str | slice) -> Sensitivity: ...
    def __getitem__(self, at: Any) -> Any:
        """A row by place or by (quantity, hyperparameter); the rows of a name as a table."""
        if isinstance(at, slice):
            return self._with(self.rows[at])
        if isinstance(at, str):
            return self._with(self._named(at))
        if isinstance(at, tuple) and len(at) == 2 and all(isinstance(part, str) for part in at):
            found = [row for row in self.rows if (row.quantity, row.hyperparameter) == at]
            return found[0] if found else self._unknown(at)
        return self.rows[int(at)] if isinstance(at, int | np.integer) else self._unknown(at)

    def _named(self, name: str) -> tuple[SensitivityRow, ...]:
        """The rows of a quantity, all of its entries if it is an array; of a hyperparameter if no
        quantity has this name.
        """
        rows = tuple(row for row in self.rows if name in (row.quantity, row.array))
        rows = rows or tuple(row for row in self.rows if row.hyperparameter == name)
        return rows or self._unknown(name)

    def _unknown(self, name: Any) -> Any:
        quantities = dict.fromkeys(row.quantity for row in self.rows)
        hyperparameters = dict.fromkeys(row.hyperparameter for row in self.rows)
        raise KeyError(
            f"no row {name!r}: quantities are {list(quantities)}, hyperparameters"
            f" {list(hyperparameters)}."
        )

    def _with(self, rows: tuple[SensitivityRow, ...]) -> Sensitivity:
        return dataclasses.replace(self, rows=rows)

    @property
    def trusted(self) -> Sensitivity:
        """The table without the rows that are marked."""
        return self._with(tuple(row for row in self.rows if row.trusted))

    def sorted(self, by: Checked[str] = "in_deviations") -> Sensitivity:
        """The table in another order: by a field of the rows, names from A to Z and numbers from
        the largest absolute value to the smallest, NaN last.
        """
        by = validate.choice(by, "Sensitivity.sorted(by=...)", _FIELDS)

        def place(row):
            value = getattr(row, by)
            if isinstance(value, str):
                return value
            return math.inf if math.isnan(value) else -abs(value)

        return self._with(tuple(sorted(self.rows, key=place)))

    def to_dataframe(self) -> Any:
        """A pandas `DataFrame` with a column for each field of the rows."""
        advice = "`Sensitivity.to_dataframe` needs pandas, which is not installed:"
        with needing("pandas", f"{advice} pip install pandas"):
            import pandas
        return pandas.DataFrame([dataclasses.asdict(row) for row in self.rows], columns=_FIELDS)

    def _lines(self) -> list[tuple[str, ...]]:
        return [
            (
                row.quantity,
                row.hyperparameter,
                f"{row.derivative:.4g}",
                f"{row.error:.2g}",
                f"[{row.low:.4g}, {row.high:.4g}]",
                f"{row.per_ten_percent:+.3g}",
                f"{row.in_deviations:+.3f}",
                "" if row.trusted else MARK,
            )
            for row in self.rows
        ]

    def _head(self) -> tuple[str, ...]:
        interval = f"{self.level:.0%} interval"
        names = ("quantity", "with respect to", "derivative", "error", interval)
        return (*names, "per +10 %", "in sd", "")

    def _doubts(self) -> list[str]:
        """Each reason once, with how many rows it marks."""
        found = collections.Counter(row.doubt for row in self.rows if not row.trusted)
        return [
            f"{MARK} {count} of {len(self.rows)} rows not to be trusted: {doubt}"
            for doubt, count in found.items()
        ]

    def _warnings(self) -> list[str]:
        return [f"warning: {warning}" for warning in self.report.warnings]

    def __str__(self) -> str:
        table = display.aligned([self._head(), *self._lines()])
        return "\n".join([*table, *self.report.notes, *self._doubts(), *self._warnings()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return (
            display.table(self._head(), self._lines())
            + display.paragraphs(self.report.notes)
            + display.paragraphs([*self._doubts(), *self._warnings()], "color:#b3261e")
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(SensitivityRow))
