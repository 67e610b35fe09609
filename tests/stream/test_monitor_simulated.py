"""The simulations of monitors, and the page that holds their figures."""

import json

import numpy as np
import pytest
import torch

from gramwatch.numerics.metrics import auroc
from lab.benchmarks import document, fog, monitor


def test_monitors_keep_what_the_page_promises():
    """The simulations of docs/data/monitor.json: what is promised, and that the obvious way breaks it."""
    result = json.loads((document.DOCS / "data" / "monitor.json").read_text(encoding="utf-8"))
    assert {row["streams"] for row in result["false_alarms"]} == {1_000}
    for row in result["false_alarms"]:
        if row["form"] != "naive":
            assert row["mean_time"] >= 10_000, row
            assert row["within"] <= 0.1, row
            assert row["martingale"] <= 0.01, row
        else:
            assert row["martingale"] > 0.02, row
    aimed = [
        row["median"]
        for row in result["delays"]
        if row["share"] == 0.1 and (row["ranking"] == 2_500 or (row["form"] == "online" and row["before"]))
    ]
    assert len(aimed) == 5
    assert max(aimed) <= 100
    assert all(row["mean_time"] >= 10_000 for row in result["replicas"])
    assert len(result["selections"]) == 12
    assert all(row["realised"] <= row["fdr"] for row in result["selections"])


def test_simulated_streams_change_when_they_should():
    rng = np.random.default_rng(0)
    scores, _ = monitor.outliers(1.0, before=100)(rng, 200, 0)
    assert abs(scores[:, :100].mean()) < 0.1
    assert scores[:, 100:].mean() == pytest.approx(monitor.SHIFT, abs=0.1)
    inside, outside = torch.from_numpy(scores[:, :100]), torch.from_numpy(scores[:, 100:])
    assert auroc(inside.flatten(), outside.flatten()) == pytest.approx(0.99, abs=0.003)
    frames, _ = monitor.frames(25)(rng, 200, 0)
    assert frames.std() == pytest.approx(1, abs=0.03)
    assert np.corrcoef(frames[:, 0], frames[:, 24])[0, 1] > 0.95
    assert abs(np.corrcoef(frames[:, 0], frames[:, 25])[0, 1]) < 0.3
    mixed, groups = monitor.mixed(0.2, 250, later=0.8)(rng, 200, 0)
    assert groups[:, :250].mean() == pytest.approx(0.2, abs=0.02)
    assert groups[:, 250:].mean() == pytest.approx(0.8, abs=0.02)
    assert mixed[groups == 1].std() == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("kind", ["online", "fixed", "naive"])
def test_simulated_alarms_come_after_the_change(kind):
    form = monitor.Form(kind, 500)
    low, high = monitor.alarm_times(form, monitor.outliers(0.5, 500), 1_000, streams=20)
    assert (low <= high).all()
    assert ((high > 500) & (high < 600)).all()


def test_simulated_replicas_share_calibration_images_and_groups_are_ranked_apart():
    form = monitor.Form("online", 600, replicas=2)
    bets = form.bets(monitor.ordinary, 4, np.random.default_rng(0))
    counts = bets.ranks.counts.sum((1, 2))
    assert counts.tolist() == [270, 270, 270, 270]
    assert all((one == other).all() for one, other in zip(bets.grids[0::2], bets.grids[1::2], strict=True))
    mix, before = monitor.mixed(0.2, 500, later=0.9), monitor.mixed(0.2)
    for kind in ("online", "fixed"):
        joined, apart = (
            monitor.alarm_times(
                monitor.Form(kind, 2_500, groups=groups), mix, 1_500, streams=10, reference=before
            )[1]
            for groups in (1, 2)
        )
        assert np.isfinite(joined).all()
        assert np.isinf(apart).all()


def test_fog_grows_after_the_clear_images():
    share = fog.fog_of(4_000)
    assert share[: fog.CLEAR].max() == 0
    assert share[-1] == pytest.approx(fog.MOST)
    assert (share.diff() >= 0).all()
    image = torch.rand(1, 3, 4, 4)
    torch.testing.assert_close(fog.fogged(image, torch.tensor([0.0])), image)
    torch.testing.assert_close(fog.fogged(image, torch.tensor([1.0])), torch.full_like(image, fog.GREY))
