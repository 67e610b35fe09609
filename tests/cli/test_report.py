"""The command `gramwatch report`, and `gramwatch score --report`."""

import json
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra 'report' is not installed")

from gramwatch.cli.report import about_guard
from lab.tests.figures.tables import many, write_csv
from tests.cli.invoking import invoke, told
from tests.cli.own import QUICK
from tests.cli.test_score import rows_of


def test_a_page_is_written_with_the_scores(own, tmp_path):
    table, page = tmp_path / "s.csv", tmp_path / "report.html"
    result = invoke(*own.score, own.test, "-o", table, "--report", page, "--fdr", 0.2)
    assert result.exit_code == 0, result.output
    assert f"written: {page}, 1." in result.output
    text = page.read_text()
    assert "selected as a set" in text
    assert str(own.train) in text  # what it was fitted on
    assert text.count("data:image/webp;base64,") >= 24
    assert "calibration images" in text
    assert "of the score" in text  # in sentences
    words = ["report", table, "--guard", own.guard, "--workers", 0, "-q", "-o"]
    alone = tmp_path / "alone.html"
    result = invoke(*words, alone, "--model", own.model, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert alone.read_text() == text
    groups = json.loads(result.stdout)["groups"]
    assert all(group["title"] in text and group["about"] in text for group in groups)
    grouped = [path for group in groups for path in group["images"]]
    flagged = [row["path"] for row in rows_of(table) if row["is_ood"] == "true"]
    assert sorted(grouped) == sorted(flagged if len(flagged) >= 10 else [])
    plain = tmp_path / "plain.html"
    assert invoke(*words, plain, "--no-explain").exit_code == 0
    assert str(own.train) in plain.read_text()
    assert plain.stat().st_size < alone.stat().st_size
    assert "name it yourself, --model" in told(invoke(*words, tmp_path / "other.html"))


def test_the_facts_are_those_of_the_guard(own):
    from gramwatch import load
    from gramwatch.files import artifact
    from gramwatch.inputs.models import resolve

    about = about_guard(artifact.read(own.guard))
    guard = load(own.guard, resolve(own.model, own.weights).network)
    assert about.level == guard.level
    assert about.threshold == pytest.approx(guard.threshold_)
    assert about.calibration is not None
    assert sorted(about.calibration) == pytest.approx(guard.calibration_scores_.tolist())
    facts = dict(about.facts)
    assert facts["network"] == own.model
    assert facts["members"] == ", ".join(guard.members)
    assert "240" in facts["fitted on"]


def test_minimal_has_no_pictures(own, tmp_path):
    table, page = tmp_path / "s.csv", tmp_path / "report.html"
    assert invoke(*own.score, own.test, "-o", table, "-q").exit_code == 0
    result = invoke("report", table, "--minimal", "-o", page, "-q", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == {"output": str(page), "bytes": page.stat().st_size}
    assert "data:image/" not in page.read_text()
    assert "Most suspicious" not in page.read_text()


def test_the_table_of_another_guard_is_refused(own, tmp_path):
    table = write_csv(tmp_path / "s.csv")
    result = invoke("report", table, "--guard", own.guard, "--model", own.model, "-o", tmp_path / "r.html")
    assert result.exit_code == 1
    assert "the table has the members gram, energy, the guard gram, profile" in told(result)


def test_several_tables_are_compared(tmp_path):
    tables = [write_csv(tmp_path / f"{name}.csv", many(50)) for name in ("monday", "tuesday")]
    assert invoke("report", *tables, "-o", tmp_path / "r.html", "-q").exit_code == 0
    assert "Sets compared" in (tmp_path / "r.html").read_text()


def test_a_page_that_exists_is_kept(tmp_path):
    table, page = write_csv(tmp_path / "s.csv"), tmp_path / "r.html"
    page.write_text("precious")
    result = invoke("report", table, "-o", page)
    assert (result.exit_code, page.read_text()) == (2, "precious")
    assert "exists: name another file, or give --overwrite" in told(result)
    assert invoke("report", table, "-o", page, "--overwrite", "-q").exit_code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "s.csv"]


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["missing.csv", "-o", "r.html"], 2, "there is no file missing.csv"),
        (["s.csv", "-o", "r.txt"], 2, "the name r.txt must end in .html"),
        (["s.csv", "-o", "r.html", "--guard", "none"], 2, "there is no file none"),
        (["s.csv", "-o", "r.html", "--guard", "s.csv"], 1, "not a safetensors file"),
        (["other.csv", "-o", "r.html"], 1, "is not a table of 'gramwatch score'"),
    ],
)
def test_wrong_usage_is_one_line(words, code, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(Path("s.csv"))
    Path("other.csv").write_text("a,b\n1,2\n")
    result = invoke("report", *words, "-q")
    assert result.exit_code == code
    assert reason in told(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.csv", "s.csv"]


def test_a_page_needs_a_table_in_a_file(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*own.score, own.test, "--report", "r.html", "-q")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "the page is made from the table: give -o FILE" in told(result)


def test_a_missing_package_is_said_before_anything_is_scored(own, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    result = invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "--report", tmp_path / "r.html", "-q")
    assert result.exit_code == 1
    assert "pip install 'gramwatch[report]'" in told(result)
    assert list(tmp_path.iterdir()) == []


def test_a_page_says_what_is_expected_at_the_level_of_the_table(own, tmp_path):
    table = tmp_path / "s.csv"
    result = invoke(*own.score, own.test, "-o", table, "--level", 0.8, "--report", tmp_path / "at_once.html")
    assert result.exit_code == 0, result.output
    words = ["report", table, "--guard", own.guard, "--model", own.model, *QUICK, "--level", 0.8]
    assert invoke(*words, "-o", tmp_path / "later.html").exit_code == 0
    assert invoke("report", table, "--level", 0.8, "-o", tmp_path / "alone.html").exit_code == 0
    for name in ("at_once", "later", "alone"):
        assert "<b>8</b> expected by chance" in (tmp_path / f"{name}.html").read_text()
