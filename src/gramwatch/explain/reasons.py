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

from gramwatch.explain.frame import INK, INSIDE, OUTSIDE, SMALL, SOFT, TEXT, Words, framed, plain, wrapped

MOST_TAPS = 2
"""The taps that a sentence names."""
MOST_EXAMPLES = 10
"""The examples of a batch that are shown in words."""
MOST_NUMBERS = 3
"""The channels that a sentence names."""


def sentences(example: Any) -> list[str]:
    """Three sentences: the verdict, what the score comes from, and what is ordinary."""
    detection = example.detection
    flagged, p_value = bool(detection.is_ood[0]), float(detection.p_value[0])
    none = "" if _higher(example) else f": {compared(example)}"
    verdict = f"{'Flagged' if flagged else 'Not flagged'} (p = {p_value:.2g}{none})."
    if not bool(example.finite[0]):
        return [verdict, "The input, or what the network made of it, is not finite.", "So nothing adds up."]
    totals = {part.name: float(part.total[0]) for part in example.parts}
    parts = sorted(example.parts, key=lambda part: -totals[part.name])
    if totals[parts[0].name] <= 0:
        return [verdict, "No part of the score is above its median on calibration data.", _rest(example, [])]
    return [verdict, _first(example, parts[0]), _rest(example, [parts[0]])]


def compared(example: Any) -> str:
    """The comparison with calibration examples, in words.

    The smallest p-value means only that none scores as high.
    """
    higher, among = _higher(example), int(example.ranking[0])
    score = "none" if not higher else f"{higher:,}"
    verb = "score this high or higher" if higher > 1 else "scores this high"
    return f"{score} of the {among:,} calibration {_thing(example)}s that it is ranked among {verb}"


def _higher(example: Any) -> int:
    """The number of calibration examples that score at least as high."""
    return max(0, round(float(example.detection.p_value[0]) * (int(example.ranking[0]) + 1)) - 1)


def _first(example: Any, part: Any) -> str:
    """The sentence about the largest part: its member, taps and channels."""
    score, total = float(example.detection.score[0]), float(part.total[0])
    share = example.percentages(0).get(part.name)
    if len(example.parts) == 1:
        start = f"The score of {part.title} is {score:.3g}"
    elif share is None:
        name = f"{part.title[0].upper()}{part.title[1:]}"
        start = f"{name} raises the score by {total:.2f}"
    else:
        sees = f"Mostly {part.sees}: " if share > 50 and part.sees else ""
        start = f"{sees}{share:.0f} % of the score comes from {part.title}"
    return f"{start}{_where(example, part)}.{_balance(example, part) if share is None else ''}"


def _balance(example: Any, part: Any) -> str:
    """The sentence about other members of an input that is not flagged. They may cancel the largest part."""
    if len(example.parts) == 1:
        return ""
    score = float(example.detection.score[0])
    others = score - float(part.total[0])
    how = f"lower it by {-others:.2f}" if others < 0 else f"raise it by {others:.2f}"
    return f" Together, the other members {how}: the score is {score:.2f}."


def _where(example: Any, part: Any) -> str:
    if part.terms is None:
        return f", {part.words[0]}" if part.words else ""
    amounts = part.terms[0, :-1]
    largest = [i for i in amounts.argsort(descending=True).tolist()[:MOST_TAPS] if float(amounts[i]) > 0]
    if not largest:
        return ""
    names = [part.taps[i].name for i in largest]
    channels = example.channels(0, member=part.name, tap=names[0], most=None)
    shown = [_layer(name) for name in names]
    return f", most at {_joined(shown)}{_which(example, channels, shown)}"


def _layer(name: str) -> str:
    """The name of a tap in a sentence. Modules of `nn.Sequential` have numbers for names."""
    return f"layer {name}" if name[0].isdigit() else name


