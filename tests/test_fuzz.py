"""A few damaged and forged files of every kind; `make fuzz` tries thousands."""

import sys
from pathlib import Path

import pytest

from gramwatch.numerics import kernels
from tests import fuzz


@pytest.mark.parametrize("name", fuzz.kinds())
def test_damaged_and_forged_files_are_refused_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_given_up", set())  # other tests go on with kernels
    monkeypatch.setattr(sys, "path", [*sys.path])
    for variable in ("GRAMWATCH_FUZZ", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    count = {"CIFAR": 400, "IDX": 400, "npy": 400, "metadata of a guard": 8}.get(name, 25)
    outcome = fuzz.try_one_kind(name, 0, seed=7, folder=tmp_path, count=count)
    assert outcome == {"tried": count, "failures": []}
