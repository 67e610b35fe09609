"""What the processes of tests/ranked.py are forked from: everything is imported, and kernels are compiled."""

import warnings

import torch

import gramwatch
from gramwatch.guard import rehearsal
from tests.guarded import OUTLIERS, images, made

torch.set_num_threads(1)
rehearsal.BUDGET = OUTLIERS  # as conftest.py has it
with warnings.catch_warnings():
    warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
    guard = gramwatch.Guard(made(), orders=(1, 2))
    guard.fit([images(40, 1)], progress=False).calibrate([images(60, 2)], progress=False)
