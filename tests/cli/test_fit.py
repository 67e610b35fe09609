"""The command `gramwatch fit`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import gramwatch
from gramwatch import CalibrationError
from gramwatch.cli.enough import few_to_calibrate, few_to_fit
from gramwatch.cli.fit import check_enough_images
from gramwatch.files import artifact
from gramwatch.inputs.files import files_of
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.inputs.models import resolve
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.inputs.readers import Images
from tests.cli.invoking import invoke, raising, told
from tests.cli.own import PREPARED, QUICK, picture, write_classes


def test_fit_says_what_it_did_and_what_the_calibration_is_worth(own):
    assert "300 images in 2 classes" in own.said
    assert "60 images are held out to calibrate" in own.said
    assert "calibrated on 60 images: enough for level 0.95" in own.said
    assert "right on 100.0% of the calibration images" in own.said


def test_fit_says_in_one_line_what_the_rehearsal_found_out(rehearsed):
    """Each member by its weight, the one that counts most first: the weights of the file."""
    path, said = rehearsed
    (line,) = (line for line in said.splitlines() if line.startswith("on this network: "))
    told_weights = dict(part.split() for part in line.removeprefix("on this network: ").split(", "))
    file = artifact.read(path)
    weights = dict(zip(file.header["members"], file.file.tensor("calibration.weights").tolist(), strict=True))
    assert {name: float(weight) for name, weight in told_weights.items()} == {
        name: round(weight, 2) for name, weight in weights.items()
    }
    assert list(map(float, told_weights.values())) == sorted(map(float, told_weights.values()))[::-1]


def test_fit_of_one_member_does_not_speak_of_a_rehearsal(own, tmp_path):
    result = invoke(
        "fit", own.model, own.train, "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        "--members", "energy", "--rehearse", *PREPARED, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "on this network" not in result.output


def test_fit_says_what_few_images_cost(own, tmp_path):
    """60 images calibrate the first guard; 24 images of each of two classes fit the second."""
    assert f"note: {few_to_calibrate(60)}" in own.said
    assert "to fit on are few" not in own.said
    write_classes(tmp_path / "few", 24, seed=3)
    result = invoke(
        "fit", own.model, tmp_path / "few", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        "--calibrate", own.train, *PREPARED, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"note: {few_to_fit(48, 2)}" in result.output
    assert "to calibrate on are few" not in result.output


def test_the_file_records_network_preprocessing_and_classes(own):
    metadata = artifact.read(own.guard).header["metadata"]
    assert metadata["model"] == {
        "name": own.model, "weights": "net.safetensors", "pretrained": False, "size": 16,
    }  # fmt: skip
    assert metadata["preprocessing"]["resize"] == "bilinear"
    assert metadata["classes"] == ["bright", "dark"]
    assert metadata["images"]["resizing"] == {"reduced": 240}
    assert metadata["images"]["count"] == 240


def test_what_is_held_out_depends_on_the_seed_alone(own, tmp_path):
    def fitted(name: str, seed: int) -> list[float]:
        arguments = ["fit", own.model, own.train, "--weights", own.weights, *PREPARED, *QUICK, "-q"]
        assert invoke(*arguments, "-o", tmp_path / name, "--seed", seed).exit_code == 0
        saved = artifact.read(tmp_path / name)
        return saved.file.tensor("calibration.scores").flatten().tolist()

    first = fitted("a.safetensors", 0)
    assert first == fitted("b.safetensors", 0)
    assert first != fitted("c.safetensors", 1)


def test_too_few_images_to_calibrate_are_refused_before_the_fit(own, tmp_path):
    write_classes(tmp_path / "few", 30, seed=3)
    result = invoke(
        "fit", own.model, tmp_path / "few", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK, "-q",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "12 images to calibrate on are too few for level 0.95: at least 38 are needed" in told(result)
    assert not (tmp_path / "g.safetensors").exists()


def test_calibration_images_of_their_own_and_a_summary(own, tmp_path):
    result = invoke(
        "fit", own.model, own.train, "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        "--calibrate", own.test, *PREPARED, *QUICK, "-q", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["fitted"], said["calibrated"], said["unreadable"]) == (300, 40, 0)
    assert said["classes"] == ["bright", "dark"]


def test_unreadable_images_are_left_out_and_named(own, tmp_path):
    write_classes(tmp_path / "images", 120, seed=4)
    (tmp_path / "images" / "dark" / "000.png").write_bytes(b"not an image")
    (tmp_path / "images" / "readme.txt").write_text("about these images")
    result = invoke(
        "fit", own.model, tmp_path / "images", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1 image(s) could not be read and are left out" in result.output
    assert "000.png: not an image of a known format" in result.output
    assert "1 other file(s) are left out" in result.output
    assert artifact.read(tmp_path / "g.safetensors").header["metadata"]["classes"] == ["bright", "dark"]


def test_if_no_image_can_be_read_it_says_why(own, tmp_path):
    (tmp_path / "bad").mkdir()
    for i in range(300):
        (tmp_path / "bad" / f"{i:03d}.png").touch()
    result = invoke(
        "fit", own.model, tmp_path / "bad", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK, "-q",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "no image could be read" in told(result)
    assert ".png: the file is empty" in told(result)


def test_folders_that_the_network_does_not_know_give_no_names(own, tmp_path):
    write_classes(tmp_path / "images", 120, seed=5)
    (tmp_path / "images" / "bright").rename(tmp_path / "images" / "zebra")  # now the order is turned round
    result = invoke(
        "fit", own.model, tmp_path / "images", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK,
    )  # fmt: skip
    assert "agree with the class folders on 0% of the calibration images" in result.output
    assert "in another order on 100%" in result.output
    assert "WARNING" not in result.output  # the network knows these images
    assert "classes" not in artifact.read(tmp_path / "g.safetensors").header["metadata"]


@pytest.mark.parametrize(
    ("model", "extra", "reason"),
    [
        ("NETS:build", [], "is not known: give --size, --resize, --mean, --std"),
        ("NETS:missing", PREPARED, "has no function 'missing'"),
        ("NETS:number", PREPARED, "returned int: it must return a torch.nn.Module"),
        ("no_such_package.x:build", PREPARED, "there is no module 'no_such_package.x'"),
        ("NETS:failing", PREPARED, "failing failed, called without arguments. ValueError: no such table ("),
        ("broken_module:build", PREPARED, "the module 'broken_module' cannot be imported. SyntaxError"),
        ("NETS:segmenter", PREPARED, "expected those of a classifier, (examples, classes)"),
        ("NETS:segmenter", PREPARED, "let a function of yours return a network that returns"),
        ("timm:no_such_network", PREPARED, "there is no network 'timm:no_such_network'"),
        ("timm:resnet18", PREPARED, "'timm:resnet18' has no weights"),
        ("nothing", PREPARED, "there is no network 'nothing': give timm:NAME"),
        ("hf:no_such_folder", PREPARED, "is no image classifier that can be had here"),
        ("NETS:build", ["--mean", "a,b"], "'a,b' is not a list of numbers"),
        ("NETS:build", ["--resize", "magic"], "there is no filter 'magic'"),
        ("NETS:build", [*PREPARED, "--level", "1.5"], "1.5 does not lie between 0 and 1"),
        ("NETS:build", [*PREPARED, "--members", "gram,magic"], "there is no member 'magic'"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_line(own, tmp_path, monkeypatch, model, extra, reason):
    (tmp_path / "broken_module.py").write_text("def build(:")
    monkeypatch.syspath_prepend(tmp_path)
    name = model.replace("NETS", own.model.partition(":")[0])
    result = invoke("fit", name, own.train, "-o", tmp_path / "g.safetensors", *extra, *QUICK, "-q")
    assert result.exit_code in (1, 2)
    assert reason in told(result)
    assert not (tmp_path / "g.safetensors").exists()


def test_weights_that_do_not_fit_are_named(own, tmp_path):
    torch.save({"model": {"module.0.weight": torch.zeros(1)}}, tmp_path / "other.pth")
    result = invoke(
        "fit", own.model, own.train, "--weights", tmp_path / "other.pth", "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK, "-q",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "missing: 0.bias, 2.weight, 2.bias and 2 more" in told(result)
    assert "of another shape: 0.weight (1,)" in told(result)


def test_a_network_of_timm_with_its_own_preprocessing(tmp_path):
    import_torchvision()
    import timm

    network = timm.create_model("resnet10t", num_classes=2)
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    write_classes(tmp_path / "images", 50, seed=6)
    guard = tmp_path / "guards" / "g.safetensors"
    result = invoke(
        "fit", "timm:resnet10t", tmp_path / "images", "--weights", tmp_path / "net.safetensors", "-o", guard,
        "--size", 32, "--hold-out", 0.5, "--members", "gram,energy", *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    recorded = artifact.read(guard).header["metadata"]
    assert (
        recorded["preprocessing"]["resize"] == timm.data.resolve_model_data_config(network)["interpolation"]
    )
    assert recorded["preprocessing"]["size"] == [32, 32]
    assert recorded["model"]["weights"] == "../net.safetensors"
    scored = invoke("score", guard, tmp_path / "images" / "dark", "-o", tmp_path / "s.csv", *QUICK)
    assert scored.exit_code == 0, scored.output  # the file says which network and which weights
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 51


def test_an_interrupted_fit_goes_on_from_its_checkpoint(own, tmp_path, monkeypatch):
    from gramwatch.inputs.readers import Tally

    arguments = [
        "fit", own.model, own.train, "--weights", own.weights, "-o", tmp_path / "g.safetensors", *PREPARED,
        *QUICK, "-q", "--checkpoint", tmp_path / "c.safetensors", "--batch-size", 50,
        "--members", "gram,energy",
    ]  # fmt: skip
    add, calls = Tally.add, []

    def interrupted(self, batch):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(self, batch)

    monkeypatch.setattr(Tally, "add", interrupted)
    result = invoke(*arguments)
    assert result.exit_code == 130
    assert f"Progress is in {tmp_path / 'c.safetensors'}" in result.output
    monkeypatch.setattr(Tally, "add", add)
    assert invoke(*arguments).exit_code == 0
    whole = [*arguments[:-6], "--batch-size", 50, "--members", "gram,energy"]
    assert "--checkpoint" not in whole
    whole[whole.index("-o") + 1] = tmp_path / "whole.safetensors"
    assert invoke(*whole).exit_code == 0
    names = [tmp_path / "g.safetensors", tmp_path / "whole.safetensors"]
    resumed, at_once = (artifact.read(name).file.tensor("calibration.scores") for name in names)
    assert torch.equal(resumed, at_once)
    assert not (tmp_path / "c.safetensors").exists()


def test_a_full_disk_leaves_no_guard(own, tmp_path, monkeypatch):
    monkeypatch.setattr("gramwatch.files.artifact.save_file", raising(OSError(28, "No space left on device")))
    result = invoke(
        "fit", own.model, own.train, "--weights", own.weights, "-o", tmp_path / "g.safetensors", *PREPARED,
        *QUICK, "-q",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "No space left on device" in told(result)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_images_is_named(own, tmp_path):
    (tmp_path / "empty").mkdir()
    result = invoke(
        "fit", own.model, tmp_path / "empty", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK, "-q",
    )  # fmt: skip
    assert result.exit_code == 1
    assert f"there is no image in the folder {tmp_path / 'empty'}: no name ends in .bmp" in told(result)


def test_the_name_of_a_guards_file_says_what_it_is(own, tmp_path):
    result = invoke("fit", own.model, own.train, "--weights", own.weights, "-o", tmp_path / "guard.txt")
    assert result.exit_code == 2
    assert f"--output: the name {tmp_path / 'guard.txt'} must end in .safetensors" in told(result)


def test_a_high_level_asks_for_as_many_images_as_it_needs():
    with pytest.raises(CalibrationError, match=r"^144 images .* at least 1,998 are needed\. Hold"):
        check_enough_images(144, 0.999)
    with pytest.raises(CalibrationError, match="at least 38 are needed, 1,000 are recommended"):
        check_enough_images(12, 0.95)


def test_a_table_of_paths_can_be_fitted_on(own, tmp_path):
    paths = sorted((own.train).rglob("*.png"))
    rows = [f'"{path}",{path.parent.name}' for path in paths]
    (tmp_path / "train.csv").write_text("\n".join(["path,label", *rows]))
    result = invoke(
        "fit", own.model, tmp_path / "train.csv", "--weights", own.weights, "-o", tmp_path / "g.safetensors",
        *PREPARED, *QUICK, "-q", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["classes"] == ["bright", "dark"]


def test_images_of_any_kind_can_be_fitted_on(own, tmp_path):
    folder: Path = tmp_path / "images"
    write_classes(folder, 120, seed=7)
    Image.new("CMYK", (24, 24), (0, 90, 90, 10)).save(folder / "bright" / "ink.jpg")
    Image.new("L", (24, 24), 200).save(folder / "bright" / "grey.png")
    result = invoke(
        "fit",
        own.model,
        folder,
        "--weights",
        own.weights,
        "-o",
        tmp_path / "g.safetensors",
        *PREPARED,
        *QUICK,
    )
    assert result.exit_code == 0, result.output
    assert "could not be read" not in result.output


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")  # most classes are never predicted
@pytest.mark.parametrize("members", [None, "gram,energy"])
def test_the_command_and_python_make_guards_with_equal_verdicts(tmp_path, members):
    """On a network with more tensors than a guard watches."""
    write_classes(tmp_path / "train", 60, seed=1)
    write_classes(tmp_path / "validation", 30, seed=2)
    weights, guard = tmp_path / "net.safetensors", tmp_path / "guard.safetensors"
    torch.manual_seed(0)
    network = resolve("resnet20", untrained=True).network
    save_file(network.state_dict(), weights)
    choice = [] if members is None else ["--members", members]
    result = invoke(
        "fit", "resnet20", tmp_path / "train", "--weights", weights, "--calibrate", tmp_path / "validation",
        "-o", guard, *choice, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = gramwatch.load(guard, network)
    prepare = Preprocessing.from_json(written.metadata["preprocessing"])
    images = {
        name: torch.cat([batch.inputs for batch in Images(files_of(tmp_path / name).paths, prepare)])
        for name in ("train", "validation")
    }
    mine = gramwatch.Guard(network, **({} if members is None else {"members": members.split(",")}))
    mine.fit(images["train"].split(64), progress=False)
    mine.calibrate(images["validation"].split(64), progress=False)
    assert written.settings_as_json() == mine.settings_as_json()
    assert written.members["gram"].settings_as_json() == mine.members["gram"].settings_as_json()
    assert len(written.members["gram"].tap_names) < len(gramwatch.find_taps(network, images["train"]))
    ours, theirs = mine(images["validation"]), written(images["validation"])
    assert torch.equal(ours.score, theirs.score)
    assert torch.equal(ours.is_ood, theirs.is_ood)


def test_a_network_that_does_not_know_its_images_is_warned_of_even_quietly(own, tmp_path):
    """Bright and dark in both folders: the predictions have nothing to do with the folders."""
    rng = np.random.default_rng(0)
    for name in ("bright", "dark"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(150):
            picture(rng, i % 2 == 0).save(tmp_path / "images" / name / f"{i:03d}.png")
    words = ["fit", own.model, tmp_path / "images", "--weights", own.weights, *PREPARED, *QUICK, "--json"]
    result = invoke(*words, "-o", tmp_path / "a.safetensors", "-q")
    assert result.exit_code == 0, result.output
    assert "WARNING: the network's classes agree with the class folders on" in result.stderr
    assert "--weights" in result.stderr
    assert "--mean" in result.stderr
    assert 0.3 < json.loads(result.stdout)["agreement"] < 0.7


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")  # one class is never predicted
def test_a_network_without_its_weights_is_warned_of(own, tmp_path):
    """Random weights: nearly all images get one class."""
    write_classes(tmp_path / "images", 150, seed=6)
    result = invoke(
        "fit", own.model, tmp_path / "images", "-o", tmp_path / "g.safetensors", *PREPARED, *QUICK
    )
    assert result.exit_code == 0, result.output
    assert "WARNING" in result.output
    assert "Does the network have its trained weights" in result.output


@pytest.mark.parametrize(
    ("mean", "std", "reason"),
    [
        ("127,127,127", "0.5,0.5,0.5", "--mean: 127 does not lie between 0 and 1"),
        ("127,127,127", "0.5,0.5,0.5", "On a scale to 255, 127 is 0.498 here"),
        ("0.5,0.5,0.5", "58.4,57.1,57.4", "--std: 58.4 does not lie between 0 and 1"),
        ("nan,0,0", "1,1,1", "--mean: nan does not lie between 0 and 1"),
        ("0.5,0.5,-0.5", "1,1,1", "--mean: -0.5 does not lie between 0 and 1"),
        ("0.5,0.5,0.5", "0.5,0,0.5", "--std: a standard deviation of 0 cannot divide"),
        ("0.5", "0.5,0.5,0.5", "--mean has 1 number(s), --std has 3"),
        ("0.5", "0.25", "Images were made grey, because the mean has one number"),
        ("0.5", "0.25", "--mean 0.5,0.5,0.5 --std 0.25,0.25,0.25"),
    ],
)
def test_means_that_do_not_fit_are_refused_with_the_option_and_a_remedy(own, tmp_path, mean, std, reason):
    guard = tmp_path / "g.safetensors"
    words = ["--size", 16, "--resize", "bilinear", "--mean", mean, "--std", std, "-q", "-o", guard]
    result = invoke("fit", own.model, own.train, "--weights", own.weights, *words, *QUICK)
    assert result.exit_code in (1, 2)
    assert reason in told(result)
    assert not guard.exists()
