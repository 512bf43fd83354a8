"""The page: every figure, what it shows, and the table of what was found, in one file that needs
no network.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import pathlib
import re
import string
from typing import NamedTuple

import jax
import numpy as np

from .experiment import Experiment, Row


class Saved(NamedTuple):
    """An experiment as it was saved: what the page is made of."""

    experiment: Experiment
    data: dict[str, np.ndarray]
    settings: str
    rows: list[Row]
    seed: int
    fast: bool
    svg: str


def write(out: pathlib.Path, saved: list[Saved]) -> pathlib.Path:
    """Writes `index.html` and returns where it is."""
    template = string.Template(
        importlib.resources.files("diffmh.reproduce").joinpath("page.html").read_text()
    )
    films = [
        {"name": one.experiment.name, **one.experiment.film(one.data)}
        for one in saved
        if one.experiment.film
    ]
    text = template.substitute(
        contents=_contents(saved),
        summary=_summary(saved),
        head=HEAD,
        table="\n".join(_table(one) for one in saved),
        figures="\n".join(_figure(one) for one in saved),
        films=json.dumps(films, ensure_ascii=False).replace("</", "<\\/"),
        version=html.escape(jax.__version__),
    )
    path = out / "index.html"
    path.write_text(text)
    return path


def _contents(saved: list[Saved]) -> str:
    links = [
        f'<a href="#{one.experiment.name}">{one.experiment.figure}'
        f" {html.escape(one.experiment.title)}</a>"
        for one in saved
    ]
    return " ".join([*links, '<a href="#table">The table</a>'])


def _summary(saved: list[Saved]) -> str:
    verdicts = [row.passed for one in saved for row in one.rows if row.passed is not None]
    kind = "smaller runs, <code>--fast</code>" if any(one.fast for one in saved) else "the full run"
    seeds = ", ".join(sorted({str(one.seed) for one in saved}))
    state = "all" if all(verdicts) else "<strong>not all</strong>"
    return f"{sum(verdicts)} of {len(verdicts)} verdicts are good ({state}); {kind}; seed {seeds}."


def _command(one: Saved) -> str:
    options = (" --fast" if one.fast else "") + (f" --seed {one.seed}" if one.seed else "")
    return f"diffmh reproduce {one.experiment.name}{options}"


HEAD = "<thead><tr><th>quantity</th><th>paper</th><th>exact</th><th>ours ± error</th><th>bar</th><th>verdict</th></tr></thead>"


def _table(one: Saved) -> str:
    """An experiment's rows under its title."""
    title = f"Fig. {one.experiment.figure} · {html.escape(one.experiment.title)}"
    return f'<tr class="group"><th colspan="6"><a href="#{one.experiment.name}">{title}</a></th></tr>\n{_rows(one)}'


def _rows(one: Saved) -> str:
    mark = {True: ("good", "✓ good"), False: ("bad", "✗ failed"), None: ("none", "—")}
    lines = []
    for row in one.rows:
        kind, words = mark[row.passed]
        cells = zip(("paper", "exact", "ours ± error", "bar"), row[1:5], strict=True)
        middle = "".join(
            f'<td data-label="{label}">{html.escape(cell)}</td>' for label, cell in cells
        )
        lines.append(
            f'<tr><th scope="row">{html.escape(row.quantity)}</th>{middle}<td data-label="verdict"'
            f' class="{kind}">{words}</td></tr>'
        )
    return "\n".join(lines)


def _figure(one: Saved) -> str:
    name, experiment = one.experiment.name, one.experiment
    player = f'<div class="player" data-film="{name}"></div>' if experiment.film else ""
    return f"""<section id="{name}">
<h2><span class="number">Fig. {experiment.figure}</span> {html.escape(experiment.title)}</h2>
<p>{html.escape(experiment.shows)}</p>
<figure role="img" aria-label="{html.escape(experiment.title)}">{_inline(one.svg, name)}</figure>
{player}
<table>{HEAD}<tbody>
{_rows(one)}
</tbody></table>
<p class="settings">{html.escape(one.settings)}</p>
<p class="command"><code>{html.escape(_command(one))}</code></p>
</section>"""


def _inline(svg: str, name: str) -> str:
    """An SVG for the middle of a page: no XML prologue, its size left to the page, its ids apart
    from other figures'.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{name}-\2"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
