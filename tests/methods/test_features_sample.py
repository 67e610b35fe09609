"""The bank of KNN and NNGuide: a uniform sample of bounded size, which grows and merges."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gramwatch
from gramwatch import Guard, InputError
from gramwatch.detect.fitting import packed, unpacked
from gramwatch.files import artifact
from gramwatch.methods import KNN, Method, NNGuide
from gramwatch.observe.observation import Observation
from tests.guarded import images, made
from tests.methods.observed import CLASSES, WIDTH, Net, observed

BOUND, FIRST, SECOND = 50, 300, 100


def numbered(count: int, start: int = 0) -> Observation:
    """Features whose direction tells the number of the example."""
    angle = torch.linspace(0.1, 1.4, FIRST + SECOND)[start : start + count]
    features = torch.zeros(count, WIDTH)
    features[:, 0], features[:, 1] = angle.cos(), angle.sin()
    return Observation(torch.zeros(count, CLASSES), features)


def bank(detector: Method) -> Tensor:
    return detector.state()["bank_"]


def numbers(detector: Method) -> Tensor:
    """The numbers of the examples in the bank."""
    everything = numbered(FIRST + SECOND).features
    assert everything is not None
    return (bank(detector) @ everything.T).argmax(1)


def fitted(net: Net, *batches: Observation, seed: int = 0, kind: type[Method] = KNN) -> Method:
    detector = kind(net, k=2, most_examples=BOUND, seed=seed)
    for batch in batches:
        detector.take(batch)
    detector.finish()
    return detector


@pytest.mark.parametrize("kind", [KNN, NNGuide])
def test_the_bank_does_not_depend_on_the_batches(net: Net, head, kind: type[Method]) -> None:
    whole = observed(head, 400, 0)
    one = fitted(net, whole, kind=kind)
    many = fitted(net, *(whole[start : start + 7] for start in range(0, 400, 7)), kind=kind)
    assert bank(one).shape == (BOUND, WIDTH)
    assert torch.equal(bank(one), bank(many))
    assert int(one.state()["count_"]) == 400
    other = fitted(net, whole, seed=1, kind=kind)
    assert not torch.equal(bank(one), bank(other))
    part = fitted(net, whole[:130], kind=kind)
    part.take(whole[130:])
    part.finish()
    assert torch.equal(bank(part), bank(one))


def test_merged_shards_are_a_uniform_sample_of_all_examples(net: Net) -> None:
    """Over 400 seeds: every example as often, both shards by their size, pairs as often as by chance."""
    seeds, total = 400, FIRST + SECOND
    often, pairs = torch.zeros(total), 0
    for seed in range(seeds):
        one, two = (fitted(net, part, seed=seed) for part in (numbered(FIRST), numbered(SECOND, FIRST)))
        if seed == 0:
            reverse = fitted(net, numbered(SECOND, FIRST)).merge(fitted(net, numbered(FIRST)))
        one.merge(two)
        if seed == 0:
            assert torch.equal(bank(one), bank(reverse))
        chosen = torch.zeros(total)
        chosen[numbers(one)] = 1
        assert chosen.sum() == BOUND
        often += chosen
        pairs += int((chosen[:SECOND] * chosen[FIRST:]).sum())  # examples of one number in both shards
    share = BOUND / total
    spread = ((often - seeds * share) ** 2 / (seeds * share * (1 - share))).sum()
    assert abs(spread - total) < 4 * (2 * total) ** 0.5
    of_first = BOUND * FIRST / total
    deviation = (of_first * (1 - FIRST / total) * (total - BOUND) / (total - 1) / seeds) ** 0.5
    assert abs(often[:FIRST].sum() / seeds - of_first) < 4 * deviation
    by_chance = seeds * SECOND * share * (BOUND - 1) / (total - 1)
    assert abs(pairs - by_chance) < 4 * by_chance**0.5


def test_copies_of_an_example_count_once(net: Net) -> None:
    copies = numbered(400)
    assert copies.features is not None
    copies.features[40:300] = copies.features[0]
    for seed in range(20):
        assert (numbers(fitted(net, copies, seed=seed)) == 0).sum() <= 1
    few = fitted(net, copies[:300])
    assert sorted(numbers(few).tolist()) == list(range(40))
    few.take(copies[:300])
    few.finish()
    assert sorted(numbers(few).tolist()) == list(range(40))


def test_the_checksums_of_inputs_decide_the_sample(net: Net) -> None:
    """Features differ in their last digits from batch to batch, inputs do not."""
    rows = replace(numbered(400), checksums=torch.arange(400) * 7919)
    rounded = replace(rows, features=rows.features * (1 + 1e-7))
    torch.testing.assert_close(bank(fitted(net, rows)), bank(fitted(net, rounded)))
    assert torch.equal(bank(fitted(net, rows)), bank(fitted(net, rows[torch.randperm(400)])))


def test_a_rank_with_fewer_examples_than_neighbours_counts(net: Net) -> None:
    one, other = KNN(net, k=20), KNN(net, k=20)
    one.note(numbered(60))
    one.take(numbered(60))
    other.note(numbered(3, 60))
    other.take(numbered(3, 60))
    one.add_unfinished(unpacked(one, *packed(other)))
    nothing = KNN(net, k=20)
    nothing.note(numbered(3))
    one.add_unfinished(unpacked(one, *packed(nothing)))
    one.finish()
    assert sorted(numbers(one).tolist()) == list(range(63))


def test_a_bank_of_an_earlier_version_judges_but_does_not_grow(tmp_path) -> None:
    """As files had it before the keys were kept."""
    net = made()
    whole = KNN(net, k=5).fit([images(300, 0)], progress=False)
    header, tensors = whole.contents()
    for name in ("state.keys_", "state.count_"):
        header["shapes"].pop(name)
        tensors.pop(name)
    more = {"network": artifact.fingerprint(net), "metadata": {}}
    artifact.write(tmp_path / "old.safetensors", header | more, tensors)
    old = gramwatch.load(tmp_path / "old.safetensors", net)
    x = images(9, 2)
    assert torch.equal(old.score_inputs(x)[1], whole.score_inputs(x)[1])
    for add in (
        lambda: old.fit([x], progress=False),
        lambda: whole.merge(old),
        lambda: old.merge(whole),
    ):
        with pytest.raises(InputError, match=r"without the keys of its sample.*fit a new one"):
            add()
    assert torch.equal(old.score_inputs(x)[1], whole.score_inputs(x)[1])


def test_a_guard_with_knn_grows_merges_and_resumes(tmp_path) -> None:
    net, x = made(), images(400, 0)
    members = ("energy", "knn", "mahalanobis_pp", "relative_mahalanobis_pp", "cadref")

    def guard() -> Guard:
        return Guard(net, members=members)

    whole = guard().fit(x.split(100), progress=False)
    merged = guard().fit(x[:150].split(50), progress=False)
    merged.merge(guard().fit(x[150:].split(50), progress=False))

    def torn():
        yield from x.split(100)[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard().fit(torn(), checkpoint=tmp_path / "c.safetensors", progress=False)
    resumed = guard().fit(x.split(100), checkpoint=tmp_path / "c.safetensors", progress=False)
    expected = whole.measure(images(20, 2)).values
    for other in (merged, resumed):
        torch.testing.assert_close(other.measure(images(20, 2)).values, expected, rtol=1e-5, atol=1e-7)
