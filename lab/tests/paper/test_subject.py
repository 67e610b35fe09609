"""What experiments are run on: images, sets, methods, and cells that are kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gramwatch import GramDetector
from gramwatch.inputs import networks
from gramwatch.methods import fgsm
from gramwatch.watch import find_taps
from gramwatch_lab.paper import experiment, subject
from gramwatch_lab.paper.sets import ood_sets
from gramwatch_lab.paper.subject import BLOCK_ENDS, PADDING, GramByOrder, MethodSpec, mirrored_and_shifted
from lab.tests.paper.made_up import NOISE

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_images_are_mirrored_and_shifted_as_in_training() -> None:
    images = torch.randint(1, 256, (40, 3, 6, 5), dtype=torch.uint8)
    moved = mirrored_and_shifted(images)
    assert torch.equal(moved, mirrored_and_shifted(images))
    side = 2 * PADDING + 1
    seen = set()
    for image, result in zip(images, moved, strict=True):
        padded = torch.nn.functional.pad(image, [PADDING] * 4)
        places = [
            (mirror, y, x)
            for mirror, source in ((False, padded), (True, padded.flip(2)))
            for y in range(side)
            for x in range(side)
            if torch.equal(result, source[:, y : y + 6, x : x + 5])
        ]
        assert places
        seen.add(places[0])
    assert {mirror for mirror, _, _ in seen} == {False, True}
    assert len(seen) > 20


# --- cells -------------------------------------------------------------------------------------------


def test_an_interrupted_experiment_loses_no_finished_cell(
    options: experiment.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at the third set of four; started again, only that and the last are measured."""
    plain, fit = subject.Together.measure, subject.fit_together
    done: list[str] = []
    fits: list[int] = []

    def measuring(evaluation: subject.Together, loader: Any, doing: str) -> Any:
        if len(done) == 2 and not interrupted:
            raise KeyboardInterrupt
        done.append(doing)
        return plain(evaluation, loader, doing, False)

    def fitting(detectors: Any, loader: Any) -> None:
        fits.append(len(detectors))
        fit(detectors, loader, progress=False)

    monkeypatch.setattr(subject.Together, "measure", measuring)
    monkeypatch.setattr(subject, "fit_together", fitting)
    study = options.subject()
    methods = experiment.methods_of(study, "msp,gram")
    sets = [ood_set for ood_set in ood_sets("mnist") if ood_set.name in ("kmnist", "gaussian", "bernoulli")]
    interrupted = False
    with pytest.raises(KeyboardInterrupt):
        study.measure(methods, sets)
    assert done == ["MNIST", "KMNIST"]
    interrupted = True
    first = options.subject().measure(methods, sets)
    assert done == ["MNIST", "KMNIST", "Gaussian noise", "Bernoulli noise"]
    assert fits == [2]  # the fit was kept too
    again = options.subject().measure(methods, sets)
    assert len(done) == 4
    assert torch.equal(first["KMNIST"]["MSP"].values, again["KMNIST"]["MSP"].values)
    assert torch.equal(first["KMNIST"]["Gram"].deviations, again["KMNIST"]["Gram"].deviations)
    # Another method is measured alone, other settings anew.
    options.subject().measure([*methods, MethodSpec("energy", "energy")], sets)
    assert len(done) == 8
    assert fits == [2, 1]
    replace(options, subset=50).subject().measure(methods[:1], sets[:1])
    assert len(done) == 10


def test_a_damaged_cell_is_measured_again(options: experiment.Options) -> None:
    study = options.subject()
    methods = experiment.methods_of(study, "msp")
    before = study.measure(methods, NOISE[:1])
    path = study.cells.path(*study._cell(methods[0], NOISE[0]))
    path.write_bytes(b"nothing")
    after = options.subject().measure(methods, NOISE[:1])
    assert torch.equal(before[NOISE[0].title]["MSP"].values, after[NOISE[0].title]["MSP"].values)


def test_the_logits_of_a_set_are_kept_and_held_once(options: experiment.Options) -> None:
    study = options.subject()
    methods = experiment.methods_of(study, "msp,energy,gram")
    before = study.measure(methods, NOISE[:1])[NOISE[0].title]
    assert before["MSP"].logits is before["energy"].logits is before["Gram"].logits
    path = study.cells.path(*study._logits_cell(NOISE[0]))
    assert len(list(study.cells.folder.glob("*-logits-*"))) == 2  # of the test images, and of the noise
    path.write_bytes(b"nothing")
    after = options.subject().measure(methods, NOISE[:1])[NOISE[0].title]
    for method, result in after.items():
        assert torch.equal(result.logits, before[method].logits)
        assert torch.equal(result.values, before[method].values)


# --- subjects ----------------------------------------------------------------------------------------


def test_images_to_tune_on_are_not_judged(options: experiment.Options) -> None:
    study = replace(options, tune="fgsm").subject()
    which = next(ood_set for ood_set in ood_sets("mnist") if ood_set.name == "kmnist")
    tuning, test = study.tuning_batches(which).images, study.test_batches(which).images
    assert len(tuning) == 12
    assert len(test) == 48
    pixels = torch.cat([tuning, test]).flatten(1).sort(0).values
    assert torch.equal(pixels, options.subject().test_batches(which).images.flatten(1).sort(0).values)


