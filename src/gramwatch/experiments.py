"""The old name of `gramwatch.paper` and `gramwatch.demo`."""

from gramwatch.errors import moved

moved("gramwatch.experiments", "gramwatch.paper", paper="gramwatch.paper.experiment")
