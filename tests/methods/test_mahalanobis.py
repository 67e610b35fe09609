"""Mahalanobis against its paper and pytorch-ood, fitted in batches, tuned, saved, and with bad input."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gramwatch.errors import GramwatchWarning, InputError, NotFittedError
from gramwatch.evaluation.evaluate import fit_together
from gramwatch.files import artifact
from gramwatch.methods import ODIN, Mahalanobis, Method
from gramwatch.observe.observation import Observation
from tests.methods.tapped import TAPS, Net, images, labelled, made, mahalanobis


@pytest.fixture
def net() -> Net:
    return made()


def means_of(net: Net, x: Tensor) -> list[Tensor]:
    first = net.first(x)
    second = net.second(net.norm(first).relu())
    return [first.mean((2, 3)), second.mean((2, 3))]


def gaussian_by_hand(features: np.ndarray, labels: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Eq. 1, one example at a time."""
    means = {int(c): features[labels == c].mean(0) for c in np.unique(labels)}
    covariance = np.zeros((features.shape[1], features.shape[1]))
    for x, c in zip(features, labels, strict=True):
        covariance += np.outer(x - means[int(c)], x - means[int(c)]) / len(features)
    return means, np.linalg.inv(covariance)


def distances_by_hand(net: Net, loader: list[tuple[Tensor, Tensor]], test: Tensor) -> np.ndarray:
    """Eq. 2 for each example and tap."""
    with torch.no_grad():
        training = [np.concatenate(m) for m in zip(*(means_of(net, x) for x, _ in loader), strict=True)]
        judged = [m.double().numpy() for m in means_of(net, test)]
    labels = np.concatenate([y for _, y in loader])
    found = np.zeros((len(test), len(training)))
    for tap, (features, rows) in enumerate(zip(training, judged, strict=True)):
        means, precision = gaussian_by_hand(features.astype(np.float64), labels)
        for i, x in enumerate(rows):
            found[i, tap] = min((x - mu) @ precision @ (x - mu) for mu in means.values())
    return found


def test_mahalanobis_as_in_the_paper(net: Net) -> None:
    test = images(7, seed=3)
    expected = distances_by_hand(net, labelled(90), test)
    detector = mahalanobis(net)
    assert not detector.gradients
    found = detector.distances(detector.observe(test))
    assert found.shape == (7, 2)
    assert np.allclose(found, expected, rtol=1e-4)
    logits, scores = detector.score_inputs(test)
    assert np.allclose(scores, expected.sum(1), rtol=1e-4)
    assert torch.allclose(logits, net(test).detach(), atol=1e-6)
    normalised = mahalanobis(net, join="normalised").score_inputs(test)[1]
    assert np.allclose(normalised, expected[:, 0] / 5 + expected[:, 1] / 4, rtol=1e-4)


def test_the_expectation_on_training_data_is_the_rank(net: Net) -> None:
    """Which is what `join='normalised'` divides by: the mean distance to the own class."""
    loader = labelled(90)
    with torch.no_grad():
        training = [
            torch.cat(m).double().numpy() for m in zip(*(means_of(net, x) for x, _ in loader), strict=True)
        ]
    labels = torch.cat([y for _, y in loader]).numpy()
    for features, rank in zip(training, (5, 4), strict=True):
        means, precision = gaussian_by_hand(features, labels)
        own = [(x - means[c]) @ precision @ (x - means[c]) for x, c in zip(features, labels, strict=True)]
        assert np.mean(own) == pytest.approx(rank)


def test_mahalanobis_in_batches_as_at_once(net: Net) -> None:
    test = images(7, seed=3)
    once = Mahalanobis(net, taps=TAPS).fit(labelled(90, batch=90), progress=False).score_inputs(test)[1]
    for batch in (1, 7, 32):
        several = Mahalanobis(net, taps=TAPS).fit(labelled(90, batch=batch), progress=False)
        assert torch.allclose(several.score_inputs(test)[1], once, rtol=1e-6)
    again = mahalanobis(net)
    again.fit(labelled(90, batch=90), progress=False)  # starts anew
    assert torch.allclose(again.score_inputs(test)[1], once, rtol=1e-6)


