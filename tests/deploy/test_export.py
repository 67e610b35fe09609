"""One graph of network and guard: ONNX Runtime and torch.export give what the guard gives."""

import copy
import importlib
import json
import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch import (
    ExportError,
    GramDetector,
    GramwatchWarning,
    Guard,
    InputError,
    MissingExtraError,
    NotFittedError,
    find_taps,
)
from gramwatch.deploy import export
from gramwatch.deploy.export import _quietly
from gramwatch.detect.measurement import Measurement
from gramwatch.inputs import networks
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.methods import METHODS
from gramwatch.numerics import statistics
from gramwatch.numerics.samples import Sample, as_maps
from gramwatch.observe.observation import Observation
from tests import real_data
from tests.guarded import CLASSES, images, made

MEMBERS = ("gram", "profile", "class_ratio", "energy")
SEVERAL = (
    "gram",
    "early_mahalanobis",
    "unit_mahalanobis",
    "relative_mahalanobis",
    "mahalanobis_pp",
    "relative_mahalanobis_pp",
    "cadref",
    "knn",
    "nnguide",
    "msp",
    "max_logit",
    "gen",
)
FIELDS = ("logits", "predicted", "score", "p_value", "is_ood")


def guarded(net: nn.Module, members=MEMBERS, make=images, count=400, **options) -> Guard:
    guard = Guard(net, members=members, **options)
    guard.fit(make(400, 1).split(100), progress=False)
    return guard.calibrate(make(count, 2).split(100), progress=False)


def by_onnx(path) -> Callable[[Tensor], dict[str, Tensor]]:
    """The graph as ONNX Runtime runs it."""
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]

    def run(x: Tensor) -> dict[str, Tensor]:
        values = session.run(None, {"images": x.numpy()})
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, values, strict=True)}

    return run


def by_torch(path) -> Callable[[Tensor], dict[str, Tensor]]:
    """The graph as PyTorch runs it."""
    run: Callable[[Tensor], dict[str, Tensor]] = torch.export.load(path).module()
    return run


RUN = {".onnx": by_onnx, ".pt2": by_torch}


def assert_same(result: dict[str, Tensor], guard: Guard, x: Tensor) -> None:
    """The same verdicts and classes, scores to 1e-4, and p-values of such scores."""
    want = guard(x)
    assert list(result) == [*FIELDS, *(f"parts.{name}" for name in guard.members)]
    assert result["is_ood"].equal(want.is_ood)
    assert result["predicted"].equal(want.predicted)
    torch.testing.assert_close(result["score"], want.score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result["logits"], want.logits, rtol=1e-4, atol=1e-4)
    assert_ranked_alike(result, guard, x)


def assert_ranked_alike(result: dict[str, Tensor], guard: Guard, x: Tensor) -> None:
    """The same p-values, but for a few ties: a calibration score within 1e-5 of the score."""
    calibration, measured = guard.calibration(), guard.measure(x)
    scores, ranks = calibration.rule(measured), calibration.ranks
    slack = 1e-5 * scores.abs().clamp_min(1)
    least, want, most = (ranks.judged(scores + s, measured.predicted)[0] for s in (slack, 0, -slack))
    p_values = torch.stack([result["p_value"], *(result[f"parts.{name}"] for name in guard.members)], 1)
    other = (p_values - want).abs() > 1e-9
    assert other.float().mean() < 0.01
    assert (p_values >= least - 1e-9)[other].all()
    assert (p_values <= most + 1e-9)[other].all()


@pytest.fixture(scope="module")
def guard() -> Guard:
    return guarded(made())


@pytest.fixture(scope="module", params=[".onnx", ".pt2"])
def exported(request, guard, tmp_path_factory):
    """A file of the guard, and the function that runs it."""
    if request.param == ".onnx":
        pytest.importorskip("onnxscript")
    path = tmp_path_factory.mktemp("export") / f"guard{request.param}"
    guard.export(path, images(3, 3))
    return RUN[request.param](path), path


def test_the_graph_gives_what_the_guard_gives(guard, exported):
    run, _ = exported
    for x in (images(1, 4), images(7, 5, 1.3), images(150, 6, 2.0)):  # another size of batch each
        assert_same(run(x), guard, x)
    detection = guard(torch.cat([images(150, 6), images(150, 6, 2.0)]))
    assert 0 < detection.is_ood[:150].sum() < detection.is_ood[150:].sum()  # there is something to confuse


