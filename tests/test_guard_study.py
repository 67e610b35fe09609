"""The study behind Guard, on a network small enough to be fitted here."""

from dataclasses import replace

import pytest
import torch

from gramwatch.deviation import TotalDeviation
from gramwatch.experiments import guard_study
from gramwatch.experiments.false_alarms import simulated
from gramwatch.experiments.subject import PADDING, mirrored_and_shifted
from gramwatch.joint import JointMeasurement, JointRule


@pytest.fixture
def measured() -> JointMeasurement:
    return simulated(300, torch.Generator().manual_seed(0))


def scores_by(measured: JointMeasurement, standard: object, join: object) -> torch.Tensor:
    totals = {"gram": TotalDeviation()}
    return JointRule(totals, standard, join).fit(measured)(measured)  # type: ignore[arg-type]


def test_every_rule_differs_from_guards_in_what_it_says() -> None:
    titles = [each.title for each in guard_study.VARIANTS]
    assert titles[0] == guard_study.GUARD
    assert len(set(titles)) == len(titles)
    for each in guard_study.VARIANTS:
        assert (guard_study.GRAM in each.rule().totals) == (guard_study.GRAM in each.members)


def test_every_form_of_gram_has_its_row() -> None:
    forms = [form.title for form in guard_study.forms_of("resnet20")]
    used = [each.form for each in guard_study.VARIANTS if each.form != guard_study.GRAM]
    assert used == forms
    assert [form.title for form in guard_study.forms_of("mnist_convnet")] == forms[:-1]  # it has no blocks


def test_a_rule_takes_the_deviations_of_its_form(measured: JointMeasurement) -> None:
    gram, energy = measured.parts["gram"], measured.parts["energy"]
    said = {guard_study.GRAM: gram[:0], "other": gram, "energy": energy}
    form = guard_study.Variant("", (guard_study.GRAM, "energy"), form="other")
    assert form.parts(said)[guard_study.GRAM].deviations is gram.deviations
    assert form.parts(said)["energy"] is energy

    halves = [
        replace(form, part=part).parts(said)[guard_study.GRAM].deviations
        for part in (guard_study._first_half, guard_study._last_half)
    ]
    assert all(half.shape[1] for half in halves)
    assert torch.equal(torch.cat(halves, 1), gram.deviations)


def test_gram_is_compressed_tap_by_tap(measured: JointMeasurement) -> None:
    gram = measured.parts["gram"]
    total = TotalDeviation().fit(gram.deviations, gram.probability)
    found = guard_study._tap_by_tap(total, gram)
    assert total.expectation_ is not None
    for i in (0, 17):
        each = gram.deviations[i] / gram.probability[i] / (total.expectation_ + 1e-7)
        assert found[i].item() == pytest.approx(sum((1 + each).log().tolist()) / len(each))
    assert (found < guard_study.gram_score(total, gram) + 1e-12).all()  # Jensen's inequality


def test_images_are_mirrored_and_shifted_as_in_training() -> None:
    images = torch.randint(1, 256, (40, 3, 6, 5), dtype=torch.uint8)
    moved = mirrored_and_shifted(images)
    assert torch.equal(moved, mirrored_and_shifted(images))
    side = 2 * PADDING + 1
    seen = set()
    for image, found in zip(images, moved, strict=True):
        padded = torch.nn.functional.pad(image, [PADDING] * 4)
        places = [
            (mirror, y, x)
            for mirror, source in ((False, padded), (True, padded.flip(2)))
            for y in range(side)
            for x in range(side)
            if torch.equal(found, source[:, y : y + 6, x : x + 5])
        ]
        assert places
        seen.add(places[0])
    assert {mirror for mirror, _, _ in seen} == {False, True}
    assert len(seen) > 20


def test_fisher_sums_logarithms_of_p_values(measured: JointMeasurement) -> None:
    found = scores_by(measured, guard_study.LogarithmOfP(), guard_study.sum_of_members)
    members = JointRule({"gram": TotalDeviation()}).fit(measured).member_scores(measured)
    p = torch.stack([(1 + (members >= row).sum(0)) / 301 for row in members])
    torch.testing.assert_close(found, -p.log().sum(1), atol=1e-3, rtol=1e-3, check_dtype=False)


def test_stouffer_is_symmetric_about_the_median(measured: JointMeasurement) -> None:
    standard = guard_study.NormalDeviate().fit(torch.linspace(0, 1, 999).double()[:, None])
    z = standard(torch.tensor([[0.5], [0.975], [0.025]]).double())[:, 0]
    assert z.tolist() == pytest.approx([0, 1.96, -1.96], abs=0.02)


def test_the_quartile_is_a_floor(measured: JointMeasurement) -> None:
    scores = torch.linspace(-1, 1, 101).double()[:, None]
    z = guard_study.FromQuartile().fit(scores)(scores)[:, 0]
    assert int((z == z.min()).sum()) == 26
    assert z[-1] == pytest.approx(1 / scores.std(correction=0).item())


def test_joins(measured: JointMeasurement) -> None:
    z = torch.tensor([[-1.0, 2.0], [-3.0, -2.0]])
    assert guard_study._highest(z).tolist() == [2, -2]
    assert guard_study._squares(z).tolist() == [4, 0]
    assert guard_study._smooth_maximum(z)[0] == pytest.approx(2.0486, abs=1e-4)


def test_sets_are_chosen_by_name() -> None:
    sets = guard_study.ood_sets("cifar10")
    chosen = {each.name for each in sets if guard_study._chosen(each, "tiny_imagenet, mnist")}
    assert chosen == {"tiny_imagenet", "mnist"}
    assert all(guard_study._chosen(each, "") for each in sets)
