"""docs/results/README.md: every figure on it is that of a file beside it, and what its words claim is so.

When a CSV changes, this writes the new figures into the page:

    python -m tests.test_results_page

Then run the tests: a sentence whose words are no longer so fails. Change it together with its check.
"""

import csv
import re

import pytest

from tests.figures import (
    NEAR,
    NUMBER,
    RESULTS,
    Figure,
    Results,
    Sentence,
    above,
    corrected,
    difference,
    least,
    most,
    on_page,
    rows_of,
    says,
    unchecked,
    within,
)

PAGE = RESULTS / "README.md"

# Numbers that are no figures: names, what the paper says, dates, code, links, tables (checked below).
EXEMPT = (
    r"CIFAR-10+|ResNet-\d+|WRN-40-2|DenseNet-BC-100-12|300-150(-50)?"
    r"|Table 2|Figures 1 and 2|Eq\. 5|TPR 95 %|\"Less than 0\.5 %\"|weight decay 0\.0005"
    r"|`[^`\n]*`|\]\([^)]*\)|^\|.*$|^    .*$"
)

NEAREST, ALIASED, CROPS = (f"Tiny ImageNet, {how}" for how in ("nearest", "anti-aliased", "crops"))
PLACES, PLACES_ALIASED = "MiniPlaces, nearest", "MiniPlaces, anti-aliased"
CIFAR100, TEXTURES, BLOBS = NEAR[1], "DTD, 10 classes", "blobs (normalised)"
NOISE = ("Gaussian noise", "Gaussian noise (normalised)")
LOGITS = ("fDBD", "NCI", "ODIN", "energy")
ORDERS = [f"Min/Max, order {order}" for order in range(1, 11)]

densenet, resnet34, resnet20, resnet32, wrn = (
    Results(f"table2-{name}") for name in ("densenet", "resnet34", "resnet20", "resnet32", "wrn40_2")
)
tuned34, tuned_dense = Results("table2-resnet34-outliers"), Results("table2-densenet-outliers")
fgsm34, fgsm_dense = Results("table2-resnet34-fgsm"), Results("table2-densenet-fgsm")
trained, exposed = Results("trained-wrn40_2"), Results("joined-wrn40_2-outlier_exposure")
orders, orders20 = Results("order-densenet"), Results("order-resnet20")
depth, depth20 = Results("depth-densenet"), Results("depth-resnet20")
ablation, ablation20 = Results("ablation-densenet"), Results("ablation-resnet20")
triangle, triangle20 = Results("triangle-densenet"), Results("triangle-resnet20")
mlps = [Results(f"mlp-mlp_{sizes}") for sizes in ("300", "300_150", "300_150_50")]
study, mnist = Results("mlp_study"), Results("outlier_exposure-mnist_convnet")


def with_published(results: Results, method: str, ood: str, metric: str = "tnr") -> list[Figure]:
    return [results.cell(method, ood, metric), results.published(method, ood, metric)]


def on_both(method: str, ood: str, metric: str = "tnr") -> list[Figure]:
    """On ResNet-34 and on the DenseNet, each with the published figure."""
    return [
        *with_published(resnet34, method, ood, metric),
        *with_published(densenet, method, ood, metric),
    ]


def far(results: Results, *methods: str) -> list[Figure]:
    return [results.mean(method, near=False) for method in methods]


def means(results: Results, *methods: str, metric: str = "tnr") -> list[Figure]:
    return [results.mean(method, metric) for method in methods]


def span(figures: list[Figure]) -> list[Figure]:
    return [least(figures), most(figures)]


def mean_of(figures: list[Figure]) -> Figure:
    return Figure(
        f"mean of {figures[0].source} ...", lambda: sum(f.compute() for f in figures) / len(figures)
    )


def even_and_odd(results: Results) -> list[Figure]:
    """The mean over the even orders, and over the odd ones above the first."""
    return [mean_of(means(results, *ORDERS[1::2])), mean_of(means(results, *ORDERS[2::2]))]


def first_and_last(results: Results, ood: str) -> list[Figure]:
    return [results.tnr(f"Min/Max, stage {stage}", ood) for stage in (1, 3)]


def of_order(results: Results, ood: str, *which: int) -> list[Figure]:
    return [results.tnr(ORDERS[order - 1], ood) for order in which]


