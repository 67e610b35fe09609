"""The page in a real browser: files, drawings, the camera, examples, bad input, a phone, accessibility.

`make test-browser` installs what is needed but Chromium itself: apt-get install chromium chromium-driver.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("selenium", reason="selenium is not installed: make test-browser")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import asked_for, check_accessible, chromium, errors, needs_axe, needs_chromium, size

pytestmark = needs_chromium
KNOWN, PHOTOGRAPH = 0, 10
"""Examples: a digit 0, and a piece of a photograph."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser: Any, page: Any) -> Any:
    """The page in a wide window, as it is when it was just opened."""
    size(browser, 1200, 900)
    browser.get(page.url)
    until(browser, lambda b: b.execute_script("return document.documentElement.dataset.ready") == "true")
    errors(browser)  # of the page before
    return browser


def until(browser: Any, condition: Any) -> Any:
    return WebDriverWait(browser, 30).until(condition)


def text(browser: Any, id_: str) -> str:
    return str(browser.find_element(By.ID, id_).text)


def shown(browser: Any, id_: str) -> bool:
    return bool(browser.find_element(By.ID, id_).is_displayed())


def choose(browser: Any, way: str) -> None:
    browser.find_element(By.CSS_SELECTOR, f"#ways input[value={way}]").click()


def verdict(browser: Any, give: Any) -> str:
    """Give an image and wait for the next verdict."""
    browser.execute_script("document.getElementById('said').textContent = ''")
    give()
    until(
        browser,
        lambda b: text(b, "said") and "busy" not in b.find_element(By.ID, "result").get_attribute("class"),
    )
    return text(browser, "said")


def example(browser: Any, number: int) -> Any:
    return browser.find_elements(By.CSS_SELECTOR, "#examples button")[number]


def upload(browser: Any, path: Path) -> None:
    browser.find_element(By.ID, "file").send_keys(str(path))


def loaded(browser: Any, id_: str) -> bool:
    script = "const e = document.getElementById(arguments[0]); return e.complete && e.naturalWidth > 0"
    return bool(browser.execute_script(script, id_))


def test_an_upload_gets_a_verdict_a_map_and_sentences(opened, demo, tmp_path, page):
    path = tmp_path / "a photograph, größer.png"
    path.write_bytes(demo[1].examples[PHOTOGRAPH].data)
    expected = demo[0](path.read_bytes())
    assert text(opened, "status") == "No image yet."
    assert verdict(opened, lambda: upload(opened, path)) == "✗ Flagged"
    assert text(opened, "predicted") == f"The network says: {expected['class']}"
    assert [e.text for e in opened.find_elements(By.CSS_SELECTOR, "#sentences li")] == expected["sentences"]
    assert len(expected["sentences"][0]) > 30
    for picture, source in (("seen", expected["input"]), ("map", expected["map"])):
        assert opened.find_element(By.ID, picture).get_attribute("src") == source
    for picture in ("given", "seen", "map"):
        until(opened, lambda b, picture=picture: loaded(b, picture))
        assert shown(opened, picture)
    rows = opened.find_elements(By.CSS_SELECTOR, "#members tbody tr")
    assert [row.find_element(By.TAG_NAME, "th").text.partition(" (")[0] for row in rows] == [
        member["name"] for member in expected["members"]
    ]
    assert errors(opened) == []
    assert all(address.startswith(page.url) for address in asked_for(opened))
    assert len(asked_for(opened)) > 3


def test_the_demo_offers_examples_and_says_what_it_is(opened, demo):
    assert text(opened, "title") == "Digits 0 to 7"
    assert opened.title == "Digits 0 to 7 · gramwatch live"
    images = opened.find_elements(By.CSS_SELECTOR, "#examples img")
    assert [image.get_attribute("alt") for image in images] == [example.name for example in demo[1].examples]
    assert verdict(opened, example(opened, KNOWN).click) == "✓ Not flagged"
    assert text(opened, "predicted") == "The network says: 0"
    assert verdict(opened, example(opened, PHOTOGRAPH).click) == "✗ Flagged"
    assert example(opened, PHOTOGRAPH).get_attribute("aria-pressed") == "true"
    assert example(opened, KNOWN).get_attribute("aria-pressed") == "false"
    opened.find_element(By.CSS_SELECTOR, "footer summary").click()
    assert "721 handwritten digits, 0 to 7" in text(opened, "facts")
    assert errors(opened) == []


