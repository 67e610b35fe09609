"""The threshold at its edges: scores that equal it, and scores that are too few for it."""

import pytest
import torch

from gramwatch.errors import CalibrationError
from gramwatch.threshold import Ranks, is_above_threshold, threshold


def test_a_score_that_equals_the_threshold_is_kept():
    scores = torch.arange(1.0, 21).double()
    limit = threshold(scores, 0.9)
    given = torch.tensor([limit, limit + 1e-9, limit - 1e-9], dtype=torch.float64)
    assert is_above_threshold(given, scores, 0.9).tolist() == [False, True, False]


def test_ranks_of_scores_that_cannot_support_the_level_are_refused():
    """Without an error, no input would ever be flagged."""
    scores, together = torch.rand(18, 1).double(), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(CalibrationError, match=r"18 calibration scores cannot support level 0\.95"):
        Ranks.of(scores, 0.95, torch.zeros(18, dtype=torch.int64), together)
