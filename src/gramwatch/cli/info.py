"""`gramwatch info`: the contents of a guard's file, without its network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import existing
from gramwatch.cli.common import metadata_of, recorded_preprocessing
from gramwatch.cli.options import Json, show_facts

if TYPE_CHECKING:
    from gramwatch.files.artifact import Saved

NAMES = {
    "network": "network",
    "weights": "weights",
    "fitted_on": "fitted on",
    "calibrated_on": "calibrated on",
    "level": "level",
    "members": "members",
    "member_weights": "weights of the members",
    "preprocessing": "images",
    "classes": "classes",
    "file": "file",
    "written_by": "written by",
    "fingerprint": "fingerprint of the weights",
}
"""The facts of a guard on a page, and their names there."""


def info(
    guard: Annotated[
        Path,
        typer.Argument(
            metavar="GUARD",
            help="A file of a guard or of another detector.",
            show_default=False,
            callback=existing("GUARD"),
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show what a guard was fitted on: network, preprocessing, members, calibration, classes.

    Example: gramwatch info guard.safetensors
    """
    from gramwatch.files import artifact

    show_facts(facts(artifact.read(guard)), as_json, shown)


def facts(saved: "Saved") -> dict[str, Any]:
    """The contents of the file as plain values."""
    from gramwatch.files.artifact import check_types, reading

    header, metadata, anything = saved.header, metadata_of(saved), dict[str, Any]
    preprocessing = recorded_preprocessing(saved)
    values = {"settings": {}, "calibration": None, "members": None} | dict(header)
    with reading(saved.path):
        check_types(values, network=anything, calibration=anything | None)
        check_types(values, settings=anything, members=anything | None)
    settings, calibration = values["settings"], values["calibration"]
    images, model, network = metadata.get("images"), metadata.get("model"), values["network"]
    return {
        "file": str(saved.path),
        "detector": header["detector"],
        "written_by": f"gramwatch {header.get('library')}",
        "network": model.get("name") if isinstance(model, dict) else None,
        "weights": model.get("weights") if isinstance(model, dict) else None,
        "parameters": network.get("parameters"),
        "fingerprint": str(network.get("weights"))[:16],
        "preprocessing": None if preprocessing is None else str(preprocessing),
        "members": None if values["members"] is None else list(values["members"]),
        "member_weights": _member_weights(saved, values["members"]),
        "level": settings.get("level"),
        "fitted_on": images if isinstance(images, dict) else None,
        "calibrated_on": calibration.get("examples") if isinstance(calibration, dict) else None,
        "classes": metadata.get("classes"),
    }


def _member_weights(saved: "Saved", members: dict[str, Any] | None) -> dict[str, float] | None:
    """The weight of each member by rehearsal. None in files of guards that did not rehearse."""
    import torch

    from gramwatch.files.artifact import reading

    stored = saved.file.layout.get("calibration.weights")
    if stored is None or members is None:
        return None
    with reading(saved.path):
        if stored.shape != (len(members),) or stored.dtype != torch.float64:
            raise ValueError(f"its weights of {len(members)} members are {stored.shape}, {stored.dtype}")
        weights = saved.file.tensor("calibration.weights")
        if not (weights.isfinite() & (weights >= 0)).all():
            raise ValueError("a weight of its members is negative or not finite")
        return {name: round(weight, 4) for name, weight in zip(members, weights.tolist(), strict=True)}


def named_facts(saved: "Saved") -> list[tuple[str, str]]:
    """The facts of a guard for a page: names and texts."""
    values = facts(saved)
    return [(NAMES[name], shown(values[name])) for name in NAMES if values.get(name) is not None]


def shown(value: Any) -> str:
    """A fact as text."""
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        rest = f" and {len(value) - 10} more" if len(value) > 10 else ""
        return ", ".join(map(str, value[:10])) + rest
    return f"{value:,}" if isinstance(value, int) else str(value)
