"""Simulated streams for docs/monitor.md: false alarms, delays, and what breaks a monitor.

    python -m lab.benchmarks.monitor

Scores of ordinary images are normal. Scores of outliers are normal too, shifted so that their AUROC is 99 %.
A thousand streams are watched at once by the classes of `gramwatch.stream.sequential`, which are those of a
`Monitor`. Takes about ten minutes on one core. Names of parts (`false_alarms`, `delays`, `breaking`,
`replicas`, `selections`) simulate these only. Writes docs/data/monitor.json, and its figures into
docs/monitor.md.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramwatch.stream.select import select
from gramwatch.stream.sequential import BINS, MOST, Evidence, FixedReference, OnlineRanks, PowerBets, grid_of
from lab.benchmarks import document
from lab.benchmarks.cells import DOCS
from lab.benchmarks.measure import machine, save

SHIFT = 2**0.5 * 2.3263478740408408
"""How far the scores of outliers lie above the others, in standard deviations: AUROC 99 %."""
PIECE = 500
"""Images of each stream that are drawn at once."""
STREAMS = 1_000
LEVELS = (10_000, 1_000_000)
"""Mean times to a false alarm, A."""

Scores = Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]
"""Draws the scores and groups of a piece, `(streams, PIECE)` each, from its first image and the number of
streams."""


# --- streams -----------------------------------------------------------------------------------------


def ordinary(rng: np.random.Generator, streams: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """No outliers."""
    scores = rng.standard_normal((streams, PIECE))
    return scores, np.zeros(scores.shape, np.int64)


def outliers(share: float, before: int = 0, over: int = 0) -> Scores:
    """A share of outliers after so many ordinary images; it may grow to this share over so many more."""

    def drawn(rng: np.random.Generator, streams: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        scores, groups = ordinary(rng, streams, first)
        now = first + np.arange(PIECE) - before
        chance = share * (np.clip(now / over, 0, 1) if over else now >= 0)
        return scores + SHIFT * (rng.random(scores.shape) < chance), groups

    return drawn


def drifting(shift: float, over: int) -> Scores:
    """All scores rise slowly, by so many standard deviations over so many images."""

    def drawn(rng: np.random.Generator, streams: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        scores, groups = ordinary(rng, streams, first)
        return scores + shift * (first + np.arange(PIECE)) / over, groups

    return drawn


def frames(repeats: int) -> Scores:
    """Video: so many frames in a row have the same score, but for a little noise."""

    def drawn(rng: np.random.Generator, streams: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        scenes = np.repeat(rng.standard_normal((streams, PIECE // repeats)), repeats, 1)
        noise = 0.1 * rng.standard_normal(scenes.shape)
        return (scenes + noise) / 1.01**0.5, np.zeros(scenes.shape, np.int64)

    return drawn


def mixed(share: float, before: int = 0, later: float | None = None) -> Scores:
    """Two classes, one with scores that are wider; its share changes after so many images."""

    def drawn(rng: np.random.Generator, streams: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        scores, _ = ordinary(rng, streams, first)
        now = np.where(first + np.arange(PIECE) < before, share, share if later is None else later)
        wide = rng.random(scores.shape) < now
        return np.where(wide, 2 * scores, scores), wide.astype(np.int64)

    return drawn


# --- watching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How streams are watched."""

    kind: str = "online"
    """`online`, `fixed`, or `naive`: p-values against a fixed set, bet on as if they were independent."""
    ranking: int = 2_500
    """Calibration images that rank. Online, a tenth of them, at most 100, set the grid."""
    confidence: float = 0.95
    every: int = 1
    groups: int = 1
    replicas: int = 1
    """So many neighbouring streams are the replicas of one. They share the calibration images."""

    def bets(self, reference: Scores, streams: int, rng: np.random.Generator) -> Callable[..., Any]:
        """A function of scores and groups, `(S,)` each, that returns the bets of one image of each stream."""
        drawn, groups = self._reference(reference, streams, rng)
        if self.kind == "online":
            return self._online(drawn, groups, rng)
        ascending = [
            [np.sort(row[group == g]) for g in range(self.groups)]
            for row, group in zip(drawn, groups, strict=True)
        ]
        fixed = [FixedReference(np.array([len(g) for g in row]), self.confidence) for row in ascending]
        return Against(ascending, fixed, PowerBets() if self.kind == "naive" else None)

    def _reference(self, draw: Scores, streams: int, rng: np.random.Generator) -> Any:
        """The calibration scores and groups of each stream."""
        pieces = [draw(rng, streams // self.replicas, first) for first in range(0, self.ranking, PIECE)]
        whole = (np.concatenate(part, 1)[:, : self.ranking] for part in zip(*pieces, strict=True))
        scores, groups = (np.repeat(part, self.replicas, 0) for part in whole)
        return scores, groups if self.groups > 1 else np.zeros_like(groups)

    def _online(self, drawn: np.ndarray, groups: np.ndarray, rng: np.random.Generator) -> Any:
        grid = min(100, self.ranking // 10)
        grids = [grid_of(row[:grid]) for row in drawn]
        counts = np.zeros((len(drawn), self.groups, BINS), np.int64)
        for stream, (edges, row, group) in enumerate(zip(grids, drawn, groups, strict=True)):
            own = slice(grid + stream % self.replicas, None, self.replicas)
            np.add.at(counts[stream], (group[own], np.searchsorted(edges, row[own])), 1)
        return Online(grids, OnlineRanks(counts), rng)


class Online:
    """Online ranks of many streams."""

    def __init__(self, grids: list[np.ndarray], ranks: OnlineRanks, rng: np.random.Generator) -> None:
        self.grids, self.ranks, self.rng, self.power = grids, ranks, rng, PowerBets()

    def __call__(self, scores: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
        """The bets of a piece, image by image."""
        bins = np.stack([np.searchsorted(g, row) for g, row in zip(self.grids, scores, strict=True)])
        lots = 1 - self.rng.random(scores.shape)
        for i in range(scores.shape[1]):
            yield self.power(self.ranks.rank(bins[:, i], groups[:, i], lots[:, i]))


class Against:
    """p-values of many streams against fixed sets."""

    def __init__(self, ascending: list[Any], fixed: list[FixedReference], power: PowerBets | None) -> None:
        self.ascending, self.fixed, self.power = ascending, fixed, power

    def __call__(self, scores: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
        """The bets of a piece, image by image."""
        p = np.empty_like(scores)
        for row, sets, score, group in zip(p, self.ascending, scores, groups, strict=True):
            for g, ascending in enumerate(sets):
                n, mine = len(ascending), group == g
                row[mine] = (1 + n - np.searchsorted(ascending, score[mine])) / (n + 1)
        if self.power is not None:
            yield from map(self.power, p.T)
        elif len(self.ascending[0]) == 1:  # all streams have the same bounds
            yield from map(self.fixed[0], p.T, groups.T)
        else:
            bets = np.stack([f(*of_stream) for f, *of_stream in zip(self.fixed, p, groups, strict=True)], 1)
            yield from bets


class Products:
    """A test martingale: the product of the bets, averaged over the kinds of bets.

    Of fair bets it ever reaches 100 in at most 1 % of streams.
    """

    level = 100

    def __init__(self, streams: int, bets: int) -> None:
        self.products = np.ones((streams, bets))
        self.reached = np.zeros(streams, bool)

    def __call__(self, bets: np.ndarray) -> None:
        """Take in the bets of one image of each stream."""
        self.products = np.minimum(self.products * bets, MOST)
        self.reached |= self.products.mean(1) >= self.level


def alarm_times(
    form: Form,
    stream: Scores,
    images: int,
    *,
    streams: int = STREAMS,
    reference: Scores = ordinary,
    seed: int = 0,
    levels: tuple[int, ...] = LEVELS,
    also: Callable[[np.ndarray], None] = lambda bets: None,
) -> np.ndarray:
    """The image at which each stream reaches each level, `(levels, streams)`; infinite if it does not.

    `also` is called with the bets of each image.
    """
    rng = np.random.default_rng(seed)
    bets = form.bets(reference, streams, rng)
    count = FixedReference.count if form.kind == "fixed" else PowerBets.count
    evidence = Evidence(streams, count)
    times = np.full((len(levels), streams // form.replicas), np.inf)
    for first in range(0, images, PIECE):
        scores, groups = stream(rng, streams, first)
        used = slice(-first % form.every, None, form.every)
        groups = groups[:, used] if form.groups > 1 else np.zeros_like(groups[:, used])
        for bet in bets(scores[:, used], groups):
            evidence.add(bet)
            also(bet)
            strength = evidence.strength.reshape(-1, form.replicas).mean(1)
            for row, level in zip(times, levels, strict=True):
                row[(strength >= level) & (row == np.inf)] = (evidence.time - 1) * form.every + 1
        if np.isfinite(times).all():
            break
    return times


# --- what is simulated -------------------------------------------------------------------------------

RANKING = (500, 2_500)
LONG = 100_000
"""The length of a stream without a change."""
SHARES = (0.02, 0.1, 0.5)
PATIENCE = 10_000
"""Images after the change within which an alarm counts."""


def false_alarms() -> list[dict[str, Any]]:
    """How soon streams without a change raise an alarm."""
    rows = []
    for kind in ("online", "fixed", "naive"):
        for ranking in RANKING:
            products = Products(STREAMS, FixedReference.count if kind == "fixed" else PowerBets.count)
            low, high = alarm_times(Form(kind, ranking), ordinary, LONG, seed=ranking, also=products)
            rows.append(
                {
                    "form": kind,
                    "ranking": ranking,
                    "streams": len(low),
                    "images": LONG,
                    "mean_time": float(np.minimum(low, LONG).mean()),
                    "within": float(np.isfinite(high).mean()),
                    "martingale": float(products.reached.mean()),
                }
            )
            print(rows[-1], flush=True)
    return rows


def delays() -> list[dict[str, Any]]:
    """How many images it takes from the change to the alarm, A = 1,000,000."""
    rows = []
    for kind in ("online", "fixed"):
        for ranking, before in ((500, 0), (2_500, 0), (500, 5_000), (2_500, 5_000)):
            for share in SHARES:
                stream = outliers(share, before)
                (alarms,) = alarm_times(
                    Form(kind, ranking), stream, before + PATIENCE, seed=1_000 + ranking, levels=LEVELS[1:]
                )
                taken = alarms[alarms > before] - before
                found_share = float((taken <= PATIENCE).mean())
                rows.append(
                    {
                        "form": kind,
                        "ranking": ranking,
                        "before": before,
                        "share": share,
                        "median": float(np.median(taken)) if found_share > 0.5 else None,
                        "found": found_share,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def breaking() -> list[dict[str, Any]]:
    """What a slow drift, a video and another mix of classes do, A = 1,000,000: the share with an alarm."""
    drift, video = drifting(0.5, 50_000), frames(25)
    rise = outliers(0.02, over=50_000)
    mix, before = mixed(0.2, 2_000, later=0.8), mixed(0.2)
    rows = []
    for kind in ("online", "fixed"):
        cases = {
            "drift": (Form(kind), drift, 50_000, ordinary, 200),
            "rise": (Form(kind), rise, 50_000, ordinary, 200),
            "video": (Form(kind), video, 20_000, ordinary, 1_000),
            "video, every 25th": (Form(kind, every=25), video, 20_000, ordinary, 1_000),
            "mix": (Form(kind), mix, 12_000, before, 1_000),
            "mix, per class": (Form(kind, groups=2), mix, 12_000, before, 1_000),
        }
        for name, (form, stream, images, reference, streams) in cases.items():
            (times,) = alarm_times(
                form, stream, images, streams=streams, reference=reference, seed=2_000, levels=LEVELS[1:]
            )
            alarms = np.isfinite(times)
            median = float(np.median(times)) if alarms.mean() > 0.5 else None
            rows.append(
                {
                    "case": name,
                    "form": kind,
                    "images": images,
                    "alarms": float(alarms.mean()),
                    "median": median,
                }
            )
            print(rows[-1], flush=True)
    return rows


def replicas() -> list[dict[str, Any]]:
    """Four replicas of a stream: how soon the mean of their strength raises a false alarm."""
    rows = []
    for kind in ("online", "fixed"):
        form = Form(kind, replicas=4)
        low, high = alarm_times(form, ordinary, LONG // 2, streams=1_600, seed=3_000)
        mean, within = float(np.minimum(low, LONG // 2).mean()), float(np.isfinite(high).mean())
        rows.append({"form": kind, "groups": len(low), "mean_time": mean, "within": within})
        print(rows[-1], flush=True)
    return rows


def selections() -> list[dict[str, Any]]:
    """Realised false-discovery rate and share of outliers found, over splits into calibration and test."""
    rows = []
    for procedure in ("bh", "storey"):
        for fdr in (0.05, 0.1, 0.2):
            for share in (0.1, 0.5):
                rng = np.random.default_rng(4_000)
                counts = np.array([_selected(rng, procedure, fdr, share) for _ in range(SPLITS)])
                rows.append(
                    {
                        "procedure": procedure,
                        "fdr": fdr,
                        "share": share,
                        "realised": float(counts[:, 0].mean()),
                        "error": float(counts[:, 0].std() / len(counts) ** 0.5),
                        "power": float(counts[:, 1].mean()),
                    }
                )
                print(rows[-1], flush=True)
    return rows


SPLITS = 10_000
SPLIT = {"ranking": 2_500, "images": 500}


def _selected(rng: np.random.Generator, procedure: Any, fdr: float, share: float) -> tuple[float, float]:
    """The share of ordinary images among those selected, and the share of outliers that is selected."""
    n, images = SPLIT.values()
    is_outlier = np.arange(images) < share * images
    scores = rng.standard_normal(images) + SHIFT * is_outlier
    p = (1 + n - np.searchsorted(np.sort(rng.standard_normal(n)), scores)) / (n + 1)
    chosen = select(torch.from_numpy(p), fdr, procedure).is_selected.numpy()
    return (chosen & ~is_outlier).sum() / max(1, chosen.sum()), chosen[is_outlier].mean()


# --- the page ----------------------------------------------------------------------------------------

NAMES = {
    "online": '`"online"`',
    "fixed": '`"fixed"`',
    "naive": "p-values against a fixed set, taken as independent",
}
CASES = {
    "drift": "All scores rise by half a standard deviation over 50,000 images",
    "rise": "The share of outliers rises to 2 % over 50,000 images",
    "video": "Video: 25 frames in a row have nearly the same score",
    "video, every 25th": "The same, `every=25`",
    "mix": "A class with scores twice as wide: 20 %, after 2,000 images 80 %",
    "mix, per class": "The same, `per_class=True`",
}


def pages(result: dict[str, Any]) -> dict[str, str]:
    """The generated parts of docs/monitor.md, by the names of their markers."""
    return {
        "false alarms": _false_alarms_table(result["false_alarms"]),
        "delays": _delays_table(result["delays"]),
        "breaking": _breaking_table(result["breaking"]),
        "replicas": _replicas_text(result["replicas"]),
        "selections": _selections_table(result["selections"]),
    }


def _table(heads: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A table whose first columns are words and whose others are figures."""
    rule = ["---"] * words + ["---:"] * (len(heads) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


def _false_alarms_table(rows: list[dict[str, Any]]) -> str:
    heads = ["", "ranking images", "A = 10,000: mean time", "A = 1,000,000: alarm", "martingale: alarm"]
    lines = [
        [
            NAMES[row["form"]],
            f"{row['ranking']:,}",
            f"{row['mean_time']:,.0f}",
            f"{100 * row['within']:.1f} %",
            f"{100 * row['martingale']:.1f} %",
        ]
        for row in rows
    ]
    return _table(heads, lines)


def _delays_table(rows: list[dict[str, Any]]) -> str:
    heads = ["", "ranking images", "ordinary images before", *(f"{100 * s:g} % outliers" for s in SHARES)]
    rows_of: dict[tuple[str, int, int], list[str]] = {}
    for row in rows:
        cells = rows_of.setdefault((row["form"], row["ranking"], row["before"]), [])
        median = "-" if row["median"] is None else f"{row['median']:,.0f}"
        cells.append(median if row["found"] > 0.995 else f"{median} ({100 * row['found']:.0f} %)")
    lines = [[NAMES[form], f"{n:,}", f"{before:,}", *cells] for (form, n, before), cells in rows_of.items()]
    return _table(heads, lines)


def _breaking_table(rows: list[dict[str, Any]]) -> str:
    rows_of: dict[str, dict[str, str]] = {}
    for row in rows:
        median = "" if row["median"] is None else f", median image {row['median']:,.0f}"
        rows_of.setdefault(row["case"], {})[row["form"]] = f"{100 * row['alarms']:.1f} %{median}"
    heads = ["streams with an alarm", NAMES["online"], NAMES["fixed"]]
    return _table(heads, [[CASES[case], cells["online"], cells["fixed"]] for case, cells in rows_of.items()])


def _replicas_text(rows: list[dict[str, Any]]) -> str:
    heads = ["", "A = 10,000: mean time per replica", "A = 1,000,000: alarm within 50,000 per replica"]
    lines = [[NAMES[row["form"]], f"{row['mean_time']:,.0f}", f"{100 * row['within']:.2f} %"] for row in rows]
    return _table(heads, lines)


def _selections_table(rows: list[dict[str, Any]]) -> str:
    heads = ["", "outliers", "asked", "realised", "outliers found"]
    titles = {"bh": "Benjamini-Hochberg", "storey": "Storey"}
    lines = [
        [
            titles[row["procedure"]],
            f"{100 * row['share']:g} %",
            f"{100 * row['fdr']:g} %",
            f"{100 * row['realised']:.2f} ± {100 * row['error']:.2f} %",
            f"{100 * row['power']:.0f} %",
        ]
        for row in rows
    ]
    return _table(heads, lines)


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "false_alarms": false_alarms,
    "delays": delays,
    "breaking": breaking,
    "replicas": replicas,
    "selections": selections,
}


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="what to simulate anew; all if none")
    parser.add_argument("--output", type=Path, default=DOCS / "data" / "monitor.json")
    args = parser.parse_args()
    result = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    for name in args.parts or PARTS:
        result |= {"kind": "monitor", **machine(torch.device("cpu")), name: PARTS[name]()}
        save(args.output, result)
    document.write()


if __name__ == "__main__":
    main()
