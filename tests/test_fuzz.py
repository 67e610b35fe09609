"""A few damaged and forged files of every kind; `make fuzz` tries thousands."""

from pathlib import Path

import pytest

from gramwatch import kernels
from tests import fuzz


@pytest.mark.parametrize("name", fuzz.kinds())
def test_damaged_and_forged_files_are_refused_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_given_up", set())  # other tests go on with kernels
    count = 400 if name in ("CIFAR", "IDX", "npy") else 25
    found = fuzz.try_one_kind(name, 0, seed=7, folder=tmp_path, count=count)
    assert found == {"tried": count, "failures": []}
