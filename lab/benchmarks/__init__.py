"""Benchmarks: scripts that print and save what the documents quote. Never run as tests."""
