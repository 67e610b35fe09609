"""A stream over time: the evidence of a monitor above, the share of flagged images below."""

from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramwatch.explain.frame import FAINT, INK, INSIDE, OUTSIDE, SMALL, SOFT, TEXT, Words, framed, plain

HIGHEST = 1e4
"""The axis ends at this many times the alarm level."""
WINDOWS = 80
"""The share of flagged images is drawn in at most so many steps."""
CAPTION = (
    "Strength: the mean of Shiryaev-Roberts over all bets, of each point the highest. The alarm comes where "
    "it reaches the dashed line. The shade begins where the monitor thinks that the change began."
)


def draw_stream(
    path: str | PathLike[str],
    time: NDArray[np.int64],
    strength: NDArray[np.float64],
    share: NDArray[np.float64],
    *,
    alarm_level: float,
    rate: float,
    alarm_at: int | None = None,
    since: int | None = None,
) -> None:
    """Draw strength and share of flagged images.

    Args:
        path: of the picture.
        time: the number of images at the end of each point.
        strength: the highest strength of each point.
        share: the share of flagged images of each point.
        alarm_level: the strength of an alarm.
        rate: the share that is flagged if nothing has changed.
        alarm_at: the image that raised the alarm.
        since: the number of images before the change, as estimated.

    """
    words, heights = Words("A stream over time"), {"height_ratios": [1.6, 1]}
    frame = framed(words, 3.4, 2, 1, caption=CAPTION, sharex=True, gridspec_kw=heights)
    above, below = frame.axes[:, 0]
    end = int(time[-1]) if len(time) else 1
    for axes in (above, below):
        plain(axes)
        axes.grid(color=FAINT, lw=0.6)
        axes.set_xlim(0, end)
        if since is not None:
            axes.axvspan(since, end, color=OUTSIDE, alpha=0.08, lw=0)
        if alarm_at is not None:
            axes.axvline(alarm_at, color=OUTSIDE, lw=1)
    _strength(above, time, strength, alarm_level, alarm_at)
    _share(below, time, share, rate)
    below.set_xlabel("images", fontsize=TEXT, color=INK)
    frame.write(path)


def _strength(axes: Any, time: Any, strength: Any, alarm_level: float, alarm_at: int | None) -> None:
    top = HIGHEST * alarm_level
    axes.plot(time, np.clip(strength, 0.1, top), color=INK, lw=1.2)
    axes.axhline(alarm_level, color=OUTSIDE, lw=1, ls="--")
    axes.set(yscale="log", ylim=(0.1, top))
    axes.minorticks_off()
    axes.set_ylabel("strength", fontsize=TEXT, color=INK)
    label = f"alarm level {alarm_level:,.0f}"
    axes.text(
        0.005, alarm_level * 1.6, label, transform=axes.get_yaxis_transform(), fontsize=SMALL, color=OUTSIDE
    )
    if alarm_at is not None:
        left = alarm_at > 0.5 * axes.get_xlim()[1]
        place = {"xytext": (-4 if left else 4, 0), "ha": "right" if left else "left"}
        axes.annotate(
            f"alarm at image {alarm_at:,}",
            (alarm_at, 0.2),
            textcoords="offset points",
            fontsize=SMALL,
            color=OUTSIDE,
            **place,
        )


def _share(axes: Any, time: Any, share: Any, rate: float) -> None:
    """The share in windows of several points: single images would be a cloud of zeros and ones."""
    images = np.diff(time, prepend=0)
    windows = np.array_split(np.arange(len(time)), min(WINDOWS, max(1, len(time))))
    ends = [time[window[-1]] for window in windows if len(window)]
    means = [100 * np.average(share[window], weights=images[window]) for window in windows if len(window)]
    if ends:
        axes.stairs(means, [0, *ends], color=INSIDE, lw=1.2)
    axes.axhline(100 * rate, color=SOFT, lw=1, ls="--")
    axes.set_ylim(0, max([3 * 100 * rate, *(1.1 * mean for mean in means)]))
    axes.set_ylabel("flagged, percent", fontsize=TEXT, color=INK)
