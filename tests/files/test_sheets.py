"""Text in cells of CSV, which no spreadsheet runs."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramwatch.files.sheets import as_cell, of_cell


@pytest.mark.parametrize(
    "text", ["=cmd|' /C calc'!A0", "+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "'=1"]
)
def test_no_cell_begins_as_a_formula(text):
    assert as_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "photo.jpg", "a=b", "'quoted'", "5", "/tmp/-x.jpg"])
def test_other_text_stays(text):
    assert as_cell(text) == text


@given(st.text(st.sampled_from("'=+-@\t ax"), max_size=6))
def test_what_was_written_is_read_back(text):
    file = io.StringIO()
    csv.writer(file).writerow([as_cell(text)])
    ((cell,),) = csv.reader(io.StringIO(file.getvalue(), newline="")) if text else [[""]]
    assert of_cell(cell) == text
    assert not as_cell(text).startswith(("=", "+", "-", "@", "\t"))
