"""The probe: a network with the same weights and other code is noticed when a guard is loaded."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gramwatch
from gramwatch import ArtifactError, GramwatchWarning, Guard, InputError
from gramwatch.detect import probe
from gramwatch.files import artifact
from gramwatch.watch import Network
from tests.files.test_artifact import joined, parts


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, width in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).eval()


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def fitted(network: nn.Module, train: Any, calibrate: Any, **options: Any) -> Guard:
    guard = Guard(network, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are rarely predicted
        guard.fit(train, progress=False)
        return guard.calibrate(calibrate, progress=False) if calibrate is not None else guard


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "guard.safetensors"
    fitted(net(), [images(100, 1)], [images(100, 2)]).save(path)
    return path


def replaced(kind: type[nn.Module], new: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    def change(network: nn.Module) -> None:
        for name, module in network.named_children():
            if isinstance(module, kind):
                setattr(network, name, new())

    return change


def assigned(kind: type[nn.Module], **values: Any) -> Callable[[nn.Module], None]:
    def change(network: nn.Module) -> None:
        for module in network.modules():
            if isinstance(module, kind):
                vars(module).update(values)

    return change


@pytest.mark.parametrize(
    "change",
    [
        replaced(nn.ReLU, nn.GELU),
        replaced(nn.AdaptiveAvgPool2d, lambda: nn.AdaptiveMaxPool2d(1)),
        assigned(nn.Conv2d, padding_mode="reflect", _reversed_padding_repeated_twice=[1, 1, 1, 1]),
        assigned(nn.BatchNorm2d, eps=1e-3),
    ],
    ids=["activation", "pooling", "padding", "epsilon"],
)
def test_other_code_with_the_same_weights_is_noticed(saved, change):
    network = net()
    change(network)
    with pytest.warns(GramwatchWarning, match=r"answers the probe otherwise.*its logits differ by up to"):
        gramwatch.load(saved, network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gramwatch.load(saved, network, check_probe=False)


def test_a_buffer_that_is_not_saved_is_noticed(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = net()
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x * self.scale)

    fitted(Scaled(), [images(100, 1)], [images(100, 2)]).save(tmp_path / "g.safetensors")
    changed = Scaled()
    changed.scale *= 1.01
    with pytest.warns(GramwatchWarning, match="its logits differ"):
        gramwatch.load(tmp_path / "g.safetensors", changed)


def test_a_network_whose_logits_stay_and_whose_inner_tensors_change_is_noticed(tmp_path):
    class Doubled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.first, self.last, self.by = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), by

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x) * self.by) / self.by
            return self.last(x.mean((2, 3)))

    torch.manual_seed(0)
    network = Doubled(1.0)
    fitted(network, [images(100, 1)], [images(100, 2)], members=["gram"]).save(tmp_path / "g.safetensors")
    changed = copy.deepcopy(network)
    changed.by = 4.0
    with pytest.warns(GramwatchWarning, match="its logits are the same, but its score was"):
        gramwatch.load(tmp_path / "g.safetensors", changed)


def test_the_same_network_is_loaded_in_silence_however_its_sums_are_ordered(saved):
    gramwatch.load(saved, net())
    gramwatch.load(saved, net().to(memory_format=torch.channels_last))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        gramwatch.load(saved, net())
    finally:
        torch.set_num_threads(threads)


def test_nothing_is_kept_of_the_probe(saved):
    guard, plain = gramwatch.load(saved, net()), gramwatch.load(saved, net(), check_probe=False)
    assert guard._plan is None
    assert torch.equal(guard(images(5, 3)).score, plain(images(5, 3)).score)


def test_a_file_that_is_saved_again_keeps_its_probe(saved, tmp_path):
    gramwatch.load(saved, net()).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == saved.read_bytes()


def test_a_checkpoint_holds_a_probe_and_is_checked(tmp_path):
    def batches(stop: bool) -> Any:
        yield images(50, 1)
        if stop:
            raise KeyboardInterrupt
        yield images(50, 2)

    with pytest.raises(KeyboardInterrupt):
        Guard(net()).fit(batches(True), checkpoint=tmp_path / "c", progress=False)
    assert artifact.read(tmp_path / "c").header["probe"]["score"] is None
    network = net()
    replaced(nn.ReLU, nn.GELU)(network)
    with pytest.warns(GramwatchWarning) as said:
        Guard(network).fit(batches(False), checkpoint=tmp_path / "c", progress=False)
    assert "answers the probe otherwise" in str(said[0].message)


def test_other_weights_and_other_devices_are_not_compared(saved, tmp_path):
    network = net()
    with torch.no_grad():
        network[0].weight += 0.1
    gramwatch.load(saved, network, accept_other_weights=True)
    forge(saved, tmp_path / "g", lambda found: found.update(device="cuda", logits=[0.0] * 4))
    gramwatch.load(tmp_path / "g", net())


def test_files_of_earlier_versions_have_none(saved, tmp_path):
    forge(saved, tmp_path / "g", None)
    network = net()
    replaced(nn.ReLU, nn.GELU)(network)
    gramwatch.load(tmp_path / "g", network)


def forge(path: Path, to: Path, change: Callable[[dict[str, Any]], Any] | None) -> None:
    """A copy with another probe, or without one, whose checksum fits."""
    layout, data = parts(path.read_bytes())
    header = json.loads(layout["__metadata__"]["gramwatch"])
    header.pop("checksum")
    if change is None:
        del header["probe"]
    else:
        change(header["probe"])
    header["checksum"] = artifact._header_checksum(header)
    layout["__metadata__"]["gramwatch"] = json.dumps(header)
    to.write_bytes(joined(layout, data))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["input"]["tensor"].update(shape=[1, 10**9, 10**9]),
        lambda found: found["input"]["tensor"].update(dtype="complex64"),
        lambda found: found["input"]["tensor"].update(low=1, high=0),
        lambda found: found["input"]["tensor"].update(dtype="int8", low=-1000, high=0),
        lambda found: found.update(input={"code": "os.system"}),
        lambda found: found.update(logits=[]),
        lambda found: found.update(score="high"),
        lambda found: found.clear(),
    ],
)
def test_a_forged_probe_is_refused_in_words(saved, tmp_path, change):
    forge(saved, tmp_path / "g", change)
    with pytest.raises(ArtifactError, match=r"/g is corrupt|/g:"):
        gramwatch.load(tmp_path / "g", net())


def test_a_probe_that_the_network_does_not_take_is_a_warning(saved, tmp_path):
    forge(saved, tmp_path / "g", lambda found: found["input"]["tensor"].update(shape=[1, 5, 12, 12]))
    with pytest.warns(GramwatchWarning, match="it fails"):
        gramwatch.load(tmp_path / "g", net())


# --- inputs of every kind ----------------------------------------------------------------------------


class Tokens(nn.Module):
    """Tokens with a mask: as Hugging Face has it, but small."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.act, self.last, self.activation = nn.ReLU(), nn.Linear(16, 3), activation

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.activation(self.act(self.hidden(self.embed(input_ids))))
        weights = attention_mask.unsqueeze(2).float()
        return self.last((x * weights).sum(1) / weights.sum(1))


