"""Folders in Hugging Face's layout: what is written, read, kept and refused."""

import json
import re
import sys

import pytest
import torch

import gramwatch
from gramwatch import ArtifactError, Guard, InputError
from gramwatch.detect.threshold import range_of_rates
from gramwatch.guard.guard import MEMBERS
from gramwatch.guard.pretrained import BEGIN, END
from tests import small


def fitted(calibrated: bool = True, **options) -> Guard:
    guard = Guard(small.made(), **options).fit([small.images(300, 0)], progress=False)
    return guard.calibrate([small.images(200, 1)], progress=False) if calibrated else guard


@pytest.fixture(scope="module")
def guard() -> Guard:
    made = fitted()
    made.metadata |= {
        "classes": ["cat", "a|b", "dog"],
        "images": {"data": "photos/*new*\n<!-- end gramwatch -->", "count": 300},
        "preprocessing": {"size": [8, 8], "resize": "bilinear", "given": ["size"]},
        "model": {"name": "timm:resnet18"},
    }
    return made


def row(card: str, name: str) -> str:
    (found,) = re.findall(rf"^\| {name} \| (.*) \|$", card, re.MULTILINE)
    return found


def test_what_was_saved_comes_back(guard, tmp_path):
    guard.save_pretrained(tmp_path / "new" / "folder")
    again = Guard.from_pretrained(tmp_path / "new" / "folder", guard.model)
    images = torch.cat([small.images(20, 4), small.images(20, 5, 3.0)])
    assert torch.equal(again(images).p_value, guard(images).p_value)
    assert torch.equal(again(images).score, guard(images).score)
    assert again.metadata == guard.metadata
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {
        "guard.safetensors",
        "config.json",
        "README.md",
    }
    one_file = gramwatch.load(tmp_path / "new" / "folder" / "guard.safetensors", guard.model)
    assert torch.equal(one_file(images).score, guard(images).score)


def test_the_card_states_data_level_calibration_and_limits(guard, tmp_path):
    guard.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: gramwatch\n")
    assert "# Guard for timm:resnet18\n" in card
    parameters = sum(t.numel() for t in guard.model.parameters())
    assert row(card, "network") == f"timm:resnet18, {parameters} parameters"
    assert row(card, "input") == "float32 (1, 8, 8) for each example"
    assert row(card, "preprocessing") == r"size: \[8, 8\], resize: bilinear"
    assert row(card, "fitted on") == r"photos/\*new\* \<\!-- end gramwatch --\>, 300 examples"
    assert row(card, "classes") == r"cat, a\|b, dog"
    assert row(card, "members") == ", ".join(MEMBERS).replace("_", r"\_")
    assert row(card, "level") == "0.95: at most 5.00% false alarms, on average"
    assert row(card, "calibrated on") == "200 examples, of which 100 rank"
    low, high = range_of_rates(100, 0.95)
    assert f"from {low:.1%} to {high:.1%}." in card
    assert "How many outliers it finds is not known" in card
    assert card.count(BEGIN) == card.count(END) == 1


def test_nine_of_ten_calibrations_lie_in_the_range():
    """Threshold of 100 uniform scores at 0.95: the rate of a calibration is one minus that threshold."""
    scores = torch.rand(20_000, 100, generator=torch.Generator().manual_seed(0)).sort(1).values
    rates = 1 - scores[:, 95]  # the 96th of 100: ceil(101 x 0.95)
    low, high = range_of_rates(100, 0.95)
    share = ((rates >= low) & (rates <= high)).double().mean()
    assert share == pytest.approx(0.9, abs=0.007)  # three standard deviations of 20,000 draws


def test_the_config_is_small_and_plain(guard, tmp_path):
    guard.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["library_name"] == "gramwatch"
    assert config["file"] == "guard.safetensors"
    assert config["settings"]["level"] == 0.95
    assert config["calibration"]["examples"] == 200
    assert config["id2label"] == {"0": "cat", "1": "a|b", "2": "dog"}
    assert (tmp_path / "config.json").stat().st_size < 2000