def _which(example: Any, channels: Sequence[Any], names: Sequence[str]) -> str:
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
        f", where {word} {_joined(plain)}" if len(names) == 1 else f"; at {names[0]}, {word} {_joined(plain)}"
    )
    thing = _thing(example)
    examples = f"{channels[0].examples:,} training {thing}s"
    high = channels[0].direction == "too high"
    if not kind.startswith("order"):
        average = "average" if len(plain) > 1 else "averages"
        return f"{where} {average} {'higher' if high else 'lower'} than the mean of {examples}"
    pooled = channels[0].examples == 0
    behind = f"training {thing}" if pooled else f"of the {examples} predicted {_class(example)}"
    act = "acts" if len(plain) == 1 else "act"
    how = "more strongly" if high else "less"
    return f"{where} {act} together with the others {how} than in any {behind}"


def _thing(example: Any) -> str:
    """The word for the inputs. Sequences of whole numbers are texts."""
    inputs = example.images
    numbers = inputs is not None and inputs.ndim == 2 and not inputs.is_floating_point()
    return "text" if numbers or example.mask is not None else "image"


def _class(example: Any) -> str:
    number = int(example.detection.predicted[0])
    return f"'{example.class_names[number]}'" if number < len(example.class_names) else f"as class {number}"


def _rest(example: Any, mentioned: Sequence[Any]) -> str:
    """The sentence about the other members."""
    others = [part for part in example.parts if part not in mentioned]
    above = [part.title for part in others if float(part.total[0]) > 0]
    ordinary = [part.title for part in others if float(part.total[0]) <= 0]
    sentences = []
    shares = example.percentages(0)
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


def html(explanation: Any) -> str:
    """Sentences and a table of the members, for the first examples."""
    blocks = []
    for i in range(min(len(explanation), MOST_EXAMPLES)):
        example = explanation[i]
        text = escaping.escape(" ".join(sentences(example)))
        rows = "".join(
            f"<tr><td>{escaping.escape(part.title)}</td>"
            f"<td style='text-align:right'>{float(part.total[0]):.3f}</td></tr>"
            for part in example.parts
        )
        score = f"{float(example.detection.score[0]):.3f}"
        total = f"<tr><th>score</th><th style='text-align:right'>{score}</th></tr>"
        blocks.append(f"<p><b>{i}</b> {text}</p><table>{rows}{total}</table>")
    rest = len(explanation) - len(blocks)
    more = f"<p>{rest} more</p>" if rest else ""
    return "".join(blocks) + more


LONGEST_BAR = 30
"""The bar of the token that adds most, in letters."""


def token_lines(tokens: Sequence[Any]) -> str:
    """One line for each token: what it adds, a bar, and the token."""
    most = max((token.contribution for token in tokens), default=0.0) or 1.0
    lines = [
        f"{token.contribution:8.3f} {'█' * round(LONGEST_BAR * token.contribution / most):{LONGEST_BAR}} "
        f"{token.text}"
        for token in tokens
    ]
    return "\n".join([f"{'adds':>8} {'':{LONGEST_BAR}} token", *lines])


def token_html(tokens: Sequence[Any]) -> str:
    """The tokens as a text. The more a token adds, the redder it is."""
    most = max((token.contribution for token in tokens), default=0.0) or 1.0
    red = ", ".join(str(int(OUTSIDE[start : start + 2], 16)) for start in (1, 3, 5))
    spans = [
        f"<span style='background: rgba({red}, {0.8 * token.contribution / most:.2f}); padding: 0 0.15em' "
        f"title='{token.contribution:.3f}'>{escaping.escape(token.text)}</span>"
        for token in tokens
    ]
    return f"<p>{' '.join(spans)}</p>"


# --- the picture -------------------------------------------------------------------------------------


def draw(example: Any, path: str | PathLike[str] | None, image: Any) -> Any:
    """The image, the map over it, bars for members and taps, and the channels furthest outside."""
    verdict, *rest = sentences(example)
    title = f"{verdict} Predicted: {_class(example).removeprefix('as ')}"
    frame = framed(Words(title, " ".join(rest)), 4.1)
    left, middle, members, taps, channels = _panels(frame)
    picture = image if image is not None else None if example.images is None else example.images[0]
    _images(left, middle, picture, None if example.map is None else example.map[0].cpu(), example.notes)
    if example.map is not None:
        middle.set_title(_mapped(example), loc="left", fontsize=TEXT, color=INK)
    _bars(members, [part.title for part in example.parts], example.members[0].tolist(), "members")
    _tap_bars(taps, example)
    _ranges(channels, _furthest(example))
    return frame.write(path)


