"""Rehearsal: a guard learns how much each member counts on this network, from outliers that it makes itself.

The outliers are made of calibration inputs that standardise, never of those that rank: p-values keep their
guarantee. A family is one way of making them. The weights separate these inputs from their outliers by
logistic regression on standardised scores. A family that changes what an image shows counts as six others.
No weight is negative. The penalty pulls the weights towards each other, and more so with few inputs: with no
information, all members count the same.

No outlier data and no labels are used.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.detect.distributed import Group
from gramwatch.detect.split import KeptInputs
from gramwatch.errors import in_short, warn
from gramwatch.files import artifact
from gramwatch.inputs.batches import Inputs, mapped
from gramwatch.inputs.image_numbers import image_of

BUDGET = 2400
"""The most outliers that are run through the network, over all families."""
PENALTY = 0.1
"""The weight of the variance of the weights in the loss, with `ENOUGH` inputs or more."""
ENOUGH = 100
"""With fewer inputs, the penalty grows as the square of what is missing."""
LARGEST = 20.0
"""Higher standardised scores count as this: one huge score must not decide."""
FEWEST = 16
"""With fewer inputs, all weights are equal."""
LEAST_TOLD = 0.1
"""With a smaller mean, before weights are scaled, scores tell little. Weights are the nearer to equal."""
LEAST_TOKENS = 4
"""Shorter texts are not changed."""
AT_ONCE = 32
"""The number of outliers in a batch."""
CONTENTS = ("shuffled tiles", "quilted", "mixed", "phases scrambled")
"""The families that change what an image shows. Other families resemble faults of the camera."""
CONTENTS_COUNT = 6
"""How many times as much as another family one of `CONTENTS` counts: there are few of them."""


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found out."""

    weights: Tensor
    """The weight of each member, `(members,)`: not negative, one on average."""
    inputs: int
    """The number of calibration inputs that outliers were made of."""
    outliers: int
    """The number of outliers that were run."""
    families: tuple[str, ...]
    """The families of outliers."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a file says of it, beside the weights."""
        return {"inputs": self.inputs, "outliers": self.outliers, "families": list(self.families)}


def check_facts(facts: Any) -> None:
    """Refuse facts of a file that are of another form."""
    if not isinstance(facts, dict):
        raise ValueError(f"its rehearsal is {facts!r:.60}")
    artifact.check_types(facts, inputs=int, outliers=int, families=list[str])
    if min(facts["inputs"], facts["outliers"]) < 1:
        raise ValueError(f"its rehearsal is {facts!r:.60}")


def check_weights(weights: Tensor) -> None:
    """Refuse weights of a file that are not one on average."""
    if abs(float(weights.mean()) - 1) > 1e-6:
        raise ValueError(f"the weights of its members are {weights.tolist()!r:.60}")


