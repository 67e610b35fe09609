"""Training: losses, images, the loop and its file, and each objective's own score where it must work."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Dirichlet, kl_divergence

import gramwatch
from gramwatch import InputError, TrainingError, artifact, metrics, networks, training
from gramwatch.datasets import CATALOGUE, ImageSet
from gramwatch.detector import Together, fit_together
from gramwatch.methods import METHODS, MSP, TRAINED, dirichlet, methods_table
from gramwatch.methods.semantic import SemanticHead
from gramwatch.observation import Needs, Observation, Plan
from gramwatch.taps import Network, find_head
from gramwatch.training import OBJECTIVES, checkpoint, loop, objective_of, recipe, train
from gramwatch.training.images import PADDING, Images
from gramwatch.training.semantic import random_vectors, read_vectors

DOCS = Path(__file__).parents[1] / "docs"
CPU = torch.device("cpu")
HALF, QUARTER = (0.5, 0.5), (0.25, 0.25)
OWN = pytest.mark.parametrize("name", list(TRAINED))


# --- a problem in the plane, whose points are images of two channels and one pixel ---------------------


def pixels(points):
    return (16 * points + 128).round().clamp(0, 255).to(torch.uint8)[:, :, None, None]


def normalised(images):
    return (images.float() / 255 - 0.5) / 0.25


CENTRES = torch.tensor([[5.0, 0.0], [-2.5, 4.33], [-2.5, -4.33]])


@dataclasses.dataclass
class Plane:
    images: torch.Tensor
    labels: torch.Tensor
    test: tuple[torch.Tensor, torch.Tensor]
    auxiliary: torch.Tensor
    """All over the plane but for the three blobs."""
    between: torch.Tensor
    """Around the middle of the three."""
    around: torch.Tensor
    """On a ring around all."""


@pytest.fixture(scope="module")
def plane():
    generator = torch.Generator().manual_seed(0)

    def blobs(count):
        labels = torch.randint(0, 3, (count,), generator=generator)
        return pixels(CENTRES[labels] + 0.5 * torch.randn(count, 2, generator=generator)), labels

    def away(points):
        return pixels(points[torch.cdist(points, CENTRES).amin(1) > 2])

    def ring(count, inner, outer):
        angle = 2 * math.pi * torch.rand(count, generator=generator)
        radius = inner + (outer - inner) * torch.rand(count, generator=generator)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    images, labels = blobs(2000)
    return Plane(
        images,
        labels,
        blobs(600),
        away(16 * torch.rand(4000, 2, generator=generator) - 8),
        away(ring(600, 0, 1.5)),
        away(ring(1500, 6.5, 7.8)),
    )


def small_mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


def trained(plane, objective, net=None, epochs=10, **options):
    torch.manual_seed(0)
    net = small_mlp() if net is None else net
    if objective.needs_outliers:
        options.setdefault("outliers", plane.auxiliary)
    options = {"batch_size": 64, "learning_rate": 0.05, "mean": HALF, "std": QUARTER, **options}
    history = train(
        net, plane.images, plane.labels, objective, test=plane.test, epochs=epochs, progress=False, **options
    )
    return net, history


@pytest.fixture(scope="module")
def nets(plane):
    """A network for each objective, trained once."""
    settings = {"semantic": {"size": 12}}  # vectors that Gram is quick with
    return {name: trained(plane, objective_of(name, settings.get(name))) for name in OBJECTIVES}


def auroc(detector, inside, outside):
    scores = [detector.score_inputs(normalised(images))[1].numpy() for images in (inside, outside)]
    return metrics.auroc(*scores)


# --- each objective's own score ------------------------------------------------------------------------


@OWN
def test_every_objective_s_own_score_tells_outliers_where_it_must(name, nets, plane):
    net, history = nets[name]
    assert history.accuracy > 0.98
    detector = OBJECTIVES[name].detector(net)
    assert auroc(detector, plane.test[0], plane.between) > 0.95
    if OBJECTIVES[name].needs_outliers:  # what saw outliers on all sides also tells those outside
        assert auroc(detector, plane.test[0], plane.around) > 0.95
        assert auroc(MSP(nets["cross_entropy"][0]), plane.test[0], plane.around) < 0.95
    else:  # the limit that their pages own up to
        assert auroc(detector, plane.test[0], plane.around) < 0.95


@pytest.mark.parametrize("uncertainty", ["mutual_information", "max_probability"])
def test_a_prior_network_s_other_uncertainties_tell_them_too(uncertainty, nets, plane):
    detector = TRAINED["prior_network"](nets["prior_network"][0], uncertainty=uncertainty)
    assert auroc(detector, plane.test[0], plane.around) > 0.95


def test_an_earlier_file_of_a_prior_network_loads(nets, plane, tmp_path):
    """Earlier files call the uncertainty `measure`."""
    net, path = nets["prior_network"][0], tmp_path / "d.safetensors"
    detector = TRAINED["prior_network"](net, uncertainty="mutual_information")
    detector.calibrate([normalised(plane.test[0])], progress=False).save(path)
    header = {
        key: value for key, value in artifact.read(path).header.items() if key not in ("checksum", "tensors")
    }
    header["settings"]["measure"] = header["settings"].pop("uncertainty")
    artifact.write(path, header, {"calibration.scores": detector.calibration_scores_})
    again = gramwatch.load(path, net)
    assert again.uncertainty == "mutual_information"
    assert again.threshold_ == detector.threshold_


def test_a_prior_network_trains_by_the_reverse_divergence_too(plane):
    net, history = trained(plane, objective_of("prior_network", {"reverse": True}), learning_rate=0.3)
    assert history.accuracy > 0.98
    assert auroc(TRAINED["prior_network"](net), plane.test[0], plane.around) > 0.95


def test_outlier_exposure_fine_tunes_a_trained_network(nets, plane):
    net = small_mlp()
    net.load_state_dict(nets["cross_entropy"][0].state_dict())
    before = auroc(MSP(net), plane.test[0], plane.around)
    _, history = trained(plane, objective_of("outlier_exposure"), net, warmup=0)
    assert history.accuracy > 0.98
    assert before < 0.95 < auroc(TRAINED["outlier_exposure"](net), plane.test[0], plane.around)


@OWN
def test_own_scores_stand_beside_gram_and_the_others(name, nets, plane, tmp_path):
    net = nets[name][0]
    own = TRAINED[name](net)
    others = {title: METHODS[title](net) for title in ("msp", "energy", "react", "vim")}
    detectors = {"Gram": gramwatch.GramDetector(net), "own": own, **others}
    fit_together(detectors, [normalised(plane.images[:500])], progress=False)
    result = gramwatch.evaluate(
        detectors,
        [normalised(plane.test[0])],
        {"between": [normalised(plane.between)]},
        draws=2,
        progress=False,
    )
    assert result.methods == ["Gram", "own", *others]
    assert result.figures()[1, 0] > 0.95
    assert ("trained with outliers (own)" in result.protocol) == OBJECTIVES[name].needs_outliers
    own.calibrate([normalised(plane.test[0])], progress=False)
    own.save(tmp_path / "own.safetensors")
    again = gramwatch.load(tmp_path / "own.safetensors", net)
    assert type(again) is type(own)
    some = normalised(plane.between[:9])
    assert torch.equal(again(some).score, own(some).score)
    assert again(some).is_ood.float().mean() > 0.5
    assert torch.equal(own(some).predicted, net(some).argmax(1))
    some[3] = torch.nan
    assert own.score_inputs(some)[1].isinf().tolist() == [i == 3 for i in range(9)]


@OWN
def test_own_scores_have_a_record_a_page_and_a_row(name):
    record = TRAINED[name].record
    assert record.retraining
    assert record.outliers == OBJECTIVES[name].needs_outliers
    for field in dataclasses.fields(record):
        assert getattr(record, field.name) != "", f"{name} says nothing of {field.name}"
    assert (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8").startswith(f"# {record.title}")
    row = next(line for line in methods_table().splitlines() if f"`{name}`" in line)
    assert ("in training" in row) == record.outliers
    assert name not in METHODS
    assert f"`{name}`" in (DOCS / "training.md").read_text(encoding="utf-8")


def test_settings_of_own_scores_are_checked(nets):
    net = nets["cross_entropy"][0]
    with pytest.raises(ValueError, match="uncertainty must be one of"):
        TRAINED["prior_network"](net, uncertainty="variance")
    with pytest.raises(ValueError, match="eps must be zero or positive"):
        TRAINED["variational_dirichlet"](net, eps=-1)
    with pytest.raises(InputError, match="Sequential has 0 SemanticHeads"):
        TRAINED["semantic"](net)
    with pytest.raises(InputError, match="semantic looks at the predicted vectors, which were not observed"):
        TRAINED["semantic"](nets["semantic"][0]).judged(Observation(torch.zeros(1, 3)))


def test_a_step_makes_the_predicted_class_likelier(nets, plane):
    net = nets["variational_dirichlet"][0]
    still, moved = (TRAINED["variational_dirichlet"](net, eps=eps) for eps in (0.0, 0.05))
    inputs = normalised(plane.between)
    assert not still.gradients
    assert (moved.score_inputs(inputs)[1] <= still.score_inputs(inputs)[1] + 1e-9).double().mean() > 0.9


# --- losses --------------------------------------------------------------------------------------------

ALPHA, BETA = (
    torch.rand(7, 4, generator=torch.Generator().manual_seed(s)).double() * 20 + 0.1 for s in (1, 2)
)
LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
STRANGE = torch.randn(12, 4, generator=torch.Generator().manual_seed(4))
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def test_functions_of_dirichlet_distributions_equal_those_of_torch():
    assert torch.allclose(
        dirichlet.kl_divergence(ALPHA, BETA), kl_divergence(Dirichlet(ALPHA), Dirichlet(BETA))
    )
    assert torch.allclose(dirichlet.differential_entropy(ALPHA), Dirichlet(ALPHA).entropy())
    flat = torch.ones(1, 4).double()
    assert torch.allclose(dirichlet.differential_entropy(flat), torch.tensor([-math.log(6)]).double())
    torch.manual_seed(0)
    p = Dirichlet(ALPHA).sample((40_000,))
    expected = Categorical(ALPHA / ALPHA.sum(1, keepdim=True)).entropy() - Categorical(p).entropy().mean(0)
    assert torch.allclose(dirichlet.mutual_information(ALPHA), expected, atol=4e-3)
    assert torch.allclose(
        dirichlet.expected_log_probability(ALPHA, torch.full((7,), 2)), p.log().mean(0)[:, 2], atol=3e-2
    )


def loss_of(objective):
    """The loss when the network is the identity."""
    value, logits = objective.loss(nn.Identity(), LOGITS, LABELS, STRANGE)
    assert torch.equal(logits, LOGITS)
    return value.double()


def test_cross_entropy_equals_the_closed_form():
    expected = -LOGITS.double().log_softmax(1)[range(6), LABELS].mean()
    assert torch.allclose(loss_of(objective_of("cross_entropy")), expected, rtol=1e-6)


def test_outlier_exposure_equals_the_closed_form():
    uniform = torch.full_like(STRANGE, 0.25).double()
    inside = -LOGITS.double().log_softmax(1)[range(6), LABELS].mean()
    outside = (
        Categorical(uniform).entropy()
        + kl_divergence(Categorical(uniform), Categorical(logits=STRANGE.double()))
    ).mean()
    for weight in (0.5, 2.0):
        found = loss_of(objective_of("outlier_exposure", {"weight": weight}))
        assert torch.allclose(found, inside + weight * outside, rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_prior_network_s_loss_equals_the_closed_form(reverse):
    target = torch.full((6, 4), 0.5).double()
    target[range(6), LABELS] = 48.5  # 50 * (1 - 3 * 0.01)
    pairs = [(target, LOGITS), (torch.ones(12, 4).double(), STRANGE)]
    parts = []
    for wanted, logits in pairs:
        both = Dirichlet(wanted), Dirichlet(logits.double().exp())
        parts.append(kl_divergence(*(reversed(both) if reverse else both)).mean())
    settings = {"precision": 50.0, "smoothing": 0.01, "weight": 0.3, "reverse": reverse}
    expected = (parts[0] + 0.3 * parts[1]) / (50 if reverse else 1)
    assert torch.allclose(loss_of(objective_of("prior_network", settings)), expected, rtol=1e-5)


@pytest.mark.parametrize("prior", ["wrong_classes", "all"])
def test_the_variational_loss_equals_the_closed_form(prior):
    alpha = LOGITS.double().exp()
    fit = alpha[range(6), LABELS].digamma() - alpha.sum(1).digamma()
    drawn = alpha.clone()
    if prior == "wrong_classes":
        drawn[range(6), LABELS] = 1
    divergence = kl_divergence(Dirichlet(drawn), Dirichlet(torch.ones(6, 4).double()))
    found = loss_of(objective_of("variational_dirichlet", {"eta": 0.2, "prior": prior}))
    assert torch.allclose(found, (0.2 * divergence - fit).mean(), rtol=1e-5)


def test_losses_and_gradients_stay_finite_far_out():
    for name in ("prior_network", "variational_dirichlet", "outlier_exposure"):
        for settings in ({}, {"reverse": True}) if name == "prior_network" else ({},):
            logits = torch.tensor([[200.0, -200.0, 0.0, 5.0]] * 6, requires_grad=True)
            loss, _ = objective_of(name, settings).loss(nn.Identity(), logits, LABELS, STRANGE)
            loss.backward()
            assert loss.isfinite(), name
            assert logits.grad.isfinite().all(), name


def test_the_semantic_head_measures_cosine_distances():
    labels = [torch.randn(3, 5), torch.randn(3, 8)]
    head = SemanticHead(6, labels)
    x = torch.randn(4, 6)
    vectors = head.predict(x).detach().split([5, 8], 1)
    distance = [
        [
            sum((1 - F.cosine_similarity(v[n], e[c], 0)) / 2 for v, e in zip(vectors, labels, strict=True))
            for c in range(3)
        ]
        for n in range(4)
    ]
    assert torch.allclose(head(x), -torch.tensor(distance), atol=1e-6)
    loss, _ = objective_of("semantic").loss(head, x, torch.tensor([0, 2, 1, 1]), None)
    assert torch.allclose(loss, torch.tensor([distance[n][c] for n, c in enumerate([0, 2, 1, 1])]).mean())


def test_other_methods_find_the_layer_that_makes_the_logits_of_a_semantic_network(nets, plane):
    net = nets["semantic"][0]
    inputs = normalised(plane.between[:20])
    assert find_head(net, inputs) is not None
    (seen,) = Plan.of(Network.of(net), [Needs(features=True)], inputs)(inputs)
    assert seen.features.shape == (20, 5 * 12)
    assert torch.allclose(seen.head(seen.features), seen.logits, atol=1e-5)
    squared = net[5].predict(net[:5](inputs)).double().square().sum(1)
    assert torch.allclose(TRAINED["semantic"](net).score_inputs(inputs)[1], -squared, rtol=1e-5)


def test_the_semantic_score_shares_a_pass_with_gram(nets, plane):
    net, runs = nets["semantic"][0], []
    own = TRAINED["semantic"](net)
    detectors = {"gram": gramwatch.GramDetector(net), "own": own}
    fit_together(detectors, [normalised(plane.images[:500])], progress=False)
    together, inputs = Together(detectors), normalised(plane.between)
    together.measure([inputs], "measuring", progress=False)
    hook = net.register_forward_hook(lambda *_: runs.append(1))
    found = together.measure([inputs], "measuring", progress=False)
    hook.remove()
    assert len(runs) == 1
    assert torch.equal(found["own"].values[:, 0], own.score_inputs(inputs)[1])


# --- label vectors -------------------------------------------------------------------------------------


def test_random_label_vectors_are_unit_directions_fixed_by_their_seed():
    found = torch.stack(random_vectors(5, 10, 100, seed=3))
    assert found.shape == (5, 10, 100)
    assert torch.allclose(found.norm(dim=2), torch.ones(5, 10))
    assert torch.equal(found, torch.stack(random_vectors(5, 10, 100, seed=3)))
    assert (found @ found.transpose(1, 2) - torch.eye(10)).abs().max() < 0.5
    assert not torch.allclose(found[0], found[1])


def test_label_vectors_are_read_from_files(tmp_path):
    array = np.random.default_rng(0).normal(size=(2, 3, 4))
    np.save(tmp_path / "two.npy", array)
    np.save(tmp_path / "one.npy", array[0])
    assert np.allclose(torch.stack(read_vectors(tmp_path / "two.npy")).numpy(), array)
    (words,) = read_vectors(tmp_path / "one.npy")
    assert np.allclose(words.numpy(), array[0])
    text = "4 2\nship 1 2\nfish 3 4\nShip 9 9\ncat -1 0.5\n"
    (tmp_path / "words.txt").write_text(text, encoding="utf-8")
    (found,) = read_vectors(tmp_path / "words.txt", ["Cat", "Ship", "aquarium fish"])
    assert found.tolist() == [[-1, 0.5], [9, 9], [3, 4]]
    (tmp_path / "more.txt").write_text("ship 1 2 3\nfish 3 4 5\ncat 6 7 8\n", encoding="utf-8")
    files = [str(tmp_path / "words.txt"), str(tmp_path / "more.txt")]
    objective = objective_of("semantic", {"vectors": files, "words": ["cat", "ship", "fish"]})
    net = small_mlp()
    objective.prepare(net)
    assert [m.shape for m in net[5].labels] == [(3, 2), (3, 3)]
    assert net[5].predict.out_features == 5
    head = net[5]
    objective.prepare(net)
    assert net[5] is head


def test_files_of_label_vectors_that_do_not_serve_are_refused(tmp_path):
    def refused(name, match, words=()):
        with pytest.raises(TrainingError, match=match):
            read_vectors(tmp_path / name, words)

    refused("none.npy", "there is no file .*none.npy")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}]), allow_pickle=True)
    refused("objects.npy", "no NumPy file of plain numbers")
    np.save(tmp_path / "flat.npy", np.zeros(4))
    refused("flat.npy", r"shape \(4,\): expected numbers")
    np.save(tmp_path / "zero.npy", np.zeros((3, 4)))
    refused("zero.npy", "finite vector with a direction")
    (tmp_path / "w.txt").write_text("cat 1 2\ndog 1 2 3\ncow 1 x\n", encoding="utf-8")
    refused("w.txt", "name the labels' words")
    refused("w.txt", "no vector for ship, car", ["cat", "ship", "car"])
    refused("w.txt", r"the vectors have \[2, 3\] numbers", ["cat", "dog"])
    refused("w.txt", "line of 'cow' holds more than numbers", ["cow"])
    np.save(tmp_path / "two.npy", np.ones((2, 4)))
    with pytest.raises(TrainingError, match="vectors for 2 labels, the network has 3"):
        objective_of("semantic", {"vectors": [str(tmp_path / "two.npy")]}).prepare(small_mlp())
    with pytest.raises(TrainingError, match="ReLU has no linear layer"):
        objective_of("semantic").prepare(nn.ReLU())


# --- images --------------------------------------------------------------------------------------------


def whole(shape, seed=0):
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_images_are_normalised_and_come_once_each():
    images = whole((10, 3, 5, 4))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    expected = (images.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    data = Images(images, mean, std, CPU)
    assert torch.allclose(torch.cat(list(data.in_order(3))).double(), expected, atol=1e-5)
    batches = list(data.shuffled(3, 3))
    assert [len(batch) for batch, _ in batches] == [3, 3, 3]
    chosen = torch.cat([part for _, part in batches])
    assert len(chosen.unique()) == 9
    assert torch.allclose(torch.cat([batch for batch, _ in batches]).double(), expected[chosen], atol=1e-5)
    twice = torch.cat([part for _, part in data.shuffled(5, 4)])
    assert twice.bincount().tolist() == [2] * 10


def test_augmented_images_are_shifted_and_mirrored_copies():
    images = whole((6, 3, 9, 8))
    data = Images(images, (0, 0, 0), (1 / 255,) * 3, CPU, augment=True)
    assert torch.allclose(torch.cat(list(data.in_order(4))), images.float())
    padded = F.pad(images.float(), (PADDING,) * 4)
    seen = set()
    for batch, chosen in data.shuffled(60, 6):
        assert batch.shape == (6, 3, 9, 8)
        for image, number in zip(batch, chosen, strict=True):
            found = [
                (row, column, mirrored)
                for row in range(2 * PADDING + 1)
                for column in range(2 * PADDING + 1)
                for mirrored in (False, True)
                for cut in [padded[number, :, row : row + 9, column : column + 8]]
                if torch.equal(image.round(), cut.flip(2) if mirrored else cut)
            ]
            assert len(found) == 1
            seen |= set(found)
    assert {row for row, _, _ in seen} == {column for _, column, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}
    assert len(seen) > 100  # of 162


# --- the loop and its file -----------------------------------------------------------------------------


class Small(nn.Module):
    """With batch normalisation and dropout, whose states and chance a resumed training must share."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(F.dropout(F.relu(self.bn(self.conv(x))).mean((2, 3)), 0.3, self.training))