def largest_loss(before: Results, method: str, after: Results, other: str, besides: str) -> Figure:
    """By how much the TNR falls at most, over all sets but one."""

    def compute() -> float:
        sets = [ood for ood in before.sets() if ood != besides]
        return max(before.tnr(method, ood).compute() - after.tnr(other, ood).compute() for ood in sets)

    return Figure(f"{before.name}.csv ({method}) less {after.name}.csv ({other}), largest", compute)


def variant(start: str) -> list[Figure]:
    """The MLP study's TNR on KMNIST and Fashion-MNIST; the accuracy in a variant's name does not count."""

    def tnr(ood: str) -> float:
        name = re.compile(re.escape(start) + r" \([\d.]+%\)")
        rows = [row for row in rows_of(study.name) if name.fullmatch(row["ood"])]
        (found,) = [float(row["tnr"]) for row in rows if row["method"] == f"Gram, {ood}"]
        return found

    return [
        Figure(f"{study.name}.csv ({start}, Gram, {ood}, tnr)", lambda ood=ood: tnr(ood))
        for ood in ("KMNIST", "Fashion-MNIST")
    ]


def behind_published(ood: str, method: str = "Gram", metric: str = "tnr", sign: int = 1) -> list[Figure]:
    """By how much the MLPs are behind the published figure: least and most."""
    pairs = [with_published(each, method, ood, metric) for each in mlps]
    return [difference(theirs, ours) if sign > 0 else difference(ours, theirs) for ours, theirs in pairs]


def fitted_on(page: str) -> Figure:
    return on_page(page, r"fitted on ([\d,]+) training images")


def inside_of(page: str) -> Figure:
    return on_page(page, r"In-distribution: ([\d,]+) examples")


