"""The studies behind Guard: its rules, how it is compared, its false alarms. Whole runs are in test_paper."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gramwatch.deviation import TotalDeviation
from gramwatch.evaluate import Row, evaluate_measured, scores_of_first_draw
from gramwatch.joint import JointRule
from gramwatch.measurement import Measurement
from gramwatch.metrics import Difference, all_metrics
from gramwatch.paper import against, guard_study
from gramwatch.paper.false_alarm_study import shares
from gramwatch.paper.false_alarms import simulated
from gramwatch.paper.subject import PADDING, mirrored_and_shifted
from gramwatch.report.why import BEST, draw_why, marks_of, read_figures
from pictures import size_of_drawing

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def measured() -> Measurement:
    return simulated(300, torch.Generator().manual_seed(0))


def scores_by(measured: Measurement, standard: object, join: object) -> torch.Tensor:
    totals = {"gram": TotalDeviation()}
    return JointRule(totals, standard, join).fit(measured)(measured)[:, 0]  # type: ignore[arg-type]


def test_every_rule_differs_from_guards_in_what_it_says() -> None:
    titles = [each.title for each in guard_study.VARIANTS]
    assert titles[0] == guard_study.GUARD
    assert len(set(titles)) == len(titles)
    for each in guard_study.VARIANTS:
        assert (guard_study.GRAM in each.rule().totals) == (guard_study.GRAM in each.members)


def test_every_form_of_gram_has_its_row() -> None:
    forms = [form.title for form in guard_study.forms_of("resnet20")]
    used = [each.form for each in guard_study.VARIANTS if each.form != guard_study.GRAM]
    assert used == forms
    assert [form.title for form in guard_study.forms_of("mnist_convnet")] == forms[:-1]  # it has no blocks


def test_a_rule_takes_the_deviations_of_its_form(measured: Measurement) -> None:
    gram, energy = measured.parts["gram"], measured.parts["energy"]
    methods = {guard_study.GRAM: gram[:0], "other": gram, "energy": energy}
    form = guard_study.JoinVariant("", (guard_study.GRAM, "energy"), form="other")
    parts = form.measured(methods).parts
    assert torch.equal(parts[guard_study.GRAM].deviations, gram.deviations)
    assert torch.equal(parts["energy"].values, energy.values)

    halves = [
        replace(form, part=part).measured(methods).parts[guard_study.GRAM].deviations
        for part in (guard_study._first_half, guard_study._last_half)
    ]
    assert all(half.shape[1] for half in halves)
    assert torch.equal(torch.cat(halves, 1), gram.deviations)


def test_gram_is_compressed_tap_by_tap(measured: Measurement) -> None:
    gram = measured.parts["gram"]
    total = TotalDeviation().fit(gram.deviations, gram.probability)
    assert total.expectation_ is not None
    ways = {
        guard_study._logarithms: lambda x: (1 + x).log().mean(),
        guard_study._cube_roots: lambda x: (x ** (1 / 3)).mean(),
        guard_study._root_of_mean: lambda x: x.mean().sqrt(),
        guard_study._logarithm_of_mean: lambda x: (1 + x.mean()).log(),
        guard_study._plain: lambda x: x.mean(),
    }
    for way, formula in ways.items():
        found = way(total, gram)
        for i in (0, 17):
            each = gram.deviations[i].double() / gram.probability[i] / (total.expectation_ + 1e-7)
            assert found[i].item() == pytest.approx(formula(each).item()), way


def test_images_are_mirrored_and_shifted_as_in_training() -> None:
    images = torch.randint(1, 256, (40, 3, 6, 5), dtype=torch.uint8)
    moved = mirrored_and_shifted(images)
    assert torch.equal(moved, mirrored_and_shifted(images))
    side = 2 * PADDING + 1
    seen = set()
    for image, found in zip(images, moved, strict=True):
        padded = torch.nn.functional.pad(image, [PADDING] * 4)
        places = [
            (mirror, y, x)
            for mirror, source in ((False, padded), (True, padded.flip(2)))
            for y in range(side)
            for x in range(side)
            if torch.equal(found, source[:, y : y + 6, x : x + 5])
        ]
        assert places
        seen.add(places[0])
    assert {mirror for mirror, _, _ in seen} == {False, True}
    assert len(seen) > 20


def test_fisher_sums_logarithms_of_p_values(measured: Measurement) -> None:
    found = scores_by(measured, guard_study.LogarithmOfP(), guard_study.sum_of_members)
    members = JointRule({"gram": TotalDeviation()}).fit(measured).member_scores(measured)
    p = torch.stack([(1 + (members >= row).sum(0)) / 301 for row in members])
    torch.testing.assert_close(found, -p.log().sum(1), atol=1e-3, rtol=1e-3, check_dtype=False)


def test_stouffer_is_symmetric_about_the_median(measured: Measurement) -> None:
    standard = guard_study.NormalDeviate().fit(torch.linspace(0, 1, 999).double()[:, None])
    z = standard(torch.tensor([[0.5], [0.975], [0.025]]).double())[:, 0]
    assert z.tolist() == pytest.approx([0, 1.96, -1.96], abs=0.02)


def test_z_scores(measured: Measurement) -> None:
    scores = torch.linspace(-1, 3, 101).double()[:, None]
    z = guard_study.ZScore(floor=None).fit(scores)(scores)[:, 0]
    assert z.mean().item() == pytest.approx(0, abs=1e-9)
    assert z.std(correction=0).item() == pytest.approx(1)


def test_members_that_say_the_same_share_their_say() -> None:
    scores = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)).double()
    scores = torch.cat([scores, scores[:, 1:]], 1)
    z = guard_study.Decorrelated(floor=None).fit(scores)(scores)
    plain = guard_study.Standard(floor=None).fit(scores)(scores)
    weights = (z / plain)[0]
    assert weights[1].item() == pytest.approx(weights[2].item())
    variances = plain.var(0)
    assert weights[0].item() == pytest.approx(1 / variances[0].item(), rel=0.05)
    assert (weights[1] + weights[2]).item() == pytest.approx(1 / variances[1].item(), rel=0.05)


def test_an_exponential_tail_goes_on_beyond_the_examples() -> None:
    scores = torch.distributions.Exponential(1.0).icdf(torch.linspace(0.0005, 0.9995, 1000)).double()[:, None]
    tail = guard_study.ExponentialTail().fit(scores)
    found = tail(torch.tensor([[0.7], [5.0], [20.0]]).double())[:, 0]
    assert found.tolist() == pytest.approx([0.7, 5.0, 20.0], rel=0.03)  # -log p of an exponential is x


def test_classes_may_lie_at_different_heights() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.arange(4).repeat(500)
    logits = torch.nn.functional.one_hot(predicted, 4).double()
    scores = torch.randn(2000, generator=generator).double() + 3 * predicted
    finite = torch.ones(2000, dtype=torch.bool)
    measured = Measurement.together({"energy": Measurement(scores[:, None], logits, finite)})
    found = guard_study.PerClass({}).fit(measured)(measured)[:, 0]
    plain = JointRule({}).fit(measured)(measured)[:, 0]

    def gap(x: torch.Tensor) -> float:
        medians = torch.stack([x[predicted == c].median() for c in range(4)])
        return float(medians.max() - medians.min())

    assert gap(found) < 0.25 * gap(plain)
    assert found.median().item() == pytest.approx(0, abs=0.1)


def test_a_rule_is_fitted_anew_each_time(measured: Measurement) -> None:
    other = simulated(200, torch.Generator().manual_seed(1))
    for variant in guard_study.VARIANTS:
        rule = replace(variant, members=("gram", "fdbd", "energy")).rule()
        rule = replace(rule, totals={"gram": variant.total})
        first = rule.fit(measured)(measured)
        again = rule.fit(other).fit(measured)(measured)
        assert torch.equal(first, again), variant.title
        assert rule.standard.median_ is None
        assert variant.total.expectation_ is None


def test_rules_and_single_methods_stand_side_by_side(measured: Measurement) -> None:
    methods = {guard_study.GRAM if name == "gram" else name: part for name, part in measured.parts.items()}
    variant = guard_study.JoinVariant("both", (guard_study.GRAM, "energy"))
    found = guard_study.WithRules(methods, [variant], ["fdbd"])
    assert list(found) == ["both", "fdbd"]
    assert len(found) == 2
    assert found["fdbd"] is methods["fdbd"]
    assert list(found["both"].parts) == [guard_study.GRAM, "energy"]
    assert torch.equal(found["both"].parts["energy"].values, methods["energy"].values)


def test_joins(measured: Measurement) -> None:
    z = torch.tensor([[-1.0, 2.0], [-3.0, -2.0]])
    assert guard_study._highest(z).tolist() == [2, -2]
    assert guard_study._squares(z).tolist() == [4, 0]
    assert guard_study._smooth_maximum(z)[0] == pytest.approx(2.0486, abs=1e-4)


def test_sets_are_chosen_by_name() -> None:
    sets = guard_study.ood_sets("cifar10")
    chosen = {each.name for each in sets if guard_study._chosen(each, "tiny_imagenet, mnist")}
    assert chosen == {"tiny_imagenet", "mnist"}
    assert all(guard_study._chosen(each, "") for each in sets)


# --- against the best single method ------------------------------------------------------------------


def rows_of(figures: dict[str, dict[str, tuple[float, float]]]) -> list[Row]:
    """AUROC and TNR in percent, by set and method."""
    return [
        Row(method, ood, 100, {"auroc": auroc / 100, "tnr": tnr / 100}, {"auroc": 0.0, "tnr": 0.0})
        for ood, found in figures.items()
        for method, (auroc, tnr) in found.items()
    ]


FIGURES = {
    "far": {"Guard": (99.96, 99), "Gram": (99.97, 99), "ODIN": (80, 40), "MSP": (70, 30)},
    "texture": {"Guard": (98, 90), "Gram": (97, 85), "ODIN": (90, 50), "MSP": (89, 48)},
    "middle": {"Guard": (89.95, 60), "Gram": (80, 40), "ODIN": (90, 61), "MSP": (84, 50)},
    "near": {"Guard": (86, 40), "Gram": (70, 20), "ODIN": (88, 44), "MSP": (85, 38)},
}


def made_up(ood: str, method: str) -> Difference:
    ours, theirs = FIGURES[ood]["Guard"][0], FIGURES[ood][method][0]
    ahead = (ours - theirs) / 100
    return Difference(ahead, ahead - 0.01, ahead + 0.01)


def test_guard_meets_the_best_single_method_of_each_set() -> None:
    rows = rows_of(FIGURES)
    every = against.against_the_best(rows, "Guard", ["Gram", "ODIN", "MSP"], made_up)
    assert [each.best for each in every] == ["Gram", "Gram", "ODIN", "ODIN"]
    assert [each.verdict for each in every] == ["saturated", "ahead", "within 0.1", "behind"]
    quick = against.against_the_best(rows, "Guard", ["Gram", "MSP"], made_up)
    assert [each.best for each in quick] == ["Gram", "Gram", "MSP", "MSP"]
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


def test_the_first_draw_is_that_of_the_evaluation(measured: Measurement) -> None:
    generator = torch.Generator().manual_seed(1)
    inside, outside = {"Guard": measured}, {"far": {"Guard": simulated(200, generator)}}
    rules = {"Guard": JointRule({"gram": TotalDeviation()})}
    kept, found = scores_of_first_draw("Guard", inside, outside, rules)
    assert (len(kept), len(found["far"])) == (270, 200)
    row = evaluate_measured(inside, outside, rules, draws=1).rows[0]
    assert row.mean == pytest.approx(all_metrics(kept, found["far"]))


# --- the picture -------------------------------------------------------------------------------------


def test_the_picture_shows_gram_the_best_other_and_guard() -> None:
    figures = {ood: {name: auroc for name, (auroc, _) in found.items()} for ood, found in FIGURES.items()}
    for found in figures.values():
        found["Gram + KNN"] = 100.0  # another rule is no single method
    rows = marks_of(figures)
    assert [row.ood for row in rows] == ["far", "texture", "middle", "near", "mean"]
    assert [(row.others_name, row.other) for row in rows[:2]] == [("ODIN", 80), ("ODIN", 90)]
    mean = rows[-1]
    assert (mean.others_name, mean.other, mean.guard) == ("ODIN", 87, pytest.approx(93.4775))


def test_the_picture_is_drawn_for_several_networks_from_their_tables(tmp_path: Path) -> None:
    table = tmp_path / "guard.csv"
    lines = ["network,in_distribution,ood,method,images,auroc"]
    lines += [
        f"ResNet-20,CIFAR-10,{ood},{method},100,{100.0 if method == 'Guard' else auroc}"
        for ood, found in FIGURES.items()
        for method, (auroc, _) in found.items()
    ]
    lines += ["ResNet-20,CIFAR-10,SVHN,Guard,data not present,"]
    table.write_text("\n".join(lines))
    title, figures = read_figures(table)
    assert title == "ResNet-20, CIFAR-10"
    assert set(figures) == set(FIGURES)
    assert figures["near"]["Guard"] == 100 > BEST
    one, three = tmp_path / "one.png", tmp_path / "three.png"
    draw_why(one, {title: figures})
    draw_why(three, {title: figures, "b": figures, "c": figures})
    (width, height), (wider, higher) = size_of_drawing(one), size_of_drawing(three)
    assert wider == width
    assert 2 * height > higher > 1.5 * height  # two networks side by side, the third below


# --- false alarms ------------------------------------------------------------------------------------


def test_false_alarms_of_fresh_examples_are_as_chance_has_them() -> None:
    examples = simulated(3000, torch.Generator().manual_seed(5))
    rule = JointRule({"gram": TotalDeviation()})
    together, per_class = (shares(examples, rule, 1500, each, splits=60) for each in (False, True))
    for each in (*together, *per_class):
        assert (each.calibration, each.fresh) == (1500, 1500)
        spread = (each.chance_high - each.chance_low) / 4
        assert each.mean <= 100 * each.alpha + 3 * spread / 60**0.5
        assert each.mean >= each.chance_low
        assert each.low == pytest.approx(each.chance_low, abs=spread)
        assert each.high == pytest.approx(each.chance_high, abs=spread)
    # 750 examples rank. By 5 %: how far rates of one calibration are from it is the beta distribution's.
    deviation = 100 * (0.05 * 0.95 * (1 / 752 + 1 / 1500)) ** 0.5
    assert together[1].chance_high - together[1].chance_low == pytest.approx(4 * 0.98 * deviation, rel=0.06)
    assert [each.chance_class for each in together] == [None] * 3
    for each in per_class:
        assert 0 < each.highest_class <= each.chance_class
    assert together[2].highest_class > per_class[2].chance_class  # what per_class is for


def test_a_p_value_that_does_not_hold_is_seen() -> None:
    """Fresh examples score higher than those that calibrate."""
    examples = simulated(1200, torch.Generator().manual_seed(6))
    rule = JointRule({"gram": TotalDeviation()})

    class Optimistic(JointRule):
        def __call__(self, measured: Measurement) -> torch.Tensor:
            scores = super().__call__(measured)
            return scores + 3 * (len(scores) > 400)  # only the fresh ones are so many

    found = shares(examples, Optimistic(rule.totals), 600, False, splits=20)
    assert all(each.mean > each.chance_high for each in found)


def test_the_shares_in_the_docs_are_those_of_the_study() -> None:
    page = (DOCS / "results/false_alarms-resnet20.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 9
    assert "\n".join(table) in (DOCS / "guard-study.md").read_text(encoding="utf-8")


def table_in_the_docs(first: str) -> list[list[str]]:
    """The cells of the table in guard-study.md whose first line begins so, without its second line."""
    lines = (DOCS / "guard-study.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(first))
    end = next(i for i in range(begin, len(lines)) if not lines[i])
    head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[begin:end])
    return [head, *body]


def test_the_means_in_the_docs_are_those_of_the_results() -> None:
    """Every figure of the big table, from the CSV of its network."""
    files = {
        "DenseNet": "densenet",
        "ResNet-20": "resnet20",
        "ResNet-32": "resnet32",
        "ResNet-34": "resnet34",
        "ResNet-56": "resnet56",
        "WRN-40-2": "wrn40_2",
        "MNIST ConvNet": "mnist_convnet",
        "new ResNet-34": "resnet34-new",
        "new WRN-40-2": "wrn40_2-new",
        "new DenseNet": "densenet-new",
    }
    head, *body = table_in_the_docs("| mean AUROC, percent |")
    assert len(body) > 40
    aurocs: dict[str, dict[tuple[str, str], float]] = {}
    for network, name in files.items():
        with (DOCS / "results" / f"guard-{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["auroc"]]
        aurocs[network] = {(row["method"], row["ood"]): float(row["auroc"]) for row in rows}
    for title, *cells in body:
        for column, cell in zip(head[1:], cells, strict=True):
            network, _, part = column.partition(", ")
            method = title.strip("*")
            own = [
                value
                for (other, ood), value in aurocs[network].items()
                if other == method and ood.startswith("Tiny ImageNet" if part else "")
            ]
            assert len(own) == (3 if part else 16), (title, column)
            assert float(cell) == pytest.approx(sum(own) / len(own), abs=0.0051), (title, column)


def test_what_came_out_in_the_docs_is_what_the_pages_say() -> None:
    """Every figure of the table that sums up, from the page of its network."""
    files = {
        "DenseNet-BC-100-12": "densenet",
        "ResNet-20": "resnet20",
        "ResNet-34": "resnet34",
        "ResNet-32": "resnet32",
        "ResNet-56": "resnet56",
        "WRN-40-2": "wrn40_2",
        "MNIST ConvNet": "mnist_convnet",
        "ResNet-34, seed 2": "resnet34-new",
        "WRN-40-2, seed 1": "wrn40_2-new",
        "DenseNet-BC-100-12, seed 1": "densenet-new",
    }
    _, *body = table_in_the_docs("| network | | ahead / within 0.1")
    assert [network for network, *_ in body] == list(files)
    for network, _, counts, aurocs, closed, tnrs, near in body:
        page = (DOCS / "results" / f"guard-{files[network]}.md").read_text(encoding="utf-8")
        (said,) = re.findall(r"^- Against all but .*: of 16 sets (.*)$", page, re.MULTILINE)
        wanted = re.findall(r"(\d+) (?:ahead|within 0.1|behind|saturated)\b", said.partition(":")[0])
        assert counts == " / ".join(wanted), network
        found = re.search(
            r"mean AUROC ([\d.]+), of the best single method \((.*?)\) ([\d.]+): (-?\d+) % .*?"
            r"mean TNR ([\d.]+), of the best single method \((.*?)\) ([\d.]+)",
            said,
        )
        assert found is not None, network
        auroc, best, its_auroc, percent, tnr, other, its_tnr = found.groups()
        assert aurocs == f"{auroc}, {best} {its_auroc}", network
        assert closed == f"{percent} %", network
        assert tnrs == f"{float(tnr):.1f}, {other} {float(its_tnr):.1f}", network
        interval = re.search(r"below (.*?) by paired bootstrap \((.*?)\)", said)
        assert near == (f"{interval[1]}: {interval[2]}" if interval else ""), network