@pytest.mark.parametrize("adapter", ["scan", lambda batch: 1.1 * batch["scan"]], ids=["key", "function"])
def test_inputs_are_read_once(adapter, tmp_path):
    def batches(*result: Tensor) -> list[dict[str, Tensor]]:
        return [{"scan": x, "patient": torch.arange(len(x))} for x in result]

    guard = Guard(made(), members=("gram", "energy"), inputs=adapter)
    guard.fit(batches(*images(400, 1).split(100)), progress=False)
    guard.calibrate(batches(images(400, 2)), progress=False)
    guard.export(tmp_path / "guard.pt2", *batches(images(3, 3)))
    (batch,) = batches(images(20, 4))
    result = by_torch(tmp_path / "guard.pt2")(
        guard.network.read(batch)
    )  # the graph takes the network's input
    want = guard(batch)
    assert result["is_ood"].equal(want.is_ood)
    torch.testing.assert_close(result["score"], want.score, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
def test_inputs_that_are_not_finite_are_flagged(guard, exported, broken):
    x = images(5, 7)
    x[2, 0, 3, 3] = broken  # 1e30: the network's tensors are finite, Gram's products are not
    with pytest.warns(GramwatchWarning, match="1 input"):
        want = guard(x)
    detection = exported[0](x)
    assert detection["score"].isinf().tolist() == want.score.isinf().tolist() == [i == 2 for i in range(5)]
    assert detection["is_ood"][2]
    whole = torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(detection["score"][whole], want.score[whole], rtol=1e-4, atol=1e-4)


def test_an_onnx_file_has_standard_operators_and_what_is_known_of_the_guard(guard, exported):
    _, path = exported
    if path.suffix != ".onnx":
        facts = {f"{export.KEY}.json": ""}
        torch.export.load(path, extra_files=facts)
        text = facts[f"{export.KEY}.json"]
    else:
        onnx = pytest.importorskip("onnx")
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert {node.domain for node in model.graph.node} == {""}
        assert not model.functions
        batch = model.graph.input[0].type.tensor_type.shape.dim[0]
        assert batch.dim_param
        text = {entry.key: entry.value for entry in model.metadata_props}[export.KEY]
    assert json.loads(text)["members"] == list(MEMBERS)
    assert json.loads(text)["level"] == 0.95


def test_more_members_bounds_in_float16_and_ranks_per_class(tmp_path):
    pytest.importorskip("onnxscript")
    guard = guarded(
        made(), SEVERAL, count=2000, storage="float16", per_class=True, orders=(3, 1, 6), pixels=16
    )
    assert len(guard.groups_) > 1
    x = torch.cat([images(60, 8), images(60, 9, 1.6)])
    for suffix in RUN:
        guard.export(tmp_path / f"guard{suffix}", x[:2])
        assert_same(RUN[suffix](tmp_path / f"guard{suffix}")(x), guard, x)


class Vectors(nn.Module):
    """Hidden vectors, which Gram judges by pairs, and a map of tokens with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Linear(7, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(40 * torch.tanh(self.hidden(F.gelu(self.tokens(x.squeeze(1))).mean(1))))


def test_vectors_tokens_and_classes_that_were_never_predicted(tmp_path):
    torch.manual_seed(1)
    net = Vectors().eval()
    bias = net.head.bias.requires_grad_(False)
    bias[3] = -1e3
    with pytest.warns(GramwatchWarning, match="fewer than 20"):
        guard = guarded(net, ("gram", "profile", "energy"))
    bias[3] = 1e3  # now it is predicted: the pooled bounds judge
    x = images(30, 4, 1.5)
    guard.export(tmp_path / "guard.pt2", x[:4])
    assert (guard(x).predicted == 3).all()
    assert_same(by_torch(tmp_path / "guard.pt2")(x), guard, x)


def test_a_network_in_training_mode_is_exported_as_it_is_judged(tmp_path):
    net = made()
    guard = guarded(nn.Sequential(nn.Dropout(0.5), net), ("gram", "energy"))
    guard.model.train()
    guard.export(tmp_path / "guard.pt2", images(2, 3))
    assert guard.model.training
    assert_same(by_torch(tmp_path / "guard.pt2")(images(9, 4)), guard, images(9, 4))


def test_pixels_are_normalised_in_the_graph(tmp_path):
    guard = guarded(made(), ("gram", "energy"))
    x = images(4, 3)
    with pytest.raises(ExportError, match="metadata"):
        guard.export(tmp_path / "guard.pt2", x, preprocessing=True)
    how = {"size": [7, 7], "shorter": 7, "resize": "bicubic", "mean": [0.5], "std": [0.25]}
    guard.metadata["preprocessing"] = how
    guard.export(tmp_path / "guard.pt2", x, preprocessing=True)
    pixels = torch.randint(256, (12, 7, 7, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    assert_same(by_torch(tmp_path / "guard.pt2")(pixels), guard, inputs)
    guard.metadata["preprocessing"] = {**how, "size": [8, 8]}
    with pytest.raises(InputError, match=r"\(1, 7, 7\).*\(1, 8, 8\)"):
        guard.export(tmp_path / "guard.pt2", x, preprocessing=True)


# --- rounding ----------------------------------------------------------------------------------------


def nearly_equal(count: int, seed: int, scale: float = 1.0) -> Tensor:
    """Images whose channel means differ little in all directions but that of brightness."""
    generator = torch.Generator().manual_seed(seed)
    brightness = 3 + torch.rand(count, 1, 1, 1, generator=generator)
    return brightness + 0.03 * scale * torch.randn(count, 1, 28, 28, generator=generator)


def in_float64(guard: Guard, net: nn.Module, x: Tensor) -> Tensor:
    """The scores of a guard of `profile` alone, with the network and the channel means in float64."""
    net, x = copy.deepcopy(net).double(), x.double()
    first = net.conv1(x)
    second = net.conv2(first.relu())
    means = tuple(t.mean((2, 3)) for t in (first, first.relu(), second, second.relu()))
    measured = guard.members["profile"].measured(Observation(net(x), channel_means=means))
    scores: Tensor = guard.calibration().rule(Measurement.together({"profile": measured}))[:, 0]
    return scores


def test_rounding_is_magnified_less_than_in_the_guard_by_an_ill_conditioned_covariance(tmp_path):
    pytest.importorskip("onnxscript")
    net = made()
    net.head.bias.requires_grad_(False).zero_()
    guard = guarded(net, ("profile",), nearly_equal)
    x = torch.cat([nearly_equal(50, 4), nearly_equal(50, 5, 2.0)])
    exact = in_float64(guard, net, x)
    of_guard = (guard(x).score - exact).abs().max()
    assert of_guard > 1e-3  # the covariance magnifies rounding
    for suffix, run in RUN.items():
        guard.export(tmp_path / f"guard{suffix}", x[:2])
        result = run(tmp_path / f"guard{suffix}")(x)["score"]
        assert (result - exact).abs().max() <= of_guard / 2  # with means in float32 it is as much


# --- networks ----------------------------------------------------------------------------------------

NETWORKS = {
    "resnet18": {"channels": (16, 24, 32, 48), "layers": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "depths": (1, 2), "embed_dim": 8, "num_heads": (1, 2),
    },
}  # fmt: skip
"""Few channels: with more channels than images, covariances hold rounding errors, which a runtime does not
repeat."""
LEAN = (1, 2, 4, 8)


def noise(count: int, seed: int, scale: float = 1.0, fine: float = 1.0) -> Tensor:
    """Coarse and fine noise, 64 pixels along a side."""
    generator = torch.Generator().manual_seed(seed)
    coarse, pixels = (torch.randn(count, 3, side, side, generator=generator) for side in (8, 64))
    return scale * (F.interpolate(coarse, 64) + fine * pixels)


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")  # classes that are never predicted
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_timm(name, tmp_path):
    pytest.importorskip("onnxscript")
    import_torchvision()
    torch.manual_seed(0)
    net = pytest.importorskip("timm").create_model(name, num_classes=5, **NETWORKS[name]).eval()
    for layer in net.modules():
        if isinstance(layer, nn.Linear):  # some means differ by rounding only with the small initial weights
            layer.weight.requires_grad_(False).mul_(4)
    few = find_taps(net, noise(2, 3)).names[::8]  # a large graph takes long to convert
    gram = GramDetector(net, taps=few, orders=(1, 2), pixels=64, channels=32)
    members = {"gram": gram, "profile": METHODS["profile"](net, taps=few)}
    if name == "resnet18":  # in the others, what there is beside taps is the same
        members |= {member: METHODS[member](net) for member in ("class_ratio", "energy")}
    guard = Guard.of(members)
    guard.fit(noise(400, 1).split(100), progress=False)
    guard.calibrate(noise(200, 2).split(100), progress=False)
    guard.export(tmp_path / "guard.onnx", noise(2, 3))
    x = torch.cat([noise(16, 4), noise(16, 5, 3.0, fine=0)])
    assert_same(by_onnx(tmp_path / "guard.onnx")(x), guard, x)
    assert guard(x).is_ood[16:].all()


@pytest.mark.real
def test_a_trained_network_on_real_images(shared_data, shared_weights, tmp_path):
    loaded = networks.load("resnet20", shared_weights / "resnet20_cifar10.pth")
    mean, std = loaded.mean, loaded.std

    def cifar(part: str, count: int) -> Tensor:
        folder = shared_data / "cifar10" / f"{part}.webp"
        return real_data.normalised(real_data.mosaic(folder, count), mean, std)

    guard = Guard(loaded.network, members=MEMBERS, orders=LEAN)
    guard.fit(cifar("train_0", 1000).split(100), progress=False)
    test = cifar("test_0", 800)
    guard.calibrate(test[:500].split(100), progress=False)
    x = torch.cat([test[500:], test[500:].flip(1) * 1.5])
    for suffix, run in RUN.items():
        guard.export(tmp_path / f"guard{suffix}", x[:2])
        assert_same(run(tmp_path / f"guard{suffix}")(x), guard, x)
    detection = guard(x)
    assert 0 < detection.is_ood[:300].float().mean() < 0.15 < detection.is_ood[300:].float().mean()


# --- what cannot be exported -------------------------------------------------------------------------


def refused(guard: Guard, tmp_path, match: str, kind=ExportError, name="guard.pt2", x=None) -> None:
    with pytest.raises(kind, match=match):
        guard.export(tmp_path / name, images(2, 3) if x is None else x)
    assert not (tmp_path / name).exists()


def test_the_format_is_chosen_by_the_suffix(guard, tmp_path):
    refused(guard, tmp_path, r"must end in \.onnx or \.pt2", ValueError, "guard.pb")


def test_a_guard_that_is_not_calibrated_is_refused(tmp_path):
    refused(Guard(made()).fit([images(400, 1)], progress=False), tmp_path, "not calibrated", NotFittedError)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"statistic": "off_diagonal"}, "'gram' has statistic='off_diagonal' at 'conv1'.*'auto'"),
        ({"statistic": "triangle"}, "'gram' has statistic='triangle' at 'conv1'"),
        ({"bounds": "mean_variance"}, "'gram' has bounds='mean_variance'.*'min_max'"),
    ],
)
def test_a_gram_member_of_another_kind_is_named(tmp_path, options, match):
    guard = Guard.of({"gram": GramDetector(made(), **options)})
    guard.fit([images(400, 1)], progress=False).calibrate([images(400, 2)], progress=False)
    refused(guard, tmp_path, match)


def test_inputs_of_several_tensors_are_refused(tmp_path):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made()

        def forward(self, a, b):
            return self.net(a + b)

    batches = [((images(400, seed), images(400, seed + 10)), torch.zeros(400)) for seed in (1, 2)]
    guard = Guard(Pair(), members=("energy",)).fit(batches[:1], progress=False)
    guard.calibrate(batches[1:], progress=False)
    refused(guard, tmp_path, "one tensor, not a tuple of 2", InputError, x=(images(2, 3), images(2, 4)))


def test_a_network_that_torch_export_refuses_is_named(tmp_path):
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made()

        def forward(self, x):
            return self.net(x if x.sum() > 0 else x + 0)

    guard = guarded(Branching(), ("energy",))
    refused(guard, tmp_path, "torch.export refuses Branching, without a guard, too")


def test_a_member_that_torch_export_refuses_is_told_from_the_network(tmp_path, monkeypatch):
    guard = guarded(made(), ("energy", "msp"))
    score = METHODS["msp"].score
    monkeypatch.setattr(
        METHODS["msp"], "score", lambda self, seen: score(self, seen) * float(seen.logits.sum())
    )
    refused(guard, tmp_path, "refuses the member 'msp' of the guard of Net: leave it out")


def test_a_missing_package_is_named_with_its_extra(guard, tmp_path, monkeypatch):
    def no_onnx(name):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(importlib, "import_module", no_onnx)
    refused(guard, tmp_path, r"the package onnx: .*gramwatch\[export\]", MissingExtraError, "guard.onnx")


# --- the plain operations ----------------------------------------------------------------------------


def far_apart(size: float) -> Tensor:
    """Maps `(3, 2, 5, 9)` whose channels and pixels differ by many magnitudes, some of them zero."""
    maps = size * torch.randn(3, 2, 5, 9, generator=torch.Generator().manual_seed(2))
    maps = maps * torch.logspace(-5, 0, 5)[:, None] * torch.logspace(0, -4, 9)
    maps[0, 1, 3] = 0
    maps[0, 0, :, 2] = 0
    maps[1, 0] = 0
    return maps


@pytest.mark.parametrize("orders", [(1, 2, 4, 8), tuple(range(1, 11)), (7, 3), (5,), (100, 6, 12)])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
def test_row_sums_are_those_of_the_readable_definition(orders, size):
    maps = far_apart(size).relu()
    want = torch.stack([statistics.row_sums(maps[:, tap].double(), orders) for tap in range(2)], 1)
    torch.testing.assert_close(export.row_sums(maps, orders), want, rtol=1e-5, atol=0)
    assert (want > 0).any()


def test_row_sums_of_both_signs_are_those_of_the_readable_definition():
    maps = far_apart(1.0)
    want = torch.stack([statistics.row_sums(maps[:, tap].double(), (8, 1, 4, 2)) for tap in range(2)], 1)
    torch.testing.assert_close(export.row_sums(maps, (8, 1, 4, 2)), want, rtol=1e-5, atol=1e-6)
    assert (want < 0).any()


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 5, 12, 11), 1), ((2, 90, 9, 9), 1), ((2, 30, 90), 2), ((4, 70), 1)]
)
def test_the_part_of_a_tap_that_counts_is_that_of_the_guard(shape, axis):
    x = torch.arange(math.prod(shape)).reshape(shape).float()
    for sample in (Sample(), Sample(20), Sample(None, 40), Sample(20, 40)):
        want = sample.of(x.shape, axis).maps(x)
        assert as_maps(export.part_of(x, axis, sample), axis).equal(want)
        means = export.channel_means(x, axis, *sample)
        torch.testing.assert_close(means, want.double().mean(2), rtol=1e-6, atol=0)


def test_few_products_make_the_powers():
    powers = {order: float(power[0]) for order, power in export.powers((8, 1, 2, 4), (torch.tensor(2.0),))}
    assert powers == {1: 2.0, 2: 4.0, 4: 16.0, 8: 256.0}
    assert [order for order, _ in export.powers((10, 7), (torch.tensor(1.0),))] == [7, 10]


@pytest.mark.parametrize(
    "statistic", ["row_sums", "diagonal", "off_diagonal", "triangle", "row_sums_of_roots"]
)
def test_the_readable_statistics_can_be_traced(statistic):
    class Statistics(nn.Module):
        def forward(self, x):
            return statistics.STATISTICS[statistic](x, (1, 2, 5), 1)

    x = torch.randn(4, 5, 6, 6, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Statistics(), (x,))
    torch.testing.assert_close(program.module()(2 * x), Statistics()(2 * x))
    assert (Statistics()(x) != 0).all()


def test_slices_that_take_all_are_dropped_and_no_others():
    class Slices(nn.Module):
        def forward(self, x):
            return x[:, 2:5][:, :, ::2] + x[:, 2:5, ::2][1:].sum(0)

    x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
    program = export._program(Slices(), x)

    def slices() -> int:
        return len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor))

    before = slices()
    export._drop_whole_slices(program.graph_module)
    assert slices() == 5 < before
    assert program.module()(x).equal(Slices()(x))


def test_the_exporter_does_not_speak_of_packages_that_are_not_needed(caplog, capsys):
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    with _quietly():
        log.warning("torchvision is not installed. Skipping torchvision::nms")
        print("optimised")
    assert caplog.text == ""
    assert capsys.readouterr() == ("", "optimised\n")
    assert log.level == logging.NOTSET
