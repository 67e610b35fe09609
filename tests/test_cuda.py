"""The same on a GPU: statistics, fit, scores, and files that move between devices."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramwatch
from gramwatch.detect.distributed import Group
from gramwatch.detect.fitting import TrainingPass
from gramwatch.detect.progress import Fits
from gramwatch.numerics.bounds import make_bounds
from gramwatch.numerics.statistics import STATISTICS
from gramwatch.observe import replay

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.hidden = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Linear(16, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x), inplace=True)))
        return self.head(torch.tanh(self.hidden(x.mean((2, 3)))))


@pytest.fixture
def net():
    net = Net()
    with torch.no_grad():
        net.head.weight *= 20
        net.head.bias -= net(torch.randn(500, 3, 16, 16)).mean(0)
    return net.eval()


@pytest.mark.parametrize("name", list(STATISTICS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_equal_those_of_the_cpu(name, dtype):
    sign = torch.where(torch.rand(3, 9, 5, 5) < 0.5, -1.0, 1.0)
    x = (sign * 10 ** (torch.rand(3, 9, 5, 5) * 8 - 4)).to(dtype)
    orders = (2, 4, 10, 20)
    expected = STATISTICS[name](x, orders, 1)
    for autocast in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            got = STATISTICS[name](x.cuda(), orders, 1)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=0)


def test_a_detector_on_the_gpu_takes_batches_from_the_cpu(net, tmp_path):
    torch.backends.cudnn.allow_tf32 = False
    train, validation, test = (torch.randn(n, 3, 16, 16) for n in (400, 200, 50))
    on_cpu = gramwatch.GramDetector(net).fit(train.split(100)).calibrate(validation.split(100))
    expected = on_cpu(test)
    on_cpu.save(tmp_path / "cpu.safetensors")
    net.cuda()
    detector = gramwatch.GramDetector(net).fit(train.split(100)).calibrate(validation.split(100))
    detection = detector(test)
    assert detection.score.device.type == "cuda"
    assert torch.equal(detection.predicted.cpu(), expected.predicted)
    torch.testing.assert_close(detection.score.cpu(), expected.score, rtol=1e-2, atol=1e-2)
    detector.save(tmp_path / "gpu.safetensors")
    again = gramwatch.load(tmp_path / "gpu.safetensors", net)(test.cuda())
    torch.testing.assert_close(again.score, detection.score, rtol=1e-4, atol=1e-4)
    loaded = gramwatch.load(tmp_path / "gpu.safetensors", net.cpu())(test)
    torch.testing.assert_close(loaded.score, detection.score.cpu(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("per_class", [False, True])
def test_a_guard_on_the_gpu(net, per_class, tmp_path):
    torch.backends.cudnn.allow_tf32 = False
    train, validation, test = (torch.randn(n, 3, 16, 16) for n in (400, 900, 50))
    on_cpu = gramwatch.Guard(net, per_class=per_class).fit(train.split(100)).calibrate(validation.split(100))
    expected = on_cpu(test)
    net.cuda()
    guard = gramwatch.Guard(net, per_class=per_class).fit(train.split(100)).calibrate(validation.split(100))
    detection = guard(test)
    assert all(
        p.is_cuda for p in (detection.score, detection.p_value, detection.is_ood, *detection.parts.values())
    )
    torch.testing.assert_close(detection.score.cpu(), expected.score, rtol=1e-2, atol=1e-2)
    assert (detection.p_value.cpu() - expected.p_value).abs().max() < 0.05
    guard.save(tmp_path / "gpu.safetensors")
    again = gramwatch.load(tmp_path / "gpu.safetensors", net)(test)
    torch.testing.assert_close(again.score, detection.score, rtol=1e-4, atol=1e-4)
    loaded = gramwatch.load(tmp_path / "gpu.safetensors", net.cpu())(test)
    torch.testing.assert_close(loaded.score, detection.score.cpu(), rtol=1e-2, atol=1e-2)


def test_a_guard_does_not_wait_for_the_gpu(net):
    guard = gramwatch.Guard(net.cuda(), per_class=True).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    test = torch.randn(50, 3, 16, 16, device="cuda")
    guard(test)
    calibration = guard.calibration(test.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = calibration.judged(guard.measure(test))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result[0], guard(test).score)


def test_a_fit_does_not_wait_for_the_gpu(net):
    guard = gramwatch.Guard(net.cuda())
    passed = TrainingPass([guard], Fits())
    batches = [torch.randn(100, 3, 16, 16, device="cuda") for _ in range(3)]
    batches[2][3] = torch.nan
    passed.take((batches[0], None))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in batches[1:]:
            passed.take((x, None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert passed.left_out_by_all(guard.leaves, Group())[0] == [1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("record", [False, True])
def test_a_fit_is_that_of_the_cpu(net, record, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    monkeypatch.setattr(replay, "CALLS", 2)
    recorded, record_one = [], replay.Replay._record

    def recording(self, *given):
        recorded.append(record_one(self, *given))
        return recorded[-1]

    monkeypatch.setattr(replay.Replay, "_record", recording)
    training, test = torch.randn(800, 3, 16, 16).split(100), torch.randn(50, 3, 16, 16)
    on_cpu = gramwatch.Guard(net).fit(training)
    measured = on_cpu.measure(test)
    net.cuda()
    guard = gramwatch.Guard(net)
    guard.record_pass = record
    guard.fit(training)
    assert [part is not None for part in recorded] == [True] * record
    for name in ("profile", "class_ratio"):
        mine, theirs = guard.members[name], on_cpu.members[name]
        assert torch.equal(mine.ranks_, theirs.ranks_)
        for state in ("counts_", "origins_", "sums_", "products_"):
            one, other = getattr(mine, state).cpu(), getattr(theirs, state)
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
    result = guard.measure(test)
    torch.testing.assert_close(result.values.cpu(), measured.values, rtol=1e-2, atol=1e-2)


def test_labels_that_are_no_classes_are_refused_at_the_end(net):
    x = torch.randn(60, 3, 16, 16, device="cuda")
    labels = torch.arange(60) % 3
    detector = gramwatch.methods.Mahalanobis(net.cuda())
    with pytest.raises(gramwatch.InputError, match="labels from -1 to 7 were given, the network has"):
        detector.fit([(x, labels), (x, labels - 1), (x, labels + 5), (x, labels)])
    detector.finish()  # the other examples are kept
    assert detector.counts_.sum() == 20 * (3 + 2 + 0 + 3)


def recordings(guard):
    """Whether the attempts to record gave a recording: of verdicts alone, then of passes with verdicts."""
    graphs = guard._plan.graphs
    replays = [replay for replay in (graphs.verdicts, graphs.whole) if replay is not None]
    return [recording is not None for replay in replays for recording in replay._recorded.values()]


def recorded_passes(guard):
    """The same of passes with their verdicts."""
    return [recording is not None for recording in guard._plan.graphs.whole._recorded.values()]


def assert_equal(result, expected):
    assert torch.equal(result.predicted, expected.predicted)
    assert torch.equal(result.is_ood, expected.is_ood)
    assert torch.equal(result.class_support, expected.class_support)
    torch.testing.assert_close(result.score, expected.score, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.p_value, expected.p_value)
    for name, p in expected.parts.items():
        torch.testing.assert_close(result.parts[name], p)


@pytest.mark.parametrize("per_class", [False, True])
def test_a_recorded_verdict_is_the_one_that_is_computed(net, per_class, monkeypatch):
    guard = gramwatch.Guard(net.cuda(), per_class=per_class).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.record_pass = False
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    batches = [scale * torch.randn(50, 3, 16, 16, device="cuda") for scale in (1, 1.2, 1.4, 1.6, 1.8, 2)]
    batches[-1][3, 0, 0, 0] = torch.nan
    monkeypatch.setattr(replay, "CALLS", 1000)
    broken = pytest.warns(gramwatch.GramwatchWarning, match=r"1 input\(s\) with NaN")
    with broken:
        computed = [guard(x) for x in batches]
    assert not recordings(guard)
    monkeypatch.setattr(replay, "CALLS", 2)
    guard._plan.graphs.forget()
    with broken:
        detections = [
            guard(x) for x in batches
        ]  # kept until the end: a later verdict must not overwrite them
    assert recordings(guard) == [True]
    for one, other in zip(detections, computed, strict=True):
        assert_equal(one, other)
    assert detections[-1].score[3] == torch.inf
    assert not detections[-1].score.is_inference()
    for count in (1, 7):  # other shapes
        expected = [guard(x[:count]) for x in batches[:2]]
        for x, other in zip(batches[:2] * 2, expected * 2, strict=True):
            assert_equal(guard(x[:count]), other)
    guard.calibrate([2 * torch.randn(900, 3, 16, 16)])
    monkeypatch.setattr(replay, "CALLS", 1000)
    anew = guard(batches[0])
    assert not torch.equal(anew.p_value, detections[0].p_value)
    monkeypatch.setattr(replay, "CALLS", 2)
    for judge in (guard, copy.deepcopy(guard)):  # what was recorded before the calibration is forgotten
        for _ in range(4):
            assert_equal(judge(batches[0]), anew)
        assert recordings(judge) == [True]


def assert_close(result, expected):
    assert torch.equal(result.predicted, expected.predicted)
    for name in ("logits", "deviations", "score"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-3, atol=1e-3)
    assert (result.p_value - expected.p_value).abs().max() < 0.02
    assert not result.logits.is_inference()


def test_a_recorded_pass_is_the_one_that_is_computed(net, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    guard = gramwatch.Guard(net.cuda()).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    batches = [scale * torch.randn(50, 3, 16, 16, device="cuda") for scale in (1, 1.2, 1.4, 1.6, 1.8, 2)]
    batches[-1][3, 0, 0, 0] = torch.nan

    def judged(record):
        guard.record_pass = record
        with pytest.warns(gramwatch.GramwatchWarning, match=r"1 input\(s\) with NaN"):
            return [guard(x) for x in batches]

    def assert_recorded(times):
        assert recorded_passes(guard) == [True] * times

    monkeypatch.setattr(replay, "CALLS", 2)
    computed, result = judged(False), judged(True)
    assert_recorded(1)
    for one, other in zip(result, computed, strict=True):
        one.logits[3], other.logits[3], one.deviations[3], other.deviations[3] = 0, 0, 0, 0  # may be NaN
        assert_close(one, other)
    assert result[-1].score[3] == torch.inf

    x = batches[1]
    with torch.no_grad():  # weights that change in place are followed
        for weight in net.parameters():
            weight.mul_(1.05)
    after = guard(x)
    assert_recorded(1)
    assert not torch.allclose(after.logits, result[1].logits)
    moved = [parameter.data_ptr() for parameter in net.parameters()]
    net.cpu()
    net.cuda()
    assert moved != [parameter.data_ptr() for parameter in net.parameters()]
    for _ in range(4):
        assert_close(guard(x), after)
    assert_recorded(2)
    for _ in range(4):
        assert_close(guard(x.to(memory_format=torch.channels_last)), after)
    assert_recorded(3)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(4):
            half = guard(x)
    assert_recorded(4)
    assert not torch.equal(half.logits, after.logits)
    assert_close(guard(x), after)
    guard.record_pass = False
    assert_close(guard(x), after)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}])
@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_a_compiled_network_is_judged_as_the_uncompiled_one(net, way, options):
    torch.backends.cudnn.allow_tf32 = False
    train, validation = torch.randn(430, 3, 16, 16), torch.randn(900, 3, 16, 16)
    plain = gramwatch.Guard(copy.deepcopy(net).cuda()).fit(train.split(100))
    plain.calibrate(validation.split(100))
    net.cuda()
    compiled = torch.compile(net, **options) if way == "torch.compile" else net
    if way == "module.compile":
        net.compile(**options)
    guard = gramwatch.Guard(compiled).fit(train.split(100)).calibrate(validation.split(100))
    # Several verdicts are held, because a CUDA graph of torch.compile overwrites its results.
    batches = [torch.randn(n, 3, 16, 16, device="cuda") for n in (50, 50, 50, 7, 1)]
    detections = [guard(x) for x in batches]
    for one, x in zip(detections, batches, strict=True):
        assert_close(one, plain(x))
    assert guard._plan._in_graph is not None


def test_a_pass_of_a_compiled_network_is_recorded(net, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    guard = gramwatch.Guard(torch.compile(net.cuda())).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    batches = [scale * torch.randn(50, 3, 16, 16, device="cuda") for scale in (1, 1.2, 1.4, 1.6, 1.8)]
    computed = [guard(x) for x in batches]
    guard.record_pass = True
    monkeypatch.setattr(replay, "CALLS", 2)
    for x, expected in zip(batches, computed, strict=True):
        assert_close(guard(x), expected)
    assert recordings(guard) == [True]
    assert guard._plan._in_graph is not None
    with torch.no_grad():  # weights that change in place are followed
        for weight in net.parameters():
            weight.mul_(1.05)
    assert not torch.allclose(guard(batches[0]).logits, computed[0].logits)


@pytest.mark.parametrize("record", [False, True])
def test_a_batch_in_pieces_is_not_recorded_but_judged(net, record, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    guard = gramwatch.Guard(net.cuda()).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    x = torch.randn(50, 3, 16, 16, device="cuda")
    expected = guard(x)
    guard.record_pass = record
    monkeypatch.setattr(replay, "CALLS", 1)
    at_once = guard.planned(x).at_once
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 2**30 // at_once * 20)
    assert guard.planned(x).at_once < 50
    for _ in range(4):
        assert_close(guard(x), expected)
    assert not recordings(guard)


@pytest.mark.parametrize("record", [False, True])
def test_what_was_recorded_in_inference_mode_serves_outside_of_it(net, record, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    guard = gramwatch.Guard(net.cuda()).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    x = torch.randn(50, 3, 16, 16, device="cuda")
    expected = guard(x)
    guard.record_pass = record
    monkeypatch.setattr(replay, "CALLS", 1)
    with torch.inference_mode():
        for _ in range(3):
            assert_close(guard(x), expected)
    assert_close(guard(x), expected)
    assert recordings(guard) == [True]


def test_a_network_that_asks_the_gpu_is_not_recorded(net, monkeypatch):
    class Asking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x if x.sum().item() < 1e9 else -x)

    monkeypatch.setattr(replay, "CALLS", 1)
    guard = gramwatch.Guard(Asking().cuda()).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate([torch.randn(200, 3, 16, 16)])
    x = torch.randn(50, 3, 16, 16, device="cuda")
    expected = guard(x)
    guard.record_pass = True
    for _ in range(4):
        assert_close(guard(x), expected)
    assert recordings(guard) == [False]
    assert "it asks the GPU for values" in repr(guard)


def test_what_cannot_be_recorded_is_computed(net, monkeypatch):
    class Waiting(gramwatch.methods.MSP):
        def score(self, observation):
            return super().score(observation) * float(observation.logits.abs().amax() > -1)

    monkeypatch.setattr(replay, "CALLS", 1)
    net.cuda()
    members = {"gram": gramwatch.GramDetector(net), "waiting": Waiting(net)}
    guard = gramwatch.Guard.of(members).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate([torch.randn(200, 3, 16, 16)])
    batches = [torch.randn(50, 3, 16, 16, device="cuda") for _ in range(5)]
    first = [guard(x) for x in batches]
    assert recordings(guard) == [False, False]
    for x, expected in zip(batches, first, strict=True):
        assert_equal(guard(x), expected)


class Counting(Net):
    """Counts how often its Python code runs."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


