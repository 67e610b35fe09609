"""From the bytes of an image to what the page shows."""

import base64
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch.deploy.live import Examiner
from gramwatch.deploy.live.demo import PREPARE
from gramwatch.errors import DataError, GramwatchWarning
from gramwatch.methods import MSP


def file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    to = BytesIO()
    image.save(to, kind, **options)
    return to.getvalue()


def picture(uri: str) -> Image.Image:
    kind, _, data = uri.partition(",")
    assert kind == "data:image/webp;base64"
    return Image.open(BytesIO(base64.b64decode(data)))


def test_the_verdict_is_that_of_the_guard_and_the_map_that_of_its_explanation(demo):
    examiner, shown = demo
    for example in (shown.examples[0], shown.examples[10]):
        inputs = PREPARE(Image.open(BytesIO(example.data)).convert("L"))[None]
        expected = examiner.detector.explain(inputs)
        result = examiner(example.data)
        assert result["is_ood"] is bool(expected.detection.is_ood[0])
        assert result["score"] == pytest.approx(float(expected.detection.score[0]))
        assert result["p_value"] == float(expected.detection.p_value[0])
        assert result["class"] == str(int(expected.detection.predicted[0]))
        rank = f"{round(result['p_value'] * (len(examiner.detector.calibration_scores_) + 1)) - 1:,} of the "
        assert result["compared"].startswith("none of the " if rank.startswith("0 ") else rank)
        assert result["is_ood"] is (result["score"] > result["threshold"])
        assert result["sentences"] == expected.sentences()[1:]
        assert sum(member["adds"] for member in result["members"]) == pytest.approx(result["score"], abs=1e-4)
        adds = [member["adds"] for member in result["members"]]
        assert adds == sorted(adds, reverse=True)
        seen, heat = (np.asarray(picture(result[name]), dtype=float) for name in ("input", "map"))
        assert seen.shape == heat.shape == (320, 320, 3)
        most, least = (getattr(expected.map[0], way)() for way in ("argmax", "argmin"))
        red = [heat[i // 8 * 40 + 20, i % 8 * 40 + 20] @ [1, -0.5, -0.5] for i in map(int, (most, least))]
        assert red[0] > red[1] + 20
    assert result["is_ood"]


def test_what_was_changed_to_read_an_image_is_said(demo):
    examiner, _ = demo
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert not any("changed" in note for note in examiner(file(image))["notes"])
    turned = examiner(file(image, exif=exif))
    assert turned["notes"][0] == "The image was changed to read it: turned as EXIF says."
    upright = examiner(file(image.transpose(Image.Transpose.ROTATE_270)))
    assert turned["score"] == upright["score"]
    deep = Image.fromarray(np.asarray(image).astype(np.uint16) << 8)
    assert examiner(file(deep))["score"] == examiner(file(image))["score"]
    assert "16 bits reduced to 8" in examiner(file(deep))["notes"][0]
    assert "CMYK made RGB" in examiner(file(image.convert("CMYK"), "JPEG"))["notes"][0]
    animated = file(image, "GIF", save_all=True, append_images=[image.rotate(90)])
    assert "first of 2 frames" in examiner(animated)["notes"][0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"no image", "not an image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image of a known format"),
        (file(Image.new("RGB", (99, 99), "teal"), "JPEG")[:-200], "cannot be read"),
        (file(Image.new("1", (20_000, 10_000))), "too large: it has more than 50,000,000 pixels"),
    ],
    ids=["empty", "text", "svg", "truncated", "huge"],
)
def test_what_cannot_be_read_is_an_error_in_words(demo, data, reason):
    with pytest.raises(DataError, match=reason):
        demo[0](data)


def test_a_detector_without_places_has_no_map_and_says_so(demo):
    detector = MSP(demo[0].detector.model)
    detector.calibrate([torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))])
    result = Examiner(detector, PREPARE)(demo[1].examples[0].data)
    assert result["map"] is None
    assert result["class"] is None
    assert any(note.startswith("no map") for note in result["notes"])
    assert len(result["members"]) == 1


def test_values_that_are_not_finite_are_no_numbers(demo):
    """JSON has no infinity."""
    detector = demo[0].detector
    broken = Examiner(detector, type(PREPARE)((8, 8), 8, "box", (0.0,), (1e-39,)))
    with pytest.warns(GramwatchWarning, match="their score is infinite"):
        result = broken(demo[1].examples[0].data)
    assert result["score"] is None
    assert result["is_ood"]
    assert result["members"] == []
    assert result["sentences"][0] == "The input, or what the network made of it, is not finite."
