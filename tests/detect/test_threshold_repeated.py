"""Inputs that repeat get one verdict in batches of any size, and the rate of false alarms holds for all."""

import copy
import json
import warnings

import pytest
import torch
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard, Monitor
from gramwatch.deploy.exported import ExportedGuard
from gramwatch.detect.calibrating import RUN_AGAIN
from gramwatch.detect.measurement import Calibration
from gramwatch.detect.threshold import ROUNDING
from gramwatch.files import artifact
from gramwatch.methods import Energy
from tests.guarded import Net, images, made
from tests.small import images as small_images
from tests.small import made as small_net

BATCHES = (1, 7, 128)
EVERY = 10
"""Every tenth image is blank: in calibration data, which are read in batches of 128, and in the stream."""

FEW = 150
"""The number of images that are judged one by one."""


def with_blanks(seed: int, value: float, count: int = 1000) -> Tensor:
    x = images(count, seed)
    x[::EVERY] = value
    return x


def calibrated(detector, x: Tensor, batch: int = 128):
    """Blank frames are exact copies, which a warning says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*exact copies", GramwatchWarning)
        return detector.calibrate(x.split(batch), progress=False)


@pytest.fixture(scope="module")
def fitted() -> Guard:
    return Guard(made()).fit(images(400, 1).split(100), progress=False)


@pytest.mark.parametrize(("value", "per_class"), [(1.0, False), (2.0, False), (2.0, True)])
def test_blank_frames_get_one_verdict_in_any_batch_and_the_rate_holds(fitted, value, per_class):
    guard = calibrated(Guard.of(fitted.members, per_class=per_class), with_blanks(2, value))
    stream = with_blanks(3, value)
    whole = guard(stream)
    for size in BATCHES:
        found = [guard(x) for x in stream[: FEW if size == 1 else None].split(size)]
        blank = torch.cat([torch.stack([f.p_value, f.is_ood, *f.parts.values()], 1) for f in found])[::EVERY]
        assert len(blank.unique(dim=0)) == 1
        flagged = torch.cat([f.is_ood for f in found])
        assert flagged.equal(whole.is_ood[: len(flagged)])
    assert whole.is_ood.double().mean() < 0.07  # 5 % and two standard deviations
    alone = guard(stream[:1])
    among = guard(torch.cat([4 * images(60, 8), stream[:1]]))
    assert float(alone.p_value) == float(among.p_value[-1])
    assert bool(alone.is_ood) == bool(among.is_ood[-1])


def test_blank_frames_get_one_verdict_from_gram_and_methods_without_a_rule(fitted):
    gram = GramDetector(fitted.model).fit(images(400, 1).split(100), progress=False)
    for detector in (gram, Energy(fitted.model)):
        for value in (2.0, -3.0):
            calibrated(detector, with_blanks(2, value))
            stream = with_blanks(3, value)
            p = [torch.cat([detector(x).p_value for x in stream[:FEW].split(n)])[::EVERY] for n in BATCHES]
            assert len(torch.cat(p).unique()) == 1
            assert float(p[0][0]) >= 0.05 or float(p[0][0]) <= 1 / 1000 + 1e-9


def test_the_rate_holds_on_average_over_calibrations_with_blank_frames(fitted):
    rates = []
    for seed in range(8):
        guard = calibrated(fitted, with_blanks(100 + seed, 2.0, 400))
        found = guard(with_blanks(200 + seed, 2.0, 400)[: 40 * EVERY])
        rates.append(float(found.is_ood.double().mean()))
    assert sum(rates) / len(rates) <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5 / 8**0.5


def test_an_exported_guard_gives_blank_frames_the_verdict_of_the_guard(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    guard = Guard(made(), members=("gram",), orders=(1, 2))  # a whole guard takes four times as long
    guard = calibrated(guard.fit(images(400, 1).split(100), progress=False), with_blanks(2, 3.0))
    guard.export(tmp_path / "guard.onnx", images(3, 3))
    exported = ExportedGuard(tmp_path / "guard.onnx", "cpu")
    assert exported.calibration().tolerance.tolist() == guard.calibration().tolerance[:1].tolist()
    assert exported.calibration().threshold(0.95) == guard.threshold_
    stream = with_blanks(3, 3.0)
    want = guard(stream)
    for size in BATCHES:
        found = [exported(x) for x in stream[: FEW if size == 1 else None].split(size)]
        flagged = torch.cat([f.is_ood for f in found])
        assert flagged.equal(want.is_ood[: len(flagged)])
        p = torch.cat([f.p_value for f in found])[::EVERY]
        assert p.unique().tolist() == [float(want.p_value[0])]


@pytest.mark.parametrize("value", [2.0])
@pytest.mark.parametrize("reference", ["online", "fixed"])
def test_a_monitor_bets_the_same_on_blank_frames_in_any_batch(fitted, reference, value):
    guard = calibrated(fitted, with_blanks(2, value))
    stream = with_blanks(3, value, FEW)
    strengths = []
    for size in BATCHES:
        monitor = Monitor(guard, reference=reference)
        for x in stream.split(size):
            monitor.update(guard(x))
        assert not monitor.alarm
        strengths.append(monitor.strength)
    assert strengths == pytest.approx([strengths[0]] * 3, rel=1e-9)


# --- the tolerance -----------------------------------------------------------------------------------


def test_the_tolerance_is_twice_the_change_of_scores_in_other_batches_or_more(fitted):
    x = images(300, 4)
    guard = fitted.calibrate(x.split(100), progress=False)
    calibration = guard.calibration()
    assert calibration.tolerance.shape == (1 + len(guard.members),)
    with torch.inference_mode():
        scores = [
            torch.cat([calibration.rule(guard.measure(part)) for part in x.split(n)]) for n in (1, 7, 100)
        ]
    change = max((scores[i] - scores[2]).abs().amax(0).max() for i in (0, 1))
    assert change > 0  # otherwise there is nothing to tolerate
    for i in (0, 1):
        # Of 300 inputs, where 32 were run again.
        assert ((scores[i] - scores[2]).abs().amax(0) <= calibration.tolerance).all()
    floor = ROUNDING * calibration.scores.abs().quantile(0.9, 0)
    assert (calibration.tolerance >= floor).all()
    assert (calibration.tolerance < 1e-3 * calibration.scores.std(0)).all()


def test_a_score_is_out_of_distribution_exactly_if_it_exceeds_the_threshold(fitted):
    guard = fitted.calibrate(images(300, 4).split(100), progress=False)
    calibration, cut = guard.calibration(), torch.tensor(guard.threshold_, dtype=torch.float64)
    scores = calibration.scores.clone()
    tolerance = float(calibration.tolerance[0])
    near = torch.stack([cut, cut.nextafter(cut + 1), cut - tolerance, cut + tolerance])
    scores = torch.cat([calibration.limits[:, 0], near]).unsqueeze(1).expand(-1, scores.shape[1])
    p, is_ood = calibration.ranks.judged(scores, torch.zeros(len(scores), dtype=torch.int64))
    assert is_ood.equal(scores[:, 0] > cut)
    assert is_ood.equal(p[:, 0] <= 0.05)
    higher = (calibration.limits[:, 0] >= scores[:, :1]).sum(1)
    assert p[:, 0].equal((1 + higher).double() / (len(calibration.scores) + 1))


def test_a_p_value_is_never_smaller_than_without_a_tolerance(fitted):
    x = images(300, 4)
    guard = fitted.calibrate(x.split(100), progress=False)
    calibration = guard.calibration()
    none = {key: value for key, value in calibration.how.items() if key != "tolerance"}
    facts = (none, calibration.predicted, calibration.ranks.group_of)
    without = Calibration.restored(calibration.rule, calibration.scores, 0.95, *facts)
    measured = guard.measure(torch.cat([x, 2 * images(100, 5)]))
    assert (calibration.judged(measured)[1] >= without.judged(measured)[1]).all()
    assert (without.judged(measured)[2] >= calibration.judged(measured)[2]).all()


def test_the_tolerance_is_saved_and_files_of_earlier_versions_have_none(fitted, tmp_path):
    x = images(300, 4)
    gram = GramDetector(fitted.model).fit(images(400, 1).split(100), progress=False)
    for detector in (fitted, gram, Energy(fitted.model)):
        detector.calibrate(x.split(100), progress=False)
        detector.save(tmp_path / "new")
        loaded = gramwatch.load(tmp_path / "new", detector.model)
        assert loaded.calibration().tolerance.equal(detector.calibration().tolerance)
        assert loaded.threshold_ == detector.threshold_
        saved = artifact.read(tmp_path / "new")
        layout = saved.file.layout
        header = json.loads(json.dumps(saved.header))
        del header["calibration"]["tolerance"]
        artifact.write(tmp_path / "old", header, {name: saved.file.tensor(name) for name in layout})
        old = gramwatch.load(tmp_path / "old", detector.model)
        assert old.calibration().tolerance.tolist() == [0.0] * len(detector.calibration().tolerance)
        scores = detector.calibration_scores_
        assert old.threshold_ == gramwatch.detect.threshold.threshold(scores, 0.95) < detector.threshold_
        old.save(tmp_path / "again")
        assert gramwatch.load(tmp_path / "again", detector.model).threshold_ == old.threshold_


@pytest.mark.parametrize("tolerance", [[-1.0], [1.0], [0.1] * 6, "much", [None] * 5, None])
def test_a_forged_tolerance_is_refused(fitted, tmp_path, tolerance):
    fitted.calibrate(images(100, 4).split(100), progress=False)
    fitted.save(tmp_path / "guard")
    saved = artifact.read(tmp_path / "guard")
    saved.header["calibration"]["tolerance"] = tolerance
    artifact.write(tmp_path / "forged", saved.header, {n: saved.file.tensor(n) for n in saved.file.layout})
    with pytest.raises(gramwatch.ArtifactError, match="tolerance"):
        gramwatch.load(tmp_path / "forged", fitted.model)


def test_a_measurement_has_no_inputs_and_is_ranked_with_the_rounding_of_float32(fitted):
    measured = fitted.measure_all(images(300, 4).split(100), progress=False)
    calibration = fitted.calibrate_on(measured).calibration()
    assert calibration.tolerance.equal(ROUNDING * calibration.scores.abs().quantile(0.9, 0))


def test_the_half_that_ranks_is_not_run_again(fitted):
    seen = []
    guard = copy.deepcopy(fitted)
    x = images(300, 4)
    measure = guard.measure
    guard.measure = lambda inputs: (seen.append(inputs), measure(inputs))[1]
    guard.calibrate(iter(x.split(100)), progress=False)
    again = torch.cat(seen[3:])
    standard, _ = gramwatch.detect.split.halves(300, 0)
    assert len(again) == 2 * RUN_AGAIN
    assert {float(a.sum()) for a in again} == {float(x[i].sum()) for i in standard[:RUN_AGAIN]}


def test_texts_of_several_lengths_are_run_again_in_batches_of_one_length():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.conv = nn.Embedding(50, 8), nn.Conv1d(8, 8, 3, padding=1)
            self.head = nn.Linear(8, 3)

        def forward(self, input_ids, attention_mask):
            mask = attention_mask[:, None]
            x = torch.relu(self.conv(self.embedding(input_ids).mT * mask)) * mask
            return self.head(x.sum(2) / attention_mask.sum(1, keepdim=True))

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        for length in (5, 9, 7, 12, 9, 5, 7, 11):
            ids = torch.randint(0, 50, (25, length), generator=generator)
            lengths = torch.randint(2, length + 1, (25, 1), generator=generator)
            yield {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}

    guard = Guard(Text().eval(), members=("profile", "energy")).fit(batches(0), progress=False)
    guard.calibrate(batches(1), progress=False)
    assert (guard.calibration().tolerance > 0).all()
    assert guard.calibration().tolerance[0] < 1e-3


class Fixed(Net):
    """A network for batches of one size."""

    def forward(self, x):
        if len(x) != 20:
            raise RuntimeError("20 images, please")
        return super().forward(x)


class Mixed(Net):
    """A network whose output depends on the other inputs of a batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_a_network_for_one_batch_size_is_calibrated_with_a_warning():
    guard = Guard(made(), members=("energy",)).fit(images(200, 1).split(20), progress=False)
    guard.model.__class__ = Fixed
    with pytest.warns(GramwatchWarning, match="could not be run again.*20 images, please"):
        guard.calibrate(images(200, 2).split(20), progress=False)
    assert guard.calibration().tolerance[0] > 0