def texts(count: int, seed: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (count, 1), generator=generator)
    return {
        "input_ids": torch.randint(0, 30, (count, length), generator=generator),
        "attention_mask": (torch.arange(length) < lengths).long(),
    }


class Tabular(nn.Sequential):
    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 3))


class Two(nn.Module):
    """A sequence of any length, and numbers beside it."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act, self.last = nn.Conv1d(4, 12, 3, padding=1), nn.ReLU(), nn.Linear(15, 3)
        self.activation = activation

    def forward(self, sequence: Tensor, numbers: Tensor) -> Tensor:
        x = self.activation(self.act(self.conv(sequence)))
        return self.last(torch.cat([x.mean(2), numbers], 1))


def pair(count: int, seed: int, length: int) -> tuple[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.randn(count, 4, length, generator=generator)
    return ((sequence, torch.randn(count, 3, generator=generator)),)


CASES: dict[str, tuple[Callable[..., nn.Module], Any, Any, Any]] = {
    "tokens in a mapping": (Tokens, torch.sigmoid, [texts(80, 1, 9), texts(40, 2, 7)], [texts(100, 3, 8)]),
    "a table": (Tabular, nn.GELU, [torch.randn(200, 6)], [torch.randn(100, 6)]),
    "two inputs, of varying length": (
        Two,
        torch.sigmoid,
        [pair(80, 1, 10), pair(40, 2, 15)],
        [pair(100, 3, 12)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_guards_of_inputs_of_every_kind_have_a_probe(case, tmp_path):
    make, other, train, calibrate = CASES[case]
    guard = fitted(make(), train, calibrate)
    guard.save(tmp_path / "g.safetensors")
    header = artifact.read(tmp_path / "g.safetensors").header
    assert header["probe"]["score"] is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*padding.*")
        gramwatch.load(tmp_path / "g.safetensors", make())
        with pytest.warns(GramwatchWarning, match="its logits differ"):
            gramwatch.load(tmp_path / "g.safetensors", make(other))


def test_a_random_network_has_no_probe(tmp_path):
    class Random(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    torch.manual_seed(0)
    guard = fitted(Random(*Tabular()), [torch.randn(200, 6)], [torch.randn(100, 6)])
    guard.save(tmp_path / "g.safetensors")
    assert "probe" not in artifact.read(tmp_path / "g.safetensors").header


def test_a_network_that_fails_on_what_is_made_up_is_said(tmp_path):
    class Sums(Tabular):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.allclose(x.sum(1), torch.ones(len(x))):
                raise ValueError("each row must sum to one")
            return super().forward(x)

    guard = fitted(Sums(), [torch.randn(200, 6).softmax(1)], [torch.randn(100, 6).softmax(1)])
    with pytest.warns(GramwatchWarning, match=r"no probe is saved.*sum to one"):
        guard.save(tmp_path / "g.safetensors")
    gramwatch.load(tmp_path / "g.safetensors", Sums())


# --- the made-up input -------------------------------------------------------------------------------

_kinds = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
_shapes = st.lists(st.integers(0, 4), max_size=3)
_tensors = st.builds(lambda kind, shape: (torch.randn(2, *shape) * 3).abs().to(kind), _kinds, _shapes)
_inputs = st.recursive(
    _tensors,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
    ),
    max_leaves=4,
)


@settings(max_examples=40)
@given(_inputs)
def test_what_is_made_up_has_the_form_and_the_range_of_the_first_example(inputs):
    from gramwatch.inputs.batches import repeated, signature, tensors_in

    recipe = probe.recipe_of(inputs)
    made = probe.made(json.loads(json.dumps(recipe)))
    assert signature(made) == signature(repeated(inputs, 1))
    for new, old in zip(tensors_in(made), tensors_in(repeated(inputs, 1)), strict=True):
        assert new.shape == old.shape
        if new.numel() and not new.is_floating_point():
            assert old.min() <= new.min() <= new.max() <= old.max()
        assert not new.is_floating_point() or bool(new.isfinite().all())


def test_what_is_made_up_looks_random_and_is_the_same_everywhere():
    made = probe.made({"tensor": {"shape": [1, 3, 40, 40], "dtype": "float32", "low": -1.0, "high": 1.0}})
    assert abs(float(made.mean())) < 0.03
    assert float(made.std()) == pytest.approx(3**-0.5, rel=0.02)
    flat = made.flatten().double()
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 0.02
    assert made.flatten()[:3].tolist() == [0.7733458280563354, -0.2897716164588928, 0.16310088336467743]


def test_what_is_too_large_or_not_plain_has_no_recipe():
    assert probe.recipe_of(torch.empty(1, 2**24 + 1, dtype=torch.bool).expand(1, -1)) is None
    assert probe.recipe_of({1: torch.zeros(2, 3)}) is None
    assert probe.recipe_of((torch.zeros(2, 3), object())) is None
    with pytest.raises((InputError, ValueError)):
        probe.made({"tuple": [{"tensor": {"shape": [2**40], "dtype": "int8", "low": 0, "high": 1}}]})


def test_half_precision_is_compared_more_loosely():
    answer = probe.Answer.of(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), None)
    near = probe.Answer.of(torch.tensor([[0.0, 1.02]], dtype=torch.bfloat16), None)
    assert not answer.differences(near, answer.rounding(torch.bfloat16))
    assert Network.of(Tabular().half()).dtype == torch.float16
