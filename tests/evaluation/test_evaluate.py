"""The evaluation protocol: against a transcription of it by hand, and its exports."""

import csv
import io
import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

import gramwatch
from gramwatch import (
    CalibrationError,
    Evaluation,
    GramDetector,
    GramwatchWarning,
    InputError,
    NotFittedError,
)
from gramwatch.detect.measurement import Measurement
from gramwatch.evaluation.evaluate import Row, evaluate, evaluate_measured
from gramwatch.methods.gram_rules import GramRule
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch.numerics.metrics import METRICS

MADE = runpy.run_path(str(Path(__file__).parents[1] / "data" / "make_detector_v1.py"))
TinyNet, inputs, outliers = MADE["TinyNet"], MADE["inputs"], MADE["outliers"]
TRAIN, CALIBRATION, TEST = inputs(240, salt=101), inputs(90, salt=202), inputs(143, salt=505)
# Neither far from nor equal to the training data, so that no figure is a plain zero or one.
NEAR = TEST[:70].flip(0).clone() + 0.3 * outliers(70, salt=606)
FAR = outliers(40, salt=707)
SETS = {"near": NEAR.split(32), "far": [FAR]}


def fitted(**choices: Any) -> GramDetector:
    detector = GramDetector(TinyNet(), **{"orders": [1, 2, 3], **choices})
    return detector.fit(TRAIN.split(80), progress=False)


@pytest.fixture(scope="module")
def detector() -> GramDetector:
    return fitted()


@pytest.fixture(scope="module")
def result(detector: GramDetector) -> Evaluation:
    return evaluate(detector, TEST.split(50), SETS, progress=False)


def values(evaluation: Evaluation) -> list[tuple[Any, ...]]:
    return [(row.method, row.ood, row.examples, row.mean, row.spread) for row in evaluation.rows]


# --- the protocol ------------------------------------------------------------------------------------


def figures_by_hand(inside: np.ndarray, outside: np.ndarray) -> dict[str, float]:
    """The five figures of one draw, without `gramwatch.numerics.metrics`."""
    scores = np.nan_to_num(np.concatenate([inside, outside]), posinf=1e30)
    is_out = np.repeat([0, 1], [len(inside), len(outside)])
    thresholds = [t for t in np.unique(np.concatenate([inside, outside])) if t <= inside.max()]
    kept = np.array([(inside <= t).mean() for t in thresholds])
    caught = np.array([(outside > t).mean() for t in thresholds])
    nearest = np.abs(kept - 0.95) <= np.abs(kept - 0.95).min() + 1e-12
    return {
        "tnr": caught[nearest].min(),
        "auroc": roc_auc_score(is_out, scores),
        "dtacc": max(0.5, ((kept + caught) / 2).max()),
        "auin": average_precision_score(1 - is_out, -scores),
        "auout": average_precision_score(is_out, scores),
    }


def scores_by_hand(
    detector: GramDetector, images: Tensor, expectation: np.ndarray, maximum: float
) -> np.ndarray:
    """Eq. 5 for the default settings and their variants, in numpy."""
    deviations, probability = measured_by_hand(detector, images)
    if detector.confidence == "divide":
        deviations = deviations / probability[:, None]
    if detector.normalise:
        used = expectation > 0
        total = (deviations[:, used] / (expectation[used] + 1e-7)).sum(1)
    else:
        total = deviations.sum(1)
    if detector.confidence == "divide_total":
        return total / probability
    if detector.confidence == "subtract":
        return total / maximum - probability
    return total