CLAIMS = [
    says(
        "Tiny ImageNet, nearest: {} on ResNet-34 ({}), {} on the DenseNet ({}). Tiny ImageNet, crops: {}"
        " on ResNet-34 ({}), {} on the DenseNet ({}).",
        *on_both("Gram", NEAREST),
        *on_both("Gram", CROPS),
        so=[
            within(*pair, 2.5)
            for each in (resnet34, densenet)
            for pair in (with_published(each, "Gram", NEAREST), with_published(each, "Gram", CROPS))
        ],
    ),
    says(
        "ResNet-34, {} far sets: ahead on {}, at most one point behind on {}, further behind on {}.",
        tuned34.count(near=False),
        *tuned34.tally(),
        so=[above(tuned34.tally()[0], tuned34.tally()[2])],
    ),
    says(
        "DenseNet, {} far sets: ahead on {}, at most one point behind on {}, further behind on {}.",
        tuned_dense.count(near=False),
        *tuned_dense.tally(),
        so=[above(tuned_dense.tally()[1], tuned_dense.tally()[2])],
    ),
    says(
        "CIFAR-100: {} on ResNet-34 ({}), {} on the DenseNet ({}). The best other method finds {} and {}.",
        *on_both("Gram", CIFAR100),
        resnet34.best(CIFAR100),
        densenet.best(CIFAR100),
        so=[above(each.best(CIFAR100), each.tnr("Gram", CIFAR100), by=5) for each in (resnet34, densenet)],
    ),
    says(
        "WRN-40-2, mean over {} sets: Outlier Exposure {}, Gram on the plain network {}, both joined on"
        " the network of Outlier Exposure {}.",
        trained.count(),
        *means(trained, "OE", "Gram"),
        exposed.mean("Gram less MSP"),
        so=[
            above(trained.mean("Gram"), trained.mean("OE")),
            above(exposed.mean("Gram less MSP"), exposed.mean("MSP")),
            above(exposed.mean("Gram less MSP"), exposed.mean("Gram")),
            above(exposed.mean("Gram less MSP"), trained.mean("Gram")),
        ],
    ),
    says(
        "WRN-40-2, mean over the same sets: Gram {}, Variational Dirichlet {}, Semantic {}.",
        *means(trained, "Gram", "VD", "Semantic"),
        so=[above(trained.mean("Gram"), trained.mean(other)) for other in ("VD", "Semantic")],
    ),
    says(
        "Three MLPs on MNIST: {} to {} against KMNIST ({} to {}), {} to {} against Fashion-MNIST ({} to {}).",
        *span([each.tnr("Gram", "KMNIST") for each in mlps]),
        *span([each.published("Gram", "KMNIST") for each in mlps]),
        *span([each.tnr("Gram", "Fashion-MNIST") for each in mlps]),
        *span([each.published("Gram", "Fashion-MNIST") for each in mlps]),
    ),
    says(
        "Min/Max, mean over the five even orders and over the four odd ones above the first: {} and {} on"
        " the DenseNet, {} and {} on ResNet-20.",
        *even_and_odd(orders),
        *even_and_odd(orders20),
        so=[above(*even_and_odd(orders)), above(*even_and_odd(orders20))],
    ),
    says(
        "DenseNet, orders one and ten: {} and {} on Tiny ImageNet, nearest; {} and {} on average",
        *of_order(orders, NEAREST, 1, 10),
        *means(orders, ORDERS[0], ORDERS[9]),
        so=[above(*of_order(orders, NEAREST, 10, 1)), above(*means(orders, ORDERS[0], ORDERS[9]))],
    ),
    says(
        "ResNet-34 and DenseNet: {} and {} on Tiny ImageNet, nearest; {} and {} on Tiny ImageNet,"
        " anti-aliased",
        *(each.tnr("Gram", ood) for ood in (NEAREST, ALIASED) for each in (resnet34, densenet)),
    ),
    says(
        "Mean of Mahalanobis, tuned on outliers and on FGSM: {} and {} on ResNet-34, {} and {} on the"
        " DenseNet",
        *(each.mean("Mahalanobis") for each in (tuned34, fgsm34, tuned_dense, fgsm_dense)),
    ),
    says(
        "Tiny ImageNet, nearest, first and last part of the network: {} and {} on the DenseNet, {} and {}"
        " on ResNet-20. Textures are the other way round: {} and {} on the DenseNet, {} and {} on"
        " ResNet-20.",
        *first_and_last(depth, NEAREST),
        *first_and_last(depth20, NEAREST),
        *first_and_last(depth, TEXTURES),
        *first_and_last(depth20, TEXTURES),
        so=[
            *(above(*first_and_last(each, NEAREST)) for each in (depth, depth20)),
            *(above(*first_and_last(each, TEXTURES)[::-1]) for each in (depth, depth20)),
        ],
    ),
    says(
        "Complete statistics, mean over the far sets: {} and {} on the DenseNet, {} and {} on ResNet-20."
        " It is not on every set: on blobs (normalised) the DenseNet has {} and {}.",
        *far(ablation, "complete, Min/Max", "complete, Mean/Var"),
        *far(ablation20, "complete, Min/Max", "complete, Mean/Var"),
        ablation.tnr("complete, Min/Max", BLOBS),
        ablation.tnr("complete, Mean/Var", BLOBS),
        so=[
            *(
                above(*far(each, "complete, Min/Max", "complete, Mean/Var"))
                for each in (ablation, ablation20)
            ),
            above(ablation.tnr("complete, Mean/Var", BLOBS), ablation.tnr("complete, Min/Max", BLOBS)),
        ],
    ),
    says(
        "ResNet-20 with {} training images, Tiny ImageNet, nearest: {} and {}; mean over {} sets: {} and"
        " {}. DenseNet with {} training images, mean: {} and {}.",
        fitted_on("triangle-resnet20.md"),
        triangle20.tnr("row sums", NEAREST),
        triangle20.tnr("full triangle", NEAREST),
        triangle20.count(),
        *means(triangle20, "row sums", "full triangle"),
        fitted_on("triangle-densenet.md"),
        *means(triangle, "row sums", "full triangle"),
        so=[
            above(triangle20.tnr("row sums", NEAREST), triangle20.tnr("full triangle", NEAREST), by=0.5),
            above(*means(triangle20, "full triangle", "row sums"), by=0.5),
            above(*means(triangle, "full triangle", "row sums"), by=0.5),
        ],
    ),
    says(
        "Complete statistics, Min/Max, mean over the far sets, with and without it: {} and {} on the"
        " DenseNet, {} and {} on ResNet-20. The published figures of this DenseNet on Tiny ImageNet (R)"
        " hardly differ either: ({}) and ({}).",
        *far(ablation, "complete, Min/Max", "complete, Min/Max (U)"),
        *far(ablation20, "complete, Min/Max", "complete, Min/Max (U)"),
        ablation.published("complete, Min/Max", "TinyImgNet (R)"),
        ablation.published("complete, Min/Max (U)", "TinyImgNet (R)"),
        so=[
            within(*far(each, "complete, Min/Max", "complete, Min/Max (U)"), 0.5)
            for each in (ablation, ablation20)
        ],
    ),
    says(
        "WRN-40-2, mean over {} sets: Prior Networks {}, Gram {}.",
        trained.count(),
        *means(trained, "DPN", "Gram"),
        so=[above(*means(trained, "DPN", "Gram"))],
    ),
]

