"""Reading a saved detector of any method."""

from os import PathLike

from torch import nn

from gramwatch import artifact
from gramwatch.detector import Detector
from gramwatch.guard import Guard, single
from gramwatch.taps import Network
from gramwatch.taps.running import InputsAdapter, LogitsAdapter, MaskAdapter, adapted


def load(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    accept_other_weights: bool = False,
    inputs: InputsAdapter = None,
    logits: LogitsAdapter = None,
    mask: MaskAdapter = None,
) -> Detector:
    """Read a saved detector for the network it was fitted on. Nothing in the file is executed.

    Args:
        path: a file written by `detector.save`.
        model: the network, with the weights it had then.
        accept_other_weights: use the detector although the network's weights differ, for example after a
            conversion to another precision. The stated false-alarm rate is then no longer guaranteed.
        inputs: the same function as when the detector was constructed, if it was a function. A key is in the
            file.
        logits: the same for `logits`.
        mask: the same for `mask`.

    """
    return restored(artifact.read(path), model, accept_other_weights, inputs, logits, mask)


def restored(
    saved: artifact.Saved,
    model: nn.Module,
    accept_other_weights: bool = False,
    inputs: InputsAdapter = None,
    logits: LogitsAdapter = None,
    mask: MaskAdapter = None,
) -> Detector:
    """The detector of an opened file; the other arguments are those of `load`."""
    network = adapted(saved.header.get("adapters", {}), Network.of(model, inputs, logits, mask))
    with artifact.reading(saved.path):
        name = saved.header["detector"]
        kind = Guard if name == Guard.name else single(name)
    return kind.from_artifact(saved, network, accept_other_weights)
