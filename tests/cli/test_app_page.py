"""docs/cli.md: its blocks run, and print what the page shows."""

import csv
import re
import subprocess
import sys

import pytest

from tests.pages import ROOT

PAGE = ROOT / "docs" / "cli.md"


def without_figures(text: str) -> str:
    """The words alone: figures of a training differ a little from machine to machine."""
    return re.sub(r"[\d.,]+", "#", " ".join(text.split()))


def test_the_blocks_of_the_page_run_and_print_what_it_shows(of_page):
    text, said = PAGE.read_text(encoding="utf-8"), of_page.said
    for line in said.splitlines():
        assert without_figures(line) in without_figures(text), line
    (flagged,) = re.findall(r"(\d+) of 200 images flagged", said)
    assert 95 <= int(flagged) <= 120
    rows = (of_page.folder / "scores.csv").read_text().splitlines()
    assert rows[0] in text
    assert len(rows) == 201
    actual, shown = ({row["path"]: row for row in csv.DictReader(lines)} for lines in (rows, _rows(text)))
    assert len(shown) == 2
    for path, row in shown.items():
        assert (row["predicted"], row["is_ood"]) == (actual[path]["predicted"], actual[path]["is_ood"])
        assert float(row["score"]) == pytest.approx(float(actual[path]["score"]), abs=0.1)
    (told,) = re.findall(r"(\d+) of 200 images flagged", text)
    assert abs(int(told) - int(flagged)) <= 3


def _rows(text: str) -> list[str]:
    """The table on the page."""
    return re.findall(r"^ {4}(path,.*|images/new/.*)", text, re.MULTILINE)


def test_the_readme_shows_the_verdict_of_the_page():
    """For the same image: an exported guard differs by roundings."""
    shown = {row["path"]: row for row in csv.DictReader(_rows(PAGE.read_text(encoding="utf-8")))}
    (score,) = re.findall(r'"score":([\d.]+)', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert float(score) == pytest.approx(float(shown["images/new/photograph/0000.png"]["score"]), abs=1e-3)


def test_every_command_for_a_network_of_ones_own_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in "fit score report info merge taps doctor".split():
        assert f"`gramwatch {name}" in text


EXTRAS = {
    r"gramwatch \w+ timm:": "networks",
    r"gramwatch (score|report) .*\.html": "report",
    r"gramwatch (live|serve) ": "serve",
    r"gramwatch export ": "export",
}
"""The extra that a command needs."""


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_the_install_line_of_a_page_has_the_extras_of_its_commands(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    (given,) = re.findall(r"^ +pip install '\.\[([\w,]+)\]'", text, re.MULTILINE)
    needed = {extra for command, extra in EXTRAS.items() if re.search(command, text)}
    assert needed
    assert needed <= set(given.split(","))


def test_the_demo_imports_nothing_that_make_does_not_install_for_it():
    code = (
        "import sys, gramwatch.cli.app, gramwatch.cli.quickstart, gramwatch.report.overview\n"
        "from gramwatch.report import pyplot\n"
        "pyplot()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = {"transformers", "timm", "torchvision", "lightning", "pyarrow", "onnx", "altair", "fastapi"}
    assert not set(done.stdout.split()) & others
