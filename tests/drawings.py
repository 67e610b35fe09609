"""What a test can say of a picture: that something is drawn, and how large it is."""

from pathlib import Path


def size_of_drawing(path: Path) -> tuple[int, int]:
    """Width and height of a picture in which something is drawn: marks and text cover some of the ground."""
    from PIL import Image

    with Image.open(path) as picture:
        shades = picture.convert("L").histogram()
        size: tuple[int, int] = picture.size
    assert sum(count > 0 for count in shades) > 20, f"{path} has hardly any shades"
    assert 0.5 * sum(shades) < max(shades) < 0.995 * sum(shades), f"{path} is empty, or all ink"
    return size
