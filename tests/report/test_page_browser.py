"""The page in a real browser: no errors, sorting and filtering, themes, a phone, accessibility.

`make test-browser` installs what is needed but Chromium itself: apt-get install chromium chromium-driver.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("altair", reason="the extra 'report' is not installed")
pytest.importorskip("selenium", reason="selenium is not installed: make test-browser")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from gramwatch.explain.thumbnails import thumbnail
from gramwatch.report.page import About, Group, Reasons, page
from gramwatch.report.scores import read
from lab.tests.figures.tables import many, write_csv
from tests.browser import asked_for, check_accessible, chromium, errors, needs_axe, needs_chromium, size

CHARTS = 7
EVIL = "<img src=x onerror=alert(1)>.png"

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def picture(key: str, grey: bool = False) -> tuple[Image.Image, str]:
    return Image.new("RGB", (32, 24), "teal"), ""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two sets, with hostile names, explanations and an image that could not be read."""
    folder = tmp_path_factory.mktemp("page")
    rows = many(230)
    rows[0][0], rows[0][2], rows[1][8] = EVIL, EVIL, f"</script>{EVIL}"
    rows.append(["camera/broken.png", None, "", *[None] * 5, "", "the file is empty"])
    scores = read(
        [write_csv(folder / "monday.csv", rows), write_csv(folder / "tuesday.csv", many(70, seed=1))]
    )
    first = scores.by_score[0]
    reasons = Reasons(
        {first: [f"Mostly texture {EVIL}."]},
        {first: thumbnail(picture("")[0])},
        [Group("Mostly gram", [0, 5, 10], "Alike.", "60 % comes from gram."), Group("energy", [15, 20])],
        "All were explained.",
        [(name, "gram", tap, 1.0) for name in ("cat", "dog") for tap in ("layer1", "layer2")],
        [("tuesday", "gram", "layer1", 0.9)],
    )
    about = About(
        [("network", "timm:resnet18"), ("fitted on", EVIL)], 0.95, 2.0, scores.score[:50], (0.03, 0.08)
    )
    path = folder / "report.html"
    path.write_text(page(scores, about, reasons, opener=picture), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Any:
    """The page in a wide window, as it is when it was just opened."""
    size(browser, 1200, 900)
    browser.get(file.as_uri())
    drawn(browser)
    return browser


def drawn(browser: Any) -> None:
    """Wait until every chart that is not folded away is drawn."""
    script = (
        "const open = [...document.querySelectorAll('.drawing')].filter((e) => e.clientWidth);"
        "return open.length > 0 && open.every((e) => e.querySelector('svg'))"
    )
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(script))


def unfold(browser: Any) -> None:
    """Open everything that is folded away."""
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    WebDriverWait(browser, 60).until(
        lambda b: len(b.find_elements(By.CSS_SELECTOR, ".drawing svg")) == CHARTS
    )


def cells(browser: Any, number: int) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((cell) => cell.textContent)"
    return list(browser.execute_script(script, f"#table tbody td:nth-child({number})"))


def column(browser: Any, name: str) -> tuple[int, Any]:
    """The number of a column, and the button in its head."""
    for number, head in enumerate(browser.find_elements(By.CSS_SELECTOR, "#table thead th"), 1):
        if head.text.rstrip(" ▲▼") == name:
            return number, head.find_element(By.TAG_NAME, "button")
    raise AssertionError(name)


def status(browser: Any) -> str:
    return str(browser.find_element(By.ID, "status").text)


def test_it_opens_without_errors_and_asks_for_nothing(opened):
    assert errors(opened) == []
    assert asked_for(opened) == []
    unfold(opened)
    assert errors(opened) == []
    assert asked_for(opened) == []


def test_layers_are_folded_away_and_drawn_in_full_width_when_unfolded(opened):
    assert not opened.find_element(By.ID, "chart-layers-0").is_displayed()
    script = "return document.querySelector('#chart-layers-0 svg')"
    opened.find_element(By.CSS_SELECTOR, "#where > details > summary").click()
    WebDriverWait(opened, 30).until(lambda b: b.execute_script(script))
    width = opened.execute_script("return document.querySelector('#chart-layers-0 svg').clientWidth")
    assert width > 200


