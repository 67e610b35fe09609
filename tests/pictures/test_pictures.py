"""How pictures are written."""

import torch


def test_a_picture_of_few_colours_looks_like_one_of_all(tmp_path):
    import io

    from PIL import Image, ImageChops

    from gramwatch.pictures import pyplot, write_picture

    figure, axes = pyplot().subplots()
    axes.imshow(torch.linspace(0, 1, 400).view(20, 20).numpy(), cmap="viridis")
    axes.set_title("a title")
    plain = io.BytesIO()
    figure.savefig(plain, format="png")
    write_picture(figure, tmp_path / "few.png")
    with Image.open(tmp_path / "few.png") as few, Image.open(plain) as many:
        assert few.size == many.size
        assert few.mode == "P"
        difference = ImageChops.difference(few.convert("RGB"), many.convert("RGB")).convert("L").histogram()
    assert sum(difference[24:]) < 0.001 * sum(difference)
    assert (tmp_path / "few.png").stat().st_size < len(plain.getvalue())
    assert not pyplot().fignum_exists(figure.number)
