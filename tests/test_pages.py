"""Pages hold what their results say: `python -m lab.benchmarks.document` changes nothing."""

import re

import pytest

from lab.benchmarks import cells, document, figures

BLOCK, FIGURE = "<!-- begin a -->\nold\n<!-- end a -->\n", "It has <!--=b-->1<!--/--> %.\n"


@pytest.fixture(scope="module")
def pages():
    return list(document.written())


def test_pages_hold_what_their_results_say(pages):
    told = {path.name: document.changed(before, after) for path, before, after in pages if before != after}
    assert told == {}, "python -m lab.benchmarks.document writes them"


def test_every_figure_stands_on_a_page(pages):
    text = "".join(before for _, before, _ in pages)
    assert set(re.findall(r"<!--=(.+?)-->", text)) == set(figures.FIGURES)


def test_blocks_and_figures_are_filled_and_named():
    old = BLOCK + FIGURE
    new = document.filled(old, {"a": "new"}, {"b": lambda: "2"})
    assert new == old.replace("old", "new").replace("1", "2")
    assert document.changed(old, new) == ["a", "b"]
    assert document.changed(old, document.filled(old, {"a": "old"}, {"b": lambda: "2"})) == ["b"]


@pytest.mark.parametrize(
    ("page", "blocks", "said"),
    [
        (FIGURE, {"a": ""}, r"blocks of results: \['a'\]"),
        (BLOCK, {}, r"blocks on the page: \['a'\]"),
        (FIGURE.replace("b", "c"), {}, "no figure 'c'"),
        (f"- {FIGURE[7:]}", {}, "begins a line"),
    ],
)
def test_what_nobody_writes_is_an_error(page, blocks, said):
    with pytest.raises(LookupError, match=said):
        document.filled(page, blocks, {"b": str})


def test_a_change_is_told_with_its_page_and_its_block(monkeypatch, capsys):
    page = document.DOCS / "guard.md"
    monkeypatch.setattr(document, "written", lambda: [(page, BLOCK, BLOCK.replace("old", "new"))])
    with pytest.raises(SystemExit, match="1"):
        document.main(["--check"])
    assert capsys.readouterr().out == "would change docs/guard.md: a\n"


def test_a_missing_cell_or_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "DOCS", tmp_path)
    (tmp_path / "a.csv").write_text("ood,method,tnr\niSUN,Gram,99.2\niSUN,MSP,\n", encoding="utf-8")
    (tmp_path / "a.json").write_text('{"rows": [{"low": 1}]}', encoding="utf-8")
    assert cells.cell("a.csv", "tnr", ood="iSUN", method="Gram") == 99.2
    for call, said in (
        (
            lambda: cells.cell("a.csv", "tnr", ood="iSUN", method="MSP"),
            "docs/a.csv: there is no tnr of iSUN, MSP",
        ),
        (lambda: cells.cell("a.csv", "auroc", ood="iSUN"), "docs/a.csv, row 2: there is no 'auroc'"),
        (lambda: cells.data("a.json")["rows"][0]["high"], "docs/a.json, rows, 0: there is no 'high'"),
        (lambda: cells.data("b.json"), "docs/b.json is missing"),
    ):
        with pytest.raises(LookupError, match=re.escape(said)):
            call()
    cells.rows.cache_clear()
    cells.data.cache_clear()
