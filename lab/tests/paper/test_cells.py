"""Cells: what is measured is kept, and damage is noticed."""

from pathlib import Path

import pytest
import torch

from gramwatch.errors import GramwatchWarning
from gramwatch_lab.paper.cells import Cells

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_cells_keep_what_they_are_given(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells")
    assert cells.read("MSP, KMNIST", {"a": 1}) is None
    cells.keep("MSP, KMNIST", {"a": 1}, {"scores": torch.arange(3.0)})
    assert cells.has("MSP, KMNIST", {"a": 1})
    assert not cells.has("MSP, KMNIST", {"a": 2})
    assert cells.path("MSP, KMNIST", {"a": 1}).name.startswith("msp-kmnist-")
    result = cells.read("MSP, KMNIST", {"a": 1})
    assert result is not None
    assert torch.equal(result["scores"], torch.arange(3.0))


@pytest.mark.filterwarnings("error::gramwatch.GramwatchWarning")
def test_a_damaged_cell_is_said_and_forgotten(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    cells.keep("x", {}, {"scores": torch.arange(3.0)})
    path = cells.path("x", {})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.warns(GramwatchWarning, match="computed anew"):
        assert cells.read("x", {}) is None
    assert not path.exists()
