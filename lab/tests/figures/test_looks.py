"""One look for each method."""

import itertools

import pytest

from gramwatch.explain.frame import DPI, MARGIN, WIDTH, Words
from gramwatch.methods import METHODS, TRAINED
from gramwatch_lab.figures.looks import (
    LOOKS,
    SPARE,
    Look,
    family,
    framed_with_legend,
    key,
    look_of,
    looks_of,
)

TITLES = [method.record.title for method in (*METHODS.values(), *TRAINED.values())]


def as_seen(colour: str) -> list[tuple[float, ...]]:
    """A colour as most people see it, and as those see it who lack the red or the green cones.

    These see one lightness of red and green together, and blue (Vienot, Brettel & Mollon, 1999).
    """
    red, green, blue = ((int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    both = [share * red**2.2 + (1 - share) * green**2.2 for share in (0.1124, 0.2929)]
    return [(red, green, blue), *((light ** (1 / 2.2), blue) for light in both)]


def test_gram_and_guard_share_their_colour_with_no_other_method():
    for name in ("Gram", "Guard"):
        others = [look_of(title).colour for title in TITLES]
        assert look_of(name).colour not in others
        assert look_of(name).colour not in [look.colour for look in SPARE]


def test_the_paper_s_methods_are_told_apart_by_colour_alone_also_by_the_colour_blind():
    for (one, a), (other, b) in itertools.combinations(LOOKS.items(), 2):
        for seen, beside in zip(as_seen(a.colour), as_seen(b.colour), strict=True):
            assert max(abs(x - y) for x, y in zip(seen, beside, strict=True)) > 0.16, (one, other)


def test_a_method_keeps_its_look_when_others_come():
    before = looks_of(["MSP", "ODIN", "Gram", "my own method"])
    after = looks_of(["another", "Gram", "my own method", "Guard", "ODIN", "MSP"])
    assert {name: after[name] for name in before} == before
    assert looks_of(["my own method"])["my own method"] == look_of("my own method")
    assert look_of("my_own_method") == look_of("my own method")


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("Gram less MSP", "Gram"),
        ("Gram, row sums", "Gram"),
        ("row sums of roots", "Gram"),
        ("off_diagonal", "Gram"),
        ("Min/Max, order 3", "Gram"),
        ("MSP, KMNIST", "MSP"),
        ("OE tuned", "OE"),
        ("Outlier Exposure", "OE"),
        ("odin", "ODIN"),
        ("unit Mahalanobis", "unit Mahalanobis"),
        ("Gramophone", "Gramophone"),
        ("own, tuned", "own"),
    ],
)
def test_forms_belong_to_their_method(name, of):
    assert family(name) == of
    assert look_of(name) == look_of(of)


def test_forms_in_one_picture_are_told_apart_and_the_method_itself_keeps_its_look():
    looks = looks_of(["Gram, row sums", "Gram", "Gram less MSP", "MSP"])
    assert looks["Gram"] == LOOKS["Gram"] == Look("#0072B2", "s")
    assert len({look.mark for name, look in looks.items() if name.startswith("Gram")}) == 3
    assert len({look.colour for look in looks.values()}) == 4
    assert list(looks) == ["Gram, row sums", "Gram", "Gram less MSP", "MSP"]


@pytest.mark.parametrize("keys", [0, 3, 40])
def test_words_legend_axes_and_caption_have_their_own_room(keys):
    legend = [key(LOOKS["Gram"], f"method {i}") for i in range(keys)]
    frame = framed_with_legend(
        Words("title " * 40, "seen " * 50, "protocol " * 50), 2, 1, 2, legend=legend, caption="x " * 300
    )
    frame.figure.canvas.draw()
    width, height = frame.figure.bbox.size
    assert width == WIDTH * DPI
    boxes = [text.get_window_extent() for text in frame.figure.texts]
    assert min(box.x0 for box in boxes) > MARGIN * DPI / 2
    assert max(box.x1 for box in boxes) < width
    assert min(box.y0 for box in boxes) > 0
    assert max(box.y1 for box in boxes) < height
    panels = [axes.get_tightbbox() for axes in frame.axes.flat]
    boxes += [legend.get_window_extent() for legend in frame.figure.legends] + panels[:1]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    assert panels[0].height > 1.5 * DPI
