"""Reading tables of scores."""

import json
from pathlib import Path

import numpy as np
import pytest

from gramwatch.errors import DataError
from gramwatch.report.scores import read
from lab.tests.figures.tables import COLUMNS, ROWS, write_csv


def test_a_csv_becomes_columns(tmp_path):
    scores = read([write_csv(tmp_path / "new.csv")])
    assert (len(scores), scores.names) == (6, ["new"])
    assert scores.readable.tolist() == [True, True, True, True, True, False]
    assert scores.is_ood.tolist() == [False, True, True, False, True, False]
    assert scores.predicted == ["cat", "dog", "dog", "cat", "2", ""]
    assert scores.score[2] == np.inf  # it has a p-value, and no finite score
    assert np.isnan(scores.score[5])
    assert scores.parts["gram"].tolist()[:2] == [0.5, 0.01]
    assert scores.errors[5] == "the file is empty"
    assert scores.selected is None
    assert scores.folders[0] == "a"


def test_the_most_unusual_are_first_and_what_cannot_be_read_is_left_out(tmp_path):
    assert read([write_csv(tmp_path / "new.csv")]).by_score == [2, 1, 4, 3, 0]


def test_all_formats_hold_the_same(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    whole = read([write_csv(tmp_path / "new.csv")])
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "new.parquet")
    for name in ("new.jsonl", "new.parquet"):
        result = read([tmp_path / name])
        assert result.paths == whole.paths
        assert result.predicted == whole.predicted
        np.testing.assert_array_equal(result.score, whole.score)
        np.testing.assert_array_equal(result.p_value, whole.p_value)
        assert result.is_ood.tolist() == whole.is_ood.tolist()


def test_several_tables_are_sets(tmp_path):
    (tmp_path / "b").mkdir()
    files = [write_csv(tmp_path / "one.csv"), write_csv(tmp_path / "two.csv")]
    scores = read(files)
    assert scores.names == ["one", "two"]
    assert scores.set_of.tolist() == [0] * 6 + [1] * 6
    assert int(scores.of_set(1).sum()) == 5
    alike = read([files[0], write_csv(tmp_path / "b" / "one.csv")])
    assert alike.names == [str(tmp_path / "one.csv"), str(tmp_path / "b" / "one.csv")]


def test_bytes_that_are_not_utf_8_are_replaced(tmp_path):
    path = write_csv(tmp_path / "new.csv")
    path.write_bytes(path.read_bytes().replace(b"a/1.png", b"a/\xff.png"))
    assert read([path]).paths[0] == "a/\ufffd.png"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("path,score\nx,1\n", "has no column predicted, class, p_value, is_ood"),
        ("path,predicted,class,score,p_value,is_ood\nx,0,cat,much,0.5,false\n", "row 1: score is 'much'"),
        ("path,predicted,class,score,p_value,is_ood\n", "there are no rows"),
        ("", "there are no rows"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path, text, reason):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=reason):
        read([tmp_path / "t.csv"])


def test_damaged_files_are_refused_in_words(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"path": "x"\n')
    with pytest.raises(DataError, match="line 1: not a JSON object"):
        read([tmp_path / "t.jsonl"])
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_text("nothing")
    with pytest.raises(DataError, match="is not a Parquet file"):
        read([tmp_path / "t.parquet"])


def test_tables_of_different_guards_are_not_joined(tmp_path):
    one = write_csv(tmp_path / "one.csv")
    two = Path(tmp_path / "two.csv")
    two.write_text(one.read_text().replace("p_energy", "p_msp"))
    with pytest.raises(DataError, match="has the members gram, msp, another table gram, energy"):
        read([one, two])