def test_a_network_that_mixes_the_inputs_of_a_batch_is_noticed():
    net = made()
    net.__class__ = Mixed
    guard = Guard(net, members=("energy",)).fit(images(200, 1).split(20), progress=False)
    with pytest.warns(GramwatchWarning, match="differ by up to .* between batches"):
        guard.calibrate(images(200, 2).split(20), progress=False)


# --- copies, what is not finite, and few images ------------------------------------------------------


def test_exact_copies_among_calibration_images_are_said_with_their_number_and_cost(fitted):
    copies = images(20, 5).repeat(50, 1, 1, 1)
    with pytest.warns(GramwatchWarning, match=r"980 of 1,000 .* exact copies.*20 are different.*23 %"):
        fitted.calibrate(copies.split(128), progress=False)


def test_a_few_copies_are_not_worth_a_warning(fitted):
    x = images(300, 5)
    x[-3:] = x[:3]
    fitted.calibrate(x.split(128), progress=False)
    x[-4:] = x[:4]
    with pytest.warns(GramwatchWarning, match="4 of 300 calibration examples are exact copies"):
        fitted.calibrate(x.split(128), progress=False)


def test_images_that_are_not_finite_are_left_out_with_what_that_means_for_the_rate(fitted):
    x = images(200, 5)
    x[3::20, :, 1] = torch.nan
    with pytest.warns(GramwatchWarning, match="^10 calibration .* holds for finite inputs.* 5.0%"):
        fitted.calibrate(x.split(64), progress=False)
    assert fitted.calibration().how["examples"] == 190
    # Halves are those of the running numbers in the loader.
    standard, _ = gramwatch.detect.split.halves(torch.arange(200)[x.isfinite().all((1, 2, 3))], 0)
    assert len(standard) == 95


def test_per_class_with_few_images_ranks_all_classes_together():
    guard = Guard(small_net(), per_class=True, members=("energy",))
    guard.fit(small_images(200, 1).split(50), progress=False)
    guard.calibrate(small_images(120, 2).split(50), progress=False)
    assert guard.groups_ == [[0, 1, 2]]
    assert guard(small_images(300, 3)).is_ood.double().mean() < 0.15
