"""The picture of the method."""

from pathlib import Path

from gramwatch_lab.figures.schematic import draw_schematic


def test_schematic(tmp_path: Path) -> None:
    from PIL import Image

    draw_schematic(tmp_path / "schematic.png")
    with Image.open(tmp_path / "schematic.png") as picture:
        assert picture.width > 1500
        shades = picture.convert("L").histogram()
    assert sum(count > 0 for count in shades) > 50  # and not one colour, or text alone
    assert max(shades) < 0.95 * sum(shades)
