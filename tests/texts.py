"""Made-up texts of different lengths, batches of them with padding, and small networks that read them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

WORDS, CLASSES, LONGEST = 40, 3, 32


def texts(count: int, seed: int, least: int = 3, most: int = 20) -> list[Tensor]:
    """Texts of random words. Word 0 is kept for padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def padded(given: Sequence[Tensor], length: int | None = None, left: bool = False) -> dict[str, Tensor]:
    """Texts as one batch, padded to the longest, or to a length."""
    length = length or max(map(len, given))
    tokens, mask = torch.zeros(2, len(given), length, dtype=torch.int64)
    for row, text in enumerate(given):
        start = length - len(text) if left else 0
        tokens[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def batches(given: Sequence[Tensor], size: int, **how: Any) -> list[dict[str, Tensor]]:
    """The texts in batches, each padded by itself."""
    return [padded(given[start : start + size], **how) for start in range(0, len(given), size)]


def transformer(family: str, **options: Any) -> nn.Module:
    """A small classifier of transformers with random weights, in float64, so that rounding hides nothing."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    if family == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    if family == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LONGEST}
    else:
        sizes["max_position_embeddings"] = LONGEST + 2  # RoBERTa begins with 2
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS, num_labels=CLASSES, pad_token_id=0, **sizes, **options
    )
    network: nn.Module = getattr(transformers, f"{family}ForSequenceClassification")(config).double().eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    head = getattr(network, "score", None) or network.classifier
    head = getattr(head, "out_proj", head)
    with torch.no_grad():
        logits = network(**padded(texts(100, 99))).logits
        head.weight /= logits.std()
        if head.bias is not None:
            head.bias.copy_((head.bias - logits.mean(0)) / logits.std())
    return network


class Reader(nn.Module):
    """A network of words that knows no mask: every word by itself, then the mean over words, or the last."""

    def __init__(self, pool: str = "real") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.pool = pool
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x, real = self.mix(self.embed(tokens)).tanh(), (tokens != 0).unsqueeze(2)
        if self.pool == "all":
            return self.head(x.mean(1))
        return self.head((x * real).sum(1) / real.sum(1).clamp_min(1))
