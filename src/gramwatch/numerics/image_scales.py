"""At which scales, in which regions and above which floors image numbers are computed, slow or fast."""

SCALES = (1, 2, 4)
"""The image is reduced by these factors, by the mean of square blocks."""
BUSY = (1, 2)
"""At these scales, the plainest and the busiest region count."""
REGIONS = 4
"""The image has so many rows and columns of regions. The plainest and the busiest one count."""
BLOCK = 8
"""The side of the blocks of JPEG. Their edges show in large differences at every eighth place."""
FLOOR = 2.5e-6
"""The floor of mean squares, relative to the square of the largest value: a quarter of a step of 8 bits."""
SHARE = 1e-3
"""The floor of shares of pixels."""
CLIPPED = 0.0041
"""A pixel is clipped if it lies this near the largest or smallest value, relative to their distance.

No whole number of steps of 8 bits is just as far, whatever their distance: rounding does not decide there."""


def pairs_of(channels: int) -> list[tuple[int, int]]:
    """The pairs of channels that are compared: neighbours, the last one and the first one among them."""
    if channels < 3:
        return [(0, 1)] if channels == 2 else []
    return [(i, (i + 1) % channels) for i in range(channels)]