def test_mahalanobis_keeps_no_examples(net: Net) -> None:
    detector = Mahalanobis(net, taps=TAPS)
    for x, y in labelled(64):
        detector.take(replace(detector.observe(x), labels=y))
        assert detector._sample is None
    assert detector._sums is not None
    kept = [detector._sums.counts]
    for group in detector._sums.groups:
        kept += [*group.products, *group.by_class, *group.origins]
    assert {t.shape for t in kept} == {(5, 5), (4, 4), (3, 5), (3, 4), (5,), (4,), (3,)}
    assert all(t.dtype == torch.float64 for t in kept)
    detector.finish()
    assert detector._sums is None


def test_mahalanobis_far_from_zero_in_float64(net: Net) -> None:
    """Sums of squares of large numbers would lose what matters: they are taken about a first mean."""
    spread = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    detector = Mahalanobis(net)
    far = spread + 1000
    for part in far.split(100):
        detector.take(Observation(torch.zeros(100, 1), channel_means=(part,)))
    detector.finish()
    exact = far.double() - far.double().mean(0)
    precision = torch.linalg.inv(exact.T @ exact / 400)
    expected = ((exact @ precision) * exact).sum(1)
    found = detector.judged(Observation(torch.zeros(400, 1), channel_means=(far,)))
    assert torch.allclose(found, expected, rtol=1e-6)


def test_mahalanobis_leaves_out_what_is_not_finite(net: Net) -> None:
    """As if it were not there: in the first batch, and in a batch that has nothing else."""
    features = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    labels, bad = torch.arange(40) % 3, torch.full((40, 5), torch.nan)

    def fitted(mixed: bool) -> Mahalanobis:
        detector, left_out = Mahalanobis(net), 0
        if mixed:
            left_out += int(
                detector.take(
                    Observation(
                        torch.zeros(40, 3),
                        channel_means=(bad,),
                        labels=labels,
                        finite=torch.zeros(40, dtype=torch.bool),
                    )
                )
            )
        for part, of_part in zip(features.split(10), labels.split(10), strict=True):
            means, finite = part, torch.ones(10, dtype=torch.bool)
            if mixed:
                means, of_part = torch.cat([bad[:3], part]), torch.cat([labels[:3], of_part])
                finite = torch.cat([torch.zeros(3, dtype=torch.bool), finite])
            seen = Observation(
                torch.zeros(len(means), 3), channel_means=(means,), labels=of_part, finite=finite
            )
            left_out += int(detector.take(seen))
        assert left_out == (52 if mixed else 0)
        detector.finish()
        return detector

    alone, mixed = fitted(False), fitted(True)
    for name in ("counts_", "origins_", "sums_", "products_", "whitening_", "centres_"):
        torch.testing.assert_close(getattr(mixed, name), getattr(alone, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e10])
