"""Headless Chromium for tests of pages. Tests are skipped, with the reason, where it is not installed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
AXE = Path(os.environ.get("GRAMWATCH_AXE", "build/axe/node_modules/axe-core/axe.min.js"))
SWITCHES = (
    "--headless=new --no-sandbox --disable-background-networking --disable-gpu --disable-dev-shm-usage "
    "--no-first-run --disable-component-update --disable-sync "
    "--force-prefers-reduced-motion "  # a click does not wait for scrolling
    "--use-fake-device-for-media-stream --use-fake-ui-for-media-stream"  # a camera that may be used
)

needs_chromium = pytest.mark.skipif(
    not CHROMIUM or not DRIVER, reason="there is no Chromium here: apt-get install chromium chromium-driver"
)
needs_axe = pytest.mark.skipif(
    not AXE.is_file(), reason="axe-core is not there: make test-browser fetches it"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for switch in SWITCHES.split():
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def size(browser: Any, width: int, height: int, mobile: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def errors(browser: Any) -> list[str]:
    """What the console has said since it was asked last."""
    return [
        entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


def asked_for(browser: Any) -> list[str]:
    """The addresses that the page has asked for, itself left out."""
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    return [name for name in browser.execute_script(script) if not name.startswith(("data:", "blob:"))]


def check_accessible(browser: Any, fewest_passes: int) -> None:
    """Run axe-core on the page as it is. Nothing serious is found, and enough is checked."""
    browser.execute_script("document.querySelectorAll('details').forEach((e) => { e.open = true; });")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    findings = browser.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run(document).then(done, (e) => done(String(e)));"
    )
    assert isinstance(findings, dict), findings
    serious = [
        (violation["id"], violation["impact"], [node["html"][:120] for node in violation["nodes"]][:3])
        for violation in findings["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert len(findings["passes"]) > fewest_passes
