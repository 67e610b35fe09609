"""Replay, as far as it goes without a GPU: what can be recorded, and what makes recordings differ."""

import pytest
import torch
from torch import Tensor, nn

import gramwatch
from gramwatch.detect.distributed import Group
from gramwatch.detect.fitting import TrainingPass
from gramwatch.detect.measurement import Verdict
from gramwatch.detect.progress import Fits
from gramwatch.observe.replay import (
    MOST,
    UNUSED,
    Asking,
    Held,
    Nest,
    Replay,
    _alike,
    _without_padding,
    padded,
)
from tests.observe.asking import asks_for_values


@pytest.mark.parametrize(
    "asking",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.amax()),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.where(x > 0),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
        lambda x: x.to("meta"),
        lambda x: torch.empty_like(x, device="meta").copy_(x),
    ],
)
def test_asking_for_values_is_found(asking) -> None:
    x = torch.randn(4, 5)
    assert asks_for_values(lambda: asking(x), "cpu")
    assert not asks_for_values(lambda: asking(x), "cuda")


@pytest.mark.parametrize(
    "working",
    [
        lambda x: (x @ x.T).relu().double().softmax(1).amax(1),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: (x > 0)[torch.tensor([0, 2])],
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.clone().masked_fill_(x > 0, 1),
        lambda x: torch.searchsorted(x.sort().values, x),
        lambda x: x / torch.tensor(3.0, dtype=torch.float64),
        lambda x: nn.functional.conv2d(x[None, None], x[None, None, :3, :3]),
    ],
)
def test_work_that_asks_for_nothing_is_not(working) -> None:
    x = torch.randn(4, 5)
    assert not asks_for_values(lambda: working(x), "cpu")


def test_what_stands_between_tensors_makes_a_difference() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert Nest({"x": x, "flag": True}).constant == Nest({"x": y, "flag": True}).constant
    others = [Nest({"x": x, "flag": False}), Nest({"y": x, "flag": True}), Nest((x, True)), Nest(x)]
    constants = {Nest({"x": x, "flag": True}).constant, *(other.constant for other in others)}
    assert len(constants) == 5
    assert Nest(x, (1, 2)).constant != Nest(x, (1, 3)).constant
    doubled = Nest({"x": (x, 3)}, 7).changed(lambda t: 2 * t)
    assert torch.equal(doubled.value["x"][0], 2 * x)
    assert (doubled.value["x"][1], doubled.beside) == (3, 7)


def test_on_a_cpu_the_function_is_called() -> None:
    calls = []

    def function(given: Nest) -> tuple[Tensor, ...]:
        calls.append(given)
        return (given.value + 1,)

    replay = Replay(function)
    for _ in range(6):
        assert torch.equal(replay(Nest(torch.zeros(2)))[0], torch.ones(2))
    assert len(calls) == 6


