"""A detector in a folder of Hugging Face's layout: its safetensors file, `config.json` and a model card.

The safetensors file holds everything. `config.json` and `README.md` are for readers and for the search of a
hub. Loading reads the safetensors file alone, and nothing is executed. `huggingface_hub` is not needed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from gramwatch.detect.detector import Detector
from gramwatch.detect.measurement import how_many_rank
from gramwatch.detect.threshold import range_of_rates
from gramwatch.errors import ArtifactError, listed
from gramwatch.files import artifact
from gramwatch.files.writing import write_text
from gramwatch.inputs.adapters import InputsAdapter, LogitsAdapter, MaskAdapter
from gramwatch.inputs.batches import described
from gramwatch.watch import Network, unwrap

FILE = "guard.safetensors"
CONFIG = "config.json"
CARD = "README.md"
LIBRARY = "gramwatch"
BEGIN, END = "<!-- begin gramwatch -->", "<!-- end gramwatch -->"
"""The part of the card between these lines is written anew by every save. The rest is the user's."""
MOST_CLASSES = 20
"""The number of names of classes on a card."""
_D = TypeVar("_D", bound=Detector)


def save(detector: Detector, folder: str | PathLike[str]) -> None:
    """Write the folder. It is created if it is missing."""
    folder = Path(folder)
    card = _card_before(folder)
    folder.mkdir(parents=True, exist_ok=True)
    detector.save(folder / FILE)
    saved = artifact.read(folder / FILE)
    config = json.dumps(config_of(saved.header), indent=2) + "\n"
    write_text(folder / CONFIG, config)
    before, after = card
    text = f"{before}{BEGIN}\n{card_of(saved, network_name(detector))}{END}{after}"
    write_text(folder / CARD, text)


def load(
    kind: type[_D],
    folder: str | PathLike[str],
    model: nn.Module,
    *,
    accept_other_weights: bool = False,
    check_probe: bool = True,
    inputs: InputsAdapter = None,
    logits: LogitsAdapter = None,
    mask: MaskAdapter = None,
) -> _D:
    """The detector of a folder. The arguments are those of `gramwatch.load`."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ArtifactError(
            f"there is no {path}: give a folder that save_pretrained wrote. For a guard on a hub, fetch its "
            "folder first: huggingface_hub.snapshot_download(NAME) returns the folder"
        )
    network = Network.of(model, inputs, logits, mask)
    return kind.from_artifact(artifact.read(path), network, accept_other_weights, check_probe)


def _card_before(folder: Path) -> tuple[str, str]:
    """The user's own parts of the card. An error if the folder holds the files of something else."""
    config, card = folder / CONFIG, folder / CARD
    if config.exists() and not _is_ours(config):
        raise ArtifactError(f"{config} is not of gramwatch: save the guard to a folder of its own")
    if not card.exists():
        return FRONT_MATTER, "\n"
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArtifactError(
            f"{card} is not of gramwatch: save the guard to a folder of its own. If it is your own card, put "
            f"the lines '{BEGIN}' and '{END}' where the guard is to be described"
        )
    return before, after


def _is_ours(config: Path) -> bool:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("library_name") == LIBRARY


# --- what the files say ------------------------------------------------------------------------------


def config_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a file for `config.json`, as plain values."""
    names = _class_names(header)
    return {
        "library_name": LIBRARY,
        "library_version": header["library"],
        "format": header["format"],
        "detector": header["detector"],
        "file": FILE,
        "settings": header["settings"],
        "calibration": header["calibration"],
        "network": header["network"],
        "preprocessing": header["metadata"].get("preprocessing"),
    } | ({"id2label": {str(i): name for i, name in enumerate(names)}} if names else {})


FRONT_MATTER = f"""---
library_name: {LIBRARY}
tags:
- out-of-distribution-detection
- anomaly-detection
---

"""


def network_name(detector: Detector) -> str:
    """The name of the network in the metadata, or else its class."""
    model = detector.metadata.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return str(name or type(unwrap(detector.model)).__name__)


def card_of(saved: artifact.Saved, network: str) -> str:
    """The description of a detector and its network for a model card, in Markdown."""
    header = saved.header
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(saved, _plain(network)))
    limits = "\n".join(f"- {limit}" for limit in _limits(header))
    return f"""\