@pytest.fixture
def counting(net):
    torch.backends.cudnn.allow_tf32 = False
    network = Counting()
    network.load_state_dict(net.state_dict())
    return network.eval().cuda()


def guarding(network, **options):
    guard = gramwatch.Guard(network, rehearse=False, **options).fit(torch.randn(400, 3, 16, 16).split(100))
    return guard.calibrate(torch.randn(900, 3, 16, 16).split(100))


def computed(guard, x):
    """The verdict without a CUDA graph of the pass."""
    guard.record_pass = False
    detection = guard(x)
    guard.record_pass = None
    return detection


def test_a_pass_is_recorded_by_itself(counting):
    guard = guarding(counting)
    batches = [scale * torch.randn(50, 3, 16, 16, device="cuda") for scale in (1, 1.2, 1.4, 1.6, 1.8)]
    expected = [computed(guard, x) for x in batches]
    for x in batches[:3]:
        guard(x)
    before = counting.runs
    for x, other in zip(batches, expected, strict=True):
        assert_close(guard(x), other)
    assert counting.runs == before
    assert recorded_passes(guard) == [True]
    assert "1 recorded pass, " in repr(guard)
    for few in (49, 30, 25):  # padded to 50
        assert_close(guard(batches[1][:few]), computed(guard, batches[1][:few]))
    assert recorded_passes(guard) == [True]
    broken = batches[1][:30].clone()
    broken[0, 0, 0, 0] = torch.nan  # the example that pads
    with pytest.warns(gramwatch.GramwatchWarning, match=r"1 input\(s\) with NaN"):
        assert guard(broken).score.isinf().sum() == 1
    for _ in range(4):
        assert_close(guard(batches[1][:10]), computed(guard, batches[1][:10]))
    assert recorded_passes(guard) == [True, True]


