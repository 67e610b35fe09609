"""The threshold at its edge: scores that are too few for it."""

import pytest
import torch

from gramwatch.detect.threshold import Ranks
from gramwatch.errors import CalibrationError


def test_ranks_of_scores_that_cannot_support_the_level_are_refused():
    """Without an error, no input would ever be flagged."""
    scores, together = torch.rand(18, 1).double(), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(CalibrationError, match=r"18 calibration scores cannot support level 0\.95"):
        Ranks.of(scores, 0.95, torch.zeros(18, dtype=torch.int64), together)