def test_mahalanobis_of_regular_and_singular_covariances(net: Net, condition: float) -> None:
    """A regular covariance is inverted by its root, a singular one by its eigenvalues. Both in one fit."""
    free = torch.randn(300, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    regular = (free * torch.logspace(0, -math.log10(condition) / 2, 6, dtype=torch.float64)).float()
    singular = torch.cat([regular[:, :5], regular[:, :1] + regular[:, 1:2]], 1)
    test = 2 * regular[:50] + 0.1
    detector = Mahalanobis(net)
    detector.take(Observation(torch.zeros(300, 2), channel_means=(regular, singular)))
    with pytest.warns(GramwatchWarning, match=r"singular at 1 of 2 tap\(s\)"):
        detector.finish()
    assert detector.ranks_ is not None
    assert detector.ranks_.tolist() == [6, 5]
    judged = Observation(torch.zeros(50, 2), channel_means=(test, torch.cat([test[:, :5], test[:, :1]], 1)))
    found = detector.distances(judged)
    for tap, (training, given) in enumerate(zip((regular, singular), judged.channel_means, strict=True)):
        exact = training.double().numpy()
        precision = np.linalg.pinv(np.cov(exact.T, bias=True), rcond=1e-13, hermitian=True)
        centred = given.double().numpy() - exact.mean(0)
        expected = ((centred @ precision) * centred).sum(1)
        assert np.allclose(found[:, tap], expected, rtol=1e-5)


def test_mahalanobis_labels_or_predictions(net: Net) -> None:
    pictures = torch.cat([x for x, _ in labelled(90)])
    with torch.no_grad():
        predicted = net(pictures).argmax(1)
    assert len(predicted.unique()) > 1
    unlabelled = Mahalanobis(net, taps=TAPS).fit([pictures], progress=False)
    with_predictions = Mahalanobis(net, taps=TAPS).fit([(pictures, predicted)], progress=False)
    with_labels = mahalanobis(net)
    test = images(5)
    scores = [r.score_inputs(test)[1] for r in (unlabelled, with_predictions, with_labels)]
    assert torch.equal(scores[0], scores[1])
    assert not torch.allclose(scores[0], scores[2])


def test_mahalanobis_classes_with_one_example_and_with_none(net: Net) -> None:
    features = torch.randn(11, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0] * 10 + [2])
    logits = torch.zeros(11, 4)
    detector = Mahalanobis(net)
    detector.take(Observation(logits, channel_means=(features,), labels=labels))
    detector.finish()
    assert detector.classes_ is not None
    assert detector.classes_.tolist() == [0, 2]
    alone = detector.judged(Observation(logits[:1], channel_means=(features[10:],)))
    assert float(alone) == pytest.approx(0, abs=1e-12)  # it is its own class mean
    means, precision = gaussian_by_hand(features.double().numpy(), labels.numpy())
    x = np.array([5.0, -3.0])
    found = detector.judged(Observation(logits[:1], channel_means=(torch.tensor([[5.0, -3.0]]),)))
    assert float(found) == pytest.approx(min((x - m) @ precision @ (x - m) for m in means.values()))


def test_mahalanobis_singular_covariance(net: Net) -> None:
    """One channel is dead and one is the sum of two others: said once, and the rest is as ever."""
    free = torch.randn(50, 2, generator=torch.Generator().manual_seed(1))
    features = torch.cat([free, free.sum(1, keepdim=True), torch.full((50, 1), 0.3)], 1)
    detector = Mahalanobis(net)
    for part in features.split(20):
        detector.take(Observation(torch.zeros(len(part), 2), channel_means=(part, part[:, :2])))
    with pytest.warns(GramwatchWarning, match=r"singular at 1 of 2 tap\(s\)") as caught:
        detector.finish()
    assert len(caught) == 1
    assert detector.ranks_ is not None
    assert detector.ranks_.tolist() == [2, 2]
    found = detector.distances(Observation(torch.zeros(50, 2), channel_means=(features, features[:, :2])))
    assert torch.allclose(found[:, 0], found[:, 1], rtol=1e-5)
    assert found.isfinite().all()


def test_mahalanobis_fewer_examples_than_channels(net: Net) -> None:
    features = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    detector = Mahalanobis(net)
    detector.take(Observation(torch.zeros(6, 2), channel_means=(features,)))
    with pytest.warns(GramwatchWarning, match="singular"):
        detector.finish()
    assert detector.ranks_ is not None
    assert detector.ranks_.tolist() == [5]
    pseudo = np.linalg.pinv(np.cov(features.double().numpy().T, bias=True), rcond=1e-10)
    centred = (features - features.mean(0)).double().numpy()
    expected = [x @ pseudo @ x for x in centred]
    found = detector.judged(Observation(torch.zeros(6, 2), channel_means=(features,)))
    assert np.allclose(found, expected, rtol=1e-5)