def test_a_recorded_pass_follows_its_network(counting):
    guard, x = guarding(counting), torch.randn(50, 3, 16, 16, device="cuda")
    for _ in range(4):
        first = guard(x)
    with torch.no_grad():
        counting.conv1.weight.mul_(1.5)
    assert_close(guard(x), computed(guard, x))
    assert not torch.allclose(guard(x).logits, first.logits)
    counting.conv2.weight = nn.Parameter(1.5 * counting.conv2.weight.detach())
    for _ in range(4):
        assert_close(guard(x), computed(guard, x))
    counting.conv2.bias.data = counting.conv2.bias.data + 1
    for _ in range(4):
        assert_close(guard(x), computed(guard, x))
    counting.hidden = nn.Linear(16, 12).cuda().eval()
    for _ in range(4):
        assert_close(guard(x), computed(guard, x))
    counting.train()
    before = counting.runs
    assert_close(guard(x), computed(guard, x))
    assert counting.runs == before + 2
    assert counting.training
    counting.eval()
    for _ in range(4):
        after = guard(x)
    assert_close(after, computed(guard, x))


def test_where_a_recording_is_not_safe_the_pass_is_computed(counting):
    x = torch.randn(50, 3, 16, 16, device="cuda")
    guard, seen = guarding(counting), []
    handle = counting.conv1.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(5):
        guard(x)
    assert len(seen) == 5
    assert "forward hooks" in repr(guard)
    handle.remove()
    for _ in range(4):
        guard(x)
    assert "1 recorded pass, " in repr(guard)

    class Drawing(Counting):
        def forward(self, x):
            return super().forward(x) + 1e-6 * torch.rand(1, device=x.device)

    class Changing(Counting):
        def forward(self, x):
            return super().forward(x + 0 if self.runs % 2 else x)

    for kind, why in ((Drawing, "it draws random numbers"), (Changing, "other operations from call to call")):
        network = kind()
        network.load_state_dict(counting.state_dict())
        guard = guarding(network.eval().cuda(), members=("gram", "profile", "energy"))
        for _ in range(5):
            assert torch.isfinite(guard(x).score).all()
        assert network.runs > 15
        assert why in repr(guard)