def test_a_guard_without_metadata_or_calibration_says_so(tmp_path):
    guard = fitted(calibrated=False)
    guard.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# Guard for SmallNet\n" in card
    assert row(card, "calibrated on") == "nothing yet"
    assert row(card, "fitted on") == "data that are not named, 300 examples"
    assert row(card, "preprocessing") == "not recorded"
    assert "It is not calibrated" in card
    assert (
        not Guard.from_pretrained(tmp_path, guard.model)
        .calibrate([small.images(200, 1)])(small.images(1, 1))
        .is_ood
    )


def test_per_class_and_members_without_gram_have_cards_too(tmp_path):
    guard = fitted(per_class=True, members=("energy", "class_ratio"))
    guard.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "if all classes are ranked together." in card
    assert row(card, "input") == "not recorded"
    assert row(card, "fitted on") == "data that are not named"


def test_what_the_user_wrote_into_the_card_is_kept(guard, tmp_path):
    guard.save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    first = path.read_text(encoding="utf-8")
    path.write_text(f"{first.replace('- anomaly-detection', '- cats')}\n## Contact\nMe.\n", encoding="utf-8")
    again = fitted()
    again.save_pretrained(tmp_path)
    card = path.read_text(encoding="utf-8")
    assert "- cats\n" in card
    assert card.endswith("\n## Contact\nMe.\n")
    assert "timm:resnet18" not in card
    assert "# Guard for SmallNet" in card
    again.save_pretrained(tmp_path)
    assert path.read_text(encoding="utf-8") == card


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type": "vit"}'),
        ("config.json", "no JSON"),
        ("config.json", "[1]"),
        ("README.md", "# My network\n"),
        ("README.md", f"{BEGIN}\nno end\n"),
    ],
)
def test_files_of_something_else_are_not_touched(guard, tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=rf"{re.escape(name)} is not of gramwatch.*folder of its own"):
        guard.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") == text


def test_a_folder_without_a_guard_is_refused_in_words(guard, tmp_path):
    with pytest.raises(ArtifactError, match=r"there is no .*snapshot_download"):
        Guard.from_pretrained(tmp_path / "someone" / "guard", guard.model)


def test_other_weights_are_refused_and_accepted_if_asked_for(guard, tmp_path):
    guard.save_pretrained(tmp_path)
    other = small.made()
    with torch.no_grad():
        other.conv1.weight.mul_(1.001)
    with pytest.raises(ArtifactError, match="other weights"):
        Guard.from_pretrained(tmp_path, other)
    assert Guard.from_pretrained(tmp_path, other, accept_other_weights=True).is_fitted


def test_adapters_are_given_again(tmp_path):
    guard = Guard(small.made(), inputs=lambda batch: batch["x"])
    guard.fit([{"x": small.images(300, 0)}], progress=False)
    guard.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="inputs= a function"):
        Guard.from_pretrained(tmp_path, guard.model)
    assert Guard.from_pretrained(tmp_path, guard.model, inputs=lambda batch: batch["x"]).is_fitted


def test_another_detector_in_the_file_is_refused(guard, tmp_path):
    guard.members["gram"].save(tmp_path / "guard.safetensors")
    with pytest.raises(ArtifactError, match="holds a 'GramDetector', not a 'Guard'"):
        Guard.from_pretrained(tmp_path, guard.model)


def test_loading_reads_the_one_file_alone(guard, tmp_path):
    guard.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{ damaged", encoding="utf-8")
    (tmp_path / "README.md").unlink()
    assert Guard.from_pretrained(tmp_path, guard.model).is_fitted


def test_huggingface_hub_is_not_needed(guard, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it is an error now
    guard.save_pretrained(tmp_path)
    assert Guard.from_pretrained(tmp_path, guard.model).is_fitted
