"""MiniPlaces: scenes of Places2 as JPEGs of 128 x 128 pixels (the course challenge of MIT's CSAIL).

Zhou et al., "Places: A 10 Million Image Database for Scene Recognition" (2017).
"""

from pathlib import Path

from gramwatch.errors import DataError
from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import first_present, image_files


def _files(root: Path, split: str) -> list[Path]:
    # The split "test" reads the validation images too. Both are outliers to every network here, and the
    # published test images have no labels.
    part = "train" if split == "train" else "val"
    folder = first_present([root / "miniplaces" / part, root / "miniplaces" / "images" / part])
    return image_files(folder)


def _read(root: Path, split: str) -> Raw:
    return Raw(_files(root, split))


LOOKED_AT = 3000
"""The number of the last image that was looked at. All images up to it were looked at, one by one."""
SCENES = Path(__file__).with_name("miniplaces_scenes.txt")
"""The names of the images that show buildings, woods, ice, mountains, open water or streets. The images were
chosen by eye from contact sheets. Other landscapes and waters look alike, and are in the list too."""


def _without_scenes(root: Path, split: str) -> Raw:
    removed = set(SCENES.read_text(encoding="utf-8").split())
    looked_at = [path for path in _files(root, split) if _number(path) <= LOOKED_AT]
    return Raw([path for path in looked_at if path.name not in removed])


def _number(path: Path) -> int:
    if not path.stem.isdecimal():
        raise DataError(f"{path} is not an image of MiniPlaces' validation set: its name is not a number")
    return int(path.stem)


MINIPLACES = Source(
    "MiniPlaces",
    "photographs of scenes of 128 x 128 pixels; the validation images (Zhou et al., 2017)",
    "miniplaces",
    _read,
    ("train", "val", "test"),
    (Download("http://miniplaces.csail.mit.edu/data/data.tar.gz", None, folder="miniplaces"),),
)
MINIPLACES_WITHOUT_SCENES = Source(
    "MiniPlaces without scenes",
    "the first 3,000 validation images of MiniPlaces but for 1,298 that show buildings, woods, ice, "
    "mountains, open water or streets, chosen by eye: outliers for networks that know scenes; get miniplaces",
    "miniplaces",
    _without_scenes,
    ("val", "test"),
)
