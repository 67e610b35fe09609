"""MiniPlaces: scenes of Places2 as JPEGs of 128 x 128 pixels (the course challenge of MIT's CSAIL).

Zhou et al., "Places: A 10 Million Image Database for Scene Recognition" (2017).
"""

from pathlib import Path

from gramwatch.datasets.folder import image_files
from gramwatch.datasets.source import Download, Raw, Source, first_present


def _read(root: Path, split: str) -> Raw:
    # The split "test" reads the validation images too. Both are outliers to every network here, and the
    # published test images have no labels.
    part = "train" if split == "train" else "val"
    folder = first_present([root / "miniplaces" / part, root / "miniplaces" / "images" / part])
    return Raw(image_files(folder))


MINIPLACES = Source(
    "MiniPlaces",
    "photographs of scenes of 128 x 128 pixels; the validation images (Zhou et al., 2017)",
    "miniplaces",
    _read,
    ("train", "val", "test"),
    (Download("http://miniplaces.csail.mit.edu/data/data.tar.gz", None, folder="miniplaces"),),
)