def rehearse(
    measured_scores: Callable[[Inputs], Tensor],
    usual: Tensor,
    kept: KeptInputs,
    group: Group,
    mask_of: Callable[[Inputs], Tensor | None],
    progress: bool = True,
) -> Rehearsal | None:
    """Make outliers of the kept inputs, run them, and learn the weights of members.

    None if the inputs are too few, if no outliers can be made of them, or if the network does not run on
    them. A warning says so in the last case.

    Args:
        measured_scores: the standardised scores of inputs, `(N, members)`.
        usual: those of calibration inputs that standardise.
        kept: a sample of these inputs.
        group: the ranks of this run, each with its part of the sample.
        mask_of: which places of inputs are padding, if the network gets a mask.
        progress: show a progress bar (on a terminal only).

    """
    from tqdm.auto import tqdm

    extremes = group.gather(_extremes(kept))
    known = [pair for pair in extremes if pair is not None]
    lowest = torch.stack([low for low, _ in known]).amin(0) if known else torch.zeros(1)
    highest = torch.stack([high for _, high in known]).amax(0) if known else torch.ones(1)
    maker = Maker(lowest, highest, kept.seed)
    first = next((inputs for _, inputs in kept.batches(1)), None)
    families = max(group.gather(() if first is None else families_of(first, maker)), key=len)
    if len(kept) < FEWEST or not families:
        return None
    per_family = min(len(kept), max(1, BUDGET // len(families)))
    order = kept.numbers.tolist()
    scores: dict[str, list[Tensor]] = {family: [] for family in families}
    shown = tqdm(
        families, desc="rehearsing", unit="family", disable=None if progress and not group.rank else True
    )
    problem = ""
    try:
        for place, family in enumerate(shown):
            start = place * per_family % len(order)
            chosen = (order[start:] + order[:start])[:per_family]
            for _, inputs in kept.batches(AT_ONCE, chosen):
                outliers = maker.outliers(inputs, family, mask_of(inputs))
                scores[family].append(measured_scores(outliers))
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        problem = in_short(error)
    ranks = group.gather((scores, problem))
    problem = next(filter(None, (p for _, p in ranks)), "")
    if problem:
        if group.rank == 0:
            warn(f"outliers could not be run through the network, so all members count the same ({problem})")
        return None
    by_family = {family: torch.cat([s for of, _ in ranks for s in of[family]]) for family in families}
    by_family = {family: s for family, s in by_family.items() if len(s)}
    if not by_family:
        return None
    run = sum(map(len, by_family.values()))
    return Rehearsal(learned_weights(usual, by_family), len(kept), run, tuple(by_family))


def _extremes(kept: KeptInputs) -> tuple[Tensor, Tensor] | None:
    """The smallest and the largest value of each channel of the kept images; None if they are no images."""
    lowest: Tensor | None = None
    highest = lowest
    for _, inputs in kept.batches(AT_ONCE):
        image = image_of(inputs)
        if image is None:
            return None
        low, high = image.float().amin((0, 2, 3)), image.float().amax((0, 2, 3))
        lowest = low if lowest is None else lowest.minimum(low)
        highest = high if highest is None else highest.maximum(high)
    return None if lowest is None or highest is None else (lowest, highest)


# --- weights -----------------------------------------------------------------------------------------


def learned_weights(usual: Tensor, outliers: Mapping[str, Tensor]) -> Tensor:
    """The weights of members, `(members,)`, from standardised scores `(N, members)`.

    They are scaled to a mean of one.

    Args:
        usual: of in-distribution inputs.
        outliers: of the outliers of each family.

    """
    from scipy.optimize import minimize

    sets = [usual, *outliers.values()]
    scores = torch.cat(sets).clamp_max(LARGEST).numpy()
    signs = np.concatenate([np.full(len(s), -1.0 if s is usual else 1.0) for s in sets])
    counts = [CONTENTS_COUNT if family in CONTENTS else 1 for family in outliers]
    per_family = zip(counts, outliers.values(), strict=True)
    shares = [0.5 / len(usual), *(0.5 * count / sum(counts) / len(s) for count, s in per_family)]
    share = np.concatenate([np.full(len(s), of) for s, of in zip(sets, shares, strict=True)])
    members = scores.shape[1]
    penalty = PENALTY * max(1.0, ENOUGH / len(usual)) ** 2

    def loss(parameters: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, object]:
        weights, offset = parameters[:-1], parameters[-1]
        margin = signs * (scores @ weights + offset)
        slope = -signs * share / (1 + np.exp(margin))
        apart = weights - weights.mean()
        value = share @ np.logaddexp(0, -margin) + penalty * (apart @ apart) / members
        gradient = scores.T @ slope + 2 * penalty * apart / members
        return float(value), np.append(gradient, slope.sum())

    start = np.append(np.ones(members), -1.0)
    bounds = [(0.0, None)] * members + [(None, None)]
    weights = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x[:-1]
    mean = weights.mean()
    if not np.isfinite(weights).all() or mean <= 0:
        return torch.ones(members, dtype=torch.float64)
    trust = min(1.0, mean / LEAST_TOLD)
    return torch.from_numpy(trust * weights / mean + (1 - trust))


# --- outliers ----------------------------------------------------------------------------------------


class Maker:
    """Makes outliers of inputs of one network.

    Args:
        lowest: the smallest value of each channel of the images, `(channels,)`.
        highest: the largest value.
        seed: of the random numbers.

    """

    def __init__(self, lowest: Tensor, highest: Tensor, seed: int) -> None:
        self._low = lowest.view(1, -1, 1, 1)
        self._range = (highest - lowest).clamp_min(1e-6).view(1, -1, 1, 1)
        self.generator = torch.Generator().manual_seed(seed)

    # Random numbers of one generator: the same seed makes the same outliers.

    def rand(self, *shape: int) -> Tensor:
        """Random numbers from 0 to 1."""
        return torch.rand(*shape, generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        """Random normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def whole(self, low: int, high: int) -> int:
        """A random whole number from `low` to `high - 1`."""
        return int(torch.randint(low, high, (), generator=self.generator))

    def between(self, low: float, high: float) -> float:
        """A random number from `low` to `high`."""
        return low + (high - low) * float(self.rand(1))

    def factor(self, low: float, high: float) -> float:
        """A random number from `low` to `high` whose logarithm is uniform."""
        return math.exp(self.between(math.log(low), math.log(high)))

    def outliers(self, inputs: Inputs, family: str, mask: Tensor | None = None) -> Inputs:
        """Outliers of inputs, by a family of `families_of`. What is neither image nor text stays as it is."""
        if family in TEXTS:
            before = text_of(inputs)
            assert before is not None
            after = TEXTS[family](self, before, torch.ones_like(before) if mask is None else mask)
        else:
            before = image_of(inputs)
            assert before is not None
            after = self.images(before, family)
        return mapped(inputs, lambda t: after if t is before else t)

    def images(self, images: Tensor, family: str) -> Tensor:
        """Outliers of images `(N, channels, height, width)`, by a family of `IMAGES`.

        A family changes pixels from 0 to 1. Here 0 and 1 are the smallest and the largest value of a channel.
        """
        pixels = (images.float() - self._low) / self._range
        if family == NORMALISED:
            changed = self._normalised_otherwise(pixels)
        else:
            change = IMAGES[family]
            changed = torch.cat([change(self, pixels[i : i + 1], pixels) for i in range(len(pixels))])
        return (changed * self._range + self._low).to(images.dtype)

    @property
    def is_normalised(self) -> bool:
        """Whether the images are not simply pixels from 0 to 1."""
        return bool(self._low.abs().amax() > 0.05 or (self._range - 1).abs().amax() > 0.05)

    def _normalised_otherwise(self, pixels: Tensor) -> Tensor:
        """The pixels of a normalisation that was left out, or done twice."""
        left_out, twice = (pixels - self._low) / self._range, pixels * self._range + self._low
        return torch.where(self.rand(len(pixels), 1, 1, 1) < 0.5, left_out, twice)


Family = Callable[[Maker, Tensor, Tensor], Tensor]
"""Makes an outlier of one image `(1, channels, height, width)`, from 0 to 1. The last is its batch."""


def _noisy(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    return (image + make.factor(0.03, 0.3) * make.randn(*image.shape)).clamp(0, 1)


def _blurred(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """A lens out of focus, or a movement along one axis."""
    sigma = make.factor(0.6, max(1.0, 0.03 * image.shape[3]))
    axes = ((2, 3), (2, 3), (2,), (3,))[make.whole(0, 4)]
    for axis in axes:
        radius = min(math.ceil(3 * sigma), image.shape[axis] - 1)
        kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma).square())
        kernel = kernel / kernel.sum()
        shape, pad = (
            ((1, 1, -1, 1), (0, 0, radius, radius)) if axis == 2 else ((1, 1, 1, -1), (radius, radius, 0, 0))
        )
        channels = image.shape[1]
        kernels = kernel.view(shape).expand(channels, *[-1] * 3)
        image = F.conv2d(F.pad(image, pad, mode="reflect"), kernels, groups=channels)
    return image


def _low_resolution(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """Reduced and enlarged again, smoothly or by the nearest pixel."""
    size, factor, way = image.shape[2:], make.factor(1.5, 6), make.whole(0, 3)
    reduced = [max(2, round(side / factor)) for side in size]
    if way == 0:
        small = F.interpolate(image, reduced, mode="nearest")
    else:
        small = F.interpolate(image, reduced, mode="bilinear", antialias=True)
    return F.interpolate(small, size, mode="nearest" if way < 2 else "bilinear")


def _channels_permuted(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    channels = torch.arange(image.shape[1])
    order = channels
    while order.equal(channels):
        order = torch.randperm(len(channels), generator=make.generator)
    return image[:, order]


def _grey(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    return image.mean(1, keepdim=True).expand_as(image)


def _inverted(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    return 1 - image


def _contrast_changed(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    factor = make.factor(0.15, 0.6) if make.whole(0, 2) else make.factor(1.6, 4)
    mean = image.mean()
    return (mean + factor * (image - mean)).clamp(0, 1)


def _brightness_changed(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """Light times or divided by 2 to 8. A pixel is proportional to the light to the power of 1 / 2.2."""
    stops = make.between(1, 3) * (1 if make.whole(0, 2) else -1)
    return (image * 2 ** (stops / 2.2)).clamp(0, 1)


def _tiles(images: Tensor, count: int) -> Tensor:
    """The tiles of images, `(N, count * count, channels, height, width)`. Pixels left over are cut off."""
    height, width = (side // count for side in images.shape[2:])
    images = images[:, :, : height * count, : width * count]
    split = images.unflatten(3, (count, width)).unflatten(2, (count, height))
    tiles: Tensor = split.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    return tiles


def _with_tiles(image: Tensor, tiles: Tensor, count: int) -> Tensor:
    """The image with tiles `(count * count, channels, height, width)` in place of its own."""
    whole = tiles.unflatten(0, (count, count)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    changed = image.clone()
    changed[0, :, : whole.shape[1], : whole.shape[2]] = whole
    return changed


def _shuffled(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """A puzzle with its tiles in a wrong order."""
    count = make.whole(2, 5)
    tiles = _tiles(image, count)[0]
    return _with_tiles(image, tiles[torch.randperm(len(tiles), generator=make.generator)], count)


def _quilted(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """Tiles of different images, each in its own place."""
    count = make.whole(2, 5)
    chosen = torch.randint(len(batch), (count * count,), generator=make.generator)
    return _with_tiles(image, _tiles(batch, count)[chosen, torch.arange(count * count)], count)


def _mixed(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """Two images on top of each other."""
    share, other = make.between(0.35, 0.65), batch[make.whole(0, len(batch))].unsqueeze(0)
    if other.equal(image):
        other = image.flip(3)
    return share * image + (1 - share) * other


def _occluded(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """A rectangle that is black, white, of one colour or of noise."""
    area, aspect = make.between(0.08, 0.4), make.factor(0.5, 2)
    sides = [(area * aspect) ** 0.5, (area / aspect) ** 0.5]
    height, width = (
        min(side, max(1, round(part * side))) for part, side in zip(sides, image.shape[2:], strict=True)
    )
    top, left = make.whole(0, image.shape[2] - height + 1), make.whole(0, image.shape[3] - width + 1)
    channels, way = image.shape[1], make.whole(0, 4)
    colour = torch.full((1, 1, 1, 1), float(way)) if way < 2 else make.rand(1, channels, 1, 1)
    changed = image.clone()
    changed[:, :, top : top + height, left : left + width] = (
        make.rand(1, channels, height, width) if way == 3 else colour
    )
    return changed


def _rotated(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    turned = torch.rot90(image, 1 + 2 * make.whole(0, 2), (2, 3))
    return turned if turned.shape == image.shape else F.interpolate(turned, image.shape[2:], mode="bilinear")


def _upside_down(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    return image.flip(2)


def _phases_scrambled(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """The same amplitudes of all waves, with other phases: the texture without the shapes."""
    spectrum = torch.fft.rfft2(image)
    phases = 2 * math.pi * make.rand(1, 1, *spectrum.shape[2:])
    phases[..., 0, 0] = 0
    turned = spectrum * torch.polar(torch.ones_like(phases), phases)
    scrambled: Tensor = torch.fft.irfft2(turned, image.shape[2:])
    return scrambled.clamp(0, 1)


def _dead_rows(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    rows = torch.randperm(image.shape[2], generator=make.generator)
    changed = image.clone()
    changed[:, :, rows[: max(1, round(make.factor(0.03, 0.3) * len(rows)))]] = float(make.whole(0, 2))
    return changed


def _nothing_but_noise(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """White noise, or smooth noise."""
    if make.whole(0, 3):
        return (0.5 + make.factor(0.1, 0.5) * make.randn(*image.shape)).clamp(0, 1)
    height, width = image.shape[2:]
    wave = (torch.fft.fftfreq(height).unsqueeze(1).square() + torch.fft.rfftfreq(width).square()).sqrt()
    falling = wave.clamp_min(1 / max(height, width)) ** -make.between(0.5, 2)
    smooth = torch.fft.irfft2(torch.fft.rfft2(make.randn(*image.shape)) * falling, (height, width))
    clouds: Tensor = 0.5 + 0.2 * (smooth - smooth.mean()) / smooth.std().clamp_min(1e-6)
    return clouds.clamp(0, 1)


def _flat(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """One colour, with a little noise."""
    colour = make.rand(1, image.shape[1], 1, 1)
    return (colour + make.between(0, 0.02) * make.randn(*image.shape)).clamp(0, 1)


def _zoomed(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """A small part of the image, enlarged."""
    size, share = image.shape[2:], make.between(0.25, 0.55)
    height, width = (max(2, round(share * side)) for side in size)
    top, left = make.whole(0, size[0] - height + 1), make.whole(0, size[1] - width + 1)
    return F.interpolate(image[:, :, top : top + height, left : left + width], size, mode="bilinear")


def _in_blocks(make: Maker, image: Tensor, batch: Tensor) -> Tensor:
    """Coarse steps of the cosine transform of blocks of 8 x 8 pixels, as JPEG of a low quality takes them."""
    place = torch.arange(8.0)
    cosines = torch.cos((2 * place + 1) * place.unsqueeze(1) * math.pi / 16) / 2
    cosines[0] /= 2**0.5
    step = make.factor(0.05, 0.3) * (1 + place + place.unsqueeze(1)) / 4
    height, width = (side // 8 * 8 for side in image.shape[2:])
    blocks = image[:, :, :height, :width].unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)
    coarse = ((cosines @ blocks @ cosines.T) / step).round() * step
    changed = image.clone()
    changed[:, :, :height, :width] = (
        (cosines.T @ coarse @ cosines).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    )
    return changed.clamp(0, 1)


IMAGES: Mapping[str, Family] = {
    "noisy": _noisy,
    "blurred": _blurred,
    "low resolution": _low_resolution,
    "channels permuted": _channels_permuted,
    "grey": _grey,
    "inverted": _inverted,
    "contrast changed": _contrast_changed,
    "brightness changed": _brightness_changed,
    "shuffled tiles": _shuffled,
    "quilted": _quilted,
    "mixed": _mixed,
    "occluded": _occluded,
    "rotated": _rotated,
    "upside down": _upside_down,
    "phases scrambled": _phases_scrambled,
    "dead rows": _dead_rows,
    "nothing but noise": _nothing_but_noise,
    "flat": _flat,
    "zoomed": _zoomed,
    "in blocks": _in_blocks,
}
"""The families of outliers of images."""
OF_CHANNELS = ("channels permuted", "grey")
"""The families that need several channels."""
NORMALISED = "normalised otherwise"
"""The family that needs images that were normalised."""


def families_of(inputs: Inputs, maker: Maker) -> tuple[str, ...]:
    """The families of outliers that can be made of these inputs. Empty if none can."""
    image = image_of(inputs)
    if image is None:
        return tuple(TEXTS) if text_of(inputs) is not None else ()
    names = [name for name in IMAGES if image.shape[1] > 1 or name not in OF_CHANNELS]
    return (*names, NORMALISED) if maker.is_normalised else tuple(names)


# --- texts -------------------------------------------------------------------------------------------


def text_of(inputs: Inputs) -> Tensor | None:
    """The tokens among the arguments of a network, `(N, length)`: `input_ids`, or its only argument."""
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < LEAST_TOKENS:
        return None
    return None if tokens.is_floating_point() or tokens.dtype == torch.bool else tokens


def _order_shuffled(make: Maker, tokens: Tensor, mask: Tensor) -> Tensor:
    """The tokens of each text in a random order. The first and the last one keep their places."""
    changed = tokens.clone()
    for row, real in zip(changed, mask, strict=True):
        places = real.nonzero().flatten()[1:-1]
        row[places] = row[places[torch.randperm(len(places), generator=make.generator)]]
    return changed


def _tokens_replaced(make: Maker, tokens: Tensor, mask: Tensor) -> Tensor:
    """A part of the tokens comes from anywhere in the batch."""
    pool = tokens[mask.bool()]
    changed = tokens.clone()
    for row, real in zip(changed, mask, strict=True):
        places = real.nonzero().flatten()[1:-1]
        places = places[make.rand(len(places)) < make.between(0.3, 1)]
        row[places] = pool[torch.randint(len(pool), (len(places),), generator=make.generator)]
    return changed


def _texts_joined(make: Maker, tokens: Tensor, mask: Tensor) -> Tensor:
    """The beginning of one text and the end of another."""
    others = torch.randperm(len(tokens), generator=make.generator)
    kept = mask.sum(1, keepdim=True) * (0.3 + 0.4 * make.rand(len(tokens), 1))
    later = mask.cumsum(1) > kept  # padding may be on either side
    return torch.where(later & mask.bool() & mask[others].bool(), tokens[others], tokens)


TEXTS: Mapping[str, Callable[[Maker, Tensor, Tensor], Tensor]] = {
    "order shuffled": _order_shuffled,
    "tokens replaced": _tokens_replaced,
    "texts joined": _texts_joined,
}
"""The families of outliers of texts."""
