"""Each objective's own score, where it must work."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import gramwatch
from gramwatch import InputError
from gramwatch.errors import TrainingError
from gramwatch.evaluation.evaluate import Together, fit_together
from gramwatch.files import artifact
from gramwatch.methods import METHODS, MSP, TRAINED
from gramwatch.numerics import metrics
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Network, find_head
from gramwatch_lab import training
from gramwatch_lab.methods.table import methods_table
from gramwatch_lab.training import OBJECTIVES, objective_of, train
from lab.tests.training.small import small_mlp

DOCS = Path(__file__).parents[3] / "docs"
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


@pytest.mark.filterwarnings("ignore:.*are exact copies")
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


@pytest.mark.filterwarnings("ignore:.*are exact copies")  # points on a plane of whole pixels
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
    few = normalised(plane.between[:9])
    assert torch.equal(again(few).score, own(few).score)
    assert again(few).is_ood.float().mean() > 0.5
    assert torch.equal(own(few).predicted, net(few).argmax(1))
    few[3] = torch.nan
    assert own.score_inputs(few)[1].isinf().tolist() == [i == 3 for i in range(9)]


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


# --- the semantic score --------------------------------------------------------------------------------


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
    evaluation, inputs = Together(detectors), normalised(plane.between)
    evaluation.measure([inputs], "measuring", progress=False)
    hook = net.register_forward_hook(lambda *_: runs.append(1))
    result = evaluation.measure([inputs], "measuring", progress=False)
    hook.remove()
    assert len(runs) == 1
    assert torch.equal(result["own"].values[:, 0], own.score_inputs(inputs)[1])


def test_settings_of_an_objective_must_be_of_the_right_kind() -> None:
    for name, settings in (
        ("outlier_exposure", {"weight": "much"}),
        ("outlier_exposure", {"weight": float("nan")}),
        ("outlier_exposure", {"weight": True}),
        ("prior_network", {"reverse": 1}),
        ("variational_dirichlet", {"prior": 3}),
        ("semantic", {"count": 2.5}),
        ("semantic", {"vectors": 3}),
    ):
        ((key, _),) = settings.items()
        with pytest.raises(TrainingError, match=f"{key} must be like"):
            training.objective_of(name, settings)
    assert training.objective_of("outlier_exposure", {"weight": 1}).settings() == {"weight": 1}
