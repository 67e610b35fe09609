"""Experiments: one file per table or figure."""
