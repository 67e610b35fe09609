"""The taps of a network in the header of a file."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_type_hints

from gramwatch.files.artifact import check_types
from gramwatch.watch.tap import Tap, Taps


def taps_to_json(taps: Taps) -> dict[str, Any]:
    """The taps as plain values."""
    return {"calls": list(taps.operations), "watched": [asdict(tap) for tap in taps]}


def taps_from_json(value: Mapping[str, Any]) -> Taps:
    """The taps from plain values, checked."""
    check_types(value, calls=list[str], watched=list[dict[str, Any]])
    if not value["watched"]:
        raise ValueError("no tap is watched")
    for entry in value["watched"]:
        check_types(entry, **get_type_hints(Tap) | {"shape": list[int]})
    taps = [Tap(**{**entry, "shape": tuple(entry["shape"])}) for entry in value["watched"]]
    for tap in taps:
        axes = range(len(tap.shape))
        if tap.channel_axis not in axes or tap.batch_axis not in axes or min(tap.shape) < 1:
            raise ValueError(
                f"tap '{tap.name}' has shape {tap.shape}, batch axis {tap.batch_axis} "
                f"and channel axis {tap.channel_axis}"
            )
        if tap.call not in range(len(value["calls"])):
            raise ValueError(f"tap '{tap.name}' is call {tap.call} of {len(value['calls'])}")
    return Taps(taps, value["calls"])
