"""The five archives that ODIN's authors published: LSUN and Tiny ImageNet, resized and cropped, and iSUN.

Liang et al., "Enhancing The Reliability of Out-of-distribution Image Detection in Neural Networks" (2018).
The authors resized them without anti-aliasing. Much of what the method detects is this: see docs/datasets.md.
"""

from functools import partial
from pathlib import Path

from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import image_files


def _read(folder: str, root: Path, split: str) -> Raw:
    return Raw(image_files(root / folder))


def _source(
    title: str,
    about: str,
    key: str,
    archive: str,
    md5: str,
    cited: str,
    sha256: str | None = None,
    size: int | None = None,
) -> Source:
    url = f"https://www.dropbox.com/s/raw/{key}/{archive}.tar.gz"
    return Source(
        title,
        f"{about} (Liang et al., 2018)",
        archive,
        partial(_read, archive),
        ("test",),
        (Download(url, md5, cited, sha256=sha256, size=size),),
        "crop" if "cropped" in about else "nearest",
    )


_ODIN = "pytorch-ood 0.4.0, dataset/img/odin.py"
_RESIZED = "reduced to 32 x 32 by its publishers without anti-aliasing"

LSUN_RESIZE = _source(
    "LSUN (R)",
    f"10,000 photographs of scenes, {_RESIZED}",
    "moqh2wh8696c3yl",
    "LSUN_resize",
    "278b7b31c8cb7e804a1465a8ce03a2dc",
    _ODIN,
)
LSUN_CROP = _source(
    "LSUN (C)",
    "10,000 photographs of scenes, cropped by their publishers",
    "fhtsw1m3qxlwj6h",
    "LSUN",
    "458a0a0ab8e5f1cb4516d7400568e460",
    _ODIN,
)
IMAGENET_RESIZE = _source(
    "Tiny ImageNet (R)",
    f"10,000 photographs, {_RESIZED}",
    "kp3my3412u5k9rl",
    "Imagenet_resize",
    "0f9ff11d45babf2eff5fe12281d1ac31",
    _ODIN,
)
IMAGENET_CROP = _source(
    "Tiny ImageNet (C)",
    "10,000 photographs, cropped by their publishers",
    "avgm2u562itwpkl",
    "Imagenet",
    "7c0827e4246c3718a5ee076e999e52e5",
    _ODIN,
)
ISUN = _source(
    "iSUN",
    "8,925 photographs of scenes, reduced to 32 x 32 by their publishers without anti-aliasing",
    "ssz7qxfqae0cca5",
    "iSUN",
    "be77b0f2c26fda898afac5f99645ee70",
    "edadaltocg/detectors, src/detectors/data/isun.py",
    # SHA-256 and size of a file with that MD5.
    "74c2d220910a65b495611601170a46fc093c26c543d66f7b843ef72954636ecc",
    4_085_055,
)
