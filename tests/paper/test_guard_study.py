"""The study of Guard: rules to join members, forms of Gram, and the figures in the docs."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import effort, photographs
from gramwatch.deviation import TotalDeviation
from gramwatch.gram_rules import MeanOfRoots
from gramwatch.guard import Guard
from gramwatch.joint import JointRule, Standard
from gramwatch.measurement import Measurement
from gramwatch.paper import guard_study
from gramwatch.paper.false_alarms import simulated
from gramwatch.report import across
from tests.guarded import made

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def measured() -> Measurement:
    return simulated(300, torch.Generator().manual_seed(0))


def scores_by(measured: Measurement, standard: Standard) -> torch.Tensor:
    return JointRule({"gram": MeanOfRoots(TotalDeviation())}, standard).fit(measured)(measured)[:, 0]


def test_every_rule_differs_from_guards_in_what_it_says() -> None:
    titles = [each.title for each in guard_study.VARIANTS]
    assert titles[0] == guard_study.GUARD
    assert len(set(titles)) == len(titles)
    for each in guard_study.VARIANTS:
        assert (guard_study.GRAM in each.rule().totals) == (guard_study.GRAM in each.members)


def test_the_first_rule_is_a_guards() -> None:
    net = made()
    guard, lean = Guard(net, members=guard_study.STUDIED), guard_study.LEAN.make(net)
    gram = guard.members["gram"]
    assert lean.settings_as_json() == gram.settings_as_json()
    variant = guard_study.VARIANTS[0]
    titles = [each.title for each in guard.members.values()]
    assert list(variant.members) == titles
    mine, theirs = variant.rule(), guard.rule()
    assert list(mine.totals.values()) == list(theirs.totals.values())
    assert (list(mine.rules.values()), mine.standard) == (list(theirs.rules.values()), theirs.standard)


def test_every_form_of_gram_has_its_row() -> None:
    forms = [form.title for form in guard_study.forms_of("resnet20")]
    usual = (guard_study.GRAM, guard_study.LEAN.title)
    used = [each.form for each in guard_study.VARIANTS if each.form not in usual]
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
    ways = {
        guard_study.Logarithms: lambda x: (1 + x).log().mean(),
        guard_study.CubeRoots: lambda x: (x ** (1 / 3)).mean(),
        guard_study.RootOfMean: lambda x: x.mean().sqrt(),
        guard_study.LogarithmOfMean: lambda x: (1 + x.mean()).log(),
        guard_study.Plain: lambda x: x.mean(),
        MeanOfRoots: lambda x: x.sqrt().mean(),
    }
    for way, formula in ways.items():
        rule = way(TotalDeviation()).fit(gram)
        expectation = rule.total.expectation_
        assert expectation is not None
        found = rule(gram)[:, 0]
        for i in (0, 17):
            each = gram.deviations[i].double() / gram.probability[i] / (expectation + 1e-7)
            assert found[i].item() == pytest.approx(formula(each).item()), way


def test_fisher_sums_logarithms_of_p_values(measured: Measurement) -> None:
    found = scores_by(measured, guard_study.LogarithmOfP())
    members = JointRule({"gram": MeanOfRoots(TotalDeviation())}).fit(measured).member_scores(measured)
    p = torch.stack([(1 + (members >= row).sum(0)) / 301 for row in members])
    torch.testing.assert_close(found, -p.log().sum(1), atol=1e-3, rtol=1e-3, check_dtype=False)


def test_stouffer_is_symmetric_about_the_median(measured: Measurement) -> None:
    standard = guard_study.NormalDeviate().fit(torch.linspace(0, 1, 999).double()[:, None])
    z = standard(torch.tensor([[0.5], [0.975], [0.025]]).double())[:, 0]
    assert z.tolist() == pytest.approx([0, 1.96, -1.96], abs=0.02)


def test_z_scores(measured: Measurement) -> None:
    scores = torch.linspace(-1, 3, 101).double()[:, None]
    z = guard_study.ZScore(floored=False).fit(scores)(scores)[:, 0]
    assert z.mean().item() == pytest.approx(0, abs=1e-9)
    assert z.std(correction=0).item() == pytest.approx(1)


def test_members_that_say_the_same_share_their_say() -> None:
    scores = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)).double()
    scores = torch.cat([scores, scores[:, 1:]], 1)
    z = guard_study.Decorrelated(floored=False).fit(scores)(scores)
    plain = guard_study.Adjusted(floored=False).fit(scores)(scores)
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
    lean = guard_study.LEAN.title
    methods = {lean if name == "gram" else name: part for name, part in measured.parts.items()}
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


# --- the figures in the docs -------------------------------------------------------------------------


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


def test_the_tables_on_photographs_are_those_of_their_csvs() -> None:
    page = (DOCS / "guard-study.md").read_text(encoding="utf-8")
    results = DOCS / "results"
    assert f"<!-- begin photographs -->\n{photographs.photographs(results)}\n<!--" in page
    assert f"<!-- begin small -->\n{photographs.small_images(results)}\n<!--" in page
    assert f"<!-- begin openood -->\n{photographs.openood(results)}\n<!--" in page
    assert f"<!-- begin effort -->\n{photographs.effort(results)}\n<!--" in page
    studies = photographs.studies_of(results, "scenes")
    assert across.tables_of(studies) in (results / "across.md").read_text(encoding="utf-8")


def test_the_sentences_on_photographs_hold() -> None:
    page = " ".join((DOCS / "guard-study.md").read_text(encoding="utf-8").split())
    studies = photographs.studies_of(DOCS / "results", "scenes")
    by_name = {study.name: study for study in studies}
    ahead = {study.name: study.mean("Guard") > study.mean(study.best()) for study in studies}
    assert f"on {sum(ahead.values())} of {len(ahead)} networks, the two fresh ones included" in page
    assert (ahead["convnext_f"], ahead["resnet50_f"]) == (True, True)
    (level,) = (by_name[name] for name, is_ahead in ahead.items() if not is_ahead)
    assert (level.name, level.best()) == ("vit_0", "profile")
    assert f"it is {level.mean('profile') - level.mean('Guard'):.1f} points behind profile alone" in page
    assert all(study.mean("Guard") > study.mean(photographs.THIRD) for study in studies)
    gains = sorted(studies, key=lambda study: study.mean(photographs.THIRD) - study.mean("Guard"))
    assert {study.name.split("_")[0] for study in gains[:5]} == {"vit", "convnext"}
    shares = [
        (study.mean("Guard") - study.mean(study.best())) / (100 - study.mean(study.best()))
        for study in studies
    ]
    assert max(shares) == pytest.approx(0.2, abs=0.02)
    closed = [photographs.on_closed_sets(study) for study in studies]
    assert (
        f"on {sum(ours > best for ours, best, _ in closed)} of {len(closed)} networks, behind profile on"
        in page
    )
    assert {
        s.name.split("_")[0] for s, (ours, best, _) in zip(studies, closed, strict=True) if ours < best
    } == {"vit"}
    gaps = [gap for study in studies for gap in photographs.behind(study).values()]
    assert f"on {sum(gap <= 1.0 for gap in gaps)} of {len(gaps)} pairs of a network and a set" in page
    near = {study.name: study.best_of("near") for study in studies if "near" in study.kinds.values()}
    best = {
        name: by_name[name].mean_of("Guard", "near") > by_name[name].mean_of(each, "near")
        for name, each in near.items()
    }
    assert (len(near), [name for name in near if best[name]]) == (3, ["vit_without_forest"])
    assert {each for name, each in near.items() if not best[name]} == {"SCALE", "relative Mahalanobis"}
    faults = [float(row[2]) for row in across._costly(studies)[1:]]
    assert f"a mean AUROC of {min(faults):.0f} to {max(faults):.0f}, not 97" in page


def test_the_sentences_beside_openood_hold() -> None:
    page = " ".join((DOCS / "guard-study.md").read_text(encoding="utf-8").split())
    results = DOCS / "results"
    studies = photographs.studies_of(results, "openood")
    with (results / "networks.csv").open(encoding="utf-8", newline="") as file:
        networks = [row for row in csv.DictReader(file) if row["network"] == "ResNet-18"]
    assert [row["seed"] for row in networks] == ["0", "1", "2"]
    assert len(studies) == 3
    one, two, three = (row["accuracy"] for row in networks)
    assert f"({one}, {two} and {three} % accuracy)" in page
    of = {name: photographs.on_openood(results, name) for name in studies[0].figures}
    near, far = ({name: of[name][kind][0] for name in of} for kind in ("near", "far"))
    cifar = {
        name: photographs.mean(study.figures[name]["CIFAR-100 subset"] for study in studies) for name in of
    }
    for said in (
        f"On far sets Guard's mean is {far['Guard']:.2f}.",
        f"On near sets it is {near['Guard']:.2f}.",
        f"where our KNN has {near['KNN']:.2f} on these networks",
        f"On images of CIFAR-100 alone Guard has {cifar['Guard']:.2f}, KNN {cifar['KNN']:.2f};",
        f"The third rule has {near[photographs.THIRD]:.2f} on near sets",
        f'"energy", "knn"))` has {near["Guard + KNN"]:.2f}.',
    ):
        assert said in page, said
    assert round(cifar["KNN"] - cifar["Guard"]) == 1
    singles = studies[0].singles
    best = max(singles, key=lambda name: near[name])
    assert (best, max(singles, key=lambda name: cifar[name])) == ("KNN", "KNN")
    assert f"on the mean, by {near['Guard'] - near[best]:.1f} points" in page
    assert max(far[name] for name in singles) < far["Guard"]


def test_the_sentences_on_small_images_and_effort_hold() -> None:
    page = " ".join((DOCS / "guard-study.md").read_text(encoding="utf-8").split())
    results = DOCS / "results"
    small = {study.name: study for study in photographs.studies_of(results, "cifar")}
    lost = {
        name: study.mean_of(photographs.THIRD, "near") - study.mean_of("Guard", "near")
        for name, study in small.items()
    }
    assert max(lost, key=lambda name: lost[name]) == "resnet34"
    assert f"ResNet-34 loses {lost['resnet34']:.1f} points on near sets" in page
    paths = sorted((results / "effort").glob("*.csv"))
    guards, grams = (
        [photographs.means_by_effort(path, method) for path in paths] for method in ("Guard", "Gram")
    )
    differences = [each[photographs.FULL] - each[photographs.LEAN] for each in guards]
    assert (len(differences), max(map(abs, differences)) < 0.05) == (4, True)
    counted = json.loads((DOCS / "data" / "effort.json").read_text(encoding="utf-8"))["points"]
    drawn = {effort.effort_of(point): point for point in counted}
    assert drawn.keys() == guards[0].keys()
    for number, path in enumerate(paths):
        label = path.stem.removeprefix("effort-").removesuffix("-scenes")
        for each, point in drawn.items():
            difference = guards[number][each] - guards[number][photographs.FULL]
            assert point["networks"][label]["difference"] == pytest.approx(difference, abs=1e-6)
    share = effort.mean_of(drawn[photographs.LEAN], "cost")
    assert f"Lean takes {100 * share:.1f} % of the products of the paper's Gram" in page
    most = max(each[photographs.FULL] - each[photographs.LEAN] for each in grams)
    assert f"up to {most:.1f} points;" in page
    pixels, channels = (
        max(each[photographs.FULL] - each[few, limit, "24 spread", "1, 2, 4, 8"] for each in guards)
        for few, limit in (("64", ""), ("256", "64"))
    )
    assert f"With 64 pixels a guard loses up to {pixels:.1f} points" in page
    assert channels < 0.05
