"""The site that `make docs` built, in a real browser and without a network."""

from __future__ import annotations

import pathlib
import re
import urllib.parse

import pytest
from browsing import complaints, needs_browser, night, open_browser, phone

SITE = pathlib.Path(__file__).parent.parent / "docs" / "_build" / "html"
PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if "_static" not in path.parts and path.name not in ("genindex.html", "search.html")
)
built = pytest.mark.skipif(not PAGES, reason="no site here: `make docs` builds it")
pytestmark = built


def targets(page: str) -> list[tuple[str, str]]:
    """Files and anchors that a page points to."""
    text = (SITE / page).read_text(encoding="utf-8")
    found = re.findall(r'(?:href|src)="([^"]+)"', text)
    inside = [link for link in found if not re.match(r"[a-z]+:|//", link)]
    return [
        (urllib.parse.unquote(address or pathlib.PurePath(page).name), anchor)
        for address, _, anchor in (link.split("?")[0].partition("#") for link in inside)
        if address or anchor
    ]


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_broken(page):
    folder = (SITE / page).parent
    assert len(targets(page)) > 10
    for address, anchor in targets(page):
        file = folder / address
        assert file.exists(), f"{page}: {address}"
        if anchor and file.suffix == ".html":
            assert f'id="{anchor}"' in file.read_text(encoding="utf-8"), f"{address}#{anchor}"


def test_nothing_comes_from_a_network():
    for page in PAGES:
        text = (SITE / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="([^"]+)"', text)
        assert [link for link in loaded if re.match(r"https?:|//", link)] == [], page


def test_every_worked_problem_is_checked_and_timed():
    pages = [page for page in PAGES if page.startswith("gallery/") and "index" not in page]
    assert len(pages) >= 10
    for page in pages:
        text = (SITE / page).read_text(encoding="utf-8")
        assert '<span class="k">assert</span>' in text, f"{page} has no check"
        assert re.search(r'<img alt="[^"/]{20,}" src="../_images/', text), f"{page} has no picture"
        found = re.search(r"This page took (\d+) s", text)
        assert found is not None and int(found[1]) < 60, f"{page} takes a minute or more"


@pytest.fixture(scope="module")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@needs_browser
def test_every_page_loads_without_errors_and_fits_a_phone(browser):
    phone(browser)
    try:
        for page in PAGES:
            browser.get(f"file://{SITE / page}")
            assert complaints(browser) == [], page
            width = browser.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, f"{page} is {width} wide"
    finally:
        phone(browser, on=False)


@needs_browser
def test_by_night(browser):
    night(browser)
    try:
        browser.get(f"file://{SITE}/index.html")
        script = "return getComputedStyle(document.body).getPropertyValue('{}')"
        light = lambda name: max(
            map(int, re.findall(r"\d+", browser.execute_script(script.format(name)))[:3])
        )
        assert light("background-color") < 60 and light("color") > 150
        (picture, *_) = browser.find_elements("css selector", ".cell_output img")
        assert "invert" in picture.value_of_css_property("filter")
    finally:
        night(browser, on=False)


@needs_browser
def test_formulas_are_set(browser):
    browser.get(f"file://{SITE}/mathematics.html")
    formulas = "document.querySelectorAll('mjx-container').length"
    assert browser.execute_script(f"return MathJax.startup.promise.then(() => {formulas})") > 20


@needs_browser
def test_formulas_of_docstrings_are_set(browser):
    """Every indented formula, and those in running text; none is left with an error of TeX."""
    for page, least in (("expectations", 10), ("kernels", 10), ("models_and_draws", 25)):
        browser.get(f"file://{SITE}/reference/{page}.html")
        count = "[document.querySelectorAll('{}').length, document.querySelectorAll('{}').length]"
        count = count.format(".content mjx-container", "mjx-merror, [data-mjx-error]")
        script = f"return MathJax.startup.promise.then(() => {count})"
        formulas, errors = browser.execute_script(script)
        assert formulas >= least and errors == 0, page


def test_signatures_have_short_types_that_link():
    text = (SITE / "reference" / "kernels.html").read_text(encoding="utf-8")
    (_, after) = text.split('id="diffmh.MetropolisHastings"')
    signature = after.split("</dt>")[0]
    assert 'href="own.html#diffmh.extend.Proposal"' in signature
    shown = re.sub(r"<[^>]+>", "", signature)
    assert re.search(r"proposal:\s+Proposal\s+\|\s+Callable", shown), shown
    for page in PAGES:
        if page.startswith("reference/"):
            text = (SITE / page).read_text(encoding="utf-8")
            for one in re.findall(r'<dt class="sig.*?</dt>', text, re.DOTALL):
                assert not re.search("jaxtyping|jaxlib|Checked|&lt;factory", one), page


def test_the_reference_has_every_public_name():
    import diffmh

    text = "".join(
        (SITE / page).read_text(encoding="utf-8") for page in PAGES if page.startswith("reference/")
    )
    names = [f"diffmh.{name}" for name in diffmh.__all__]
    names += [f"diffmh.sad.{name}" for name in dir(diffmh.sad) if name[0].isupper()]
    names += [f"diffmh.extend.{name}" for name in dir(diffmh.extend) if name[0].isupper()]
    modules = {f"diffmh.{name}" for name in ("extend", "models", "plots", "sad")}
    assert [name for name in names if f'id="{name}"' not in text and name not in modules] == []


@needs_browser
def test_search_finds_a_word(browser):
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(f"file://{SITE}/search.html?q=recoupling")
    found = lambda browser: browser.find_elements("css selector", "#search-results li a")
    WebDriverWait(browser, 30).until(found)
    assert any("glossary" in link.get_attribute("href") for link in found(browser))
    assert complaints(browser) == []