def run(objective, path=None, net=None, **options):
    torch.manual_seed(5)
    net = Small() if net is None else net
    settings = {
        **{"mean": (0.5,) * 3, "std": (0.25,) * 3, "epochs": 4, "batch_size": 16, "augment": True, "seed": 2},
        **options,
    }
    if objective.needs_outliers:
        settings.setdefault("outliers", whole((30, 3, 8, 8), 7))
    labels = torch.arange(50) % 4
    test = whole((21, 3, 8, 8), 8), torch.arange(21) % 4
    history = train(
        net, whole((50, 3, 8, 8)), labels, objective, test=test, checkpoint=path, progress=False, **settings
    )
    return net, history


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_an_interrupted_training_ends_as_if_it_had_not_been(name, tmp_path, monkeypatch):
    objective, path = objective_of(name), tmp_path / "net.safetensors"
    straight, told = run(objective)
    left, calls = type(objective).loss, iter(range(100))

    def interrupted(self, *batch):
        if next(calls) == 7:  # in the third epoch, of three steps each
            raise KeyboardInterrupt
        return left(self, *batch)

    with monkeypatch.context() as patched:
        patched.setattr(type(objective), "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(objective, path)
    header, tensors = training.read(path)
    assert (header["epoch"], header["finished"]) == (2, False)
    assert any(key.startswith(checkpoint.MOMENTUM) for key in tensors)
    torch.rand(3)  # what chance did in between must not matter
    resumed, again = run(objective, path)
    for key, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert [dataclasses.replace(e, seconds=0) for e in again.epochs] == [
        dataclasses.replace(e, seconds=0) for e in told.epochs
    ]
    header, tensors = training.read(path)
    assert (header["epoch"], header["finished"], header["accuracy"]) == (4, True, told.accuracy)
    assert set(tensors) == set(straight.state_dict())


def test_a_finished_file_is_not_trained_again(tmp_path, monkeypatch):
    path = tmp_path / "net.safetensors"
    net, history = run(objective_of("cross_entropy"), path)
    before = path.read_bytes()
    monkeypatch.setattr(loop._Run, "epoch", None)
    other, again = run(objective_of("cross_entropy"), path, Small())
    assert again == history
    assert path.read_bytes() == before
    assert not other.training
    assert torch.equal(other.fc.weight, net.fc.weight)


def test_the_file_says_how_its_network_came_about(tmp_path):
    path = tmp_path / "net.safetensors"
    net, history = run(objective_of("semantic", {"count": 11, "size": 6}), path, name="small")
    header, tensors = training.read(path)
    assert header["network"] == "small"
    assert (header["classes"], header["mean"], header["std"]) == (4, [0.5] * 3, [0.25] * 3)
    assert (header["objective"], header["settings"]["count"], header["seed"]) == ("semantic", 11, 2)
    assert header["accuracy"] == history.accuracy
    json.dumps(header)
    torch.manual_seed(9)
    again = Small()
    training.restore(again, header, tensors)
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(again(x), net(x))


def test_a_file_of_another_training_is_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    run(objective_of("cross_entropy"), path)
    with pytest.raises(TrainingError, match=r"epochs was 4, is 6; learning_rate was 0.1, is 0.2"):
        run(objective_of("cross_entropy"), path, epochs=6, learning_rate=0.2)
    with pytest.raises(TrainingError, match="objective was cross_entropy"):
        run(objective_of("variational_dirichlet"), path)
    with pytest.raises(TrainingError, match="is already there"):
        run(objective_of("cross_entropy"), path, resume=False)
    MSP(Small()).calibrate([torch.randn(30, 3, 8, 8)], progress=False).save(path)
    with pytest.raises(TrainingError, match="not a network"):
        run(objective_of("cross_entropy"), path)
    path.write_bytes(b"nothing")
    with pytest.raises(gramwatch.ArtifactError, match="truncated or not a safetensors file"):
        run(objective_of("cross_entropy"), path)


def test_training_leaves_the_caller_s_chance_alone_and_depends_on_its_seed():
    torch.manual_seed(1)
    expected = torch.rand(4)
    nets = []
    for seed in (2, 2, 3):
        net = Small()
        net.load_state_dict(nets[0][1] if nets else net.state_dict())
        start = {key: value.clone() for key, value in net.state_dict().items()}
        run(objective_of("cross_entropy"), net=net, seed=seed, epochs=1)
        nets.append((net, start))
    assert torch.equal(nets[0][0].fc.weight, nets[1][0].fc.weight)
    assert not torch.equal(nets[0][0].fc.weight, nets[2][0].fc.weight)
    torch.manual_seed(1)
    net = Small()
    torch.manual_seed(1)
    train(
        net, whole((20, 3, 8, 8)), torch.arange(20) % 4, objective_of("semantic"),
        mean=(0.5,) * 3, std=(0.25,) * 3, epochs=1, progress=False,
    )  # fmt: skip
    assert torch.equal(torch.rand(4), expected)


def test_the_learning_rate_rises_then_falls_along_a_cosine():
    def at(epoch, warmup=2.0):
        return loop.learning_rate_at(epoch, 10, 0.4, warmup)

    assert 0 < at(0) < at(1) < at(1.99) <= at(2) == 0.4
    assert at(6) == pytest.approx(0.2)
    assert at(10) == pytest.approx(0, abs=1e-12)
    assert at(0, warmup=0) == 0.4


def test_one_step_is_that_of_sgd_with_nesterov_momentum():
    """Two epochs of one batch each, without chance, against the formula."""
    images, labels = whole((4, 3, 8, 8)), torch.tensor([0, 1, 2, 3])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    weight = net[1].weight.detach().clone()
    bias = net[1].bias.detach().clone()
    x = ((images.float() / 255 - 0.5) / 0.25).flatten(1)
    momentum = [torch.zeros_like(weight), torch.zeros_like(bias)]
    values = [weight, bias]
    for step in range(2):
        for value in values:
            value.requires_grad_()
        F.cross_entropy(x @ values[0].T + values[1], labels).backward()
        rate = loop.learning_rate_at(step, 2, 0.1, 0.5)
        for i, value in enumerate(values):
            gradient = value.grad + 5e-4 * value.detach()
            momentum[i] = 0.9 * momentum[i] + gradient
            values[i] = value.detach() - rate * (gradient + 0.9 * momentum[i])
    train(
        net, images, labels, objective_of("cross_entropy"), mean=(0.5,) * 3, std=(0.25,) * 3, epochs=2,
        batch_size=4, warmup=0.5, progress=False,
    )  # fmt: skip
    assert torch.allclose(net[1].weight, values[0], atol=1e-5)
    assert torch.allclose(net[1].bias, values[1], atol=1e-5)


def test_mixed_precision_and_compilation_are_used_when_asked_for(monkeypatch):
    compiled = []

    def compiling(net):
        compiled.append(net)
        return net

    monkeypatch.setattr(torch, "compile", compiling)
    plain, _ = run(objective_of("semantic"), epochs=2)
    mixed, history = run(objective_of("semantic"), epochs=2, precision="bfloat16", compile=True)
    assert compiled == [mixed]
    assert plain.conv.weight.dtype == mixed.conv.weight.dtype == torch.float32
    assert math.isfinite(history.epochs[-1].loss)
    assert not torch.equal(plain.conv.weight, mixed.conv.weight)
    assert torch.allclose(plain.conv.weight, mixed.conv.weight, atol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_training_on_a_gpu(name, tmp_path):
    path = tmp_path / "net.safetensors"
    net, history = run(objective_of(name), path, device="cuda", compile=name == "semantic")
    assert math.isfinite(history.epochs[-1].loss)
    assert net.conv.weight.is_cuda
    assert net.conv.weight.is_contiguous()
    assert run(objective_of(name), path, Small(), device="cuda")[1] == history


# --- what is refused -----------------------------------------------------------------------------------


def test_what_cannot_be_trained_is_refused():
    good = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "epochs": 1, "progress": False}
    images, labels = whole((8, 3, 8, 8)), torch.arange(8) % 4
    plain = objective_of("cross_entropy")

    def refused(match, images=images, labels=labels, objective=plain, net=None, **options):
        with pytest.raises(TrainingError, match=match):
            train(net or Small(), images, labels, objective, **(good | options))

    refused("outlier_exposure trains with outliers", objective=objective_of("outlier_exposure"))
    refused("cross_entropy has no use for outliers", outliers=images)
    refused("labels run from 0 to 4, but the network has 4", labels=torch.arange(8) % 5)
    refused("labels run from -1", labels=labels - 1)
    refused("must be 8 whole numbers, not torch.int64 of shape", labels=labels[:7])
    refused("must be 8 whole numbers, not torch.float32", labels=labels.float())
    refused("images must be uint8 of shape", images=images.float())
    refused("images must be uint8 of shape", images=images[:, 0])
    refused("have 3 channels, mean and std 1 and 1", mean=(0.5,), std=(0.5,))
    refused(
        r"images have shape \(3, 8, 8\), outliers \(3, 9, 9\)",
        objective=objective_of("outlier_exposure"),
        outliers=whole((4, 3, 9, 9)),
    )
    refused("the labels of the test must be 8", test=(images, labels[:3]))
    refused("epochs and batch_size must be at least 1", epochs=0)
    refused("precision must be one of", precision="float16")
    refused("network returns shape", net=nn.Conv2d(3, 4, 3))
    refused("training diverged in epoch 1: the loss is nan", net=Broken())
    with pytest.raises(TrainingError, match="there is no objective 'hinge': choose from cross_entropy"):
        objective_of("hinge")
    with pytest.raises(TrainingError, match="semantic has the settings vectors, words, count"):
        objective_of("semantic", {"k": 3})
    for name, settings in {
        "outlier_exposure": {"weight": 0},
        "prior_network": {"smoothing": 0},
        "variational_dirichlet": {"eta": -1},
        "semantic": {"count": 0},
    }.items():
        with pytest.raises(TrainingError, match=name):
            objective_of(name, settings)
    with pytest.raises(TrainingError, match="prior must be one of"):
        objective_of("variational_dirichlet", {"prior": "none"})
    with pytest.raises(TrainingError, match=r"below 0.25"):
        loss_of(objective_of("prior_network", {"smoothing": 0.3}))


class Broken(Small):
    def forward(self, x):
        return super().forward(x) * torch.nan


# --- recipes and the command ---------------------------------------------------------------------------


def test_recipes_are_for_networks_that_exist_and_fit_the_loop():
    foreign = {name for name in training.RECIPES if ":" in name}
    assert set(training.RECIPES) - foreign <= set(networks.NETWORKS)
    assert all(networks.record_of(name, 128).shape == (3, 128, 128) for name in foreign)
    for name in networks.NETWORKS:
        assert recipe(name).augment == (networks.NETWORKS[name].shape[0] == 3)
    tuning = recipe("wrn40_2", fine_tuning=True)
    assert (tuning.epochs, tuning.learning_rate) == (10, 0.001)
    run(objective_of("cross_entropy"), **vars(dataclasses.replace(recipe("mlp_300"), epochs=1)))


@pytest.fixture
def digits(monkeypatch):
    """In the place of real sets: images whose class is which third of them is bright."""

    def load(
        name, root=None, *, split="test", size=None, reduce=None, grey=None, count=None, seed=0, classes=None
    ):
        asked.append((name, split, size, reduce, grey))
        images = whole((60, 1, 28, 28), len(split)) // 4
        labels = torch.arange(60) % 3
        for label in range(3):
            images[labels == label, :, 9 * label : 9 * label + 9] += 150
        return ImageSet(name, images, None if name == "nameless" else labels)

    asked = []
    monkeypatch.setattr("gramwatch.datasets.load", load)
    monkeypatch.setattr("gramwatch.datasets.source_of", lambda name, split: CATALOGUE["mnist"])
    return asked


def command(*arguments):
    from typer.testing import CliRunner

    from gramwatch.cli.app import app

    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_the_command_trains_resumes_and_writes_what_networks_load_reads(digits, tmp_path):
    path = tmp_path / "new" / "mlp.safetensors"
    common = [
        "mlp_300",
        "--set",
        "digits",
        "--output",
        path,
        "--epochs",
        10,
        "--batch-size",
        10,
        "--device",
        "cpu",
    ]
    done = command(*common, "--objective", "semantic", "--option", "size=7", "--option", "count=2")
    assert done.exit_code == 0, done.output
    assert "test accuracy 100.00 % after 10 epochs" in done.output
    loaded = networks.load("mlp_300", path)
    (head,) = (part for part in loaded.network.modules() if isinstance(part, SemanticHead))
    assert [m.shape for m in head.labels] == [(3, 7)] * 2
    images = gramwatch.datasets.load("digits").images
    assert torch.equal(loaded.network(loaded.prepare(images)).argmax(1), torch.arange(60) % 3)
    assert TRAINED["semantic"](loaded.network).score_inputs(loaded.prepare(images))[1].isfinite().all()
    refused = command(*common, "--objective", "semantic")
    assert refused.exit_code == 2
    again = command(
        *common, "--objective", "semantic", "--option", "size=7", "--option", "count=2", "--resume"
    )
    assert again.exit_code == 0, again.output


def test_the_command_fine_tunes_with_outliers(digits, tmp_path):
    plain, tuned = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    common = ["mlp_300", "--set", "digits", "--batch-size", 10, "--device", "cpu"]
    assert command(*common, "--epochs", 2, "--output", plain).exit_code == 0
    arguments = ["--objective", "outlier_exposure", "--auxiliary", "strange:val:nearest,other:val"]
    done = command(*common, *arguments, "--weights", plain, "--output", tuned)
    assert done.exit_code == 0, done.output
    assert "10 epochs of batches of 10, learning rate 0.001" in done.output
    assert digits[-2:] == [("strange", "val", 28, "nearest", True), ("other", "val", 28, None, True)]
    assert training.read(tuned)[0]["plan"]["outliers"] == 120


def test_the_command_says_what_is_missing(digits, tmp_path):
    path = tmp_path / "a.safetensors"
    cases = [
        (["mlp_300", "--output", tmp_path / "a.pth"], "safetensors"),
        (["mlp_300", "--output", path, "--objective", "prior_network"], "--auxiliary"),
        (["mlp_300", "--output", path, "--auxiliary", "x:val"], "no use for"),
        (["mlp_300", "--output", path, "--option", "weight"], "NAME=VALUE"),
        (["mlp_300", "--output", path, "--set", "nameless"], "no labels"),
    ]
    for arguments, told in cases:
        done = command(*arguments)
        assert done.exit_code == 2
        assert told in done.output, done.output
    assert not path.exists()
