"""Detectors x sets: a table, and its picture."""