def test_hostile_names_are_texts(opened):
    assert not opened.execute_script("return document.querySelector('img[onerror], img[src=x]')")
    search = opened.find_element(By.ID, "search")
    search.send_keys("onerror")
    WebDriverWait(opened, 10).until(lambda b: status(b).startswith("2 of"))
    assert EVIL in cells(opened, 1)
    assert EVIL in opened.find_element(By.ID, "fitted").text
    assert errors(opened) == []


def test_the_table_is_sorted_by_any_column(opened):
    number, _ = column(opened, "score")
    scores = [float(text) for text in cells(opened, number)]
    assert scores == sorted(scores, reverse=True)
    number, button = column(opened, "p-value")
    button.click()
    values = [float(text) for text in cells(opened, number)]
    assert values == sorted(values)
    head = button.find_element(By.XPATH, "..")
    assert head.get_attribute("aria-sort") == "ascending"
    button.click()
    values = [float(text) for text in cells(opened, number)]
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    number, button = column(opened, "class")
    button.click()
    texts = cells(opened, number)
    assert texts == sorted(texts)


def test_filters_and_search_work_together(opened):
    assert status(opened) == "301 of 301 images"
    Select(opened.find_element(By.ID, "verdict")).select_by_visible_text("flagged")
    assert status(opened) == "60 of 301 images"
    number, _ = column(opened, "verdict")
    assert set(cells(opened, number)) == {"flagged"}
    Select(opened.find_element(By.ID, "set")).select_by_visible_text("tuesday")
    assert status(opened) == "14 of 301 images"
    Select(opened.find_element(By.ID, "class")).select_by_visible_text("dog")
    number, _ = column(opened, "class")
    assert set(cells(opened, number)) == {"dog"}
    opened.find_element(By.ID, "search").send_keys("nothing has this name")
    WebDriverWait(opened, 10).until(lambda b: status(b) == "0 of 301 images")
    assert opened.find_element(By.ID, "place").text == "none"


def test_what_could_not_be_read_can_be_found(opened):
    Select(opened.find_element(By.ID, "verdict")).select_by_visible_text("not readable")
    assert status(opened) == "1 of 301 images"
    assert cells(opened, 1) == ["camera/broken.png"]
    assert "the file is empty" in cells(opened, column(opened, "note")[0])


def test_pages_of_the_table_follow_each_other(opened):
    seen = []
    following = opened.find_element(By.ID, "next")
    for _ in range(7):
        seen += cells(opened, 1)
        if following.is_enabled():
            following.click()
    assert len(seen) == 301
    assert opened.find_element(By.ID, "place").text == "301 to 301"
    opened.find_element(By.ID, "previous").click()
    assert opened.find_element(By.ID, "place").text == "251 to 300"


def test_the_keyboard_is_enough(opened):
    """From the address, Tab reaches the skip link first. A column is sorted by Enter."""
    opened.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert opened.switch_to.active_element.text == "Skip to the report"
    number, button = column(opened, "path")
    button.send_keys(Keys.ENTER)
    assert cells(opened, number) == sorted(cells(opened, number))
    assert opened.switch_to.active_element == button


def test_themes_change_colours_and_charts(opened):
    def colours() -> tuple[str, str]:
        back = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
        drawn(opened)
        label = opened.find_element(By.CSS_SELECTOR, "#chart-scores svg .role-axis-label text")
        return back, label.get_attribute("fill")

    button, by_theme = opened.find_element(By.ID, "theme"), {}
    for name in ("light", "dark"):
        button.click()
        assert button.text == f"Theme: {name}"
        WebDriverWait(opened, 30).until(lambda _: colours() not in by_theme.values())
        by_theme[name] = colours()
    assert by_theme["light"][0] == "rgb(255, 255, 255)"
    assert by_theme["dark"][0] == "rgb(20, 23, 27)"
    assert by_theme["light"][1] != by_theme["dark"][1]
    assert errors(opened) == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_it_fits_a_phone(opened, width):
    size(opened, width, 844, mobile=True)
    opened.refresh()
    drawn(opened)
    unfold(opened)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    wide = opened.execute_script(
        "return [...document.querySelectorAll('.drawing svg')].filter((e) => "
        "e.getBoundingClientRect().right > innerWidth).length"
    )
    assert wide == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@needs_axe
def test_axe_finds_nothing_serious(opened, theme):
    for _ in range(1 if theme == "light" else 2):
        opened.find_element(By.ID, "theme").click()
    drawn(opened)
    unfold(opened)
    check_accessible(opened, fewest_passes=20)
