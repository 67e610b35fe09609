"""Whether a function asks a device for values: what tests of passes have in common."""

from collections.abc import Callable
from typing import Any

from gramwatch.observe.replay import Asking


def asks_for_values(function: Callable[[], Any], device: str) -> bool:
    """Whether a function copies values from a kind of device, or needs them to know a size."""
    trial = Asking(device)
    with trial:
        function()
    return trial.asked