def draw(browser: Any, points: list[tuple[float, float]]) -> None:
    """A stroke on the canvas. Its corners are -1 and 1."""
    canvas = browser.find_element(By.ID, "canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    half = canvas.size["width"] / 2
    moves = ActionChains(browser, duration=20)
    (x, y), *rest = points
    moves.move_to_element_with_offset(canvas, int(half * x), int(half * y)).click_and_hold()
    for x, y in rest:
        moves.move_to_element_with_offset(canvas, int(half * x), int(half * y))
    moves.release().perform()


def test_a_drawing_is_judged(opened):
    choose(opened, "draw")
    assert not shown(opened, "drop")
    opened.find_element(By.ID, "judge-drawing").click()
    until(opened, lambda b: text(b, "failure") == "No verdict. Nothing is drawn.")
    angles = np.linspace(-np.pi / 2, 1.5 * np.pi, 16)
    draw(opened, [(0.3 * float(np.cos(a)), 0.55 * float(np.sin(a))) for a in angles])
    assert verdict(opened, opened.find_element(By.ID, "judge-drawing").click) == "✓ Not flagged"
    assert text(opened, "predicted") == "The network says: 0"
    draw(opened, [(-0.6, -0.6), (0.6, 0.6)])
    draw(opened, [(0.6, -0.6), (-0.6, 0.6)])
    assert verdict(opened, opened.find_element(By.ID, "judge-drawing").click) == "✗ Flagged"
    opened.find_element(By.ID, "clear").click()
    script = (
        "return [...document.getElementById('canvas').getContext('2d').getImageData(0, 0, 320, 320).data]"
    )
    assert set(opened.execute_script(script)) == {0, 255}  # black, and opaque
    assert errors(opened) == []


def test_the_camera_is_used_only_while_it_is_wanted(opened):
    choose(opened, "camera")
    button = opened.find_element(By.ID, "photograph")
    until(opened, lambda _: button.is_enabled())
    assert verdict(opened, button.click) == "✗ Flagged"  # a test pattern is no digit
    until(opened, lambda b: loaded(b, "given"))
    running = "const s = document.getElementById('video').srcObject; return s ? s.active : false"
    assert opened.execute_script(running) is True
    choose(opened, "file")
    assert opened.execute_script(running) is False
    assert errors(opened) == []


def test_a_file_can_be_dropped_and_pasted(opened):
    script = """
      const [kind, number, done] = arguments;
      fetch(`examples/${number}`).then((answer) => answer.blob()).then((blob) => {
        const data = new DataTransfer();
        data.items.add(new File([blob], "image.png", { type: "image/png" }));
        document.body.dispatchEvent(kind === "drop"
          ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
          : new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        done();
      });"""
    assert verdict(opened, lambda: opened.execute_async_script(script, "drop", KNOWN)) == "✓ Not flagged"
    assert verdict(opened, lambda: opened.execute_async_script(script, "paste", PHOTOGRAPH)) == "✗ Flagged"
    assert errors(opened) == []


def test_what_cannot_be_read_is_said_on_the_page(opened, tmp_path, demo):
    good = demo[1].examples[KNOWN].data
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    contents = {
        "text.png": b"no image",
        "truncated.png": good[:-30],
        "empty.png": b"",
        "huge.png": (tmp_path / "huge.png").read_bytes(),
    }
    reasons = {
        "text.png": "Not an image of a known format (JPEG, PNG, WEBP, BMP, GIF, PPM, TIFF).",
        "truncated.png": "Cannot be read: ",
        "empty.png": "The file is empty.",
        "huge.png": "Too large: it has more than 50,000,000 pixels.",
    }
    verdict(opened, example(opened, KNOWN).click)
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        upload(opened, tmp_path / name)
        until(opened, lambda b, name=name: text(b, "failure").startswith(f"No verdict. {reasons[name]}"))
        assert not shown(opened, "answer")
    assert opened.find_element(By.ID, "failure").get_attribute("role") == "alert"
    assert all("status of 400" in message for message in errors(opened))  # the browser logs what is refused
    assert verdict(opened, example(opened, KNOWN).click) == "✓ Not flagged"
    assert not shown(opened, "failure")


def test_images_of_every_kind_are_judged(opened, tmp_path):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    grey, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = 6
    grey.save(tmp_path / "grey.png")
    Image.fromarray(pixels.astype(np.uint16) << 8).save(tmp_path / "16 bits.png")
    grey.convert("CMYK").save(tmp_path / "cmyk.jpg")
    grey.save(tmp_path / "turned.jpg", exif=exif)
    grey.save(tmp_path / "unknown to browsers.tif")
    notes = {
        "grey.png": "",
        "16 bits.png": "16 bits reduced",
        "cmyk.jpg": "CMYK made RGB",
        "turned.jpg": "EXIF",
    }
    for name in [*notes, "unknown to browsers.tif"]:
        assert "lagged" in verdict(opened, lambda name=name: upload(opened, tmp_path / name))
        said = opened.find_element(By.ID, "notes").get_attribute("textContent")
        assert notes.get(name, "") in said
    until(opened, lambda b: not shown(b, "f-given"))  # the browser cannot show a TIFF, the network's input is
    assert shown(opened, "seen")
    assert errors(opened) == []


def test_a_guard_that_went_away_is_said(opened):
    opened.execute_cdp_cmd("Network.enable", {})
    opened.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/judge"]})
    example(opened, KNOWN).click()
    until(
        opened,
        lambda b: "gramwatch does not answer" in text(b, "failure").lower().replace("no verdict. ", ""),
    )
    opened.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    assert verdict(opened, example(opened, KNOWN).click) == "✓ Not flagged"


def test_the_keyboard_is_enough(opened):
    opened.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert opened.switch_to.active_element.text == "Skip to the image"
    ways = opened.find_element(By.CSS_SELECTOR, "#ways input:checked")
    ways.send_keys(Keys.ARROW_RIGHT)
    assert shown(opened, "canvas")
    assert verdict(opened, lambda: example(opened, KNOWN).send_keys(Keys.ENTER)) == "✓ Not flagged"
    assert text(opened, "status") == "Not flagged. The network says: 0."
    assert opened.find_element(By.ID, "status").get_attribute("role") == "status"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_it_fits_a_phone(opened, width):
    size(opened, width, 844, mobile=True)
    opened.refresh()
    until(opened, lambda b: b.find_elements(By.CSS_SELECTOR, "#examples button"))
    for way in ("draw", "camera", "file"):
        choose(opened, way)
        assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    verdict(opened, example(opened, PHOTOGRAPH).click)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    box = opened.execute_script("return document.getElementById('verdict').getBoundingClientRect().toJSON()")
    assert 0 <= box["top"] < 844 / 2  # the verdict is in view
    assert box["right"] <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
@needs_axe
def test_axe_finds_nothing_serious(opened, theme):
    for _ in range(1 if theme == "light" else 2):
        opened.find_element(By.ID, "theme").click()
    background = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[theme]
    script = "return getComputedStyle(document.body).backgroundColor"
    assert opened.execute_script(script) == background
    for number, way in ((KNOWN, "draw"), (PHOTOGRAPH, "file")):
        choose(opened, way)
        verdict(opened, example(opened, number).click)
        check_accessible(opened, fewest_passes=20)
    upload(opened, Path(__file__))
    until(opened, lambda b: shown(b, "failure"))
    check_accessible(opened, fewest_passes=20)