MOST_BARS, MOST_RANGES = 7, 7
BESIDE = 7
"""The distance of a channel's figures from the end of its bar, in points: a dot there is 4.5 points wide."""


def _panels(frame: Any) -> list[Any]:
    """Three panels above and two below, each row with widths of its own."""
    frame.axes[0, 0].remove()
    rows = frame.figure.add_gridspec(2, 1, height_ratios=[1.15, 1])
    above = rows[0].subgridspec(1, 3, width_ratios=[1, 1, 1.1])
    below = rows[1].subgridspec(1, 2)
    places = [above[0], above[1], above[2], below[0], below[1]]
    return [frame.figure.add_subplot(place) for place in places]


def _furthest(example: Any) -> list[Any]:
    """The channels that add most, each once. Those with a range come first: a mean says less."""
    if not bool(example.finite[0]):
        return []
    channels = [
        c for part in example.parts if part.terms is not None for c in example.channels(0, member=part.name)
    ]
    channels.sort(key=lambda c: (not _has_range(c), -c.contribution))
    distinct = {(c.tap, c.channel): c for c in reversed(channels)}
    return [c for c in channels if distinct[c.tap, c.channel] is c][:MOST_RANGES]


def _mapped(example: Any) -> str:
    """The caption of the map: the members that have taps, and their share of the score."""
    placed = [part for part in example.parts if part.terms is not None]
    title = f"map of {_joined([part.title for part in placed])}"
    shares = example.percentages(0)
    if len(placed) == len(example.parts) or not shares:
        return title
    return f"{title}: {sum(shares.get(part.name, 0.0) for part in placed):.0f} % of it"


def _images(left: Any, middle: Any, picture: Any, heat: Tensor | None, notes: Sequence[str]) -> None:
    for axes in (left, middle):
        axes.set_axis_off()
    shown = None if picture is None else shown_image(picture)
    if shown is not None and shown.ndim >= 2:
        left.imshow(shown.numpy(), cmap="gray", interpolation="nearest")
        left.set_title("input", loc="left", fontsize=TEXT, color=INK)
    if heat is None or heat.ndim > 2:
        text = next((note for note in notes if note.startswith("no map")), "no map")
        middle.text(0, 0.5, "\n".join(wrapped(text, SMALL, 2.2)), fontsize=SMALL, color=SOFT)
        return
    if heat.ndim == 1:
        middle.set_axis_on()
        plain(middle)
        middle.fill_between(range(len(heat)), heat.numpy(), color=OUTSIDE, lw=0)
        return
    if shown is not None and tuple(shown.shape[:2]) == tuple(heat.shape):
        grey = shown if shown.ndim == 2 else shown.mean(2)
        middle.imshow(grey.numpy(), cmap="gray", interpolation="nearest")
    peak = max(float(heat.max()), 1e-12)
    alpha = (heat / peak).clamp(0, 1).sqrt() * 0.85
    middle.imshow(heat.numpy(), cmap="inferno", vmin=0, vmax=peak, alpha=alpha.numpy())


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    """Horizontal bars. Unusual ones are red."""
    plain(axes)
    values = [value if value == value else 0.0 for value in values]
    colours = [OUTSIDE if value > 0 else INSIDE for value in values]
    axes.barh(range(len(values)), values, color=colours, height=0.65)
    axes.axvline(0, color=SOFT, lw=0.7)
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(f"{title}: contributions", loc="left", fontsize=TEXT, color=INK)


