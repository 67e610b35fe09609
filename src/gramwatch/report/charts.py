"""The charts of a page, as specifications of Vega-Lite with the same figures as a table beside them.

Figures are counted here, so that a chart of 100,000 images is as small as one of a hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gramwatch.errors import MissingExtraError
from gramwatch.report.scores import Numbers, Scores, Truths

INSIDE, OUTSIDE = "#5b87a0", "#d1553f"
"""Not flagged and flagged. Both stand out on white and on black."""
SETS = ("#5b87a0", "#e08a1e", "#3aa17e", "#b279c9", "#c4a000", "#d1553f", "#7d8f2f", "#8c6d5a")
"""The colours of sets."""
BINS, P_BINS = 40, 20
TICKS = [n * 10.0**e for e in range(-12, 13) for n in (1, 2, 5)]
"""The possible labels of the scale of scores, also with a minus."""
MOST_ROWS = 30
"""The most bars of a chart."""


@dataclass(frozen=True)
class Chart:
    """A chart."""

    name: str
    """Its identifier on the page."""
    title: str
    about: str
    """The content of the chart in one or two sentences. Screen readers read it in place of the chart."""
    spec: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """The same figures as a table."""


def altair() -> Any:
    """Altair, or an error that names the extra."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "a report needs Altair, vl-convert and Jinja2: install them with pip install 'gramwatch[report]'"
        ) from None
    return altair


def scripts() -> str:
    """The JavaScript that draws the charts: Vega, Vega-Lite and Vega-Embed, about 0.9 MB."""
    altair()
    import vl_convert

    return str(vl_convert.javascript_bundle(None))  # type: ignore[arg-type]


def _spec(chart: Any, height: int = 220) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(
        width="container", height=height, autosize={"type": "fit-x", "contains": "padding"}
    ).to_dict()
    return spec


def _data(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    values = [dict(zip(columns, row, strict=True)) for row in rows]
    return altair().Data(values=values)


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f} %"


# --- distributions -----------------------------------------------------------------------------------


def score_edges(values: Numbers) -> tuple[Numbers, float]:
    """The edges of the bins, and the constant of the scale: linear near zero, logarithmic far from it."""
    constant = max(float(np.median(np.abs(values))), 1e-12)
    low, high = np.arcsinh(values.min() / constant), np.arcsinh(values.max() / constant)
    edges = np.sinh(np.linspace(low, high if high > low else low + 1, BINS + 1)) * constant
    edges[0], edges[-1] = min(edges[0], values.min()), max(edges[-1], values.max())
    return edges, constant


def score_chart(scores: Scores, threshold: float | None, calibration: Numbers | None) -> Chart:
    """The distribution of scores, with the threshold and the scores of calibration images."""
    finite = np.isfinite(scores.score)
    known = [scores.score[finite]] + ([] if calibration is None else [calibration])
    edges, constant = score_edges(np.concatenate(known))
    rows: list[list[Any]] = []
    for name, chosen in _sets(scores, finite):
        rows += _bins(name, scores.score[chosen], edges)
    if calibration is not None:
        rows += _bins("calibration images", calibration, edges)
    columns = ["images of", "from", "to", "images", "share"]
    chart = _steps(columns, rows, "score (linear near 0, logarithmic far from it)", constant)
    about = "How many images have which score. Higher is more unusual."
    if threshold is not None:
        chart += _vertical(threshold)
        about += f" Images to the right of the dashed line, {threshold:.4g}, are flagged."
    left_out = int(np.isinf(scores.score).sum())
    if left_out:
        about += f" Images with an infinite score are not drawn: {left_out:,}."
    return Chart("scores", "Scores", about, _spec(chart), columns, _readable(rows))


def p_value_chart(scores: Scores, alpha: float | None) -> Chart:
    """The distribution of p-values, with the threshold and the distribution by chance."""
    alt = altair()
    edges = np.linspace(0, 1, P_BINS + 1)
    rows: list[list[Any]] = []
    for name, chosen in _sets(scores, scores.readable):
        # A p-value that equals an edge belongs to the bin below: it is flagged there.
        rows += _bins(name, scores.p_value[chosen] - 1e-9, edges)
    columns = ["images of", "from", "to", "images", "share"]
    chart = _steps(columns, rows, "p-value", None)
    chart += (
        alt.Chart(_data(["share"], [[1 / P_BINS]]))
        .mark_rule(strokeDash=[2, 3], strokeWidth=1.5)
        .encode(y="share:Q")
    )
    about = (
        "How many images have which p-value. Images like those of the fit would fill all columns to the "
        "dotted line. Many small p-values are a sign of unusual images."
    )
    if alpha is not None:
        chart += _vertical(alpha)
        about += f" Images to the left of the dashed line, {alpha:.4g}, are flagged."
    return Chart("p-values", "p-values", about, _spec(chart), columns, _readable(rows))


def _sets(scores: Scores, which: Truths) -> list[tuple[str, Truths]]:
    """The images of each set, or if there is only one, those flagged and those not."""
    if len(scores.names) > 1:
        return [(name, which & (scores.set_of == i)) for i, name in enumerate(scores.names)]
    return [("not flagged", which & ~scores.is_ood), ("flagged", which & scores.is_ood)]


def _bins(name: str, values: Numbers, edges: Numbers) -> list[list[Any]]:
    counts = np.histogram(values, edges)[0]
    total = max(1, len(values))
    return [
        [name, float(edges[i]), float(edges[i + 1]), int(count), float(count) / total]
        for i, count in enumerate(counts)
    ]


