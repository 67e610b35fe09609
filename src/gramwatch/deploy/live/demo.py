"""The page of `gramwatch live --demo`: a network that knows the digits 0 to 7, trained at once."""

from collections.abc import Callable, Iterator
from io import BytesIO

import torch
from torch import Tensor

from gramwatch.deploy.live.examiner import Examiner
from gramwatch.deploy.live.shown import Example, Shown
from gramwatch.explain.thumbnails import network_input
from gramwatch.guard.guard import Guard
from gramwatch.inputs.demo import Digits, digits, outlier_sets, small_convnet, train
from gramwatch.inputs.preprocessing import Preprocessing

PREPARE = Preprocessing(size=(8, 8), shorter=8, resize="box", mean=(0.0,), std=(1.0,))
"""The digits were made from larger ones by averaging squares, too."""
CLASSES = tuple("01234567")
SETS = {
    "digits 8 and 9, held out": "a digit 8 or 9",
    "photograph patches": "a piece of a photograph",
    "blobs": "blobs",
    "Bernoulli noise": "black and white noise",
    "Gaussian noise": "grey noise",
}
"""The sets that the examples are of, and what their images are called."""
OTHERS = 2
"""Examples of each set."""
ABOUT = (
    "The demo: a small network that knows the handwritten digits 0 to 7, as 8 x 8 grey pixels. It has never "
    "seen an 8, a 9, or anything else."
)


def demo_page(say: Callable[[str], None], progress: bool = True, epochs: int = 40) -> tuple[Examiner, Shown]:
    """Train the demo's network, guard it, and choose examples.

    Args:
        say: told what happens.
        progress: whether bars are shown on a terminal.
        epochs: of the training.

    """
    data = digits()
    say(f"training a small network on {len(data.train)} handwritten digits, 0 to 7")
    torch.manual_seed(0)
    network = small_convnet(len(CLASSES))
    train(network, data.train, data.train_labels, epochs, progress=progress)
    say("fitting and calibrating its guard")
    guard = Guard(network)
    guard.metadata["classes"] = list(CLASSES)
    guard.fit(data.train.split(256), progress=progress)
    guard.calibrate(data.validation.split(256), progress=progress)
    facts = [
        ("network", "three convolutions, for 8 x 8 images"),
        ("fitted on", f"{len(data.train)} handwritten digits, 0 to 7"),
        ("calibrated on", f"{len(data.validation)} others"),
        ("level", f"{guard.level:g}"),
        ("members", ", ".join(guard.members)),
        ("images", str(PREPARE)),
    ]
    shown = Shown("Digits 0 to 7", ABOUT, facts, list(_examples(data)), fill=True)
    return Examiner(guard, PREPARE, CLASSES), shown


def _examples(data: Digits) -> Iterator[Example]:
    """Digits that the network knows, and images of each set that it does not know."""
    for label, name in enumerate(CLASSES):
        yield Example(f"a digit {name}", _png(data.test[data.test_labels == label][0]))
    outliers = outlier_sets(data)
    for name, called in SETS.items():
        for image in outliers[name][:OTHERS]:
            yield Example(called, _png(image))


def _png(image: Tensor) -> bytes:
    file = BytesIO()
    network_input(image, PREPARE).save(file, "PNG")
    return file.getvalue()
