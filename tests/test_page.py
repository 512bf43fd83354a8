"""The page in a real browser: headless Chromium from the system, driven by Selenium."""

from __future__ import annotations

import shutil
import time

import pytest
from test_reproduce import results  # noqa: F401

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no Chromium with its driver on this machine; .ci/run installs it",
)


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1200,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=DRIVER)
    )
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, results):  # noqa: F811
    browser.set_window_size(1200, 900)
    browser.get(f"file://{results[0]}/index.html")
    return browser


def find(page, selector):
    return page.find_elements("css selector", selector)


def test_it_loads_without_errors(page):
    assert "diffmh" in page.title
    assert [
        entry for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ] == []


def test_every_figure_has_size(page):
    figures = find(page, "figure svg")
    assert len(figures) == 2
    assert all(figure.size["width"] > 400 and figure.size["height"] > 100 for figure in figures)


def test_the_table_has_all_rows(page):
    rows = find(page, "#table tbody tr:not(.group)")
    assert len(rows) == 4 and all(
        len(row.find_elements("css selector", "th, td")) == 6 for row in rows
    )
    assert len(find(page, "#table .good")) == 4


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
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        assert all(element.size["width"] <= 390 for element in find(page, ".player, table"))
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