class Net(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.hidden = nn.Linear(8, 12)
        self.head = nn.Linear(12, 3)
        with torch.no_grad():  # so that every class is predicted
            self.head.weight *= 20
            self.head.bias -= self(**batches(1)[0]).mean(0)

    def forward(self, image: Tensor, shift: Tensor) -> Tensor:
        seen = self.conv(image + shift[:, None, None, None]).relu().mean((2, 3))
        return self.head(self.hidden(seen).relu())


def batches(number: int) -> list[dict[str, Tensor]]:
    return [{"image": torch.randn(100, 3, 8, 8), "shift": torch.randn(100)} for _ in range(number)]


def test_a_guard_that_would_record_judges_the_same_on_a_cpu() -> None:
    torch.manual_seed(0)
    guard = gramwatch.Guard(Net().eval()).fit(batches(8), progress=False)
    guard.calibrate(batches(4), progress=False)
    some = batches(1)[0]
    expected = guard(some)
    guard.record_pass = True
    for _ in range(5):
        found = guard(some)
        for name in ("logits", "score", "p_value", "deviations"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
            assert not getattr(found, name).is_inference()
    guard.calibrate(batches(4), progress=False)
    assert guard.record_pass


def test_a_guard_that_would_record_fits_and_calibrates_the_same_on_a_cpu() -> None:
    torch.manual_seed(0)
    net, training, held_out = Net().eval(), batches(8), batches(4)

    def ready(record: bool) -> gramwatch.Guard:
        guard = gramwatch.Guard(net, members=("gram", "profile", "fdbd", "class_ratio", "energy"))
        guard.record_pass = record
        return guard.fit(training, progress=False).calibrate(held_out, progress=False)

    found, expected = (ready(record).contents()[1] for record in (True, False))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_batch_of_a_fit_asks_for_no_values() -> None:
    """After the first, which looks at the network. On a GPU, asking is waiting."""
    torch.manual_seed(0)
    guard = gramwatch.Guard(Net().eval())
    some = batches(1)[0]
    broken = {name: tensor.clone() for name, tensor in some.items()}
    broken["image"][3] = torch.nan
    passed = TrainingPass([guard], Fits())
    passed.take((some, None))
    assert not asks_for_values(lambda: passed.take((broken, None)), "cpu")
    assert [int(n) for n in passed.left_out_by_all(guard.leaves, Group())[0]] == [1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("per_class", [False, True])
def test_what_a_gpu_would_record_is_the_verdict(per_class: bool) -> None:
    torch.manual_seed(0)
    guard = gramwatch.Guard(
        Net().eval(), per_class=per_class, members=("gram", "fdbd", "class_ratio", "energy")
    )
    guard.fit(batches(8), progress=False).calibrate(batches(8), progress=False)
    some = batches(1)[0]
    some["image"][3] = torch.nan
    expected = guard.judge(guard.measure(some))
    copied = []

    def copy(t: Tensor) -> Tensor:
        copied.append(t)
        return t.clone()

    graphs = guard.planned(some).graphs
    apart = graphs.given(some, guard).changed(copy)
    assert len(copied) == len({id(t) for t in copied})  # those that members share are copied once
    for given in (apart, graphs.given(Nest(some).changed(torch.clone).value, guard)):
        found = guard.judge_given(given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_nothing_in_a_guard_asks_for_values_before_its_end() -> None:
    torch.manual_seed(0)
    guard = gramwatch.Guard(Net().eval(), per_class=True).fit(batches(8), progress=False)
    guard.calibrate(batches(8), progress=False)
    some = batches(1)[0]
    guard(some)
    graphs = guard.planned(some).graphs
    assert not asks_for_values(lambda: guard.judge_given(graphs.given(some, guard)), "cpu")
    assert asks_for_values(lambda: guard(some), "cpu")  # how many are broken, at the end


# --- whether a pass may be replayed -------------------------------------------------------------------


def why_not(function) -> str:
    trial = Asking("cpu")
    with trial:
        function()
    return trial.why_not


def test_random_numbers_forbid_a_recording() -> None:
    x, layer = torch.randn(1, 2, 4, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.1).eval()
    for drawing in (
        lambda: torch.rand_like(x),
        lambda: nn.functional.dropout(x, 0.5),
        lambda: torch.bernoulli(x.sigmoid()),
        lambda: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ):
        assert why_not(drawing) == "it draws random numbers"
    for steady in (
        lambda: nn.functional.dropout(x, 0.5, training=False),
        lambda: nn.functional.scaled_dot_product_attention(x, x, x),
        lambda: layer(x[0]),
    ):
        assert why_not(steady) == ""


def test_a_network_in_training_mode_or_with_hooks_is_not_replayed() -> None:
    net = Net().eval()
    held = Held(net)
    assert held.why_not() == ""
    net.hidden.train()
    assert held.why_not() == "it is in training mode"
    net.eval()
    for register in (net.conv.register_forward_hook, net.conv.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert "forward hooks" in held.why_not()
        handle.remove()
        assert held.why_not() == ""
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "forward hooks" in held.why_not()
    handle.remove()
    assert held.why_not() == ""


def test_hooks_of_a_guard_in_another_thread_are_not_those_of_others() -> None:
    net = Net().eval()
    held, seen = Held(net), []
    net.conv.register_forward_hook(lambda *_: seen.append(held.why_not()))
    handle = next(iter(net.conv._forward_hooks))
    net.conv._forward_hooks[-7] = net.conv._forward_hooks.pop(handle)
    net(**batches(1)[0])
    assert seen == [""]


def test_weights_that_are_replaced_are_seen() -> None:
    net = Net().eval()
    held = Held(net)
    before = held.places()
    with torch.no_grad():
        net.conv.weight.mul_(2)
    assert held.places() == before
    net.conv.weight = nn.Parameter(net.conv.weight.detach().clone())
    assert held.places() != before
    before = held.places()
    net.hidden.weight.data = net.hidden.weight.data.clone()
    assert held.places() != before
    assert held.holds
    net.head = nn.Linear(12, 3)
    assert not held.holds


def test_a_batch_is_padded_with_its_first_example_and_cut_again() -> None:
    torch.manual_seed(0)
    guard = gramwatch.Guard(Net().eval()).fit(batches(8), progress=False)
    guard.calibrate(batches(4), progress=False)
    few = {name: tensor[:37].clone() for name, tensor in batches(1)[0].items()}
    expected = guard(few)
    for broken in ((), (3,), (0, 5)):
        images = few["image"].clone()
        images[list(broken)] = torch.nan
        inputs = few | {"image": images}
        graphs = guard.planned(inputs).graphs
        many = padded(inputs, 37, 50)
        assert {name: len(tensor) for name, tensor in many.items()} == {"image": 50, "shift": 50}
        tensors = guard.judge_given(graphs.given(many, guard))
        verdict = Verdict(*_without_padding(tensors, 37))
        assert int(verdict.finite) == 37 - len(broken)
        kept = [i for i in range(37) if i not in broken]
        torch.testing.assert_close(verdict.score[kept], expected.score[kept], rtol=1e-5, atol=1e-5)
        assert torch.equal(verdict.is_ood[kept], expected.is_ood[kept])
        assert all(len(t) == 37 for t in verdict if t is not None and t.ndim)


def test_padding_keeps_the_memory_format() -> None:
    x = torch.randn(5, 3, 6, 4)
    for given in (x, x.to(memory_format=torch.channels_last)):
        assert padded(given, 5, 8).stride()[1:] == given.stride()[1:]
        assert torch.equal(padded(given, 5, 8)[:5], given)
        assert torch.equal(padded(given, 5, 8)[5:], given[:1].expand(3, -1, -1, -1))


def test_the_recording_that_was_not_used_for_longest_makes_place() -> None:
    class Recorded:
        memory = 10

    replay: Replay[Nest] = Replay(lambda nest: (nest.value,))
    for number in range(MOST):
        assert replay._has_place()
        replay._recorded[number], replay._used[number], replay._calls[number] = Recorded(), number, 3  # type: ignore[assignment]
    replay._recorded["refused"] = None
    assert (replay.recordings, replay.memory) == (MOST, 10 * MOST)
    replay._count = UNUSED
    assert not replay._has_place()
    replay._used[0], replay._count = UNUSED, UNUSED + 2
    assert replay._has_place()
    assert list(replay._recorded) == [0, 2, 3, "refused"]


def test_a_replay_is_compared_with_what_was_computed() -> None:
    score, flags = torch.linspace(0, 5, 100), torch.arange(100) < 5
    ranks = score.clone()
    ranks[7] += 1
    assert _alike((score, flags), (score, flags))
    assert _alike((ranks, flags), (score, flags))  # one value at a tie
    assert _alike((torch.tensor([torch.nan, torch.inf]),), (torch.tensor([torch.nan, torch.inf]),))
    assert not _alike((score.flip(0), flags), (score, flags))
    assert not _alike((torch.zeros(100), flags), (score, flags))
    assert not _alike((torch.tensor(90),), (torch.tensor(100),))


def test_a_guard_says_why_its_pass_is_not_recorded() -> None:
    torch.manual_seed(0)
    guard = gramwatch.Guard(Net().eval()).fit(batches(8), progress=False)
    guard.calibrate(batches(4), progress=False)
    assert guard.record_pass is None
    assert "recorded" not in repr(guard)
    graphs = guard.planned(batches(1)[0]).graphs
    assert not graphs.may_replay(False)
    assert graphs.may_replay(None)
    assert "recorded" not in repr(guard)
    guard.model.train()
    assert not graphs.may_replay(None)
    assert "its pass is not recorded: it is in training mode" in repr(guard)
    assert graphs.may_replay(True)
    guard.model.eval()
    assert graphs.may_replay(None)
    assert "recorded" not in repr(guard)


class Scaled(Net):
    """One of its inputs is a number, which has no examples."""

    def forward(self, image: Tensor, shift: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(image if scale is None else scale * image, shift)


def test_inputs_that_are_not_all_batches_are_not_padded() -> None:
    torch.manual_seed(0)
    scaled = [batch | {"scale": torch.tensor(2.0)} for batch in batches(13)]
    guard = gramwatch.Guard(Scaled().eval()).fit(scaled[:8], progress=False)
    guard.calibrate(scaled[8:12], progress=False)
    given = scaled[12]
    graphs = guard.planned(given).graphs
    few = {name: tensor[:60] if tensor.ndim else tensor for name, tensor in given.items()}
    whole = graphs.judged(given, guard)
    assert graphs._held is not None
    form = tuple((t.shape[1:], t.dtype, t.stride()[1:]) for t in given.values())
    graphs._sizes[form, graphs._held.places()] = {100}  # as if it had been recorded
    for one, other in zip(graphs.judged(few, guard), whole, strict=True):
        assert one.shape[:1] == (() if not other.ndim else (60,))
    assert int(Verdict(*whole).finite) == 100
    torch.testing.assert_close(Verdict(*graphs.judged(few, guard)).score, whole[0][:60], rtol=1e-5, atol=1e-5)


def test_hooks_that_are_skipped_on_demand_are_no_reason() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    guard = gramwatch.Guard(net).fit(batches(8), progress=False).calibrate(batches(4), progress=False)
    graphs = guard.planned(batches(1)[0]).graphs
    net.conv.register_forward_hook(lambda *_: None)
    assert not graphs.may_replay(None)
    assert "forward hooks" in repr(guard)
    assert graphs.may_replay(True)
    assert "not recorded" not in repr(guard)