def test_mahalanobis_as_in_pytorch_ood(net: Net) -> None:
    """Theirs has half of it, and a covariance that is not divided by the number of examples."""
    others = pytest.importorskip("pytorch_ood.detector")
    loader, test = labelled(90), images(9, seed=3)

    def encoder(x: Tensor) -> Tensor:
        return means_of(net, x)[1]

    theirs = others.Mahalanobis(encoder).to("cpu").fit(loader)
    ours = mahalanobis(net, taps=["second"])
    with torch.no_grad():
        expected = theirs.predict(test) * 2 * 90
    assert torch.allclose(ours.score_inputs(test)[1].float(), expected, rtol=1e-3)
    several = others.MultiMahalanobis([nn.Identity()] * 2)
    with torch.no_grad():
        taps = [torch.cat(part) for part in zip(*(means_of(net, x) for x, _ in loader), strict=True)]
        several.fit_structured(taps, torch.cat([y for _, y in loader]))
        expected = several.predict_structured(means_of(net, test)) * 2 * 90
    assert torch.allclose(mahalanobis(net).score_inputs(test)[1].float(), expected, rtol=1e-3)
    moved = others.MahalanobisODIN(encoder, eps=0.01, norm_std=[0.2, 0.3, 0.4])
    moved._base = theirs
    ours_moved = mahalanobis(net, taps=["second"], eps=0.01, scale=(0.2, 0.3, 0.4))
    expected = moved.predict(test).detach() * 2 * 90
    assert torch.allclose(ours_moved.score_inputs(test)[1].float(), expected, rtol=1e-3)


@pytest.mark.parametrize("scale", [None, (0.2, 0.5, 2.0)])
def test_mahalanobis_with_a_step_for_each_tap(net: Net, scale: Any) -> None:
    """Algorithm 1: nearest class, a step towards it, the distance after; for each tap its own."""
    loader, test, eps = labelled(90), images(4, seed=3), 0.02
    divisor = torch.ones(3, 1, 1) if scale is None else torch.tensor(scale).view(-1, 1, 1)
    with torch.no_grad():
        training = [
            torch.cat(m).double().numpy() for m in zip(*(means_of(net, x) for x, _ in loader), strict=True)
        ]
    labels = torch.cat([y for _, y in loader]).numpy()
    expected = np.zeros((4, 2))
    for tap in range(2):
        means, precision = gaussian_by_hand(training[tap], labels)
        centres, matrix = [torch.tensor(means[c]) for c in sorted(means)], torch.tensor(precision)
        for i, image in enumerate(test):
            leaf = image[None].clone().requires_grad_()
            features = means_of(net, leaf)[tap][0].double()
            apart = [((features - c) @ matrix @ (features - c)).item() for c in centres]
            nearest = centres[apart.index(min(apart))]
            distance = (features - nearest) @ matrix @ (features - nearest)
            (found,) = torch.autograd.grad(distance, leaf)
            with torch.no_grad():
                after = means_of(net, image[None] - eps * found.sign() / divisor)[tap][0].double()
            expected[i, tap] = min(float((after - c) @ matrix @ (after - c)) for c in centres)
    detector = mahalanobis(net, eps=eps, scale=scale)
    assert detector.gradients
    assert np.allclose(detector.score_inputs(test)[1], expected.sum(1), rtol=1e-4)
    assert (detector.score_inputs(test)[1] < mahalanobis(net).score_inputs(test)[1]).all()
    _, both, finite = detector._distances_on(test, [0.0, eps])
    assert np.allclose(both[1], expected, rtol=1e-4)
    assert torch.allclose(both[0].sum(1), mahalanobis(net).score_inputs(test)[1], rtol=1e-5)
    assert finite.all()


def telling(seed: int, shift: float) -> Tensor:
    """Images whose first channel is shifted: some taps see it, others do not."""
    pictures = images(60, seed)
    pictures[:, 0] += shift
    return pictures


