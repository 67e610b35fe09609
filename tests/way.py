"""The way of a batch: the functions of the library that `guard(images)` passes, in order."""

import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gramwatch

ROOT = Path(gramwatch.__file__).parent


class Way(NamedTuple):
    """What one call of a guard passes."""

    functions: list[tuple[str, str]]
    """The file and the name of each function, in the order of the first call."""
    doors: int
    """Calls from a function of one file to a function of another, each counted once."""

    @property
    def modules(self) -> int:
        """The number of files."""
        return len({file for file, _ in self.functions})


def ready(**options: Any) -> gramwatch.Guard:
    """A guard of a small network, fitted and calibrated. `options` are arguments of `Guard`."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    ).eval()
    guard = gramwatch.Guard(network, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)  # noise shows few classes
        guard.fit([torch.randn(64, 3, 16, 16) for _ in range(4)], progress=False)
        guard.calibrate([torch.randn(64, 3, 16, 16) for _ in range(2)], progress=False)
    return guard


def way_of(guard: gramwatch.Guard, images: torch.Tensor) -> Way:
    """What the fourth call of a guard passes. Comprehensions and lambdas are parts of their functions."""
    passed: dict[tuple[str, str], None] = {}
    doors: set[tuple[Any, ...]] = set()

    def place(frame: types.FrameType) -> tuple[str, str] | None:
        file, code = Path(frame.f_code.co_filename), frame.f_code
        if not file.is_relative_to(ROOT) or code.co_name.startswith("<"):
            return None
        return file.relative_to(ROOT).as_posix(), getattr(code, "co_qualname", code.co_name)

    def note(frame: types.FrameType, event: str, _: object) -> None:
        here = place(frame) if event == "call" else None
        if here is None:
            return
        passed[here] = None
        back = frame.f_back
        while back is not None and place(back) is None:
            back = back.f_back
        caller = place(back) if back is not None else None
        if caller is not None and caller[0] != here[0]:
            doors.add((*caller, *here))

    for _ in range(3):
        guard(images)
    sys.setprofile(note)
    try:
        guard(images)
    finally:
        sys.setprofile(None)
    return Way(list(passed), len(doors))