def measured_by_hand(detector: GramDetector, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    measured = detector.measure_all([images], progress=False)
    exponentials = np.exp(measured.logits.double().numpy())
    return measured.deviations.double().numpy(), exponentials.max(1) / exponentials.sum(1)


def protocol_by_hand(
    detector: GramDetector, inside: Tensor, outside: Tensor, draws: int, seed: int, share: float
) -> dict[str, list[dict[str, float]]]:
    """Ten times: a tenth of the test data, drawn by the seed, sets E[delta]; the rest are compared."""
    figures: dict[str, list[dict[str, float]]] = {"Gram": [], "MSP": []}
    deviations, probability = measured_by_hand(detector, inside)
    _, outside_probability = measured_by_hand(detector, outside)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        order = torch.randperm(len(inside), generator=generator).numpy()
        size = round(share * len(inside))
        validation, test = order[:size], order[size:]
        weighed = deviations / probability[:, None] if detector.confidence == "divide" else deviations
        expectation = weighed[validation].mean(0)
        used = expectation > 0
        largest = (weighed[validation][:, used] / (expectation[used] + 1e-7)).sum(1).max()
        gram = scores_by_hand(detector, inside, expectation, largest)
        figures["Gram"].append(
            figures_by_hand(gram[test], scores_by_hand(detector, outside, expectation, largest))
        )
        figures["MSP"].append(figures_by_hand(-probability[test], -outside_probability))
    return figures


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"confidence": "none"},
        {"confidence": "divide_total"},
        {"confidence": "subtract"},
        {"confidence": "none", "normalise": False},
        {"bounds": "mean_variance"},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_protocol_written_out(choices: dict[str, Any]) -> None:
    detector = fitted(**choices)
    table = evaluate(detector, TEST.split(50), SETS, progress=False)
    assert [(row.ood, row.method) for row in table.rows] == [
        ("near", "Gram"),
        ("near", "MSP"),
        ("far", "Gram"),
        ("far", "MSP"),
    ]
    for row in table.rows:
        images = {"near": NEAR, "far": FAR}[row.ood]
        expected = protocol_by_hand(detector, TEST, images, draws=10, seed=0, share=0.1)[row.method]
        assert row.examples == len(images)
        for key in METRICS:
            figures_of_metric = [figures[key] for figures in expected]
            assert row.mean[key] == pytest.approx(np.mean(figures_of_metric), abs=1e-9), (row, key)
            assert row.spread[key] == pytest.approx(np.std(figures_of_metric), abs=1e-9), (row, key)


def test_draws_share_and_seed_are_those_asked_for(detector: GramDetector) -> None:
    table = evaluate(
        detector, [TEST], {"near": [NEAR]}, draws=3, validation_share=0.4, seed=77, progress=False
    )
    expected = protocol_by_hand(detector, TEST, NEAR, draws=3, seed=77, share=0.4)
    for row in table.rows:
        for key in METRICS:
            assert row.mean[key] == pytest.approx(np.mean([f[key] for f in expected[row.method]]), abs=1e-9)
    assert "143 examples; 3 draws of 57 for validation and 86 for test, seed 77" in table.protocol


def test_the_figures_are_not_trivial(result: Evaluation) -> None:
    near, _, far, _ = result.rows
    assert all(0.1 < near.mean[key] < 0.99 for key in METRICS)
    assert all(far.mean[key] > near.mean[key] for key in METRICS if key not in ("auin", "auout"))
    assert near.spread["auroc"] > 0


def test_the_protocol_is_told_in_words(result: Evaluation) -> None:
    assert "143 examples; 10 draws of 14 for validation and 129 for test, seed 0" in result.protocol


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(
    detector: GramDetector, result: Evaluation
) -> None:
    torch.manual_seed(12345)  # the global generator plays no part
    again = evaluate(detector, TEST.split(50), SETS, progress=False)
    assert again == result
    with pytest.warns(GramwatchWarning, match="2 of 6 taps never deviate .* leaky_relu, leaky_relu#2$"):
        other = evaluate(detector, TEST.split(50), SETS, seed=1, progress=False)
    assert values(other) != values(result)


def test_the_global_generator_is_left_alone(detector: GramDetector) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    evaluate(detector, [TEST], {"far": [FAR]}, draws=2, progress=False)
    assert torch.rand(3).equal(expected)


def test_the_size_of_batches_and_labels_beside_the_inputs_do_not_matter(
    detector: GramDetector, result: Evaluation
) -> None:
    labelled = [(part, torch.zeros(len(part))) for part in TEST.split(11)]
    table = evaluate(detector, labelled, {"near": [NEAR], "far": FAR.split(7)}, progress=False)
    for row, expected in zip(table.rows, result.rows, strict=True):
        assert row.mean == pytest.approx(expected.mean, abs=0.02)
        assert (row.method, row.ood, row.examples) == (expected.method, expected.ood, expected.examples)


