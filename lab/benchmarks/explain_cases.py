"""Pictures of single explanations for docs/explain.md and the README.

    python -m lab.benchmarks.explain_cases --data sets --weights weights --guards guards

Takes the networks and guards of `lab.benchmarks.explain`. Of each kind of outlier, the first flagged image is
drawn. Writes docs/images/explain_NETWORK_KIND.png, explain_set.png, and docs/data/explain_cases.json with the
sentences and the clusters.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch import explain_set
from gramwatch_lab import datasets
from gramwatch_lab.datasets.faults import blur
from gramwatch_lab.datasets.images import resized
from lab.benchmarks import document
from lab.benchmarks.explain import DOCS, SUBJECTS, Subject, prepared
from lab.benchmarks.measure import save
from lab.benchmarks.planted import damaged

LOOKED_AT = 40
"""Images of each kind among which the first flagged one is drawn."""


def kinds(subject: Subject, inside: Tensor, root: Path) -> dict[str, Tensor]:
    """Outliers by kind, from 0 to 1: an artefact, another source, a fault of the camera."""
    others = datasets.load("tiny_imagenet", root, count=LOOKED_AT, grey=False, seed=3).images
    pixels = (255 * inside[:LOOKED_AT]).round().to(torch.uint8)
    return {
        "artefact": damaged(inside[:LOOKED_AT], seed=21).images,
        "other": resized(others, subject.size).float() / 255,
        "blur": blur(pixels, 1.5 * subject.size / 64).float() / 255,
    }


def drawn(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Draw the first flagged image of each kind; its sentences."""
    loaded, guard, inside = prepared(subject, args)
    cases: dict[str, Any] = {}
    inside = inside[-LOOKED_AT:]
    for kind, images in kinds(subject, inside, args.data).items():
        flagged = guard(loaded.prepare(images)).is_ood
        entry: dict[str, Any] = {"flagged": int(flagged.sum()), "images": len(images)}
        if int(flagged.sum()):
            i = int(flagged.nonzero()[0])
            explanation = guard.explain(loaded.prepare(images[i : i + 1]))
            entry["sentences"] = explanation.sentences()
            name = f"explain_{subject.key}_{kind}.png"
            explanation.plot(0, args.docs / "images" / name, image=images[i])
        cases[kind] = entry
    if subject.key == "resnet18":
        cases["set"] = grouped(guard, loaded, inside, kinds(subject, inside, args.data), args.docs)
    return cases


def grouped(
    guard: Any, loaded: Any, inside: Tensor, outliers: dict[str, Tensor], docs: Path
) -> dict[str, Any]:
    """Clusters of a mixed set, the taps that set it apart, and the heat map."""
    mixed = torch.cat(list(outliers.values()))
    source = [kind for kind, images in outliers.items() for _ in images]
    explanation = explain_set(guard, map(loaded.prepare, mixed.split(20)), progress=False)
    plain = explain_set(guard, map(loaded.prepare, inside.split(20)), progress=False)
    explanation.plot(docs / "images" / "explain_set.png")
    clusters = []
    for cluster in explanation.clusters():
        counts = {kind: sum(source[i] == kind for i in cluster.examples) for kind in outliers}
        clusters.append({"size": len(cluster), "of": counts, "taps": [list(t) for t in cluster.taps]})
    apart = [vars(difference) for difference in plain.apart(explanation)]
    return {
        "images": len(explanation),
        "flagged": int(explanation.is_ood.sum()),
        "clusters": clusters,
        "apart": apart,
    }


TITLES = {"artefact": "an artefact", "other": "another source", "blur": "blur"}


def case_list(cases_of: dict[str, Any]) -> str:
    """The sentences and pictures of all cases, in Markdown."""
    lines = []
    titles = {subject.key: subject.title for subject in SUBJECTS}
    for key, cases in cases_of.items():
        for kind, title in TITLES.items():
            entry = cases[kind]
            head = f"**{titles[key]}, {title}** ({entry['flagged']} of {entry['images']} flagged)."
            lines.append(" ".join([head, *entry.get("sentences", ["None was flagged."])]))
            if "sentences" in entry:
                name = f"explain_{key}_{kind}.png"
                lines.append(f"![{titles[key]}, {title}: image, map and contributions](images/{name})")
    return "\n\n".join(lines)


def cluster_table(cases_of: dict[str, Any]) -> str:
    """The clusters of the mixed set, and the taps that set it apart, in Markdown."""
    mixed = cases_of["resnet18"]["set"]
    lines = ["| cluster | artefact | another source | blur | furthest above the others |"]
    lines.append("| ---: | ---: | ---: | ---: | --- |")
    for cluster in mixed["clusters"]:
        counts = " | ".join(str(cluster["of"][kind]) for kind in TITLES)
        taps = ", ".join(f"{member} {tap}".strip() for member, tap, _ in cluster["taps"])
        lines.append(f"| {cluster['size']} | {counts} | {taps} |")
    apart = ", ".join(
        f"{difference['member']} {difference['tap']}".strip() + f" ({100 * difference['auroc']:.0f})"
        for difference in mixed["apart"]
    )
    flagged = f"{mixed['flagged']} of {mixed['images']} images are flagged."
    return "\n".join([*lines, "", f"{flagged} Set apart from ordinary scenes by (AUROC, percent): {apart}."])


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", type=Path, required=True, help="the folder of the networks")
    parser.add_argument("--guards", type=Path, required=True, help="a folder where fitted guards are kept")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    cases_of = {subject.key: drawn(subject, args) for subject in SUBJECTS}
    kept = args.docs / "data" / "explain_cases.json"
    save(kept, cases_of)
    cases_of = json.loads(kept.read_text(encoding="utf-8"))  # rounded, as it is kept
    document.write()
    for key, cases in cases_of.items():
        for kind, entry in cases.items():
            print(key, kind, *entry.get("sentences", [entry]))


if __name__ == "__main__":
    main()
