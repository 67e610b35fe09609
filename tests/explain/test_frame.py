"""What all pictures have in common."""

import itertools

import torch

from gramwatch.explain.frame import (
    DPI,
    MARGIN,
    WIDTH,
    Words,
    framed,
    pyplot,
    text_width,
    wrapped,
    write_picture,
)


def test_a_protocol_is_split_into_who_saw_outliers_and_the_rest():
    words = Words.of(
        "a title",
        "ResNet-20, CIFAR-10, fitted on all training images. In-distribution: 10 examples; mean ± standard "
        "deviation over the draws, percent. ODIN tuned on FGSM examples; no method saw an outlier. "
        "Accuracies: outlier_exposure 92.45%. (U): not normalised.",
    )
    assert words.seen == "ODIN tuned on FGSM examples; no method saw an outlier."
    assert words.protocol == (
        "ResNet-20, CIFAR-10, fitted on all training images. In-distribution: 10 examples; mean over the "
        "draws, percent. Accuracies: outlier_exposure 92.45%. (U): not normalised."
    )


def test_lines_are_as_long_as_they_may_be_and_no_longer():
    text = "a few words that do not fit into one line of two inches, whatever the letters are"
    lines = wrapped(text, 8, 2)
    assert " ".join(lines) == text
    assert all(text_width(line, 8) <= 2 for line in lines)
    assert all(text_width(f"{a} {b.split()[0]}", 8) > 2 for a, b in itertools.pairwise(lines))
    assert text_width(text, 8, "bold") > text_width(text, 8)


def test_words_axes_and_caption_have_their_own_room():
    frame = framed(Words("title " * 40, "seen " * 50, "protocol " * 50), 2, 1, 2, caption="x " * 300)
    frame.figure.canvas.draw()
    width, height = frame.figure.bbox.size
    assert width == WIDTH * DPI
    boxes = [text.get_window_extent() for text in frame.figure.texts]
    assert min(box.x0 for box in boxes) > MARGIN * DPI / 2
    assert max(box.x1 for box in boxes) < width
    assert min(box.y0 for box in boxes) > 0
    assert max(box.y1 for box in boxes) < height
    panels = [axes.get_tightbbox() for axes in frame.axes.flat]
    boxes += panels[:1]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    assert panels[0].height > 1.5 * DPI


def test_a_picture_of_few_colours_looks_like_one_of_all(tmp_path):
    import io

    from PIL import Image, ImageChops

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
