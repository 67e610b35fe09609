"""Judge a folder of images with ONNX Runtime: no PyTorch, no gramwatch.

    gramwatch export guard.safetensors -o guard.onnx
    python onnx_only.py guard.onnx photos/new

It needs onnxruntime and numpy, and Pillow to read images. Every image is one line of CSV. One that
cannot be read is a line with its error.
"""

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # from 1.29 on, it reports about models otherwise
import onnxruntime

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
AT_ONCE = 32
MOST_PIXELS = 2**24
"""A thin image would be far larger than that after resizing. It is an error here."""


def pixels(path: Path, how: dict) -> np.ndarray:
    """An image, resized and cropped as the network's training did: height x width x channels in uint8."""
    height, width = how["size"]
    with Image.open(path, formats=FORMATS) as opened:
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16 bits, of which the upper 8 are kept
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("L" if len(how["mean"]) == 1 else "RGB")
    if how["shorter"] is None:
        new = (width, height)
    else:
        short, long = sorted(image.size)
        longer = max(1, int(how["shorter"] * long / short))
        new = (how["shorter"], longer) if image.width <= image.height else (longer, how["shorter"])
    if new[0] * new[1] > max(MOST_PIXELS, 16 * min(new) ** 2):
        raise ValueError(f"too thin: {image.width} x {image.height} pixels")
    if new != image.size:
        image = image.resize(new, Image.Resampling[how["resize"].upper()])
    left, top = round((image.width - width) / 2.0), round((image.height - height) / 2.0)
    return np.array(image.crop((left, top, left + width, top + height))).reshape(height, width, -1)


def read(path: Path, how: dict) -> tuple:
    """The pixels of an image and no error, or no pixels and the error in one line."""
    try:
        return pixels(path, how), ""
    except Exception as error:  # a damaged file can raise nearly anything
        return None, " ".join(str(error).split()) or type(error).__name__


def main(graph: str, folder: str) -> None:
    """Print a table of the verdicts for all images of a folder."""
    session = onnxruntime.InferenceSession(graph, providers=onnxruntime.get_available_providers())
    facts = json.loads(session.get_modelmeta().custom_metadata_map["gramwatch"])
    names = [output.name for output in session.get_outputs()]
    parts = [name for name in names if name.startswith("parts.")]
    paths = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    classes = facts.get("classes") or []
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["path", "predicted", "class", "score", "p_value", "is_ood", *parts, "error"])
    for start in range(0, len(paths), AT_ONCE):
        batch = [(path, *read(path, facts["preprocessing"])) for path in paths[start : start + AT_ONCE]]
        readable = [image for _, image, error in batch if not error]
        if readable:
            outputs = dict(zip(names, session.run(None, {"images": np.stack(readable)}), strict=True))
        rows = iter(range(len(readable)))
        for path, _, error in batch:
            if error:
                table.writerow([path, *[""] * (5 + len(parts)), error])
                continue
            i = next(rows)
            number = int(outputs["predicted"][i])
            name = classes[number] if number < len(classes) else ""
            score, p_value, *of_parts = (f"{outputs[key][i]:.6g}" for key in ("score", "p_value", *parts))
            table.writerow([path, number, name, score, p_value, bool(outputs["is_ood"][i]), *of_parts, ""])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python onnx_only.py guard.onnx FOLDER")
    main(*sys.argv[1:])