def test_too_little_memory_for_a_recording_is_no_error(counting, monkeypatch):
    guard, x = guarding(counting), torch.randn(50, 3, 16, 16, device="cuda")
    expected = computed(guard, x)

    class Full(torch.cuda.graph):
        def __exit__(self, *error):
            super().__exit__(*error)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", Full)
    for _ in range(5):
        assert_close(guard(x), expected)
    assert "too little memory" in repr(guard)
    assert torch.rand(3, device="cuda").isfinite().all()


def test_two_guards_and_several_threads_share_a_network(counting):
    guards = [guarding(counting), guarding(counting, members=("gram", "energy"))]
    batches = [scale * torch.randn(50, 3, 16, 16, device="cuda") for scale in (1, 1.2, 1.4, 1.6)]
    expected = {id(guard): [computed(guard, x) for x in batches] for guard in guards}
    failures = []

    def work(guard):
        try:
            for _ in range(6):
                for x, other in zip(batches, expected[id(guard)], strict=True):
                    assert_close(guard(x), other)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(guard,)) for guard in guards * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert all(True in recorded_passes(guard) for guard in guards)


def test_mean_variance_and_autocast_on_the_gpu(net):
    net.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        detector = gramwatch.GramDetector(net, bounds="mean_variance")
        detector.fit(torch.randn(400, 3, 16, 16).split(100)).calibrate([torch.randn(200, 3, 16, 16)])
        assert detector(8 * torch.randn(50, 3, 16, 16)).is_ood.all()


