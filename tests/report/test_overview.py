"""The picture of the demo."""

import pytest
import torch


def test_scores_stand_where_they_belong():
    from gramwatch.report.overview import _place

    scores = torch.tensor([-30.0, -3.0, -1.5, 0.0, 1.5, 3.0, 30.0, 300.0, torch.inf])
    places = _place(scores, 3.0)
    assert places[:-1] == pytest.approx([-2, -1, -0.5, 0, 0.5, 1, 2, 3])
    assert places[-1] > 20