QUESTIONS = [
    says(
        "Tiny ImageNet, nearest, Min/Max, orders one, four and ten alone: {}, {} and {} on the DenseNet;"
        " {}, {} and {} on ResNet-20.",
        *of_order(orders, NEAREST, 1, 4, 10),
        *of_order(orders20, NEAREST, 1, 4, 10),
        so=[
            above(*of_order(each, NEAREST, high, low))
            for each in (orders, orders20)
            for low, high in ((1, 4), (4, 10))
        ],
    ),
    says(
        "On the DenseNet, the mean over {} sets is {} at order one, highest at order {} with {}, and {}"
        " at order ten.",
        orders.count(),
        orders.mean(ORDERS[0]),
        orders.peak(ORDERS),
        most(means(orders, *ORDERS)),
        orders.mean(ORDERS[9]),
        so=[above(*means(orders, ORDERS[0], ORDERS[9]))],
    ),
    says(
        "On ResNet-20 it is highest at order {} with {}, and {} at order ten.",
        orders20.peak(ORDERS),
        most(means(orders20, *ORDERS)),
        orders20.mean(ORDERS[9]),
    ),
    says(
        "Blobs (normalised) lose most from order one to order ten: {} to {} on the DenseNet, {} to {} on"
        " ResNet-20. Textures lose too: {} to {} on the DenseNet, {} to {} on ResNet-20. The paper itself"
        " reports a loss on CIFAR-100, and we see it: {} to {} on the DenseNet, {} to {} on ResNet-20.",
        *(
            figure
            for ood in (BLOBS, TEXTURES, CIFAR100)
            for each in (orders, orders20)
            for figure in of_order(each, ood, 1, 10)
        ),
        so=[
            above(*of_order(each, ood, 1, 10))
            for ood in (BLOBS, TEXTURES, CIFAR100)
            for each in (orders, orders20)
        ]
        + [
            above(
                difference(*of_order(each, BLOBS, 1, 10)),
                largest_loss(each, ORDERS[0], each, ORDERS[9], BLOBS),
            )
            for each in (orders, orders20)
        ],
    ),
    says(
        "All ten orders together have a mean of {} on the DenseNet, more than any single order. On"
        " ResNet-20 they have {}, less than order one.",
        orders.mean("Gram"),
        orders20.mean("Gram"),
        so=[
            above(orders.mean("Gram"), most(means(orders, *ORDERS))),
            above(orders20.mean(ORDERS[0]), orders20.mean("Gram")),
        ],
    ),
    says(
        "Tiny ImageNet (R) ({}) on ResNet-34 and ({}) on the DenseNet. Ours are {} and {} on Tiny"
        " ImageNet, nearest, and {} and {} on crops.",
        *(each.published("Gram", "TinyImgNet (R)") for each in (resnet34, densenet)),
        *(each.tnr("Gram", ood) for ood in (NEAREST, CROPS) for each in (resnet34, densenet)),
        so=[within(*(each.tnr("Gram", ood) for each in (resnet34, densenet)), 3) for ood in (NEAREST, CROPS)],
    ),
    says(
        "On the near set ResNet-34 is {} points ahead (published: {}).",
        difference(*(each.tnr("Gram", CIFAR100) for each in (resnet34, densenet))),
        difference(*(each.published("Gram", CIFAR100) for each in (resnet34, densenet))),
    ),
    says(
        "On properly reduced photographs the two differ more: {} and {} on Tiny ImageNet, anti-aliased,"
        " {} and {} on MiniPlaces, anti-aliased. The mean over the far sets is {} on ResNet-34 and {} on"
        " the DenseNet.",
        *(each.tnr("Gram", ood) for ood in (ALIASED, PLACES_ALIASED) for each in (resnet34, densenet)),
        *far(resnet34, "Gram"),
        *far(densenet, "Gram"),
        so=[
            above(resnet34.tnr("Gram", ood), densenet.tnr("Gram", ood), by=10)
            for ood in (ALIASED, PLACES_ALIASED)
        ],
    ),
    says(
        "On ResNet-34 they do. Tuned on outliers and on FGSM, mean over {} sets: ODIN {} and {},"
        " Mahalanobis {} and {}.",
        tuned34.count(),
        *(each.mean(method) for method in ("ODIN", "Mahalanobis") for each in (tuned34, fgsm34)),
        so=[above(tuned34.mean(method), fgsm34.mean(method), by=1.5) for method in ("ODIN", "Mahalanobis")],
    ),
    says(
        "On the DenseNet: ODIN {} and {}, Mahalanobis {} and {}.",
        *(each.mean(method) for method in ("ODIN", "Mahalanobis") for each in (tuned_dense, fgsm_dense)),
        so=[
            within(tuned_dense.mean(method), fgsm_dense.mean(method), 1) for method in ("ODIN", "Mahalanobis")
        ],
    ),
    says(
        "The largest loss is Mahalanobis on Bernoulli noise, on ResNet-34: {} and {}.",
        tuned34.tnr("Mahalanobis", "Bernoulli noise"),
        fgsm34.tnr("Mahalanobis", "Bernoulli noise"),
        so=[
            above(
                difference(*(each.tnr("Mahalanobis", "Bernoulli noise") for each in (tuned34, fgsm34))),
                largest_loss(one, method, other, method, "Bernoulli noise" if one is tuned34 else ""),
            )
            for one, other in ((tuned34, fgsm34), (tuned_dense, fgsm_dense))
            for method in ("ODIN", "Mahalanobis")
        ],
    ),
    says(
        "one has {} training images and the other all, one judges {} in-distribution images and the other"
        " {}. Gram is not tuned and has {} and {} on ResNet-34, {} and {} on the DenseNet.",
        fitted_on("table2-resnet34-outliers.md"),
        inside_of("table2-resnet34-outliers.md"),
        inside_of("table2-resnet34-fgsm.md"),
        *(each.mean("Gram") for each in (tuned34, fgsm34, tuned_dense, fgsm_dense)),
    ),
]