def test_mahalanobis_tune_weighs_the_tap_that_tells(net: Net) -> None:
    """Of two taps, the first is noise and the second tells: tuned, it beats the plain sum."""
    generator = torch.Generator().manual_seed(1)

    class TwoTaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise, self.signal, self.fc = nn.Linear(4, 4), nn.Linear(1, 1), nn.Linear(5, 2)
            with torch.no_grad():
                self.noise.weight.copy_(torch.eye(4))
                self.signal.weight.fill_(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.cat([self.noise(x[:, :4]), self.signal(x[:, 4:])], 1))

    two = TwoTaps().eval()
    training, inside = (torch.randn(count, 5, generator=generator) for count in (300, 200))
    outside = torch.randn(200, 5, generator=generator)
    inside[:, :4] *= 4 * torch.rand(200, 1, generator=generator)
    outside[:, :4] *= 4 * torch.rand(200, 1, generator=generator)
    outside[:, 4] += 6
    detector = Mahalanobis(two, taps=["noise", "signal"])
    detector.fit([(training, torch.zeros(300, dtype=torch.long))], progress=False)

    def auroc(r: Method) -> float:
        a, b = (r.score_inputs(x)[1] for x in (inside, outside))
        return float((a[:, None] < b[None]).double().mean())

    plain = auroc(detector)
    detector.calibrate([inside], progress=False)
    detector.tune(inside.split(64), outside.split(64), steps=[0.0], progress=False)
    assert detector.join == "regression"
    assert detector.eps == 0
    assert detector.tuned_on_outliers
    assert detector.weights_ is not None
    assert detector.weights_[1] > 5 * detector.weights_[0].abs()
    assert auroc(detector) > 0.99 > plain
    with pytest.raises(NotFittedError, match="not calibrated"):
        detector(inside)
    detector.fit([(training, torch.zeros(300, dtype=torch.long))], progress=False)
    assert not detector.tuned_on_outliers
    with pytest.raises(NotFittedError, match="has no weights yet"):
        detector.score_inputs(inside)


def test_mahalanobis_tune_chooses_the_step() -> None:
    """A step that carries training-like inputs home, and outliers not, must be preferred to none."""

    class Wall(nn.Module):
        """The feature of an outlier does not answer to its input."""

        def __init__(self) -> None:
            super().__init__()
            self.tap, self.fc = nn.Linear(1, 1), nn.Linear(1, 2)
            with torch.no_grad():
                self.tap.weight.fill_(1)
                self.tap.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.tap(torch.where(x[:, 1:] > 0, x[:, :1].detach(), x[:, :1])))

    generator = torch.Generator().manual_seed(1)
    training = torch.cat([0.1 * torch.randn(200, 1, generator=generator), torch.zeros(200, 1)], 1)
    away = 1 + 0.2 * torch.randn(80, 1, generator=generator)
    inside, outside = torch.cat([away, torch.zeros(80, 1)], 1), torch.cat([away, torch.ones(80, 1)], 1)
    detector = Mahalanobis(Wall().eval(), taps=["tap"])
    detector.fit([(training, torch.zeros(200, dtype=torch.long))], progress=False)
    detector.tune([inside], [outside], steps=[0.0, 1.0], progress=False)
    assert detector.eps == 1
    assert detector.gradients
    assert detector.score_inputs(inside)[1].mean() < detector.score_inputs(outside)[1].mean()


