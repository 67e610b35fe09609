"""The contract of all detectors: fit, merge, calibrate, call, save; and from a score to a verdict (Eq. 6)."""