def test_adversarial_examples_are_made_by_true_classes(options: experiment.Options) -> None:
    study = replace(options, tune="fgsm", subset=100).subject()
    images = torch.cat(list(study.tuning_batches(study._inside)))
    test = study.load("mnist", count=100)
    assert test.labels is not None
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:20]
    assert torch.equal(images, study.loaded.prepare(test.images[order]))
    expected = fgsm(study.network, images, test.labels[order], scale=study.loaded.std)
    assert torch.equal(torch.cat(study.fgsm_batches()), expected)
    wrong = (test.labels[order] + 1) % 8
    assert not torch.equal(fgsm(study.network, images, wrong, scale=study.loaded.std), expected)


def test_a_part_in_distribution_is_validated_by_its_own_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-100's part, made up: validation is a split, and the page is marked."""
    generator = np.random.default_rng(0)
    (tmp_path / "cifar100-subset").mkdir()
    labels = np.repeat(np.arange(4), 60)
    images = generator.integers(0, 60, (240, 32, 32, 3)) + 48 * labels[:, None, None, None]
    np.save(tmp_path / "cifar100-subset" / "images.npy", images.astype(np.uint8))
    np.save(tmp_path / "cifar100-subset" / "labels.npy", labels)
    weights = tmp_path / "net.pth"
    torch.save(networks.build("resnet20", 4).state_dict(), weights)
    noise = [ood_set for ood_set in ood_sets("cifar10") if ood_set.name == "gaussian"]
    monkeypatch.setattr("gramwatch_lab.paper.experiment.ood_sets", lambda name: noise)
    given = experiment.Options(
        tmp_path / "out",
        network="resnet20",
        weights={"net": weights},
        in_distribution="cifar100_parts",
        data=tmp_path,
        subset=40,
        methods="msp,gram",
        say=lambda text: None,
    )
    study = given.subject()
    assert (study.inside_title, study.published_title) == ("CIFAR-100 (indicative)", "CIFAR-100")
    lines = experiment.run("table2", given)
    assert {line.ours.examples for line in lines if line.ours} == {40}
    page = (given.output / "table2-resnet20-cifar100_parts.md").read_text(encoding="utf-8")
    assert "CIFAR-100 (indicative). Indicative: 6,000 images, mostly of the training split" in page
    assert "In-distribution: 40 examples for validation and 40 for test" in page
    measured = study.measure(experiment.methods_of(study, "gram"), noise)
    assert set(measured) == {study.inside_title, subject.VALIDATION, noise[0].title}
    assert len(measured[subject.VALIDATION]["Gram"]) == 40
    monkeypatch.setattr("gramwatch_lab.paper.experiment.ood_sets", lambda name: noise)
    members = "gram,profile,class_ratio,energy"
    joined = experiment.computed("guard_study", replace(given, methods=members))
    assert {line.ood for line in joined} == {noise[0].title}
    page = (given.output / "guard-resnet20-cifar100_parts.md").read_text(encoding="utf-8")
    assert "In-distribution: 40 examples for validation and 40 for test" in page


def test_gram_by_order_is_gram_taken_apart(options: experiment.Options) -> None:
    study = options.subject()
    batches = [batch[0] for batch in study.training_batches()]
    settings: dict[str, Any] = {"taps": ["conv?"], "statistic": "row_sums"}
    fine = GramByOrder(study.network, **settings).fit(batches, progress=False)
    whole = GramDetector(study.network, **settings).fit(batches, progress=False)
    third = GramDetector(study.network, orders=[3], **settings).fit(batches, progress=False)
    images = next(iter(study.test_batches(NOISE[0])))
    by_order = fine.measure(images).deviations.unflatten(1, (2, 10))
    assert torch.allclose(by_order.sum(2), whole.measure(images).deviations, rtol=1e-5)
    assert torch.allclose(by_order[:, :, 2], third.measure(images).deviations, rtol=1e-5)
    assert by_order.sum() > 0


@pytest.mark.parametrize("name", BLOCK_ENDS)
def test_block_ends_are_taps(name: str) -> None:
    names = {tap.name for tap in find_taps(networks.build(name).eval(), torch.rand(2, 3, 32, 32))}
    assert set(BLOCK_ENDS[name]) <= names


# --- what is fitted ----------------------------------------------------------------------------------


def test_what_is_missing_for_absent_sets_only_is_not_fitted(options: experiment.Options) -> None:
    absent = next(ood_set for ood_set in ood_sets("mnist") if ood_set.name == "svhn")
    told: list[str] = []
    study = replace(options, say=told.append).subject()
    knn, fdbd = MethodSpec("KNN", "knn"), MethodSpec("fDBD", "fdbd")
    assert list(study.measure([knn], [absent, NOISE[0]])) == ["MNIST", NOISE[0].title]
    (study.cells.folder / study._file(knn).name).unlink()
    told.clear()
    assert list(study.measure([knn, fdbd], [absent, NOISE[0]])["MNIST"]) == ["KNN", "fDBD"]
    assert any("fDBD fitted" in text for text in told)
    assert not any("KNN" in text for text in told)
    assert any("SVHN: data not present" in text for text in told)


def test_gram_is_fitted_on_moved_images_too(options: experiment.Options) -> None:
    study = options.subject()
    settings = {"taps": ["conv?"], "statistic": "row_sums"}
    methods = [MethodSpec("still", "gram", settings), MethodSpec("moved", "gram", settings, moved=True)]
    still, moved = study._fitted(methods).values()
    assert isinstance(still, GramDetector)
    assert isinstance(moved, GramDetector)
    assert moved.class_counts_.sum() == 2 * still.class_counts_.sum()
    images = next(iter(study.training_batches(moved=True)))[0]
    assert still.measure(images).deviations.amax() > 1e-3 > moved.measure(images).deviations.amax()
    assert methods[0].as_json().keys() < methods[1].as_json().keys()
