"""The same on a GPU: statistics, fit, scores, and files that move between devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramwatch
from gramwatch.bounds import make_bounds
from gramwatch.statistics import STATISTICS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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
    found = detector(test)
    assert found.score.device.type == "cuda"
    assert torch.equal(found.predicted.cpu(), expected.predicted)
    torch.testing.assert_close(found.score.cpu(), expected.score, rtol=1e-2, atol=1e-2)
    detector.save(tmp_path / "gpu.safetensors")
    again = gramwatch.load(tmp_path / "gpu.safetensors", net)(test.cuda())
    torch.testing.assert_close(again.score, found.score, rtol=1e-4, atol=1e-4)
    loaded = gramwatch.load(tmp_path / "gpu.safetensors", net.cpu())(test)
    torch.testing.assert_close(loaded.score, found.score.cpu(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("per_class", [False, True])
def test_a_guard_on_the_gpu(net, per_class, tmp_path):
    torch.backends.cudnn.allow_tf32 = False
    train, validation, test = (torch.randn(n, 3, 16, 16) for n in (400, 900, 50))
    on_cpu = gramwatch.Guard(net, per_class=per_class).fit(train.split(100)).calibrate(validation.split(100))
    expected = on_cpu(test)
    net.cuda()
    guard = gramwatch.Guard(net, per_class=per_class).fit(train.split(100)).calibrate(validation.split(100))
    found = guard(test)
    assert all(p.is_cuda for p in (found.score, found.p_value, found.is_ood, *found.parts.values()))
    torch.testing.assert_close(found.score.cpu(), expected.score, rtol=1e-2, atol=1e-2)
    assert (found.p_value.cpu() - expected.p_value).abs().max() < 0.05
    guard.save(tmp_path / "gpu.safetensors")
    again = gramwatch.load(tmp_path / "gpu.safetensors", net)(test)
    torch.testing.assert_close(again.score, found.score, rtol=1e-4, atol=1e-4)
    loaded = gramwatch.load(tmp_path / "gpu.safetensors", net.cpu())(test)
    torch.testing.assert_close(loaded.score, found.score.cpu(), rtol=1e-2, atol=1e-2)


def test_a_guard_does_not_wait_for_the_gpu(net):
    guard = gramwatch.Guard(net.cuda(), per_class=True).fit(torch.randn(400, 3, 16, 16).split(100))
    guard.calibrate(torch.randn(900, 3, 16, 16).split(100))
    test = torch.randn(50, 3, 16, 16, device="cuda")
    guard(test)
    calibration = guard._calibrated_on(test.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = calibration.judged(guard.measure(test))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[0], guard(test).score)


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
    monkeypatch.setattr("gramwatch.detector.MOST_STATISTICS", 0)
    monkeypatch.setattr("gramwatch.statistics.PIECE", 2000)
    twice = gramwatch.GramDetector(net, statistic=statistic, storage=storage).fit(train)
    assert once.measure_all(train).deviations.le(1e-3).all()
    torch.testing.assert_close(twice.measure(test).deviations, expected, rtol=1e-3, atol=1e-3)


def test_batches_are_copied_ahead_and_none_is_lost():
    from gramwatch.taps import on_device_ahead

    model = nn.Linear(3, 3).cuda()
    batches = [torch.full((2, 3), float(i)) for i in range(5)]
    pinned = [(b.pin_memory(), {"mask": b + 1}) for b in batches]
    assert [b.mean().item() for b in on_device_ahead(batches, model)] == [0, 1, 2, 3, 4]
    found = list(on_device_ahead(pinned, model))
    assert all(x.is_cuda and mask["mask"].is_cuda for x, mask in found)
    assert [mask["mask"].mean().item() for _, mask in found] == [1, 2, 3, 4, 5]
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
