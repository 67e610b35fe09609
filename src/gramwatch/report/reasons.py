"""An explanation in sentences, as HTML and as a picture.

The functions take an `Explained` of one example. They name members, taps, channels and classes, and nothing
that was not measured.
"""

import html as escaping
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

MOST_TAPS = 2
"""The taps that a sentence names."""
MOST_NUMBERS = 3
"""The channels that a sentence names."""


def sentences(one: Any) -> list[str]:
    """Three sentences: the verdict, what the score comes from, and what is ordinary."""
    found = one.found
    flagged, p_value = bool(found.is_ood[0]), float(found.p_value[0])
    verdict = f"{'Flagged' if flagged else 'Not flagged'} (p = {p_value:.2g})."
    if not bool(one.finite[0]):
        return [verdict, "The input, or what the network made of it, is not finite.", "So nothing adds up."]
    totals = {part.name: float(part.total[0]) for part in one.parts}
    parts = sorted(one.parts, key=lambda part: -totals[part.name])
    if totals[parts[0].name] <= 0:
        return [verdict, "No part of the score is above its median on calibration data.", _rest(one, [])]
    return [verdict, _first(one, parts[0]), _rest(one, [parts[0]])]


def _first(one: Any, part: Any) -> str:
    """What the largest part is, and where it lies."""
    score, total = float(one.found.score[0]), float(part.total[0])
    share = one.percentages(0).get(part.name)
    if len(one.parts) == 1:
        start = f"The score of {part.title} is {score:.3g}"
    elif share is None:
        start = f"The largest part of its score, {total:.2g} of {score:.2g}, comes from {part.title}"
    else:
        sees = f"Mostly {part.sees}: " if share > 50 and part.sees else ""
        start = f"{sees}{share:.0f} % of the score comes from {part.title}"
    return f"{start}{_where(one, part)}."


def _where(one: Any, part: Any) -> str:
    if part.terms is None:
        return ""
    amounts = part.terms[0, :-1]
    largest = [i for i in amounts.argsort(descending=True).tolist()[:MOST_TAPS] if float(amounts[i]) > 0]
    if not largest:
        return ""
    names = [part.taps[i].name for i in largest]
    channels = one.channels(0, member=part.name, tap=names[0], most=None)
    return f", most at {_joined(names)}{_which(one, channels, names)}"


def _which(one: Any, channels: Sequence[Any], names: Sequence[str]) -> str:
    """The channels of the first tap that are furthest outside, in words."""
    if not channels:
        return ""
    kind = channels[0].of
    alike = [
        c for c in channels if c.of.split()[0] == kind.split()[0] and c.direction == channels[0].direction
    ]
    numbers = list(dict.fromkeys(c.channel for c in alike))[:MOST_NUMBERS]
    plain = [f"{n[0]} with {n[1]}" if isinstance(n, tuple) else str(n) for n in numbers]
    word = "channel" if len(plain) == 1 else "channels"
    where = (
        f", where {word} {_joined(plain)}" if len(names) == 1 else f". At {names[0]}, {word} {_joined(plain)}"
    )
    examples = f"{channels[0].examples:,} training images"
    high = channels[0].direction == "too high"
    if not kind.startswith("order"):
        average = "average" if len(plain) > 1 else "averages"
        return f"{where} {average} {'higher' if high else 'lower'} than the mean of {examples}"
    pooled = channels[0].examples == 0
    behind = "training image" if pooled else f"of the {examples} predicted {_class(one)}"
    act = "acts" if len(plain) == 1 else "act"
    how = "more strongly" if high else "less"
    return f"{where} {act} together with the others {how} than in any {behind}"


def _class(one: Any) -> str:
    number = int(one.found.predicted[0])
    return f"'{one.class_names[number]}'" if number < len(one.class_names) else f"as class {number}"


def _rest(one: Any, said: Sequence[Any]) -> str:
    """What the other members say."""
    others = [part for part in one.parts if part not in said]
    above = [part.title for part in others if float(part.total[0]) > 0]
    ordinary = [part.title for part in others if float(part.total[0]) <= 0]
    sentences = []
    shares = one.percentages(0)
    if above:
        named = [
            f"{part.title} ({shares[part.name]:.0f} %)" if part.name in shares else part.title
            for part in others
            if part.title in above
        ]
        sentences.append(f"{_joined(named)} {'adds' if len(above) == 1 else 'add'} to it")
    if ordinary:
        verb = "is" if len(ordinary) == 1 else "are"
        sentences.append(f"{_joined(ordinary)} {verb} ordinary: not above the median of calibration data")
    if not sentences:
        return "The detector has no other part."
    text = ("; " if above and ordinary else "").join(sentences)
    return f"{text[0].upper()}{text[1:]}."


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def html(explained: Any, most: int = 10) -> str:
    """Sentences and a table of the members, for the first examples."""
    blocks = []
    for i in range(min(len(explained), most)):
        one = explained[i]
        text = escaping.escape(" ".join(sentences(one)))
        rows = "".join(
            f"<tr><td>{escaping.escape(part.title)}</td>"
            f"<td style='text-align:right'>{float(part.total[0]):.3f}</td></tr>"
            for part in one.parts
        )
        total = f"<tr><th>score</th><th style='text-align:right'>{float(one.found.score[0]):.3f}</th></tr>"
        blocks.append(f"<p><b>{i}</b> {text}</p><table>{rows}{total}</table>")
    more = f"<p>{len(explained) - most} more</p>" if len(explained) > most else ""
    return "".join(blocks) + more


# --- the picture -------------------------------------------------------------------------------------


def draw(one: Any, path: str | PathLike[str] | None, image: Any) -> Any:
    """The image, the map over it, bars for members and taps, and the channels furthest outside."""
    raise NotImplementedError


def shown_image(given: Any) -> Tensor:
    """An image as `(H, W, 3)` or `(H, W)`, from 0 to 1. A network's input is stretched to that range."""
    image = torch.as_tensor(given).detach().cpu().float()
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[-1] not in (1, 3):
        image = image.permute(1, 2, 0)
    if image.ndim == 3 and image.shape[2] != 3:
        image = image.mean(2)
    low, high = image.min(), image.max()
    if float(low) >= 0 and float(high) <= 1:
        return image
    return (image - low) / (high - low).clamp_min(1e-9)
