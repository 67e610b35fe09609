"""Guard against the best single method of each set."""

from gramwatch.evaluation.evaluate import Row
from gramwatch.numerics.metrics import Difference
from gramwatch_lab.paper import against

FIGURES = {
    "far": {"Guard": (99.96, 99), "Gram": (99.97, 99), "ODIN": (80, 40), "MSP": (70, 30)},
    "texture": {"Guard": (98, 90), "Gram": (97, 85), "ODIN": (90, 50), "MSP": (89, 48)},
    "middle": {"Guard": (89.95, 60), "Gram": (80, 40), "ODIN": (90, 61), "MSP": (84, 50)},
    "near": {"Guard": (86, 40), "Gram": (70, 20), "ODIN": (88, 44), "MSP": (85, 38)},
}


def rows_of(figures: dict[str, dict[str, tuple[float, float]]]) -> list[Row]:
    """AUROC and TNR in percent, by set and method."""
    return [
        Row(method, ood, 100, {"auroc": auroc / 100, "tnr": tnr / 100}, {"auroc": 0.0, "tnr": 0.0})
        for ood, result in figures.items()
        for method, (auroc, tnr) in result.items()
    ]


def made_up(ood: str, method: str) -> Difference:
    ours, theirs = FIGURES[ood]["Guard"][0], FIGURES[ood][method][0]
    ahead = (ours - theirs) / 100
    return Difference(ahead, ahead - 0.01, ahead + 0.01)


def test_guard_meets_the_best_single_method_of_each_set() -> None:
    rows = rows_of(FIGURES)
    every = against.against_the_best(rows, "Guard", ["Gram", "ODIN", "MSP"], made_up)
    assert [comparison.best for comparison in every] == ["Gram", "Gram", "ODIN", "ODIN"]
    assert [comparison.verdict for comparison in every] == ["saturated", "ahead", "within 0.1", "behind"]
    quick = against.against_the_best(rows, "Guard", ["Gram", "MSP"], made_up)
    assert [comparison.best for comparison in quick] == ["Gram", "Gram", "MSP", "MSP"]
    lines = against.table(every, quick).splitlines()
    assert lines[3] == "| texture | 98.00 | Gram 97.00 | +1.00 (+0.00 to +2.00), ahead | the same |  |"
    assert lines[5].startswith(
        "| near | 86.00 | ODIN 88.00 | -2.00 (-3.00 to -1.00), behind | MSP 85.00 | +1.00"
    )


def test_what_is_above_the_mark_where_the_other_is_not_is_ahead() -> None:
    nothing = Difference(0.0, 0.0, 0.0)
    assert against.Against("x", 99.96, "MSP", 99.0, nothing).verdict == "ahead"
    assert against.Against("x", 99.0, "MSP", 99.96, nothing).verdict == "behind"


def test_the_summary_counts_and_averages() -> None:
    rows, singles = rows_of(FIGURES), ["Gram", "ODIN", "MSP"]
    every = against.against_the_best(rows, "Guard", singles, made_up)
    words = against.in_words(rows, "Guard", singles, every, ["near"])
    assert "of 4 sets 1 ahead, 1 within 0.1, 1 behind (near), 1 saturated: ahead on 33 % of those" in words
    # Guard (99.96 + 98 + 89.95 + 86) / 4, ODIN (80 + 90 + 90 + 88) / 4; TNR 72.25, of Gram 61.
    assert "mean AUROC 93.48, of the best single method (ODIN) 87.00: 50 % of its distance to 100" in words
    assert "mean TNR 72.25, of the best single method (Gram) 61.00: +11.25 points" in words
    assert words.endswith("near set near: below ODIN by paired bootstrap (-3.00 to -1.00).")
