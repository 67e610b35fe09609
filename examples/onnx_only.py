"""Judge a folder of images with ONNX Runtime: no PyTorch, no gramwatch.

    gramwatch export guard.safetensors -o guard.onnx
    python onnx_only.py guard.onnx photos/new

It needs onnxruntime and numpy, and Pillow to read images. Every image is one line of CSV.
"""

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # from 1.29 on, it reports about models otherwise
import onnxruntime

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"}
AT_ONCE = 32


def pixels(path: Path, how: dict) -> np.ndarray:
    """An image, resized and cropped as the network's training did: height x width x channels in uint8."""
    height, width = how["size"]
    image = Image.open(path).convert("L" if len(how["mean"]) == 1 else "RGB")
    if how["shorter"] is None:
        new = (width, height)
    else:
        short, long = sorted(image.size)
        longer = max(1, int(how["shorter"] * long / short))
        new = (how["shorter"], longer) if image.width <= image.height else (longer, how["shorter"])
    if new != image.size:
        image = image.resize(new, Image.Resampling[how["resize"].upper()])
    left, top = round((image.width - width) / 2.0), round((image.height - height) / 2.0)
    return np.array(image.crop((left, top, left + width, top + height))).reshape(height, width, -1)


def main(graph: str, folder: str) -> None:
    """Print a table of the verdicts for all images of a folder."""
    session = onnxruntime.InferenceSession(graph, providers=onnxruntime.get_available_providers())
    facts = json.loads(session.get_modelmeta().custom_metadata_map["gramwatch"])
    names = [output.name for output in session.get_outputs()]
    parts = [name for name in names if name.startswith("parts.")]
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
    classes = facts.get("classes") or []
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["path", "predicted", "class", "score", "p_value", "is_ood", *parts])
    for start in range(0, len(paths), AT_ONCE):
        some = paths[start : start + AT_ONCE]
        images = np.stack([pixels(path, facts["preprocessing"]) for path in some])
        found = dict(zip(names, session.run(None, {"images": images}), strict=True))
        for i, path in enumerate(some):
            number = int(found["predicted"][i])
            name = classes[number] if number < len(classes) else ""
            score, p_value, *of_parts = (f"{found[key][i]:.6g}" for key in ("score", "p_value", *parts))
            table.writerow([path, number, name, score, p_value, bool(found["is_ood"][i]), *of_parts])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python onnx_only.py guard.onnx FOLDER")
    main(*sys.argv[1:])
