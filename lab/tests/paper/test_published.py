"""The published figures: against the paper's source, where it is to be had, and against themselves."""

import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from conftest import SHARED
from gramwatch_lab.paper import published
from gramwatch_lab.paper.beside import Line, tally

NUMBER = r"\d+\.\d*|\d+"


@pytest.fixture(scope="module")
def source() -> str:
    files = sorted((SHARED / "paper").glob("*.txt")) if (SHARED / "paper").is_dir() else []
    if not files:
        pytest.skip(f"the paper's source is not at {SHARED / 'paper'}")
    return Path(files[0]).read_text(encoding="utf-8")


def numbers_between(source: str, start: str, end: str) -> list[float]:
    """All figures in the cells of the tables of a part, in order: what follows an ampersand or a slash."""
    begin = source.index(start)
    part = source[begin : source.index(end, begin)]
    part = re.sub(r"\\(textbf|multicolumn|multirow|cline|begin)\b(\{[^{}]*\})?", r"\2", part)
    part = part.replace("{", " ").replace("}", " ")
    return [float(n) for n in re.findall(rf"[&/]\s*({NUMBER})(?=\s*(?:[&/\\\n]|$))", part)]


def transcribed(*blocks: str) -> list[float]:
    """The figures of our blocks, in order."""
    return [
        float(n)
        for block in blocks
        for row in published._rows(block)
        for cell in row[1:]
        for n in cell.split()
        if re.fullmatch(NUMBER, n)
    ]


def test_expanded_table_as_in_the_source(source: str) -> None:
    result = numbers_between(source, r"\section{Expanded Table}", r"\label{tab:exp_ood_results}")
    assert len(result) == 36 * 12
    assert result == transcribed(published.EXPANDED)


def test_joined_tables_as_in_the_source(source: str) -> None:
    result = numbers_between(source, r"\section{Combining OE + Ours}", r"\section{Few more OOD results}")
    ours = transcribed(published.JOINED)
    assert result[: len(ours)] == ours
    both = zip(
        published._rows(published.PRELIMINARY_BASELINE),
        published._rows(published.PRELIMINARY_OE),
        strict=True,
    )
    rows = [" ".join([*plain[2:], *exposed[2:]]) for plain, exposed in both]
    assert result[len(ours) :] == [float(n) for row in rows for n in row.split()]


def test_ablation_as_in_the_source(source: str) -> None:
    result = numbers_between(source, "are considered in Table 4.", r"\label{tab:detailed_ablation}")
    blocks = (published.ABLATION_TNR, published.ABLATION_AUROC, published.ABLATION_DTACC)
    by_row = zip(*(published._rows(block) for block in blocks), strict=True)
    ours = [float(n) for rows in by_row for row in rows for n in row[3].split()]
    assert len(ours) == 30 * 36
    assert result == ours


def test_exposure_and_trained_and_mlp_as_in_the_source(source: str) -> None:
    small = numbers_between(source, r"\textbf{Mean TNR @ TPR95}", r"\label{tab:OE}")
    large = numbers_between(source, r"\label{appendix:OE}", r"\caption{Comparison of Mean TNR@TPR95 values.}")
    assert small + large == transcribed(published.EXPOSURE)
    result = numbers_between(source, r"\label{appendix:dpn+}", r"\label{appendix:mlp_results}")
    assert result == transcribed(published.TRAINED)
    result = numbers_between(source, r"\label{appendix:mlp_results}", r"\label{fig:mnist_ood}")
    assert [n for n in result if n not in (300.0,)] == transcribed(published.MLP)


def test_curves_as_in_the_source(source: str) -> None:
    points = re.findall(r"coordinates \{\s*((?:\(\d+,[\d.]+\))+)\s*\}", source)
    curves = [[float(v) for v in re.findall(r",([\d.]+)\)", line)] for line in points]
    ours = [
        [float(v) for v in row[3].split()]
        for block in (published.DEPTH, published.ORDER)
        for row in published._rows(block)
    ]
    assert curves == ours


def test_means_of_the_ablation_follow_from_its_rows() -> None:
    """Near sets left out, as the caption says; the deviation is that of a sample."""
    near = {("CIFAR-10", "CIFAR-100"), ("CIFAR-100", "CIFAR-10")}
    for block in (published.ABLATION_TNR, published.ABLATION_AUROC, published.ABLATION_DTACC):
        *rows, means, deviations = published._rows(block)
        kept = [[float(n) for n in row[3].split()] for row in rows if (row[0], row[2]) not in near]
        for column, theirs, spread in zip(
            zip(*kept, strict=True), means[3].split(), deviations[3].split(), strict=True
        ):
            assert mean(column) == pytest.approx(float(theirs), abs=0.07)
            assert stdev(column) == pytest.approx(float(spread), abs=0.07)


def test_the_tally_of_table_2_is_what_the_paper_counts() -> None:
    """15 wins, 6 on par, 3 second of 24, by the rule of `tally`."""
    table2 = {"iSUN", "LSUN (R)", "TinyImgNet (R)", "SVHN", "CIFAR-10"}
    lines = [
        Line(entry.network, entry.in_distribution, entry.ood, entry.method, None, (entry,))
        for entry in published.entries()
        if entry.table == "tab:exp_ood_results"
        and entry.ood in table2
        and (entry.in_distribution, entry.ood) != ("CIFAR-100", "CIFAR-10")
    ]
    assert len(lines) == 24 * 4
    assert tally(lines, "Gram", published=True) == [15, 6, 3]
    assert tally(lines, "Gram") == [0, 0, 0]


def test_contradictions_are_kept() -> None:
    for ood, figures in (("TinyImgNet (R)", (98.7, 99.48)), ("SVHN", (97.6, 98.14))):
        result = published.find("CIFAR-10", "resnet34", ood, "Gram")
        line = Line("ResNet-34", "CIFAR-10", ood, "Gram", None, tuple(result))
        assert line.their("tnr") == figures[0]
        assert figures[1] in [entry.figures["tnr"] for entry in line.contradicting("tnr")]
        assert line.cell("tnr").startswith(f"({figures[0]} or {figures[1]}")


def test_released_figures_agree_with_the_table_up_to_rounding() -> None:
    """All but the detection accuracies of one network on two sets, and one figure rounded up."""
    differing = []
    for entry in published.entries():
        if entry.table == "released figures":
            tables = published.find(
                entry.in_distribution, entry.network, entry.ood, "Gram", ("tab:exp_ood_results",)
            )
            # Cropped sets against SVHN are released, but in no table.
            assert len(tables) == (0 if (entry.in_distribution, entry.ood[-3:]) == ("SVHN", "(C)") else 1)
            differing += [
                (entry.network, entry.in_distribution, entry.ood, metric)
                for table in tables
                for metric in published.SHOWN
                if abs(entry.figures[metric] - table.figures[metric]) > 0.101
            ]
    assert differing == [
        ("resnet34", "CIFAR-100", "iSUN", "dtacc"),
        ("resnet34", "CIFAR-100", "LSUN (R)", "dtacc"),
    ]
