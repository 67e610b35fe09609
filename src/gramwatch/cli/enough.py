"""The cost of few images in missed outliers, measured by `python -m lab.benchmarks.sample_sizes`."""

CALIBRATION_IMAGES = 1_000
"""The recommended number of images to calibrate on."""
IMAGES_OF_A_CLASS = 100
"""The recommended number of training images of each class."""
MISSED_BY_CALIBRATION = {40: 13, 100: 12, 200: 1, 500: 2}
"""Number of calibration images: further outliers missed, of 100, compared with the largest number of
images."""
MISSED_BY_FIT = {10: 8, 25: 2, 50: 1, 100: 1}
"""The same for training images of each class."""
HARDLY = 2
"""Fewer missed outliers than this, of 100, are not worth a message."""
PAGE = "docs/howto/calibration.md"


def few_to_calibrate(images: int) -> str | None:
    """The cost of calibrating on `images` images, in words. None if it is small."""
    measured, missed = _nearest(MISSED_BY_CALIBRATION, images)
    if missed <= HARDLY:
        return None
    return (
        f"{images:,} images to calibrate on are few. Guards calibrated on {measured:,} missed up "
        f"to {missed} of 100 outliers more than with many. {CALIBRATION_IMAGES:,} are recommended ({PAGE})"
    )


def few_to_fit(images: int, classes: int) -> str | None:
    """The cost of fitting on so few images of each class, in words. None if it is small."""
    measured, missed = _nearest(MISSED_BY_FIT, images // classes)
    if missed <= HARDLY:
        return None
    return (
        f"{images:,} images of {classes:,} classes to fit on are few. Guards fitted on {measured:,} "
        f"of each class missed up to {missed} of 100 outliers more than with many. {IMAGES_OF_A_CLASS:,} of "
        f"each class are recommended ({PAGE})"
    )


def _nearest(table: dict[int, int], images: int) -> tuple[int, int]:
    """The largest number in the table that is not above this one, else the smallest, and its cost."""
    key = max((number for number in table if number <= images), default=min(table))
    return key, table[key]
