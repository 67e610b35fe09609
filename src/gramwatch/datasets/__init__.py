"""Sets of images, in and out of distribution: one source per file."""
