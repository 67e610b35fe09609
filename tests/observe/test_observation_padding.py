"""Padding does not change a verdict: fit, calibrate and call, alone, in longer batches, left and right."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard, InputError
from gramwatch.watch import Network, find_taps, observe
from tests import oracle
from tests.texts import CLASSES, WORDS, Reader, batches, padded, texts, transformer

MEMBERS = ("gram", "profile", "class_ratio", "energy")
TRAIN, HELD_OUT, FRESH = texts(240, 0), texts(120, 1), texts(12, 2)
FEW = pytest.mark.filterwarnings(
    "ignore:.*classes were predicted for fewer than",
    "ignore:.*covariance is singular",
    "ignore:.*never deviate on the calibration data",
    "ignore:.*float64, for which there are no fast kernels",
)


def fitted(detector, size: int = 30, **how):
    """The detector, fitted and calibrated on batches of made-up texts."""
    detector.fit(batches(TRAIN, size, **how), progress=False)
    return detector.calibrate(batches(HELD_OUT, size, **how), progress=False)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal but for rounding, in networks in float64."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@FEW
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_padding_does_not_change_a_verdict(family):
    network = transformer(family)
    members = (*MEMBERS, "mahalanobis", "knn", "vim")
    one, other = Guard(network, members=members), Guard(network, members=members)
    fitted(one), fitted(other, size=40, length=32)
    close(other.calibration_scores_, one.calibration_scores_)
    alone = torch.cat([one(padded([text])).score for text in FRESH])
    for guard in (one, other):
        for batch in (padded(FRESH), padded(FRESH, 27), padded(FRESH[::-1], 32)):
            score = guard(batch).score
            close(score.flip(0) if batch["input_ids"].shape[1] == 32 else score, alone)
    bounds, others = (guard.members["gram"].fitted_bounds.state() for guard in (one, other))
    for name, tensor in bounds.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-5, atol=1e-5)


@FEW
def test_of_a_padded_batch_gram_sees_the_tokens_that_the_paper_would():
    network, orders = transformer("Bert"), (1, 2, 4)
    detector = GramDetector(network, orders=orders, statistic="row_sums")
    detector.fit(batches(TRAIN, 30), progress=False)
    taps = find_taps(network, padded(FRESH))
    maps: list[list[np.ndarray]] = []
    for text in FRESH:
        maps.append([np.empty(0)] * len(taps))
        observe(Network(network), taps, padded([text]), lambda n, x: maps[-1].__setitem__(n, x[0].numpy()))
    table = detector.planned(padded(FRESH))(padded(FRESH, 25))[0].statistics
    starts = detector._layout("cpu").starts.tolist()
    for row, of_text in enumerate(maps):
        for tap, feature_map in enumerate(of_text):
            found = table[row, starts[tap] : starts[tap + 1]].view(len(orders), -1).double().numpy()
            for number, order in enumerate(orders):
                expected = oracle.stat(feature_map, order, "row_sums")
                # Signed sums may cancel: what is lost is a share of the sum of magnitudes.
                lost = 1e-5 * oracle.magnitude(feature_map, order, "row_sums")
                np.testing.assert_array_less(
                    np.abs(
                        np.sign(found[number]) * np.abs(found[number]) ** order
                        - np.sign(expected) * np.abs(expected) ** order
                    ),
                    lost + 1e-30,
                )


@FEW
def test_the_sample_of_a_text_does_not_depend_on_padding():
    network = transformer("Bert")
    detector = fitted(GramDetector(network, pixels=5, channels=16, orders=(1, 2)))
    alone = torch.cat([detector(padded([text])).deviations for text in FRESH])
    close(detector(padded(FRESH, 30)).deviations, alone)
    assert float(alone.max()) > 0.1


@FEW
@pytest.mark.parametrize("family", ["Llama", "Roberta"])
def test_texts_may_be_padded_on_the_left_if_the_network_allows_it(family):
    network = transformer(family, **({"bos_token_id": None, "eos_token_id": None}))
    guard = fitted(Guard(network, members=("gram", "profile", "energy")))
    right, left = padded(FRESH, 28), padded(FRESH, 24, left=True)
    with torch.no_grad():
        same = torch.allclose(network(**right).logits, network(**left).logits, atol=1e-4)
    assert same == (family == "Llama")  # RoBERTa reads the first place, which is padding then
    if same:
        close(guard(left).score, guard(right).score)


@FEW
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_network_that_sees_padding_itself_is_named(family):
    network = transformer(family)
    with pytest.warns(GramwatchWarning, match="itself returns other logits if an input is padded"):
        fitted(Guard(network, members=("energy",)), left=True)


@FEW
def test_tokens_folded_into_the_batch_are_padded_to_one_length():
    network = transformer("GPT2", bos_token_id=None, eos_token_id=None)

    def with_positions(batch):
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        return {**batch, "position_ids": positions}

    guard = Guard(network, members=("gram", "energy"), inputs=with_positions)
    fitted(guard, length=24)
    right = guard(padded(FRESH, 24))
    close(guard(padded(FRESH, 24, left=True)).score, right.score)
    assert float(right.deviations.max()) > 0.1


@FEW
@pytest.mark.parametrize("mask", [lambda tokens: tokens != 0, lambda tokens: (tokens != 0).int()])
def test_a_network_without_a_mask_gets_one_by_a_function(mask, tmp_path):
    network, tokens = Reader(), lambda batch: batch["input_ids"]
    guard = fitted(Guard(network, inputs=tokens, mask=mask))
    alone = torch.cat([guard(padded([text])).score for text in FRESH])
    close(guard(padded(FRESH, 40)).score, alone)
    counting = fitted(Guard(network, inputs=tokens))
    assert (counting(padded(FRESH, 40)).score - counting(padded(FRESH)).score).abs().max() > 0.1
    guard.save(tmp_path / "guard.safetensors")
    with pytest.raises(InputError, match="fitted with inputs= a function"):
        gramwatch.load(tmp_path / "guard.safetensors", network)
    with pytest.raises(InputError, match=r"fitted with mask= a function.*load\(path, model, mask=\.\.\.\)"):
        gramwatch.load(tmp_path / "guard.safetensors", network, inputs=tokens)
    again = gramwatch.load(tmp_path / "guard.safetensors", network, inputs=tokens, mask=mask)
    assert torch.equal(again(padded(FRESH)).score, guard(padded(FRESH)).score)


@FEW
def test_a_network_whose_mean_counts_padding_is_named():
    guard = Guard(Reader("all"), inputs="input_ids", mask=lambda tokens: tokens != 0)
    with pytest.warns(GramwatchWarning, match="Reader itself returns other logits if an input is padded"):
        guard.fit(batches(TRAIN, 30), progress=False)


class Steps(nn.Module):
    """A recurrent network with the steps on its first axis, then a convolution that makes texts shorter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.steps = nn.Embedding(WORDS, 8), nn.GRU(8, 10)
        self.shorter, self.head = nn.Conv1d(10, 6, 3, stride=2), nn.Linear(10, CLASSES)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        x, _ = self.steps(self.embed(tokens).transpose(0, 1))
        self.shorter(x.permute(1, 2, 0)).relu()  # its places are not those of the text
        last = attention_mask.sum(1) - 1
        return self.head(x[last, torch.arange(len(last))])