# Guard for {_plain(network)}

This guard says whether an input is unlike the training data of its network: a score, a p-value and a verdict.
gramwatch {_plain(header["library"])} made it.

| | |
| --- | --- |
{rows}

## Use it

```python
import gramwatch

guard = gramwatch.Guard.from_pretrained("this folder", model)  # the network, with the weights named above
detection = guard(images)
print(detection.is_ood, detection.p_value)
```

The network is not in this folder. A network with other weights is refused. Nothing here is executed.

## Limits

{limits}
"""


def _rows(saved: artifact.Saved, network: str) -> Iterator[tuple[str, str]]:
    header, metadata = saved.header, saved.header["metadata"]
    known, settings = header["network"], header["settings"]
    yield "network", f"{network}, {known['parameters']:,} parameters"
    yield "weights", f"SHA-256 {known['weights'][:16]}..."
    yield "input", _input(header)
    yield "preprocessing", _preprocessing(metadata.get("preprocessing"))
    yield "fitted on", _fitted_on(saved)
    yield "classes", _classes(header)
    if "members" in header:
        yield "members", ", ".join(map(_plain, header["members"]))
    yield "level", f"{settings['level']:g}: at most {1 - settings['level']:.2%} false alarms, on average"
    yield "calibrated on", _calibrated_on(header["calibration"])


def _limits(header: Mapping[str, Any]) -> Iterator[str]:
    calibration, level = header["calibration"], header["settings"]["level"]
    if calibration is None:
        yield "It is not calibrated: it gives no verdict before `guard.calibrate(loader)`."
    else:
        low, high = range_of_rates(how_many_rank(calibration), level)
        yield (
            "The rate of false alarms holds for inputs like those of the calibration, on average over "
            f"calibrations. In nine of ten calibrations of this size it is from {low:.1%} to {high:.1%}"
            + (", if all classes are ranked together." if header["settings"].get("per_class") else ".")
        )
    yield "How many outliers it finds is not known. It depends on the outliers. Near classes are hardest."
    yield "The preprocessing must be that of the fit, the resize filter included."
    yield "It is of no use after a change of the network's weights. Fit a new one."


def _input(header: Mapping[str, Any]) -> str:
    members = header.get("members", {"": header}).values()
    form = next((member["inputs"] for member in members if "inputs" in member), None)
    return "not recorded" if form is None else _plain(described(form)) + " for each example"


def _preprocessing(settings: Any) -> str:
    if not isinstance(settings, dict):
        return "not recorded" if settings is None else _plain(settings)
    return ", ".join(
        f"{_plain(name)}: {_plain(value)}" for name, value in settings.items() if name != "given"
    )


def _fitted_on(saved: artifact.Saved) -> str:
    images = saved.header["metadata"].get("images")
    data = images.get("data") if isinstance(images, dict) else images
    named = _plain(data) if data else "data that are not named"
    counts = next((name for name in saved.file.layout if name.endswith("class_counts")), None)
    return named if counts is None else f"{named}, {int(saved.file.tensor(counts).sum()):,} examples"


def _class_names(header: Mapping[str, Any]) -> list[str]:
    names = header["metadata"].get("classes")
    return [str(name) for name in names] if isinstance(names, list) else []


def _classes(header: Mapping[str, Any]) -> str:
    names, calibration = _class_names(header), header["calibration"] or {}
    if names:
        return listed([_plain(name) for name in names], MOST_CLASSES)
    return f"{calibration['classes']:,}, not named" if "classes" in calibration else "not named"


def _calibrated_on(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "nothing yet"
    return f"{calibration['examples']:,} examples, of which {how_many_rank(calibration):,} rank"


def _plain(value: Any) -> str:
    """A value in one line of Markdown, without any markup."""
    return re.sub(r"([\\`*_\[\]<>|#~!])", r"\\\1", " ".join(str(value).split()))
