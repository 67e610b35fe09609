"""Reading a saved detector of any method."""

from os import PathLike

from torch import nn

from gramwatch.detect.detector import Detector
from gramwatch.files import artifact
from gramwatch.guard.guard import Guard, single
from gramwatch.inputs.adapters import InputsAdapter, LogitsAdapter, MaskAdapter
from gramwatch.watch import Network


def load(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    accept_other_weights: bool = False,
    check_probe: bool = True,
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
        check_probe: run the network on the small made-up input that the file holds, and warn if its logits
            or its score differ from those in the file: the network has the same weights and other code. It
            is checked on the kind of device on which the file was written, and not with other weights.
        inputs: the same function as when the detector was constructed, if it was a function. A key is in the
            file.
        logits: the same for `logits`.
        mask: the same for `mask`.

    """
    network = Network.of(model, inputs, logits, mask)
    return restored(artifact.read(path), network, accept_other_weights, check_probe)


def restored(
    saved: artifact.Saved,
    model: nn.Module | Network,
    accept_other_weights: bool = False,
    check_probe: bool = True,
) -> Detector:
    """The detector of an opened file, of whatever method; the other arguments are those of `load`."""
    with artifact.reading(saved.path):
        name = saved.header["detector"]
        kind = Guard if name == Guard.name else single(name)
    return kind.from_artifact(saved, model, accept_other_weights, check_probe)
