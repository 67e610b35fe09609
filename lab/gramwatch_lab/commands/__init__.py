"""Commands that join `gramwatch`: `paper`, `study`, `train` and `data`."""
