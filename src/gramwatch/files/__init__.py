"""Files are written whole or not at all, and read with suspicion. Every file names the library's version."""

__version__ = "0.1.0"