@FEW
def test_taps_whose_places_are_not_those_of_the_mask_are_named():
    def named(batch):
        return {"tokens": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    given, held_out, fresh = (texts(*each, least=6) for each in ((240, 0), (120, 1), (12, 2)))
    guard = Guard(Steps(), inputs=named)
    with pytest.warns(GramwatchWarning, match="padding counts at 2 tap.*of Steps.*: shorter, relu$"):
        guard.fit(batches(given, 30), progress=False)
    detector = GramDetector(Steps().double(), taps=["steps"], inputs=named)
    detector.fit(batches(given, 30), progress=False).calibrate(batches(held_out, 30), progress=False)
    alone = torch.cat([detector(padded([text])).score for text in fresh])
    close(detector(padded(fresh, 30)).score, alone)


@FEW
def test_padding_counts_if_asked_to():
    network = transformer("Bert")
    guard = fitted(Guard(network, mask=False), length=24)
    expected = guard(padded(FRESH, 24)).score
    with pytest.warns(GramwatchWarning, match="another size than the detector was fitted on"):
        longer = guard(padded(FRESH, 32)).score
    assert (longer - expected).abs().max() > 0.1


@FEW
def test_a_mask_that_is_none_is_refused_or_named(tmp_path):
    network = transformer("Bert")
    with pytest.raises(InputError, match="mask='attentive' names an argument of the network"):
        Guard(network, mask="attentive").fit(batches(TRAIN, 30), progress=False)
    with pytest.raises(InputError, match="mask=FUNCTION returned a float32 tensor"):
        Guard(network, mask=lambda inputs: torch.ones(30, 3)).fit(batches(TRAIN, 30), progress=False)
    floating = [
        {**each, "attention_mask": each["attention_mask"].float()} for each in batches(TRAIN, 30, length=20)
    ]
    with pytest.warns(GramwatchWarning, match="padding counts: attention_mask is no tensor of whole numbers"):
        Guard(network).fit(floating, progress=False)
    by_name = fitted(Guard(network, mask="attention_mask"))
    close(by_name(padded(FRESH, 30)).score, fitted(Guard(network))(padded(FRESH)).score)
    by_name.save(tmp_path / "guard.safetensors")
    assert gramwatch.load(tmp_path / "guard.safetensors", network).network.mask == "attention_mask"


@FEW
def test_a_text_that_is_nothing_but_padding_is_left_out_and_flagged():
    network, batch = transformer("Bert"), padded(texts(3, 5), 24)
    batch["attention_mask"][1] = 0
    guard = Guard(network)
    with pytest.warns(GramwatchWarning, match=r"1 training example\(s\) with NaN or infinity were left out"):
        guard.fit([*batches(TRAIN, 30), batch], progress=False)
    guard.calibrate(batches(HELD_OUT, 30), progress=False)
    with pytest.warns(GramwatchWarning, match="their score is infinite"):
        found = guard(batch)
    assert found.score.isinf().tolist() == [False, True, False]


@FEW
@pytest.mark.filterwarnings("error:.*another size than the detector was fitted on")
def test_the_length_of_a_batch_is_not_the_size_of_a_text(tmp_path):
    network = transformer("Bert")
    guard = fitted(Guard(network), length=24)
    expected = guard(padded(FRESH, 24)).score
    close(guard(padded(FRESH, 28)).score, expected)
    guard.save(tmp_path / "guard.safetensors")
    again = gramwatch.load(tmp_path / "guard.safetensors", network)
    close(again(padded(FRESH, 29)).score, expected)


@FEW
def test_a_compiled_network_leaves_padding_out():
    how = {"inputs": "input_ids", "mask": lambda tokens: tokens != 0}
    expected = fitted(Guard(Reader(), **how), length=24)(padded(FRESH, 24)).score
    compiled = torch.compile(Reader(), backend="eager")
    close(fitted(Guard(compiled, **how), length=24)(padded(FRESH, 24)).score, expected)


@FEW
def test_an_exported_guard_leaves_padding_out(tmp_path):
    guard = Guard(Reader(), mask=lambda tokens: tokens != 0)
    training, held_out = (
        [each["input_ids"] for each in batches(some, 30, length=24)] for some in (TRAIN, HELD_OUT)
    )
    guard.fit(training, progress=False).calibrate(held_out, progress=False)
    guard.export(tmp_path / "guard.pt2", held_out[0])
    graph = torch.export.load(tmp_path / "guard.pt2").module()
    tokens = padded(FRESH, 24)["input_ids"]
    close(graph(tokens)["score"].detach(), guard(tokens).score)
    close(graph(tokens)["score"].detach(), guard(padded(FRESH)["input_ids"]).score)


@FEW
def test_gradients_go_through_what_is_not_padding():
    network = transformer("Bert")
    detector = GramDetector(network)
    batch = padded(FRESH, 24)
    embedded = network.bert.embeddings.word_embeddings(batch["input_ids"]).detach().requires_grad_()
    given = {"inputs_embeds": embedded, "attention_mask": batch["attention_mask"]}
    detector.fit([{name: t.detach() for name, t in given.items()}], progress=False)
    from gramwatch.methods import Mahalanobis

    method = Mahalanobis(network)
    method.fit([{name: t.detach() for name, t in given.items()}], progress=False)
    (seen,) = method.planned(given).differentiable(given)
    seen.channel_means[0].sum().backward()
    reached = embedded.grad.abs().sum(2) > 0
    assert torch.equal(reached, batch["attention_mask"].bool())
