"""Reading a saved detector, of whatever method."""

from os import PathLike

from torch import nn

from gramwatch import artifact
from gramwatch.detector import GramDetector
from gramwatch.errors import ArtifactError
from gramwatch.rivals import RIVALS, TRAINED, Rival


def load(
    path: str | PathLike[str], model: nn.Module, *, accept_other_weights: bool = False
) -> GramDetector | Rival:
    """Read a saved detector for the network it was fitted on. Nothing in the file is executed.

    Args:
        path: a file written by `detector.save`.
        model: the network, with the weights it had then.
        accept_other_weights: use the detector although the network's weights differ (after converting
            them to another precision, say). The calibration then no longer holds as stated.

    """
    saved = artifact.read(path)
    name = saved.header["detector"]
    if name == GramDetector.__name__:
        return GramDetector.from_artifact(saved, model, accept_other_weights)
    methods = {**RIVALS, **TRAINED}
    if name in methods:
        return methods[name].from_artifact(saved, model, accept_other_weights)
    raise ArtifactError(f"{path} holds a {name!r}, which this version does not know")
