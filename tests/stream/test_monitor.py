"""Monitor: what it says of a stream, that it goes on exactly after a restart, and what it refuses."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import gramwatch
from gramwatch import ArtifactError, Detection, GramDetector, GramwatchWarning, Guard, Monitor, NotFittedError
from gramwatch.errors import InputError
from gramwatch.files.artifact import opened, write
from gramwatch.methods import Energy
from gramwatch.stream.monitor import GRID_EXAMPLES, POINTS, History
from gramwatch.stream.sequential import BINS, Evidence, FixedReference, OnlineRanks, PowerBets
from tests.drawings import size_of_drawing
from tests.guarded import images, made

FORMS = ("online", "fixed")
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def guard() -> Guard:
    return guarded()


def guarded(seed: int = 2, **how) -> Guard:
    guard = Guard(made(), **how)
    return guard.fit([images(400, 1)], progress=False).calibrate([images(800, seed)], progress=False)


@pytest.fixture(scope="module")
def stream(guard) -> Detection:
    """300 ordinary images; then every fourth is an outlier."""
    x = images(600, 3)
    x[300::4] *= 4
    return guard(x)


def state(monitor: Monitor) -> dict[str, np.ndarray]:
    arrays = {**monitor._arrays(), "seen": np.array(monitor.seen)}
    if monitor.reference == "online":
        arrays["next lot"] = np.array(monitor._lots(monitor._evidence.time).random())
        assert (
            monitor._random.bit_generator.state == monitor._lots(monitor._evidence.time).bit_generator.state
        )
    return arrays


def assert_same(one: Monitor, other: Monitor) -> None:
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert (one.alarm, one.alarm_at, one.since) == (other.alarm, other.alarm_at, other.since)


def detection(guard: Guard, scores: torch.Tensor, predicted: torch.Tensor) -> Detection:
    """A detection with these scores."""
    all_scores = scores[:, None].expand(-1, 1 + len(guard.members))
    p, is_ood = guard.calibration().ranks.judged(all_scores, predicted)
    logits = torch.nn.functional.one_hot(predicted, 4).float()
    parts = dict(zip(guard.members, p.T[1:], strict=True))
    return Detection(logits, predicted, scores, p[:, 0], is_ood, parts=parts)


# --- what it says ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", FORMS)
def test_a_change_raises_an_alarm_that_says_when_and_what(guard, stream, reference):
    monitor = Monitor(guard, reference=reference)
    assert not monitor.update(stream[:300])
    assert monitor.alarm_at is None
    assert monitor.strength < 10_000
    assert monitor.update(stream[300:])
    assert monitor.alarm_at is not None
    assert 300 < monitor.alarm_at < 500
    assert 280 < monitor.since <= 301
    flagging = monitor.parts[0]
    assert {part.name for part in monitor.parts} == set(guard.members)
    assert flagging.images == 600 - monitor.since
    assert flagging.flagged > 60 > 20 > flagging.expected
    assert [row.excess for row in monitor.parts] == sorted((r.excess for r in monitor.parts), reverse=True)
    assert sum(row.images for row in monitor.classes) == 600 - monitor.since
    flagged = int(stream[monitor.since :].is_ood.sum())
    assert sum(row.flagged for row in monitor.classes) == flagged
    assert f"ALARM at image {monitor.alarm_at}" in repr(monitor)
    assert str(flagging.name) in repr(monitor)


def test_an_ordinary_stream_raises_no_alarm(guard):
    monitor = Monitor(guard)
    assert not monitor.update(guard(images(2_000, 4)))
    assert "no alarm" in repr(monitor)
    assert monitor.seen == 2_000


def test_it_is_what_the_simulations_simulate(guard, stream):
    """One stream, by the classes of `sequential` alone."""
    monitor = Monitor(guard, seed=7)
    scores, by = stream.score.numpy(), [7, int(monitor._checksum, 16)]
    lots = 1 - np.random.Generator(np.random.PCG64(np.random.SeedSequence([*by, 0]))).random(len(stream))
    calibration = guard.calibration_scores_.numpy()
    drawn = np.random.default_rng(by).permutation(len(calibration))
    counts = np.bincount(np.searchsorted(monitor._grid, calibration[drawn[40:]]), minlength=BINS)
    ranks, bets, evidence = OnlineRanks(counts[None, None]), PowerBets(), Evidence(1, PowerBets.count)
    zero = np.zeros(1, np.int64)
    strengths = []
    for score, lot in zip(scores, lots, strict=True):
        p = ranks.rank(np.searchsorted(monitor._grid, [score]), zero, np.array([lot]))
        evidence.add(bets(p))
        strengths.append(evidence.strength[0])
    monitor.update(stream)
    np.testing.assert_array_equal(monitor._evidence.sums, evidence.sums)
    np.testing.assert_array_equal(monitor._history.curves()[1], strengths)

    fixed, evidence = FixedReference(np.array([400]), 0.95), Evidence(1, FixedReference.count)
    for p in stream.p_value.numpy():
        evidence.add(fixed(np.array([p]), zero))
    other = Monitor(guard, reference="fixed")
    other.update(stream)
    np.testing.assert_array_equal(other._evidence.sums, evidence.sums)


@pytest.mark.parametrize("reference", FORMS)
@pytest.mark.parametrize("every", [1, 3])
def test_batches_do_not_matter(guard, stream, reference, every):
    whole, parts = (Monitor(guard, reference=reference, every=every) for _ in range(2))
    whole.update(stream)
    for start in range(0, 600, 7):
        parts.update(stream[start : start + 7])
    parts.update(stream[:0])
    assert whole.alarm
    assert_same(whole, parts)


def test_thinning_uses_every_nth_image(guard, stream):
    thinned, chosen = Monitor(guard, every=3), Monitor(guard)
    thinned.update(stream)
    chosen.update(stream[::3])
    np.testing.assert_array_equal(thinned._evidence.sums, chosen._evidence.sums)
    assert thinned.since == 3 * chosen.since
    assert thinned.alarm_at == 3 * (chosen.alarm_at - 1) + 1


def test_frames_that_repeat_raise_a_false_alarm_unless_thinned(guard):
    detection = guard(images(150, 5)[torch.arange(150).repeat_interleave(20)])
    plain, thinned = Monitor(guard, mean_time_to_false_alarm=10_000), Monitor(guard, every=20)
    assert plain.update(detection)
    assert not thinned.update(detection)
    assert thinned.strength < 1_000


def test_a_changed_mix_of_classes_raises_no_alarm_per_class():
    """Class 0 has higher scores than the others. From image 300 on, there is no other class."""
    rng = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 4, (600,), generator=rng)
    predicted[300:] = 0
    for per_class, alarm in ((False, True), (True, False)):
        guard = guarded(per_class=per_class, level=0.9)
        calibration = guard.calibration()
        rare = torch.randint(0, 4, (400,), generator=rng)
        scores = torch.randn(400, 1 + len(guard.members), generator=rng).double() + 3 * (rare == 0)[:, None]
        groups = torch.arange(4) if per_class else torch.zeros(4, dtype=torch.int64)
        ranks = gramwatch.detect.threshold.Ranks.of(scores, 0.9, rare, groups)
        guard._calibration = type(calibration)(calibration.rule, scores, rare, ranks, calibration.how)
        new = torch.randn(600, generator=rng).double() + 3 * (predicted == 0)
        for reference in FORMS:
            monitor = Monitor(guard, reference=reference, mean_time_to_false_alarm=100_000)
            assert monitor.update(detection(guard, new, predicted)) is alarm


def test_a_restart_forgets_the_alarm_and_keeps_the_images(guard, stream):
    monitor = Monitor(guard)
    monitor.update(stream)
    counts = monitor._ranks.counts.copy()
    monitor.restart()
    assert (monitor.alarm, monitor.strength, monitor.since, monitor.seen) == (False, 0, 600, 600)
    np.testing.assert_array_equal(monitor._ranks.counts, counts)
    assert monitor.parts[0].flagged == 0
    assert monitor.classes == []
    monitor.update(stream[:10])
    assert sum(row.images for row in monitor.classes) <= 10


def test_replicas_rank_by_parts_of_the_calibration_scores(guard):
    whole = Monitor(guard)._ranks.counts
    parts = [Monitor(guard, replica=(number, 3)) for number in range(3)]
    np.testing.assert_array_equal(sum(part._ranks.counts for part in parts), whole)
    assert whole.sum() == 400 - min(GRID_EXAMPLES, 40)
    lots = {float(part._random.random()) for part in parts}
    assert len(lots) == 3


@pytest.mark.parametrize("reference", FORMS)
@pytest.mark.parametrize("kind", [GramDetector, Energy])
def test_any_detector_can_be_watched(tmp_path, reference, kind):
    net = made()
    detector = kind(net).fit([images(400, 1)], progress=False).calibrate([images(800, 2)], progress=False)
    monitor = Monitor(detector, reference=reference)
    monitor.update(detector(images(100, 3)))
    assert monitor.parts == []
    detector.save(tmp_path / "detector.safetensors")
    monitor.save(tmp_path / "monitor.safetensors")
    again = gramwatch.load(tmp_path / "detector.safetensors", net)
    restored = Monitor.load(tmp_path / "monitor.safetensors", again)
    for watcher in (monitor, restored):
        watcher.update(detector(images(100, 6, 4.0)))
        assert watcher.seen == 200
    assert_same(monitor, restored)


def test_an_infinite_score_is_the_strangest(guard):
    x = images(40, 3)
    x[:, 0, 0, 0] = torch.nan
    with pytest.warns(GramwatchWarning, match="NaN"):
        detection = guard(x)
    for reference in FORMS:
        assert Monitor(guard, reference=reference).update(detection)


def test_memory_does_not_grow(guard, stream, tmp_path):
    monitor, sizes = Monitor(guard), []
    monitor.update(stream)
    for _ in range(3):
        for _ in range(3):
            monitor.update(stream)
        monitor.save(tmp_path / "monitor.safetensors")
        sizes.append(sum(value.nbytes for value in monitor._arrays().values()))
    assert len(set(sizes)) == 1
    assert monitor._evidence.time == 6_000 > POINTS


def test_the_code_on_the_page_runs(guard, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    batches = [images(50, 3), images(50, 4), images(50, 5, 4.0)]
    names = {"gramwatch": gramwatch, "guard": guard, "stream": batches, "detection": guard(batches[-1])}
    for block in blocks:
        exec(block, names)
    assert names["monitor"].alarm
    assert "ALARM" in capsys.readouterr().out
    assert (tmp_path / "stream.png").is_file()
    assert len(names["chosen"]) > 30


# --- history and picture -----------------------------------------------------------------------------


def test_the_history_keeps_peaks_and_counts_in_a_constant_number_of_points():
    rng = np.random.default_rng(0)
    images = 5 * POINTS + 3
    strength, flagged = rng.random(images), rng.random(images) < 0.3
    history = History()
    for value in zip(strength, flagged, strict=True):
        history.add(*value)
    ends, peaks, share = history.curves()
    assert history.stride == 8
    assert len(ends) <= POINTS
    assert ends[-1] == images
    starts = np.concatenate([[0], ends[:-1]])
    for start, end, peak, rate in zip(starts, ends, peaks, share, strict=True):
        assert peak == strength[start:end].max()
        assert rate == pytest.approx(flagged[start:end].mean())


def test_the_picture_of_a_stream(guard, stream, tmp_path):
    monitor = Monitor(guard)
    monitor.plot(tmp_path / "empty.png")
    monitor.update(stream)
    monitor.plot(tmp_path / "stream.png")
    assert size_of_drawing(tmp_path / "stream.png")[0] == 1600


# --- save and load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", FORMS)
@pytest.mark.parametrize("at", [0, 100, 317, 550])
def test_it_goes_on_exactly_where_it_was(guard, stream, tmp_path, reference, at):
    settings = {"reference": reference, "every": 2, "seed": 5, "replica": (1, 2), "confidence": 0.9}
    undisturbed, monitor = (Monitor(guard, **settings) for _ in range(2))
    undisturbed.update(stream)
    monitor.update(stream[:at])
    monitor.save(tmp_path / "monitor.safetensors")
    restored = Monitor.load(tmp_path / "monitor.safetensors", guard)
    assert restored.settings_as_json() == monitor.settings_as_json()
    assert_same(Monitor.load(tmp_path / "monitor.safetensors", guard), monitor)
    restored.update(stream[at:])
    assert_same(restored, undisturbed)
    assert (restored.parts, restored.classes) == (undisturbed.parts, undisturbed.classes)


def test_a_monitor_of_version_0_1_goes_on_as_it_was_begun_and_says_so(tmp_path, recwarn):
    begun = runpy.run_path(str(DATA / "make_monitor_v1.py"))
    detector, noted = begun["Watched"](), json.loads(begun["NUMBERS"].read_text(encoding="utf-8"))
    path = begun["FILE"]
    for place in (tmp_path / "once", tmp_path / "twice"):  # also after it is saved by this version
        with pytest.warns(GramwatchWarning, match="earlier version"):
            monitor = Monitor.load(path, detector)
        assert monitor.seen == 150
        monitor.save(path := place)
        strengths = []
        for one in begun["stream"](150, salt=22):
            monitor.update(one)
            strengths.append(monitor.strength)
        assert strengths == pytest.approx(noted["strength"], rel=1e-12)
        assert repr(monitor) == noted["repr"]
    monitor.save(path)
    with pytest.warns(GramwatchWarning, match="earlier version"):
        again = Monitor.load(path, detector)
    assert_same(again, monitor)
    new = Monitor(detector, mean_time_to_false_alarm=1_000, replica=(1, 2))
    new.save(path)
    fixed = Monitor(detector, reference="fixed")
    fixed.save(tmp_path / "fixed")
    recwarn.clear()
    assert_same(Monitor.load(path, detector), new)
    assert_same(Monitor.load(tmp_path / "fixed", detector), fixed)
    assert not recwarn


def test_an_old_monitor_with_a_fixed_reference_goes_on_without_a_word(guard, stream, tmp_path):
    """It draws nothing."""
    path = tmp_path / "monitor.safetensors"
    monitor = Monitor(guard, reference="fixed")
    monitor.update(stream)
    monitor.save(path)
    header = {k: v for k, v in opened(path).header.items() if k not in ("format", "library", "tensors")}
    del header["monitor"]["draw"]
    write(path, header, {name: torch.from_numpy(array) for name, array in monitor._arrays().items()})
    assert_same(Monitor.load(path, guard), monitor)


def test_a_file_is_refused_for_another_calibration_or_another_thing(guard, stream, tmp_path):
    path = tmp_path / "monitor.safetensors"
    monitor = Monitor(guard)
    monitor.update(stream)
    monitor.save(path)
    with pytest.raises(ArtifactError, match="another calibration"):
        Monitor.load(path, guarded(seed=9))
    guard.save(tmp_path / "guard.safetensors")
    with pytest.raises(ArtifactError, match="no monitor"):
        Monitor.load(tmp_path / "guard.safetensors", guard)
    with pytest.raises(NotFittedError, match="not calibrated"):
        Monitor.load(path, Guard(made(), members=["energy"]))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("seen", -1),
        ("seen", 10**30),
        ("seen", 599),
        ("seen", True),
        ("stride", 3),
        ("stride", 0),
        ("parts", ["gram"]),
        ("parts", "gram"),
        ("classes", 2**40),
        ("classes", 3),
        ("alarm", {"at": 1}),
        ("alarm", {"at": 601, "start": 0, "bet": 0}),
        ("alarm", {"at": 10, "start": 0, "bet": 99}),
        ("calibration", "0"),
        ("monitor", None),
        ("monitor", {"every": 1}),
        ("monitor", {"replica": [0, 0]}),
        ("monitor", {"replica": [0, 1, 2], "every": -1}),
        ("monitor", {"replica": [0, 1], "surprise": 1}),
        ("monitor", {"replica": [0, 1], "draw": "by hand"}),
        ("monitor", {"replica": [0, 1], "draw": ["seed"]}),
    ],
)
def test_forged_headers_are_refused(guard, stream, tmp_path, entry, value):
    path = tmp_path / "monitor.safetensors"
    monitor = Monitor(guard)
    monitor.update(stream)
    monitor.save(path)
    header = {k: v for k, v in opened(path).header.items() if k not in ("format", "library", "tensors")}
    tensors = {name: torch.from_numpy(array) for name, array in monitor._arrays().items()}
    write(path, {**header, entry: value}, tensors)
    with pytest.raises(ArtifactError, match=r"monitor\.safetensors"):
        Monitor.load(path, guard)


@pytest.mark.parametrize("name", ["sums", "gains", "starts", "counts", "history.flagged", "classes"])
def test_forged_numbers_are_refused(guard, stream, tmp_path, name):
    path = tmp_path / "monitor.safetensors"
    monitor = Monitor(guard)
    monitor.update(stream)
    monitor.save(path)
    header = {k: v for k, v in opened(path).header.items() if k not in ("format", "library", "tensors")}
    tensors = {key: torch.from_numpy(array).clone() for key, array in monitor._arrays().items()}
    tensors[name].view(-1)[0] = -1
    write(path, header, tensors)
    with pytest.raises(ArtifactError, match=name):
        Monitor.load(path, guard)


def test_a_batch_that_was_taken_in_by_half_is_never_saved(guard, stream, tmp_path, monkeypatch):
    path = tmp_path / "monitor.safetensors"
    monitor = Monitor(guard)
    monitor.update(stream[:100])
    monitor.save(path)

    def interrupted(self, bets):
        if self.time == 150:
            raise KeyboardInterrupt
        return add(self, bets)

    add = Evidence.add
    with monkeypatch.context() as patch:
        patch.setattr(Evidence, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            monitor.update(stream[100:])
    for refused in (lambda: monitor.save(path), lambda: monitor.update(stream)):
        with pytest.raises(gramwatch.GramwatchError, match="interrupted"):
            refused()
    undisturbed, restored = Monitor(guard), Monitor.load(path, guard)
    undisturbed.update(stream)
    restored.update(stream[100:])
    assert_same(undisturbed, restored)


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean_time_to_false_alarm": 0},
        {"reference": "martingale"},
        {"every": 0},
        {"confidence": 1.0},
        {"replica": (2, 2)},
        {"seed": -1},
    ],
)
def test_wrong_arguments_are_named(guard, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Monitor(guard, **wrong)


def test_a_detector_must_be_calibrated_by_halves():
    guard = Guard(made()).fit([images(400, 1)], progress=False)
    with pytest.raises(NotFittedError, match="not calibrated"):
        Monitor(guard)
    guard.calibrate([images(400, 2)], split=False, progress=False)
    with pytest.warns(GramwatchWarning, match="split=False"):
        Monitor(guard)


def test_detections_of_another_detector_are_refused(guard, stream):
    monitor = Monitor(guard)
    monitor.update(stream)
    net = made()
    other = Energy(net).calibrate([images(100, 2)], progress=False)
    with pytest.raises(InputError, match="one detector"):
        monitor.update(other(images(5, 3)))
