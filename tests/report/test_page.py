"""The page: what is on it, that nothing in it is executed, and its size."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("altair", reason="the extra 'report' is not installed")

from PIL import Image

from gramwatch.report import page as pages
from gramwatch.report.page import About, Group, Reasons, by_members, page
from gramwatch.report.scores import read
from lab.tests.figures.tables import ROWS, many, write_csv

EVIL = "<img src=x onerror=alert(1)>.png"


class Found(HTMLParser):
    """The elements of a page, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture
def scores(tmp_path):
    return read([write_csv(tmp_path / "new.csv")])


def picture(key: str, grey: bool = False) -> tuple[Image.Image, str]:
    return Image.new("RGB", (16, 16), "green"), ""


def test_the_page_says_what_was_found(scores):
    about = About(
        [("network", "timm:resnet18"), ("fitted on", "photos")], 0.9, 2.5, np.arange(9.0), (0.02, 0.2)
    )
    result = Found(page(scores, about, opener=picture))
    text = " ".join(result.text.split())
    assert "5 images judged" in text
    assert "3 flagged, 60.0 %" in text
    assert "about 0 of 5 would be flagged, and from 0 to 1 in nine of ten" in text  # 0.5 is rounded to even
    assert "1 could not be read" in text
    assert "timm:resnet18" in text
    assert "b/6.png: the file is empty" in text


def test_without_a_guard_the_largest_flagged_p_value_stands_in(scores):
    text = " ".join(Found(page(scores)).text.split())
    assert "the largest flagged p-value, 0.04, for the rate" in text
    assert "file was not given (--guard)" in text


def test_a_page_of_nothing_flagged_and_one_of_nothing_readable(tmp_path):
    quiet = read([write_csv(tmp_path / "quiet.csv", [ROWS[0], ROWS[3]])])
    assert "0 flagged, 0.0 %" in " ".join(Found(page(quiet)).text.split())
    broken = read([write_csv(tmp_path / "broken.csv", [ROWS[5]])])
    assert "0 images judged" in " ".join(Found(page(broken, opener=picture)).text.split())


def test_nothing_in_a_table_is_markup(tmp_path):
    """The path, the class, the note and the error, the set and the facts are texts, whatever they hold."""
    evil = "</script><script>alert(1)</script>" + EVIL
    rows = [[evil, 0, evil, 3.0, 0.01, True, 0.01, 0.01, evil, ""], [evil + "2", None, "", *[None] * 6, evil]]
    scores = read([write_csv(tmp_path / f"{EVIL}.csv", rows), write_csv(tmp_path / "b.csv", rows)])
    reasons = Reasons(
        {0: [evil]},
        {},
        [Group(evil, [0], evil)],
        evil,
        [(evil, evil, evil, 1.0)],
        [(evil,) * 3 + (0.9,)],
        [evil],
    )
    text = page(scores, About([(evil, evil)]), reasons, opener=picture, title=evil)
    result = Found(text)
    assert all(attrs["src"].startswith("data:image/") for attrs in result.all("img"))
    assert not [attrs for _, attrs in result.tags if any(name.startswith("on") for name in attrs)]
    assert len(result.scripts) == 3
    assert result.text.count("alert(1)") > 10  # it is shown
    data = json.loads(result.scripts[0])
    assert data["table"]["classes"]["texts"] == ["", evil]
    assert "<" not in result.scripts[0]


def test_the_policy_allows_the_two_scripts_of_the_page_and_nothing_from_elsewhere(scores):
    result = Found(page(scores, opener=picture))
    (policy,) = [a["content"] for a in result.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    sums = re.findall(r"'sha256-([^']+)'", policy)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in result.scripts[1:]]
    assert sums == digests
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe-eval" not in policy
    assert not result.all("link")
    assert not [attrs for attrs in result.all("script") if "src" in attrs]
    assert all(attrs["href"].startswith("#") for attrs in result.all("a"))


def test_the_table_holds_every_cell(scores):
    data = json.loads(Found(page(scores)).scripts[0])["table"]
    paths = [
        data["folders"]["texts"][f] + n for f, n in zip(data["folders"]["of"], data["names"], strict=True)
    ]
    assert paths == scores.paths
    assert data["score"] == [0.5, 9, "inf", 0.7, 3, None]
    assert data["p"] == [0.6, 0.01, 0.01, 0.5, 0.04, None]
    assert data["flagged"] == [0, 1, 1, 0, 1, 0]
    assert data["members"]["energy"] == [0.7, 0.8, 0.01, 0.3, 0.02, None]


def test_groups_are_by_the_members_that_are_unusual(scores):
    groups = by_members(scores, 0.05)
    assert {group.title: list(group.images) for group in groups} == {
        "gram": [1],
        "gram and energy": [2],
        "energy": [4],
    }
    assert by_members(scores, None) == []
    assert "only all members together" in {g.title for g in by_members(scores, 0.001)}


def test_explanations_are_shown(scores):
    reasons = Reasons(
        {1: ["Flagged (p = 0.01).", "Mostly texture."]},
        {1: "data:image/webp;base64,AAAA"},
        [Group("Mostly gram", [1, 2], "Like each other."), Group("Energy", [4])],
        "All 3 flagged images were explained.",
        [("dog", "gram", "layer1", 2.0), ("dog", "gram", "layer2", -1.0)],
        notes=["3 images were explained."],
    )
    result = Found(page(scores, reasons=reasons, opener=picture))
    text = " ".join(result.text.split())
    assert "Mostly texture." in text
    assert "Mostly gram 2 images, 66.7 %. Like each other." in text
    assert "All 3 flagged images were explained." in text
    assert "Layers and classes: gram" in text
    assert "3 images were explained." in text
    assert "data:image/webp;base64,AAAA" in {attrs["src"] for attrs in result.all("img")}


def test_of_many_layers_the_largest_are_shown(scores):
    cells = [("dog", "gram", f"layer{i:02d}", float(i % 30)) for i in range(60)]
    text = Found(page(scores, reasons=Reasons(cells=cells)))
    values = json.loads(text.scripts[0])["charts"]["layers-0"]["data"]["values"]
    assert [value["layer"] for value in values] == [f"layer{i:02d}" for i in range(60) if i % 30 >= 20]
    assert "The 20 of 60 layers with the largest values are shown" in text.text


def test_every_chart_has_a_description_and_a_table(tmp_path):
    files = [write_csv(tmp_path / f"{n}.csv", many(60, seed=n)) for n in range(2)]
    result = Found(page(read(files)))
    ids = {attrs["id"] for _, attrs in result.tags if attrs.get("id")}
    drawn = [attrs for attrs in result.all("div") if "data-chart" in attrs]
    assert {attrs["data-chart"] for attrs in drawn} == {
        "scores", "p-values", "sets", "members", "member-sets", "folders"
    }  # fmt: skip
    for attrs in drawn:
        assert attrs["role"] == "img"
        assert {attrs["aria-labelledby"], attrs["aria-describedby"]} <= ids
    assert len(result.all("figure")) == len(drawn)
    assert all("alt" in attrs for attrs in result.all("img"))


def test_a_hundred_thousand_images_are_less_than_20_mb(tmp_path):
    scores = read([write_csv(tmp_path / "t.csv", many(100_000, "a/rather/long/name/of/a/folder"))])
    text = page(scores)
    assert len(text.encode()) < 20e6
    assert len(json.loads(Found(text).scripts[0])["table"]["names"]) == 100_000


def test_the_templates_are_part_of_the_package():
    assert {path.name for path in pages.TEMPLATES.iterdir()} == {"page.html", "page.css", "page.js"}