def _tap_bars(axes: Any, example: Any) -> None:
    several = sum(part.terms is not None for part in example.parts) > 1
    rows = []
    for part in example.parts:
        if part.terms is not None:
            for tap, value in zip(part.taps, part.terms[0, :-1].tolist(), strict=True):
                rows.append((value, f"{part.title}: {tap.name}" if several else tap.name))
    rows = sorted(rows, reverse=True)[:MOST_BARS]
    names = [name if len(name) <= 30 else f"{name[:12]}...{name[-15:]}" for _, name in rows]
    _bars(axes, names, [value for value, _ in rows], "taps")


def _has_range(channel: Any) -> bool:
    """Whether a channel was compared with a range, as Gram does, and not with a mean."""
    return bool(channel.of.startswith("order"))


def _ranges(axes: Any, channels: Sequence[Any]) -> None:
    """Each channel's range on training data, scaled to the same length, and the value."""
    plain(axes)
    axes.set_title("channels: value; training data", loc="left", fontsize=TEXT, color=INK)
    axes.set_xticks([])
    if not channels:
        axes.set_yticks([])
        return
    for y, channel in enumerate(channels):
        low, high, value = channel.low, channel.high, channel.value
        ends = [min(low, value), max(high, value)]
        span = (ends[1] - ends[0]) or 1.0
        at = [(number - ends[0]) / span for number in (low, high, value)]
        axes.plot(at[:2], [y, y], color=INSIDE, lw=5, solid_capstyle="butt", zorder=1)
        if low == high:
            axes.plot(at[0], y, "|", color=INSIDE, ms=9, mew=2, zorder=1)
        axes.plot(at[2], y, "o", color=OUTSIDE, ms=4.5, zorder=2)
        mean = f"{_figure(low)} to {_figure(high)}" if _has_range(channel) else f"mean {_figure(low)}"
        axes.annotate(
            f"{_figure(value)}; {mean}",
            (1, y),
            xytext=(BESIDE, 0),
            textcoords="offset points",
            fontsize=SMALL - 0.5,
            va="center",
            color=SOFT,
        )
    axes.set_xlim(-0.05, 1.75)
    axes.set_ylim(len(channels) - 0.4, -0.6)
    names = [f"{_short(c.tap)} {_number(c)} {c.of}" for c in channels]
    axes.set_yticks(range(len(names)), names, fontsize=SMALL - 0.5)


def _figure(value: float) -> str:
    """Three digits, without an exponent for numbers of everyday size."""
    if not 100 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{float(f'{value:.3g}'):,.0f}"


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"...{name[-19:]}"


def _number(channel: Any) -> str:
    number = channel.channel
    return f"{number[0]}x{number[1]}" if isinstance(number, tuple) else f"channel {number}"


def draw_heat(
    path: str | PathLike[str] | None,
    means: Tensor,
    classes: Sequence[str],
    columns: Sequence[tuple[str, str]],
) -> Any:
    """Mean contributions `(classes, columns)` as a heat map: one row per class, one column per tap."""
    words = Words(
        "What is unusual, by tap and predicted class", "", "Mean contributions. Red adds to scores."
    )
    frame = framed(words, 0.9 + 0.26 * len(classes))
    axes = frame.axes[0, 0]
    plain(axes)
    limit = max(float(means.abs().max()), 1e-12)
    drawn = axes.imshow(means.cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_yticks(range(len(classes)), classes, fontsize=SMALL)
    members = list(dict.fromkeys(member for member, _ in columns))
    starts = [next(i for i, column in enumerate(columns) if column[0] == member) for member in members]
    for start in starts[1:]:
        axes.axvline(start - 0.5, color=INK, lw=0.8)
    ends = [*starts[1:], len(columns)]
    middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    names = [
        f"{member}\n{end - start} taps" if end - start > 1 else member
        for member, start, end in zip(members, starts, ends, strict=True)
    ]
    turned = [90 if end - start < 2 else 0 for start, end in zip(starts, ends, strict=True)]
    axes.set_xticks(middles, names, fontsize=SMALL)
    for label, degrees in zip(axes.get_xticklabels(), turned, strict=True):
        label.set_rotation(degrees)
    frame.figure.colorbar(drawn, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=SMALL)
    return frame.write(path)


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