AGAINST_LOGITS = [
    difference(each.auroc(method, ood), each.auroc("Gram", ood))
    for each in (densenet, resnet20, resnet32)
    for method in LOGITS
    for ood in (CIFAR100, ALIASED, PLACES_ALIASED)
]

DETAILS = [
    says(
        "AUROC on Tiny ImageNet, nearest: {} on ResNet-34 ({}), {} on the DenseNet ({}). On crops: {} on"
        " ResNet-34 ({}), {} on the DenseNet ({}). On CIFAR-100: {} on ResNet-34 ({}), {} on the DenseNet"
        " ({}).",
        *(figure for ood in (NEAREST, CROPS, CIFAR100) for figure in on_both("Gram", ood, "auroc")),
    ),
    says(
        "blobs (normalised) with {} on ResNet-34 and {} on the DenseNet ({}), and textures with {} on the"
        " DenseNet ({}); on ResNet-34 they have {}.",
        resnet34.tnr("Gram", BLOBS),
        *with_published(densenet, "Gram", BLOBS),
        *with_published(densenet, "Gram", TEXTURES),
        resnet34.tnr("Gram", TEXTURES),
        so=[
            above(*with_published(each, "Gram", ood)[::-1], by=2.5)
            for each, ood in ((resnet34, BLOBS), (densenet, BLOBS), (densenet, TEXTURES))
        ],
    ),
    says(
        "Gram finds {} % of Tiny ImageNet on the DenseNet if the pictures are reduced with anti-aliasing,"
        " and {} % if they are reduced by nearest neighbour. MiniPlaces: {} % and {} %. On ResNet-34: {} %"
        " and {} % of Tiny ImageNet, {} % and {} % of MiniPlaces.",
        *(
            each.tnr("Gram", ood)
            for each in (densenet, resnet34)
            for ood in (ALIASED, NEAREST, PLACES_ALIASED, PLACES)
        ),
    ),
    says(
        "fDBD, NCI, ODIN and energy are all ahead of Gram by AUROC on the DenseNet, ResNet-20 and"
        " ResNet-32, by {} points or more.",
        least(AGAINST_LOGITS),
    ),
    says(
        "On ResNet-34 Gram is ahead of all four on both anti-aliased sets by AUROC; by TNR energy is"
        " ahead of Gram, {} to {} on Tiny ImageNet and {} to {} on MiniPlaces.",
        *(resnet34.tnr(method, ood) for ood in (ALIASED, PLACES_ALIASED) for method in ("energy", "Gram")),
        so=[
            above(resnet34.auroc("Gram", ood), resnet34.auroc(method, ood))
            for ood in (ALIASED, PLACES_ALIASED)
            for method in LOGITS
        ]
        + [
            above(resnet34.tnr("energy", ood), resnet34.tnr("Gram", ood)) for ood in (ALIASED, PLACES_ALIASED)
        ],
    ),
    says(
        "On textures and on badly reduced photographs, Gram is ahead of all four by TNR on all these"
        " networks.",
        so=[
            above(each.tnr("Gram", ood), each.tnr(method, ood))
            for each in (densenet, resnet20, resnet32, resnet34)
            for ood in (TEXTURES, NEAREST, PLACES, CROPS)
            for method in LOGITS
        ],
    ),
    says(
        "Energy finds {} to {} % of Gaussian noise on the DenseNet, ResNet-20 and ResNet-34, {} to {} %"
        " on ResNet-32, and {} to {} % on WRN-40-2.",
        *span([each.tnr("energy", ood) for each in (densenet, resnet20, resnet34) for ood in NOISE]),
        *span([resnet32.tnr("energy", ood) for ood in NOISE]),
        *span([wrn.tnr("energy", ood) for ood in NOISE]),
    ),
    says(
        "ReAct has a mean AUROC of {} on the DenseNet ([why](../methods/react.md)) and {} on ResNet-20."
        " ASH has {} and {}.",
        *(each.mean(method, "auroc") for method in ("ReAct", "ASH") for each in (densenet, resnet20)),
    ),
    says(
        "Min/Max with normalisation, mean over the far sets, for the diagonal, the pairs and both: {}, {}"
        " and {} on the DenseNet; {}, {} and {} on ResNet-20. On ResNet-20 the diagonal is the one case in"
        " which Mean/Var is ahead, with {}.",
        *(
            figure
            for each in (ablation, ablation20)
            for figure in far(
                each, *(f"{kind}, Min/Max" for kind in ("diagonal", "off-diagonal", "complete"))
            )
        ),
        *far(ablation20, "diagonal, Mean/Var"),
        so=[
            above(*far(each, f"{kind}, {a}", f"{kind}, {b}"))
            for each in (ablation, ablation20)
            for kind in ("diagonal", "off-diagonal", "complete")
            for end in ("", " (U)")
            for a, b in (
                (f"Mean/Var{end}", f"Min/Max{end}")
                if (each, kind, end) == (ablation20, "diagonal", "")
                else (f"Min/Max{end}", f"Mean/Var{end}"),
            )
        ],
    ),
    says(
        "Normalisation helps Mean/Var on ResNet-20: {} with and {} without it, for complete statistics.",
        *far(ablation20, "complete, Mean/Var", "complete, Mean/Var (U)"),
        so=[above(*far(ablation20, "complete, Mean/Var", "complete, Mean/Var (U)"), by=1)],
    ),
    says(
        "The first dense block of the DenseNet finds {} of Tiny ImageNet, nearest, {} of crops and {} of"
        " MNIST; all blocks together find {}, {} and {}.",
        *(
            depth.tnr(method, ood)
            for method in ("Min/Max, stage 1", "Gram")
            for ood in (NEAREST, CROPS, "MNIST")
        ),
    ),
    says(
        "The DenseNet was fitted on {} training images and judged on {} images of each set, with {}"
        " images for validation. Mean over {} sets: row sums {}, sums of roots as the text of the paper"
        " has them {}, full triangle {}. Row sums with all training images reach {}.",
        fitted_on("triangle-densenet.md"),
        triangle.images(NEAREST),
        on_page("triangle-densenet.md", r"10 draws of ([\d,]+) for validation"),
        triangle.count(),
        *means(triangle, "row sums", "row sums of roots", "full triangle"),
        ablation.mean("complete, Min/Max"),
    ),
    says(
        "ResNet-20 was fitted on {} training images and judged on {} of each set. There the triangle"
        " differs from row sums by {} points of TNR on Tiny ImageNet, nearest, by {} on crops, and by {}"
        " on blobs (normalised). AUROC differs by {} at most on the first two.",
        fitted_on("triangle-resnet20.md"),
        triangle20.images(NEAREST),
        difference(triangle20.tnr("row sums", NEAREST), triangle20.tnr("full triangle", NEAREST)),
        difference(triangle20.tnr("row sums", CROPS), triangle20.tnr("full triangle", CROPS)),
        difference(triangle20.tnr("full triangle", BLOBS), triangle20.tnr("row sums", BLOBS)),
        most(
            difference(triangle20.auroc(a, ood), triangle20.auroc(b, ood))
            for a, b in (("row sums", "full triangle"), ("full triangle", "row sums"))
            for ood in (NEAREST, CROPS)
        ),
    ),
    says(
        "ResNet-34, Tiny ImageNet, nearest: {} ({}) and {} ({}); crops: {} ({}) and {} ({}). Gram has {}"
        " and {} there.",
        *(
            figure
            for ood in (NEAREST, CROPS)
            for method in ("ODIN", "Mahalanobis")
            for figure in with_published(tuned34, method, ood)
        ),
        *(tuned34.tnr("Gram", ood) for ood in (NEAREST, CROPS)),
    ),
    says(
        "Mean over {} sets, Gram, Mahalanobis and ODIN: {}, {} and {} on ResNet-34; {}, {} and {} on the"
        " DenseNet. By mean AUROC Gram is not ahead: {} and Mahalanobis {} on ResNet-34, {} and ODIN {} on"
        " the DenseNet.",
        tuned34.count(),
        *means(tuned34, "Gram", "Mahalanobis", "ODIN"),
        *means(tuned_dense, "Gram", "Mahalanobis", "ODIN"),
        *means(tuned34, "Gram", "Mahalanobis", metric="auroc"),
        *means(tuned_dense, "Gram", "ODIN", metric="auroc"),
        so=[
            above(*means(tuned34, "Mahalanobis", "Gram", metric="auroc")),
            above(*means(tuned_dense, "ODIN", "Gram", metric="auroc")),
        ],
    ),
    says(
        "Without tuning, Mahalanobis finds {} of Tiny ImageNet, nearest, on ResNet-34.",
        resnet34.tnr("Mahalanobis", NEAREST),
    ),
    says(
        "on MiniPlaces, anti-aliased, Prior Networks {}, Outlier Exposure {}, Gram {}. They are behind on"
        " blobs (normalised): {}, {} and {}.",
        *(trained.tnr(method, ood) for ood in (PLACES_ALIASED, BLOBS) for method in ("DPN", "OE", "Gram")),
        so=[
            above(trained.tnr(method, PLACES_ALIASED), trained.tnr("Gram", PLACES_ALIASED), by=20)
            for method in ("DPN", "OE")
        ]
        + [above(trained.tnr("Gram", BLOBS), trained.tnr(method, BLOBS)) for method in ("DPN", "OE")],
    ),
    says(
        "On CIFAR-100, training with outliers made MSP worse here: {} after it, {} before. Its authors"
        " report ({}) after it.",
        trained.tnr("OE", CIFAR100),
        trained.tnr("MSP", CIFAR100),
        exposed.published("MSP", CIFAR100),
        so=[above(trained.tnr("MSP", CIFAR100), trained.tnr("OE", CIFAR100))],
    ),
    says(
        "Variational Dirichlet and Semantic have means of {} and {}, MSP {}. Variational Dirichlet is"
        " behind MSP on CIFAR-100, {} to {}, and on Bernoulli noise, {} to {}. Semantic finds {} to {} %"
        " of Gaussian, Rademacher and Bernoulli noise.",
        *means(trained, "VD", "Semantic", "MSP"),
        *(trained.tnr(method, ood) for ood in (CIFAR100, "Bernoulli noise") for method in ("VD", "MSP")),
        *span([trained.tnr("Semantic", f"{kind} noise") for kind in ("Gaussian", "Rademacher", "Bernoulli")]),
        so=[above(trained.tnr("MSP", ood), trained.tnr("VD", ood)) for ood in (CIFAR100, "Bernoulli noise")],
    ),
    says(
        "on the WRN-40-2 of Outlier Exposure, mean over {} sets: Gram less MSP {}, Gram over MSP {}, Gram"
        " {}, MSP {}.",
        exposed.count(),
        *means(exposed, "Gram less MSP", "Gram over MSP", "Gram", "MSP"),
    ),
    says(
        "300-150-50 against KMNIST: {} ({}), AUROC {} ({}). Against Fashion-MNIST: {} ({}), AUROC {} ({}).",
        *(
            figure
            for ood in ("KMNIST", "Fashion-MNIST")
            for metric in ("tnr", "auroc")
            for figure in with_published(mlps[2], "Gram", ood, metric)
        ),
    ),
    says(
        "Gram misses the published TNR by {} to {} points on KMNIST and by {} to {} on Fashion-MNIST.",
        *span(behind_published("KMNIST")),
        *span(behind_published("Fashion-MNIST")),
    ),
    says(
        "row sums {} and {}, pixels from nought to one {} and {}, weight decay 0.0005 {} and {}, dropout"
        " {} and {}.",
        *variant("row sums"),
        *variant("pixels from 0 to 1"),
        *variant("weight decay 0.0005"),
        *variant("dropout 0.5"),
    ),
    says(
        "The published AUROC of MSP is {} to {} points lower than ours although its TNR is higher.",
        *span([f for ood in ("KMNIST", "Fashion-MNIST") for f in behind_published(ood, "MSP", "auroc", -1)]),
        so=[
            above(*with_published(each, "MSP", ood)[::-1])
            for each in mlps
            for ood in ("KMNIST", "Fashion-MNIST")
        ],
    ),
    says(
        "{} sets, most of {} images, four of {} to {}. MSP on the plain network finds {} or more of all"
        " but KMNIST and blobs.",
        mnist.count(),
        mnist.images("KMNIST"),
        *span([mnist.images(ood) for ood in (TEXTURES, PLACES, PLACES_ALIASED, CIFAR100)]),
        least(
            mnist.tnr("MSP", ood)
            for ood in (
                "Fashion-MNIST",
                "CIFAR-10",
                NEAREST,
                ALIASED,
                CROPS,
                PLACES,
                PLACES_ALIASED,
                TEXTURES,
                CIFAR100,
                BLOBS,
                *NOISE,
                "Bernoulli noise",
                "Rademacher noise",
            )
        ),
    ),
    says(
        "There Gram with row sums is behind MSP: {} and {} on KMNIST, {} and {} on blobs. Training with"
        " outliers helps MSP: {} on KMNIST, {} on blobs.",
        *(mnist.tnr(method, ood) for ood in ("KMNIST", "blobs") for method in ("Gram", "MSP")),
        *(mnist.tnr("OE", ood) for ood in ("KMNIST", "blobs")),
        so=[
            above(mnist.tnr(a, ood), mnist.tnr(b, ood))
            for a, b in (("MSP", "Gram"), ("OE", "MSP"))
            for ood in ("KMNIST", "blobs")
        ],
    ),
]