@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize("statistic", ["auto", "triangle"])
def test_float16_bounds_and_pieces_equal_those_of_the_cpu(net, storage, statistic, monkeypatch):
    statistics, predicted = torch.randn(60, 30) * 10.0 ** torch.arange(-15, 15), torch.arange(60) % 3 - 1
    on_cpu, on_gpu = (
        make_bounds("min_max", storage, 3, [5, 20, 5], device) for device in ("cpu", torch.device("cuda"))
    )
    on_cpu.update(statistics, predicted)
    on_gpu.update(statistics.cuda(), predicted.cuda())
    never = torch.arange(3)
    for row, expected in zip(on_gpu.rows(never.cuda()), on_cpu.rows(never), strict=True):
        assert row.cpu().equal(expected)
    torch.backends.cudnn.allow_tf32 = False
    net.cuda()
    train, test = torch.randn(400, 3, 16, 16).split(100), 2 * torch.randn(50, 3, 16, 16)
    once = gramwatch.GramDetector(net, statistic=statistic, storage=storage).fit(train)
    expected = once.measure(test).deviations
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 0)
    monkeypatch.setattr("gramwatch.numerics.statistics.PIECE", 2000)
    twice = gramwatch.GramDetector(net, statistic=statistic, storage=storage).fit(train)
    assert once.measure_all(train).deviations.le(1e-3).all()
    torch.testing.assert_close(twice.measure(test).deviations, expected, rtol=1e-3, atol=1e-3)


def test_batches_are_copied_ahead_and_none_is_lost():
    from gramwatch.inputs.batches import on_device_ahead

    model = nn.Linear(3, 3).cuda()
    batches = [torch.full((2, 3), float(i)) for i in range(5)]
    pinned = [(b.pin_memory(), {"mask": b + 1}) for b in batches]
    assert [b.mean().item() for b in on_device_ahead(batches, model)] == [0, 1, 2, 3, 4]
    result = list(on_device_ahead(pinned, model))
    assert all(x.is_cuda and mask["mask"].is_cuda for x, mask in result)
    assert [mask["mask"].mean().item() for _, mask in result] == [1, 2, 3, 4, 5]
    assert list(on_device_ahead([], model)) == []


def test_what_a_loader_gave_before_it_failed_is_fitted(net):
    def failing():
        yield torch.randn(30, 3, 16, 16)
        yield torch.randn(30, 3, 16, 16)
        raise OSError("disk")

    detector = gramwatch.GramDetector(net.cuda())
    with pytest.raises(OSError, match="disk"):
        detector.fit(failing())
    assert detector.class_counts_.sum() == 60
