"""What explanations add to a page."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gramwatch
from gramwatch.explain.thumbnails import Finder
from gramwatch.inputs.demo import digits, photograph_patches, small_convnet, train
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.report import explained as module
from gramwatch.report.explained import Explainer
from gramwatch.report.scores import read
from gramwatch_lab.datasets.faults import FAULTS
from lab.tests.figures.tables import write_csv
from tests.report.test_causes import photographs

PREPARED = Preprocessing((8, 8), 8, "bilinear", (0.0,), (1.0,))
COLOURED = Preprocessing((32, 32), 32, "bilinear", (0.0,) * 3, (1.0,) * 3)


def written(images: torch.Tensor, folder: Path) -> list[str]:
    folder.mkdir()
    paths = [folder / f"{i:03d}.png" for i in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        pixels = image.mul(255).round().byte().permute(1, 2, 0).squeeze(2)
        Image.fromarray(pixels.numpy()).save(path)
    return [str(path) for path in paths]


def table(guard: gramwatch.Guard, paths: list[str], file: Path, prepared: Preprocessing = PREPARED) -> Path:
    inputs = torch.stack([prepared(Image.open(path)) for path in paths])
    detection = guard(inputs)
    rows = [
        [
            path,
            int(detection.predicted[i]),
            "",
            float(detection.score[i]),
            float(detection.p_value[i]),
            bool(detection.is_ood[i]),
        ]
        + [float(detection.parts[name][i]) for name in ("gram", "energy")]
        + ["", ""]
        for i, path in enumerate(paths)
    ]
    return write_csv(file, rows)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    torch.manual_seed(0)
    data, model = digits(), small_convnet()
    train(model, data.train, data.train_labels, epochs=10)
    guard = gramwatch.Guard(model, members=("gram", "energy"))
    guard.fit(data.train.split(256)).calibrate(data.validation.split(256))
    noise = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    odd = written(torch.cat([photograph_patches(40), noise]), folder / "odd")
    fine = written(data.test[:40], folder / "fine")
    return guard, table(guard, fine, folder / "fine.csv"), table(guard, odd, folder / "odd.csv")


def explainer(guard, *tables, **options):
    return Explainer(guard, PREPARED, read(tables), Finder(), **options)


def test_the_most_suspicious_have_sentences_and_maps(guarded):
    guard, _, odd = guarded
    one = explainer(guard, odd)
    reasons = one.reasons(20)  # in three batches
    rows = one.scores.by_score[:20]
    assert set(reasons.sentences) == set(reasons.maps) == set(rows)
    inputs = torch.stack([PREPARED(Image.open(one.scores.paths[row])) for row in rows])
    explanation = guard.explain(inputs)
    assert [reasons.sentences[row] for row in rows] == [explanation.sentences(i)[1:] for i in range(20)]
    assert len({tuple(reasons.sentences[row]) for row in rows}) > 5
    assert all(uri.startswith("data:image/webp;base64,") for uri in reasons.maps.values())
    assert reasons.notes == []


def test_an_image_that_is_gone_has_no_sentences_and_the_others_keep_theirs(guarded, tmp_path):
    guard, _, odd = guarded
    whole = explainer(guard, odd)
    rows = whole.scores.by_score[:12]
    gone = whole.scores.paths[rows[3]]
    (tmp_path / "odd.csv").write_text(odd.read_text().replace(gone, "gone.png"))
    reasons, before = explainer(guard, tmp_path / "odd.csv").reasons(12), whole.reasons(12)
    assert reasons.sentences == {row: text for row, text in before.sentences.items() if row != rows[3]}
    assert reasons.maps == {row: uri for row, uri in before.maps.items() if row != rows[3]}


def test_every_flagged_image_is_in_one_group(guarded):
    guard, _, odd = guarded
    one = explainer(guard, odd)
    reasons = one.reasons(0)
    grouped = sorted(row for group in reasons.groups for row in group.images)
    assert grouped == np.flatnonzero(one.scores.is_ood).tolist()
    assert len(reasons.groups) >= 2
    assert reasons.grouped.startswith(f"All {len(grouped)} flagged images were explained")
    assert all("% of the score" in group.details for group in reasons.groups)
    assert len({group.title for group in reasons.groups}) == len(reasons.groups)


def test_flagged_images_that_are_blurred_or_noisy_are_grouped_by_these_words(tmp_path):
    torch.manual_seed(0)
    clean = photographs(560, side=32)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 3),
    ).eval()
    guard = gramwatch.Guard(network, members=("gram", "energy"), level=0.7)
    with pytest.warns(gramwatch.GramwatchWarning, match="classes were predicted"):  # nobody trained it
        guard.fit((clean[:240] / 255).split(80))
    guard.calibrate((clean[240:400] / 255).split(80))
    blurred = FAULTS["blur"].apply(clean[500:530], 3.0, 0)
    noisy = FAULTS["sensor_noise"].apply(clean[530:], 25.0, 0)
    paths = written(torch.cat([clean[400:500], blurred, noisy]) / 255, tmp_path / "images")
    scores = read([table(guard, paths, tmp_path / "t.csv", COLOURED)])
    reasons = Explainer(guard, COLOURED, scores, Finder()).reasons(0)
    groups = {group.title: group.images for group in reasons.groups}
    for title, start in {"Blurred or smooth": 100, "Noisy": 130}.items():
        inside = [start <= i < start + 30 for i in groups[title]]
        assert sum(inside) >= max(20, 0.9 * len(inside))
    assert "not flagged" in reasons.groups[0].about
    assert "% of the score comes from" in reasons.groups[0].details


def test_layers_by_class_are_means_of_the_explained_set(guarded):
    guard, _, odd = guarded
    one = explainer(guard, odd)
    cells = one.reasons(0).cells
    flagged = np.flatnonzero(one.scores.is_ood)
    inputs = torch.stack([PREPARED(Image.open(one.scores.paths[row])) for row in flagged])
    explanation = gramwatch.explain_set(guard, [inputs], progress=False)
    classes, means = explanation.by_class()
    taps = [column for column, (_, tap) in enumerate(explanation.columns) if tap]
    assert len(cells) == len(classes) * len(taps)
    name, member, tap, value = cells[0]
    assert (name, (member, tap)) == (str(classes[0]), explanation.columns[0])
    assert value == pytest.approx(float(means[0, 0]), rel=1e-4)


def test_sets_are_told_apart(guarded):
    guard, fine, odd = guarded
    apart = explainer(guard, fine, odd).reasons(0).apart
    assert {name for name, *_ in apart} == {"odd"}
    assert len(apart) == 3
    assert max(value for *_, value in apart) > 0.9


def test_of_many_images_some_are_drawn(guarded, monkeypatch):
    guard, _, odd = guarded
    monkeypatch.setattr(module, "MOST", 20)
    reasons = explainer(guard, odd).reasons(0)
    assert sum(len(group.images) for group in reasons.groups) == 20
    assert reasons.grouped.startswith("20 of ")


def test_images_that_changed_or_are_gone_are_said(guarded, tmp_path):
    guard, _, odd = guarded
    moved = write_csv(tmp_path / "moved.csv", [])
    text = odd.read_text().replace("/odd/", "/nowhere/")
    moved.write_text(text)
    reasons = explainer(guard, moved).reasons(3)
    assert (reasons.sentences, reasons.groups, reasons.cells) == ({}, [], [])
    swapped = tmp_path / "swapped.csv"
    swapped.write_text(odd.read_text().replace("/odd/", "/fine/").replace("/fine/04", "/odd/04"))
    assert "score otherwise now than in the table" in explainer(guard, swapped).reasons(0).notes[0]


def test_few_flagged_images_make_no_groups(guarded):
    guard, fine, _ = guarded
    one = explainer(guard, fine)
    assert one.scores.is_ood.sum() < module.FEWEST
    assert one.reasons(0).groups == []