def _readable(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [
        [row[0], f"{row[1]:.3g}", f"{row[2]:.3g}", f"{row[3]:,}", percent(row[4])] for row in rows if row[3]
    ]


def _steps(columns: Sequence[str], rows: list[list[Any]], title: str, constant: float | None) -> Any:
    """Columns from edge to edge for one set, lines for several and for calibration images."""
    alt = altair()
    names = list(dict.fromkeys(row[0] for row in rows))
    verdicts = names[:2] == ["not flagged", "flagged"]
    if verdicts:  # shares of all images, not of each verdict
        total = max(1, sum(row[3] for row in rows if row[0] in names[:2]))
        for row in rows:
            if row[0] in names[:2]:
                row[4] = row[3] / total
    colours = [INSIDE, OUTSIDE] if verdicts else list(SETS[: len(names)])
    colours = [*colours, *(["#888888"] * (len(names) - len(colours)))][: len(names)]
    scale = alt.Scale(type="symlog", constant=constant, nice=False) if constant else alt.Scale(domain=[0, 1])
    ticks = alt.Axis(grid=False, labelOverlap="greedy", format=",~r")
    if constant:
        far = [tick for tick in TICKS if tick >= constant / 2]
        ticks = alt.Axis(
            grid=False, labelOverlap="greedy", format=",~r", values=[0, *far, *(-t for t in far)]
        )
    x = alt.X("from:Q", title=title, scale=scale, axis=ticks)
    colour = alt.Color("images of:N", title=None, scale=alt.Scale(domain=names, range=colours))
    y = alt.Y("share:Q", title="share of images", axis=alt.Axis(format="%"), stack=None)
    tip = [alt.Tooltip(c, format=".3~g") for c in ("from:Q", "to:Q")]
    tip = [alt.Tooltip("images of:N"), *tip, alt.Tooltip("images:Q"), alt.Tooltip("share:Q", format=".1%")]
    data = _data(columns, rows)
    zero = alt.Y2Datum(0)
    bars = alt.Chart(data).mark_rect(opacity=0.75).encode(x, alt.X2("to:Q"), y, zero, colour, tooltip=tip)
    lines = (
        alt.Chart(data).mark_line(interpolate="step-after", strokeWidth=2).encode(x, y, colour, tooltip=tip)
    )
    if not verdicts:
        return lines
    drawn = bars.transform_filter(alt.FieldOneOfPredicate("images of", ["not flagged", "flagged"]))
    if len(names) > 2:
        drawn += lines.transform_filter(
            alt.FieldEqualPredicate(field="images of", equal="calibration images")
        )
    return drawn


def _vertical(value: float) -> Any:
    alt = altair()
    return (
        alt.Chart(_data(["from"], [[value]])).mark_rule(strokeDash=[6, 4], strokeWidth=1.5).encode(x="from:Q")
    )


# --- shares and heat ---------------------------------------------------------------------------------


def share_chart(
    name: str, title: str, about: str, rows: Sequence[tuple[str, int, int]], expected: float | None, kind: str
) -> Chart:
    """The share of flagged images by set or by folder: name, flagged, all."""
    alt = altair()
    shown = list(rows)[:MOST_ROWS]
    columns = [kind, "flagged", "images", "share"]
    values: list[list[Any]] = [[label, part, count, part / max(1, count)] for label, part, count in shown]
    chart = (
        alt.Chart(_data(columns, values))
        .mark_bar(color=OUTSIDE)
        .encode(
            alt.X(
                "share:Q", title="share flagged", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])
            ),
            alt.Y(f"{kind}:N", title=None, sort=None, axis=alt.Axis(labelLimit=180)),
            tooltip=[f"{kind}:N", "flagged:Q", "images:Q", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    if expected is not None:
        line = alt.Chart(_data(["share"], [[expected]]))
        chart += line.mark_rule(strokeDash=[2, 3], strokeWidth=1.5).encode(x="share:Q")
        about += f" The dotted line is what chance alone would give, {percent(expected)}."
    if len(rows) > len(shown):
        about += f" The first {len(shown)} of {len(rows):,} are drawn."
    table = [[label, f"{flagged:,}", f"{count:,}", percent(share)] for label, flagged, count, share in values]
    return Chart(name, title, about, _spec(chart, 30 + 24 * len(values)), columns, table)


def heat_chart(
    name: str,
    title: str,
    about: str,
    axes: tuple[str, str],
    cells: Sequence[tuple[str, str, float]],
    *,
    shares: bool,
) -> Chart:
    """A value for each pair of a column and a row: (column, row, value). Shares go from 0 to 1."""
    alt = altair()
    columns = [*axes, "value"]
    limit = max((abs(value) for _, _, value in cells), default=1.0) or 1.0
    scale = (
        alt.Scale(domain=[0, 1], range=["#e9eef1", OUTSIDE], interpolate="rgb")
        if shares
        else alt.Scale(
            type="sqrt", domain=[-limit, 0, limit], range=["#3f74a3", "#e9eef1", OUTSIDE], interpolate="rgb"
        )
    )
    form = ".0%" if shares else ".2f"
    chart = (
        alt.Chart(_data(columns, cells))
        .mark_rect()
        .encode(
            alt.X(f"{axes[0]}:N", sort=None, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=120)),
            alt.Y(f"{axes[1]}:N", sort=None, title=None, axis=alt.Axis(labelLimit=170)),
            alt.Color(
                "value:Q",
                scale=scale,
                title=None,
                legend=alt.Legend(format="%" if shares else ".2~g", orient="top", gradientLength=160),
            ),
            tooltip=[f"{axes[0]}:N", f"{axes[1]}:N", alt.Tooltip("value:Q", format=form)],
        )
    )
    table = [[x, y, percent(value) if shares else f"{value:.3f}"] for x, y, value in cells]
    return Chart(name, title, about, _spec(chart, 20 * len({row for _, row, _ in cells})), columns, table)
