"""The site: every page is run when it is built, and nothing on it needs a network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys

from docutils import nodes
from PIL import Image

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS))
import draw_architecture  # noqa: E402

# Pages take programs from there instead of repeating them; so do the kernels that run the pages.
sys.path.insert(0, str(DOCS.parent / "examples"))
os.environ["PYTHONPATH"] = str(DOCS.parent / "examples")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project, author, copyright = "diffmh", "The diffmh developers", "the diffmh developers"
release = version = importlib.metadata.version("diffmh")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "docstrings",
]
exclude_patterns = ["_build"]
nitpicky = False

# Pages.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds of the clock for a cell, on a busy machine too
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"


def _digest() -> str:
    """Of the package and the examples: what other code found is not taken up."""
    digest = hashlib.sha256()
    for folder in ("src", "examples"):
        for path in sorted((DOCS.parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "executed" / _digest())

# Docstrings: single backticks are code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings.py has shorter ones
autodoc_preserve_defaults = True
autoclass_content = "class"
add_module_names = False
python_maximum_signature_line_length = 90

# The look, and formulas without a network: MathJax in one file, from a package.
html_theme = "furo"
html_title = "diffmh"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
# Summaries are fetched page by page, which a browser refuses where pages are plain files.
html_show_search_summary = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#c8102e", "color-brand-content": "#1f5fbf"},
    "dark_css_variables": {"color-brand-primary": "#ff6b7a", "color-brand-content": "#71a8ff"},
}
# A link to the repository and to each page's source, once pyproject.toml has a "Repository" URL.
for _url in importlib.metadata.metadata("diffmh").get_all("Project-URL", []):
    if _url.startswith("Repository, "):
        html_theme_options |= {
            "source_repository": _url.removeprefix("Repository, "),
            "source_branch": "main",
            "source_directory": "docs/",
        }
_mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
assert _mathjax is not None and _mathjax.origin is not None, 'pip install "diffmh[docs]"'
html_static_path.append(
    str(pathlib.Path(_mathjax.origin).parent / "static" / "mathjax" / "tex-svg.js")
)
mathjax_path = "tex-svg.js"


def _as_svg(app, name, source):
    """GitHub draws the mermaid of docs/architecture.md; here the same imports are an SVG."""
    if name == "architecture":
        before, rest = source[0].split(draw_architecture.BEGIN)
        after = rest.split(draw_architecture.END, 1)[1]
        source[0] = f"{before}```{{raw}} html\n{draw_architecture.drawing()}\n```\n{after}"


CARD = """:::{grid-item-card} [](%(page)s.md)
:link: %(page)s
:link-type: doc

```{raw} html
<img alt="" class="thumbnail" src="../_static/thumbnails/%(page)s.png">
```
%(method)s. *Checked against* %(check)s.
:::
"""


def _as_cards(app, name, source):
    """GitHub shows the gallery as a table; here each row is a card with a small picture."""
    if name != "gallery/index":
        return
    row = re.compile(r"\| \[\]\((?P<page>\w+)\.md\) \| (?P<method>.*) \| (?P<check>.*) \|\n")
    cards = "".join(CARD % found.groupdict() for found in row.finditer(source[0]))
    begin, end = source[0].index("| problem |"), source[0].index("```{toctree}")
    grid = "::::{grid} 1 1 2 2\n:gutter: 3\n\n" + cards + "::::\n\n"
    source[0] = source[0][:begin] + grid + source[0][end:]


def _thumbnails(app, exception):
    """The last picture of each page of the gallery, made small."""
    if exception is not None or app.builder.format != "html":
        return
    folder = pathlib.Path(app.outdir) / "_static" / "thumbnails"
    folder.mkdir(parents=True, exist_ok=True)
    for page in app.env.toctree_includes["gallery/index"]:
        pictures = list(app.env.get_doctree(page).findall(nodes.image))
        if not pictures:  # built without running the pages
            continue
        last = pictures[-1]
        picture = pathlib.Path(app.outdir) / "_images" / app.builder.images[last["uri"]]
        with Image.open(picture) as whole:
            whole.thumbnail((640, 480))
            whole.save(folder / f"{pathlib.PurePath(page).name}.png")


def _accessible(app, page, template, context, doctree):
    """Complete what screen readers and keyboards need: the level of the captions in the sidebar,
    the focus of what scrolls (code, tables, and outputs on a phone), the name of folded code, which
    is its own text, and signatures of several lines, which are no list of definitions.
    """
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    body = body.replace("<table ", '<table tabindex="0" ')
    body = body.replace('<div class="cell_output ', '<div tabindex="0" class="cell_output ')
    body = body.replace(' aria-label="Toggle hidden content"', "")
    context["body"] = re.sub(
        r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>",
        lambda lines: re.sub(
            "<(/?)dd>", r"<\1span>", f'<span class="lines">{lines[1]}</span>'
        ).replace("<span><em", '<span class="line"><em'),
        body,
    )


def _leave_out_aliases(app, what, name, member, skip, options):
    """Fields of named tuples, which their class explains."""
    return True if (getattr(member, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app):
    app.connect("source-read", _as_svg)
    app.connect("source-read", _as_cards)
    app.connect("build-finished", _thumbnails)
    # After the theme has made its own.
    app.connect("html-page-context", _accessible, priority=900)
    app.connect("autodoc-skip-member", _leave_out_aliases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
