"""Headless Chromium from the system, driven by Selenium."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no Chromium with its driver on this machine; .ci/run installs it",
)


def open_browser():
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
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=DRIVER)
    )


def complaints(browser) -> list:
    return [
        entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


def phone(browser, on: bool = True) -> None:
    if on:
        size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    else:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def night(browser, on: bool = True) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark"}] if on else []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
