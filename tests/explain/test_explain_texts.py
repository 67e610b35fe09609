"""Explanations of texts: padding adds nothing, and tokens are shown with what they add."""

import warnings

import pytest
import torch
from torch import Tensor

from gramwatch import GramwatchWarning, Guard
from gramwatch.errors import InputError
from tests.explain.test_explain import planted
from tests.test_contract import images
from tests.texts import Reader, batches, padded, texts


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def reading() -> Guard:
    """A guard of a network of words, one of which, 39, is unlike all others and not in its training texts."""
    network = Reader()
    with torch.no_grad():
        network.embed.weight[39] *= 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        guard = Guard(network, inputs="input_ids", mask=lambda tokens: tokens != 0)
        train, held_out = ([text.clamp_max(38) for text in texts(count, count)] for count in (300, 120))
        return guard.fit(batches(train, 30), progress=False).calibrate(batches(held_out, 30), progress=False)


@pytest.mark.parametrize("left", [False, True])
def test_padding_has_no_contribution(reading, left):
    given = [text.clamp_max(38) for text in texts(6, 4, least=8)]
    for text in given:
        text[5] = 39
    explanation = reading.explain(padded(given, 30, left=left))
    real = padded(given, 30, left=left)["attention_mask"].bool()
    assert explanation.map.shape == (6, 30)
    assert not explanation.map[~real].any()
    assert torch.equal(explanation.mask, real)
    amounts = sum(
        terms[:, :-1].clamp_min(0).sum(1)
        for terms in explanation.taps.values()  # no tap is a vector: all have places
    )
    close(explanation.map.sum(1).double(), amounts)
    for number, text in enumerate(given):
        alone = reading.explain(padded([text]))
        torch.testing.assert_close(explanation.map[number][real[number]], alone.map[0], rtol=1e-4, atol=1e-5)
        assert int(alone.map.argmax()) == 5
        close(explanation[number].members, alone.members)


def test_tokens_are_shown_with_what_they_add(reading):
    text = torch.tensor([3, 1, 4, 39, 5, 9, 2, 6])
    explanation = reading.explain(padded([text, texts(1, 6, least=12)[0]], left=True))
    tokens = explanation.tokens(0, lambda ids: [f"<{number}>" for number in ids])
    assert [token.text for token in tokens] == [f"<{number}>" for number in text.tolist()]
    skipped = explanation.map.shape[1] - len(text)
    assert [token.place for token in tokens] == list(range(skipped, skipped + len(text)))
    assert sum(token.contribution for token in tokens) == pytest.approx(float(explanation.map[0].sum()))
    lines = str(tokens).splitlines()
    assert lines[4] == f"{tokens[3].contribution:8.3f} {'█' * 30} <39>"
    assert len(lines) == 1 + len(text)
    html = tokens._repr_html_()
    assert html.count("<span") == len(text)
    assert f"0.80); padding: 0 0.15em' title='{tokens[3].contribution:.3f}'>&lt;39&gt;</span>" in html
    assert [token.text for token in explanation[0].tokens(0)] == [str(number) for number in text.tolist()]


def test_a_tokenizer_of_transformers_names_the_tokens(reading):
    class Tokenizer:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["word"] * len(ids)

    explanation = reading.explain(padded(texts(2, 7)))
    assert {token.text for token in explanation.tokens(1, Tokenizer())} == {"word"}
    with pytest.raises(InputError, match="makes 1 texts of"):
        explanation.tokens(0, lambda ids: ["one"])


def test_only_texts_have_tokens(reading):
    with pytest.raises(InputError, match="no contributions by token, only those of a text have them"):
        planted().explain(images(2, 0)).tokens(0)
    with pytest.raises(InputError, match="explain its places"):
        reading.explain(padded(texts(2, 7)), places=False).tokens(0)
    with pytest.raises(IndexError):
        reading.explain(padded(texts(2, 7))).tokens(2)


def test_a_text_is_called_a_text(reading):
    unusual = torch.full((12,), 39)
    for places in (True, False):
        said = " ".join(reading.explain(padded([unusual]), places=places).sentences())
        assert " training text" in said
        assert "image" not in said
