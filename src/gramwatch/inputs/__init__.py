"""Inputs: batches of any nesting, images of files and named sets, preprocessing, networks by name."""