def test_mahalanobis_saved_and_loaded(net: Net, tmp_path: Path) -> None:
    test = images(6, seed=4)
    for choices in ({}, {"join": "normalised"}, {"eps": 0.01, "scale": [0.2, 0.3, 0.4]}):
        detector = mahalanobis(net, **choices)
        detector.calibrate([images(30, seed=9)], progress=False)
        detector.save(tmp_path / "m.safetensors")
        again = Mahalanobis.from_artifact(artifact.read(tmp_path / "m.safetensors"), net)
        assert isinstance(again, Mahalanobis)
        assert (again.join, again.eps, again.scale) == (detector.join, detector.eps, detector.scale)
        assert torch.equal(again.score_inputs(test)[1], detector.score_inputs(test)[1])
        assert torch.equal(again(test).p_value, detector(test).p_value)
        assert not again.tuned_on_outliers
    tuned = mahalanobis(net)
    tuned.tune([telling(2, 0)], [telling(3, 2)], steps=[0.0, 0.005], progress=False)
    tuned.save(tmp_path / "m.safetensors")
    again = Mahalanobis.from_artifact(artifact.read(tmp_path / "m.safetensors"), net)
    assert again.tuned_on_outliers
    assert torch.equal(again.score_inputs(test)[1], tuned.score_inputs(test)[1])


def test_mahalanobis_fitted_together_as_alone(net: Net) -> None:
    methods: dict[str, Method] = {"a": Mahalanobis(net, taps=TAPS), "b": ODIN(net, taps=TAPS)}
    fit_together(methods, labelled(90), progress=False)
    test = images(5)
    assert torch.equal(methods["a"].score_inputs(test)[1], mahalanobis(net).score_inputs(test)[1])
    assert torch.equal(methods["b"].score_inputs(test)[1], ODIN(net).score_inputs(test)[1])


def test_mahalanobis_broken_inputs(net: Net) -> None:
    training = labelled(90)
    broken = [(x.clone(), y) for x, y in training]
    broken[0][0][2] = math.nan
    with pytest.warns(GramwatchWarning, match=r"^1 training example\(s\) with NaN") as caught:
        detector = Mahalanobis(net, taps=TAPS).fit(broken, progress=False)
    assert len(caught) == 1
    assert isinstance(detector, Mahalanobis)
    test = images(4)
    test[1] = math.nan
    for eps in (0.0, 0.01):
        detector.eps = eps
        assert detector.score_inputs(test)[1].isinf().tolist() == [False, True, False, False]


def test_mahalanobis_errors(net: Net) -> None:
    with pytest.raises(ValueError, match="join must be one of"):
        Mahalanobis(net, join="best")
    with pytest.raises(NotFittedError):
        Mahalanobis(net).score_inputs(images(2))
    with pytest.raises(NotFittedError):
        Mahalanobis(net).tune([images(2)], [images(2)], progress=False)
    with (
        pytest.warns(GramwatchWarning, match=r"2 training example\(s\) with NaN"),
        pytest.raises(InputError, match="no finite training example"),
    ):
        Mahalanobis(net).fit([images(2) * math.nan], progress=False)
    with pytest.raises(InputError, match="labels from 0 to 7 were given, the network has classes 0 to 2"):
        Mahalanobis(net).fit([(images(2), torch.tensor([0, 7]))], progress=False)
    with pytest.raises(InputError, match="no covariance"):
        Mahalanobis(net).fit([(images(2), torch.tensor([0, 1]))], progress=False)
    detector = mahalanobis(net)
    with pytest.raises(InputError, match=r"fitted on 2 tap\(s\) with 9 channels in all, 1 tap"):
        detector.judged(Observation(torch.zeros(1, 3), channel_means=(torch.zeros(1, 5),)))
    with pytest.raises(InputError, match="cannot be tuned on 4 finite outlying"):
        detector.tune([images(40)], [images(4)], steps=[0.0], progress=False)
    with pytest.raises(NotFittedError, match="has no weights yet"):
        mahalanobis(net, join="regression").score_inputs(images(2))
    with pytest.raises(InputError, match="judges by gradients"):
        mahalanobis(net, eps=0.01).judged(Observation(torch.zeros(1, 3)))
    with pytest.raises(InputError, match="one floating-point tensor, not a tuple"):
        mahalanobis(net, eps=0.01).score_inputs((images(2), images(2)))
    with pytest.raises(ValueError, match="steps is empty"):
        detector.tune([images(40)], [images(40)], steps=[], progress=False)