def test_one_draw_has_no_spread(detector: GramDetector) -> None:
    table = evaluate(detector, [TEST], SETS, draws=1, progress=False)
    assert [row.spread for row in table.rows] == [dict.fromkeys(METRICS, 0.0)] * 4
    assert table.rows[0].mean["auroc"] > 0.5


def test_the_baseline_needs_no_validation_data_of_its_own(detector: GramDetector) -> None:
    # Its scores depend on no draw, only which of them are compared does.
    probability = measured_by_hand(detector, TEST)[1]
    outside = measured_by_hand(detector, NEAR)[1]
    table = evaluate(detector, [TEST], {"near": [NEAR]}, progress=False).rows[1]
    whole = figures_by_hand(-probability, -outside)
    assert table.method == "MSP"
    assert table.mean["auroc"] == pytest.approx(whole["auroc"], abs=0.02)


def test_nothing_about_the_detector_is_changed(tmp_path: Path) -> None:
    detector = fitted().calibrate([CALIBRATION], progress=False)
    detector.save(tmp_path / "before")
    bounds = {name: tensor.clone() for name, tensor in detector._bounds.state().items()}
    scores, cut = detector.calibration_scores_, detector.threshold_
    verdict = detector(FAR)
    evaluate(detector, TEST.split(50), SETS, draws=2, progress=False)
    detector.save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
    assert detector.threshold_ == cut
    assert detector.calibration_scores_.equal(scores)
    assert detector(FAR).p_value.equal(verdict.p_value)
    assert all(detector._bounds.state()[name].equal(tensor) for name, tensor in bounds.items())


def test_a_detector_that_is_only_fitted_stays_uncalibrated(detector: GramDetector) -> None:
    evaluate(detector, [TEST], {"far": [FAR]}, draws=1, progress=False)
    with pytest.raises(NotFittedError, match="not calibrated"):
        detector(FAR)


def test_a_calibration_plays_no_part(detector: GramDetector, result: Evaluation) -> None:
    calibrated = fitted().calibrate([CALIBRATION], progress=False)
    assert evaluate(calibrated, TEST.split(50), SETS, progress=False) == result


# --- inputs that are not finite ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outliers_that_are_not_finite_count_as_caught(detector: GramDetector, value: float) -> None:
    broken = NEAR.clone()
    broken[:, 0, 2, 2] = value
    table = evaluate(detector, [TEST], {"broken": [broken]}, draws=2, progress=False)
    for row in table.rows:
        assert row.mean == pytest.approx(dict.fromkeys(METRICS, 1.0), abs=1e-12)
        assert row.examples == len(NEAR)


def test_some_outliers_that_are_not_finite_count_as_the_highest_scores(detector: GramDetector) -> None:
    broken = NEAR.clone()
    broken[:35] = math.nan
    table = evaluate(detector, [TEST], {"broken": [broken], "whole": [NEAR[35:]]}, draws=2, progress=False)
    gram, msp, whole_gram, whole_msp = table.rows
    for row, whole in ((gram, whole_gram), (msp, whole_msp)):
        assert row.mean["tnr"] == pytest.approx(0.5 + whole.mean["tnr"] / 2)
        assert row.mean["auroc"] == pytest.approx(0.5 + whole.mean["auroc"] / 2)


def test_test_data_that_are_not_finite_count_as_false_alarms_and_set_no_expectation(
    detector: GramDetector,
) -> None:
    broken = TEST.clone()
    broken[::4] = math.nan
    with pytest.warns(GramwatchWarning, match="2 of 6 taps never deviate .* conv2, leaky_relu#2$"):
        table = evaluate(detector, [broken], {"near": [NEAR]}, draws=2, progress=False)
    finite = detector.measure_all([broken], progress=False).finite.numpy()
    deviations, probability = measured_by_hand(detector, TEST)
    outside, outside_probability = measured_by_hand(detector, NEAR)
    inside, outside = deviations / probability[:, None], outside / outside_probability[:, None]
    aurocs = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        order = torch.randperm(143, generator=generator).numpy()
        validation = order[:14][finite[order[:14]]]
        expectation = inside[validation].mean(0)
        used = expectation > 0
        scores = np.where(finite, (inside[:, used] / (expectation[used] + 1e-7)).sum(1), 1e30)[order[14:]]
        theirs = (outside[:, used] / (expectation[used] + 1e-7)).sum(1)
        aurocs.append(figures_by_hand(scores, theirs)["auroc"])
    assert table.rows[0].mean["auroc"] == pytest.approx(np.mean(aurocs), abs=1e-9)
    whole = evaluate(detector, [TEST], {"near": [NEAR]}, draws=2, progress=False)
    assert table.rows[0].mean["auroc"] < whole.rows[0].mean["auroc"]


