"""The page: every figure, what it shows, and the table of results, in one file that needs no
network.
"""

from __future__ import annotations

import html
import importlib.metadata
import importlib.resources
import json
import pathlib
import re
import string
from collections.abc import Sequence

import jax

from ..plots import style
from ..runs.files import write_whole
from .experiment import COLUMNS, Experiment, Size
from .saved import Saved

# The figures' colours, by their names in the page's style sheet, for the light and the dark theme.
_NAMES = ("ink", "grey", "faint", "paper", "red", "blue", "green", "amber", "violet")
COLOURS = {getattr(style, name.upper()): name for name in _NAMES}

# Part of the title of every page that `write` wrote.
OURS = "reproduced by diffmh"

OPTIONS = {Size.FAST: " --fast", Size.DEMO: "", Size.FULL: " --full"}
RUNS = {
    Size.FAST: "short runs, <code>--fast</code>",
    Size.DEMO: "the usual run",
    Size.FULL: "the long run, <code>--full</code>",
}


def write(
    out: pathlib.Path, saved: list[Saved], pending: Sequence[Experiment] = ()
) -> pathlib.Path:
    """Write `index.html` and return its path. While experiments are `pending`, the page names
    them and reloads itself.
    """
    source = importlib.resources.files("diffmh.reproduce").joinpath("page.html")
    played = [(one.experiment.name, one.experiment.film, one.data) for one in saved]
    films = [{"name": name, **film(data)} for name, film, data in played if film]
    # `</` would end the script element that holds the films.
    text = string.Template(source.read_text(encoding="utf-8")).substitute(
        home=_home(),
        contents="\n".join(_link(one) for one in saved),
        summary=_summary(saved) if saved else "Nothing is finished yet.",
        pending=_pending(pending),
        reload='<meta http-equiv="refresh" content="5">' if pending else "",
        figures="\n".join(_figure(one) for one in saved),
        films=json.dumps(films, ensure_ascii=False).replace("</", "<\\/"),
        version=html.escape(jax.__version__),
    )
    path = out / "index.html"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    return path


def _home() -> str:
    """The home page in the package's metadata; the top of the page if there is none."""
    try:
        urls = importlib.metadata.metadata("diffmh").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        urls = []
    places = dict(url.split(", ", 1) for url in urls)
    return html.escape(places.get("Homepage", "#top"))


def _link(one: Saved) -> str:
    name, number = one.experiment.name, one.experiment.figure
    return f'<a href="#{name}">{number} {html.escape(one.experiment.title)}</a>'


def _summary(saved: list[Saved]) -> str:
    verdicts = [row.passed for one in saved for row in one.rows if row.passed is not None]
    kinds = {RUNS[one.size] for one in saved}
    seeds = ", ".join(sorted({str(one.seed) for one in saved}))
    state = "all" if all(verdicts) else "<strong>not all</strong>"
    return (
        f"{sum(verdicts)} of {len(verdicts)} verdicts are good ({state});"
        f" {' and '.join(sorted(kinds))}; seed {seeds}."
    )


def _pending(experiments: Sequence[Experiment]) -> str:
    if not experiments:
        return ""
    titles = "; ".join(f"{one.figure} {html.escape(one.title)}" for one in experiments)
    return (
        f'<p class="soft">Still being computed: {titles}. This page reloads itself until all are'
        " here.</p>"
    )


def _command(one: Saved) -> str:
    options = OPTIONS[one.size] + (f" --seed {one.seed}" if one.seed else "")
    return f"diffmh reproduce {one.experiment.name}{options}"


EMPTY = ' class="empty"'
MARKS = {True: ("good", "✓ good"), False: ("bad", "✗ failed"), None: ("none", "—")}


def _table(one: Saved) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    lines = []
    for row in one.rows:
        kind, words = MARKS[row.passed]
        middle = "".join(
            f'<td data-label="{label}"{EMPTY * (cell == "—")}>{html.escape(cell)}</td>'
            for label, cell in zip(COLUMNS[1:5], row[1:5], strict=True)
        )
        verdict = f'<td data-label="verdict" class="{kind}">{words}</td>'
        quantity = f'<th scope="row">{html.escape(row.quantity)}</th>'
        lines.append(f"<tr>{quantity}{middle}{verdict}</tr>")
    body = "\n".join(lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _figure(one: Saved) -> str:
    name, experiment = one.experiment.name, one.experiment
    player = f'<div class="player" data-film="{name}"></div>' if experiment.film else ""
    title = html.escape(experiment.title)
    return f"""<section id="{name}">
<h2><span class="number">Fig. {experiment.figure}</span> {title}</h2>
<p>{html.escape(experiment.shows)}</p>
<figure role="img" aria-label="{title}">
<div class="wide">{_inline(one.svg, name)}</div>
<div class="narrow">{_inline(one.narrow_svg, name + "-narrow")}</div>
</figure>
{player}
{_table(one)}
<p class="settings">{html.escape(one.settings)}</p>
<p class="command"><code>{html.escape(_command(one))}</code></p>
</section>"""


def _inline(svg: str, name: str) -> str:
    """An SVG to embed in the page: without the XML prologue and a fixed size, with ids that differ
    from other figures', and with the colours of the page.
    """
    svg = svg[svg.index("<svg") :]
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{name}-\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)

    def by_name(colour: re.Match[str]) -> str:
        return f"var(--{COLOURS[colour[0]]})" if colour[0] in COLOURS else colour[0]

    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", by_name, svg)
