"""The page in a real browser: headless Chromium from the system, driven by Selenium."""

from __future__ import annotations

import time

import pytest
from browsing import complaints, needs_browser, night, open_browser, phone
from test_reproduce import SMALL

from diffmh.reproduce import EXPERIMENTS, Claim, Result, Size, saved
from diffmh.reproduce import page as pages

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """All six figures, from small data made up for it."""
    out = tmp_path_factory.mktemp("page")
    rows = [
        Claim("a", "≈ 1", "1", "1.00 ± 0.01", "|z| < 5", True),
        Claim("b", "—", "—", "1", "—", None),
    ]
    for name, experiment in EXPERIMENTS.items():
        saved.save(experiment, Result(SMALL[name], "small", rows), out, 0, Size.FAST)
    pages.write(out, saved.load_all(out))
    return out


@pytest.fixture
def page(browser, out):
    browser.set_window_size(1200, 900)
    browser.get(f"file://{out}/index.html")
    return browser


def find(page, selector):
    return page.find_elements("css selector", selector)


def test_it_loads_without_errors(page):
    assert "diffmh" in page.title
    assert complaints(page) == []


def test_every_figure_has_size(page):
    figures = [figure for figure in find(page, "figure svg") if figure.is_displayed()]
    assert len(figures) == 6
    assert all(figure.size["width"] > 400 and figure.size["height"] > 100 for figure in figures)


def test_every_table_is_there_once_with_all_its_rows(page):
    rows = find(page, "tbody tr")
    assert len(rows) == 12, "each quantity once"
    assert all(len(row.find_elements("css selector", "th, td")) == 6 for row in rows)
    assert len(find(page, "td.good")) == 6
    assert find(page, ".soft")[0].text.startswith("6 of 6 verdicts are good (all)")


def test_every_link_leads_somewhere(page):
    here = {link.get_attribute("href").split("#")[1] for link in find(page, "nav a")}
    assert here == set(EXPERIMENTS)
    assert all(find(page, f"#{name}") for name in here)
    (home,) = find(page, "a.home")
    assert home.text == "diffmh" and home.get_attribute("href")


@pytest.fixture
def dark(page):
    night(page)
    yield page
    night(page, on=False)


def colours(page) -> dict[str, str]:
    """Of the page, of a figure's paper, and of a figure's letters."""
    body, paper, letters = (
        find(page, "body")[0],
        find(page, "#branching .wide svg [style*='--paper']")[0],
        find(page, "#branching .wide svg [style*='fill: var(--ink)']")[0],
    )
    return {
        "page": body.value_of_css_property("background-color"),
        "paper": paper.value_of_css_property("fill"),
        "letters": letters.value_of_css_property("fill"),
    }


def test_by_day(page):
    found = colours(page)
    assert found["page"] == "rgba(255, 255, 255, 1)"
    assert (found["paper"], found["letters"]) == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")


def test_by_night_figures_and_films_are_dark_too(dark):
    found = colours(dark)
    assert found["page"] == "rgba(13, 17, 23, 1)"
    assert (found["paper"], found["letters"]) == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")
    dark.refresh()
    brightest = dark.execute_script(
        """
        const c = document.querySelector("[data-film=branching] canvas");
        const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
        let least = 255;
        for (let i = 0; i < data.length; i += 4) {
          const light = Math.max(data[i], data[i + 1], data[i + 2]);
          if (data[i + 3] === 255) least = Math.min(least, light);
        }
        return least;
        """
    )
    assert brightest > 100, "no line of the film is dark on dark"


def test_a_player_steps_plays_and_pauses(page):
    for film in find(page, ".player"):
        frame = lambda film=film: int(film.get_attribute("data-frame"))
        painted = lambda film=film: page.execute_script(
            "const c = arguments[0].querySelector('canvas'); return c.toDataURL();", film
        )
        before, picture = frame(), painted()
        film.find_element("css selector", ".step").click()
        assert frame() != before and painted() != picture
        play = film.find_element("css selector", ".play")
        started = frame()
        play.click()
        assert play.text == "Pause"
        waited = time.monotonic() + 10
        while frame() == started and time.monotonic() < waited:
            time.sleep(0.05)
        assert frame() != started
        play.click()
        stopped = frame()
        time.sleep(0.8)
        assert frame() == stopped and play.text == "Play"


def test_it_fits_a_phone(page):
    phone(page)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        parts = find(page, ".player, table, figure")
        assert len(parts) == 14 and all(element.size["width"] <= 390 for element in parts)
        figures = [figure for figure in find(page, "figure svg") if figure.is_displayed()]
        assert len(figures) == 6
        # A point of the drawing, whose letters have nine, is a pixel or more: it can be read.
        for figure in figures:
            points = page.execute_script("return arguments[0].viewBox.baseVal.width", figure)
            assert figure.size["width"] >= points
    finally:
        phone(page, on=False)