CHECKS = [*CLAIMS, *QUESTIONS, *DETAILS]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("sentence", CHECKS, ids=lambda each: str(each)[:60])
def test_a_sentence_says_what_its_files_say(page: str, sentence: Sentence) -> None:
    mistakes = list(sentence.mistakes(page))
    assert not mistakes, "\n".join([f"docs/results/README.md: {sentence}", *mistakes])


def test_no_figure_stands_outside_a_checked_sentence(page: str) -> None:
    assert unchecked(page, CHECKS, EXEMPT) == []


def test_no_check_has_a_figure_in_its_words() -> None:
    for sentence in CHECKS:
        assert not re.findall(NUMBER, re.sub(EXEMPT, "", sentence.text)), sentence.text


def test_a_wrong_figure_is_named_with_its_file_and_the_right_value(page: str) -> None:
    sentence = CLAIMS[0]
    begin, end = sentence.found(page).span(1)
    right = page[begin:end]
    (mistake,) = sentence.mistakes(page[:begin] + "12.3" + page[end:])
    assert mistake == f"says 12.3, should say {right} by table2-resnet34.csv (Gram, {NEAREST}, tnr)"
    assert corrected(page[:begin] + "12.3" + page[end:], CHECKS) == corrected(page, CHECKS)


def test_a_number_without_a_check_is_found(page: str) -> None:
    (found,) = unchecked(page + "\nGram has 97.3 here.\n", CHECKS, EXEMPT)
    assert "Gram has 97.3 here." in found


def test_a_claim_that_is_not_so_is_found(page: str) -> None:
    low, high = densenet.tnr("Gram", ALIASED), densenet.tnr("Gram", NEAREST)
    first = CLAIMS[0]
    wrong = Sentence(first.text, first.figures, (above(low, high),))
    assert [m for m in wrong.mistakes(page) if "is not above" in m]


def test_the_table_of_networks_is_that_of_its_file(page: str) -> None:
    with (RESULTS / "networks.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    assert "\n".join([f"| {' | '.join(head)} |", "| --- | --- | --- | ---: | ---: | ---: |", *table]) in page
    for _, objective, *_, accuracy in (row for row in rows if row[0] == "WRN-40-2"):
        measured = on_page("trained-wrn40_2.md", rf"{objective} ([\d.]+)%")
        assert accuracy == measured.written(accuracy), objective


if __name__ == "__main__":
    PAGE.write_text(corrected(PAGE.read_text(encoding="utf-8"), CHECKS), encoding="utf-8")