def test_a_draw_of_nothing_but_broken_examples_is_an_error_that_says_so(detector: GramDetector) -> None:
    broken = torch.full_like(TEST, math.nan)
    with pytest.raises(InputError, match="NaN or infinity"):
        evaluate(detector, [broken], {"far": [FAR]}, progress=False)


# --- exports -----------------------------------------------------------------------------------------


def test_csv_parses_back_to_the_same_numbers(result: Evaluation, tmp_path: Path) -> None:
    text = result.to_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text(encoding="utf-8") == text
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == len(result.rows) == 4
    for line, row in zip(lines, result.rows, strict=True):
        assert (line["method"], line["ood"], int(line["examples"])) == (row.method, row.ood, row.examples)
        assert {key: float(line[key]) for key in METRICS} == row.mean
        assert {key: float(line[f"{key}_spread"]) for key in METRICS} == row.spread
        assert len(line) == 3 + 2 * len(METRICS)


def test_json_parses_back_to_the_same_rows(result: Evaluation, tmp_path: Path) -> None:
    text = result.to_json(tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text(encoding="utf-8") == text
    parsed = json.loads(text)
    assert Evaluation(tuple(Row(**row) for row in parsed["rows"]), parsed["protocol"]) == result


def test_markdown_is_a_table_of_as_many_columns_in_every_line(result: Evaluation, tmp_path: Path) -> None:
    text = result.to_markdown(tmp_path / "table.md")
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == text
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table == lines[: len(table)]
    assert len(table) == 2 + len(result.rows)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert {len(row) for row in cells} == {2 + len(METRICS)}
    assert cells[0] == ["out-of-distribution set", "method", "TNR@95", "AUROC", "DTACC", "AUIN", "AUOUT"]
    assert cells[1] == ["---", "---", *["---:"] * len(METRICS)]
    for row, line in zip(result.rows, cells[2:], strict=True):
        assert line[:2] == [f"{row.ood} ({row.examples})", row.method]
        assert line[3] == f"{100 * row.mean['auroc']:.2f} ± {100 * row.spread['auroc']:.2f}"
    assert result.protocol in text


def test_without_a_path_nothing_is_written(
    result: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert result.to_csv()
    assert result.to_json()
    assert result.to_markdown()
    assert list(tmp_path.iterdir()) == []


def test_printing_shows_an_aligned_table_in_percent(result: Evaluation) -> None:
    printed = str(result)
    assert repr(result) == printed
    head, rule, *lines, protocol = printed.splitlines()
    assert head.split("  ")[0] == "out-of-distribution set"
    assert set(rule) == {"-", " "}
    assert protocol == result.protocol
    assert len(lines) == len(result.rows)
    assert len({len(line) for line in (head, rule, *lines)}) == 1
    for row, line in zip(result.rows, lines, strict=True):
        assert line.startswith(f"{row.ood} ({row.examples})")
        for key in METRICS:
            assert f"{100 * row.mean[key]:.2f} ± {100 * row.spread[key]:.2f}" in line


def test_names_with_commas_quotes_and_bars_survive(detector: GramDetector) -> None:
    name = 'a, "b" | c'
    table = evaluate(detector, [TEST], {name: [FAR]}, draws=1, progress=False)
    assert [line["ood"] for line in csv.DictReader(io.StringIO(table.to_csv()))] == [name] * 2
    assert [row["ood"] for row in json.loads(table.to_json())["rows"]] == [name] * 2
    line = table.to_markdown().splitlines()[2]
    assert line.replace("\\|", "").count("|") == 3 + len(METRICS)
    assert name in str(table)


def test_numbers_are_plain_floats_and_rows_cannot_be_changed(result: Evaluation) -> None:
    for row in result.rows:
        assert list(row.mean) == list(row.spread) == list(METRICS)
        assert all(type(value) is float for value in (*row.mean.values(), *row.spread.values()))
    with pytest.raises(AttributeError):
        result.rows = ()  # type: ignore[misc]


# --- errors ------------------------------------------------------------------------------------------


def test_a_detector_that_is_not_fitted_is_an_error() -> None:
    with pytest.raises(NotFittedError, match="not fitted"):
        evaluate(GramDetector(TinyNet()), [TEST], {"far": [FAR]}, progress=False)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_too_few_test_data_are_an_error_that_counts_them(detector: GramDetector, count: int) -> None:
    with pytest.raises(InputError, match=f"{count} in-distribution examples cannot be split"):
        evaluate(detector, [TEST[:count]], {"far": [FAR]}, progress=False)


def test_the_fewest_test_data_that_can_be_split_work(detector: GramDetector) -> None:
    # One in ten: enough deviate in this draw to score by.
    images = TEST[measured_by_hand(detector, TEST)[0].sum(1) > 0][:10]
    with pytest.warns(GramwatchWarning, match="5 of 6 taps never deviate"):
        table = evaluate(detector, [images], {"far": [FAR]}, draws=1, progress=False)
    assert "1 draws of 1 for validation and 9 for test" in table.protocol
    assert table.rows[0].mean["auroc"] > 0.5


@pytest.mark.parametrize("share", [0.0, -1.0, 1.0, 2.0])
def test_a_share_that_leaves_nothing_is_an_error(detector: GramDetector, share: float) -> None:
    with pytest.raises(InputError, match="cannot be split"):
        evaluate(detector, [TEST], {"far": [FAR]}, validation_share=share, progress=False)


@pytest.mark.parametrize("empty", [[], [TEST[:0]]], ids=["no batch", "an empty batch"])
def test_an_empty_loader_is_an_error_that_names_it(detector: GramDetector, empty: list[Tensor]) -> None:
    with pytest.raises(InputError, match="no example: in-distribution"):
        evaluate(detector, empty, {"far": [FAR]}, progress=False)
    with pytest.raises(InputError, match="no example: nothing here"):
        evaluate(detector, [TEST], {"nothing here": empty}, progress=False)


@pytest.mark.parametrize("draws", [0, -1])
def test_no_draws_are_an_error(detector: GramDetector, draws: int) -> None:
    with pytest.raises(ValueError, match=f"draws must be at least 1, got {draws}"):
        evaluate(detector, [TEST], {"far": [FAR]}, draws=draws, progress=False)


def test_inputs_of_another_size_are_an_error(detector: GramDetector) -> None:
    with pytest.raises(InputError, match="fitted on"):
        evaluate(detector, [TEST], {"large": [torch.zeros(4, 1, 8, 8)]}, progress=False)


def test_validation_data_that_never_deviate_cannot_be_divided_by() -> None:
    detector = fitted(confidence="subtract")
    with pytest.raises(CalibrationError, match="largest deviation, which is zero"):
        evaluate(detector, TRAIN.split(80), {"far": [FAR]}, validation_share=0.01, draws=1, progress=False)


def test_evaluate_is_part_of_the_package() -> None:
    assert gramwatch.evaluate is evaluate


def test_no_out_of_distribution_set_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one"):
        evaluate(fitted(), [CALIBRATION], {})


def test_validation_data_of_their_own_fit_the_rules_and_all_else_is_for_test() -> None:
    """The same as one draw, whose validation data are handed over apart."""
    measured = [Measurement(torch.rand(n, 3), torch.randn(n, 4), torch.ones(n).bool()) for n in (50, 30)]
    inside, outside = ({"Gram": measurement} for measurement in measured)
    rules = {"Gram": GramRule(TotalDeviation())}
    drawn = evaluate_measured(inside, {"set": outside}, rules, draws=1, validation_share=0.2, seed=3)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    apart = [{"Gram": measured[0][part]} for part in (order[10:], order[:10])]
    table = evaluate_measured(apart[0], {"set": outside}, rules, validation=apart[1])
    assert table.rows[0].mean == drawn.rows[0].mean
    assert table.protocol == "In-distribution: 10 examples for validation and 40 for test, percent."
    swapped = evaluate_measured(apart[0], {"set": outside}, rules, validation=apart[0])
    assert swapped.rows[0].mean != drawn.rows[0].mean
