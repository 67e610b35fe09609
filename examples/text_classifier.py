"""A text classifier under guard: trained here, judged on texts of another kind, explained by token.

A small BERT learns to tell tweets, sentences on films and sentences on products apart. The guard then meets
what it was not trained on: sentences of editorials, shuffled words, misspelt words, French and Python code.

    pip install '.[hf]'
    python examples/text_classifier.py --runs 3 --json text.json

pip downloads the texts: the source archive of vaderSentiment holds the four kinds of sentences (Hutto &
Gilbert, ICWSM 2014), Django holds messages in French. `--texts` and `--messages` take archives that are here.
Nothing in the archives is executed. A run takes about three minutes of one core.
"""

import argparse
import gettext
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import gramwatch

KINDS = {"tweet": "tweets", "film": "movieReviewSnippets", "product": "amazonReviewSnippets"}
"""The classes, and the files that hold their sentences."""
HELD_OUT = 400
"""Sentences of each kind to calibrate on, and as many to test on."""
MOST = 3000
"""The most sentences of each kind to train on."""
LONGEST = 64
MODULES = ("argparse", "ast", "datetime", "difflib", "doctest", "inspect", "mailbox", "tarfile", "typing")


# --- texts -------------------------------------------------------------------------------------------


def downloaded(package: str, folder: Path, *options: str) -> Path:
    """The archive of a package, fetched by pip unless it is in the folder."""
    name = package.partition("=")[0].lower()
    files = [path for path in folder.glob("*") if path.name.lower().startswith(name)]
    if not files:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *options, "-d", folder, package]
        subprocess.run(list(map(str, command)), check=True)
        return downloaded(package, folder)
    return files[0]


def sentences(archive: Path, name: str) -> list[list[str]]:
    """The sentences of one kind, those of one document together: the archive holds another archive."""
    with tarfile.open(archive) as outer:
        inner = next(member for member in outer if member.name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=outer.extractfile(inner)) as files:
            file = next(member for member in files if member.name.endswith(f"{name}_GroundTruth.txt"))
            lines = files.extractfile(file).read().decode().splitlines()
    documents: dict[str, list[str]] = {}
    for line in lines:  # number of the sentence, or of document and sentence; a rating; the sentence
        number, _, text = line.split("\t", 2)
        documents.setdefault(number.partition("_")[0], []).append(text)
    return list(documents.values())


def french(wheel: Path) -> list[str]:
    """Messages of five words or more, without tags and the places for names and numbers."""
    known_texts = set()
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith("/locale/fr/LC_MESSAGES/django.mo"):
                catalogue = gettext.GNUTranslations(io.BytesIO(files.read(name)))
                messages = (text for text in catalogue._catalog.values() if isinstance(text, str))
                known_texts |= {
                    " ".join(re.sub(r"%(\(\w+\))?[sd]|<.*?>", " ", text).split()) for text in messages
                }
    return sorted(text for text in known_texts if len(text.split()) >= 5)


def code() -> list[str]:
    """Lines of five words or more of Python's own library."""
    folder = Path(subprocess.__file__).parent
    lines = [line for name in MODULES for line in (folder / f"{name}.py").read_text("utf-8").splitlines()]
    return sorted({line.strip() for line in lines if len(line.split()) >= 5})


def shuffled(text: str, draw: random.Random) -> str:
    """The words of a text in another order."""
    words = text.split()
    draw.shuffle(words)
    return " ".join(words)


def misspelt(text: str, draw: random.Random) -> str:
    """A text in which two letters are swapped in every word of four letters or more."""

    def swapped(match: re.Match[str]) -> str:
        word = match.group()
        at = draw.randrange(1, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return re.sub(r"[A-Za-z]{4,}", swapped, text)


class Texts:
    """Sentences to train on, to calibrate on and to test on, with classes, and sets of others."""

    def __init__(self, archive: Path, messages: Path, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.train, self.calibration, self.test = [], [], []
        for label, name in enumerate(KINDS.values()):
            documents = sentences(archive, name)
            draw.shuffle(documents)  # a document is in one part only
            flat = [(text, label) for document in documents for text in document]
            held_out = min(HELD_OUT, len(flat) // 4)
            self.calibration += flat[:held_out]
            self.test += flat[held_out : 2 * held_out]
            self.train += flat[2 * held_out :][:MOST]
        editorials = [text for document in sentences(archive, "nytEditorialSnippets") for text in document]
        test_texts = [text for text, _ in self.test]
        self.others = {
            "editorials": draw.sample(editorials, min(len(test_texts), len(editorials))),
            "shuffled words": [shuffled(text, draw) for text in test_texts],
            "misspelt words": [misspelt(text, draw) for text in test_texts],
            "French": french(messages),
            "Python code": draw.sample(lines := code(), min(len(test_texts), len(lines))),
        }


# --- the network -------------------------------------------------------------------------------------


def tokenizer_of(texts: list[str], words: int = 6000) -> PreTrainedTokenizerFast:
    """A tokenizer of words and their pieces, made from the training texts."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.BpeTrainer(vocab_size=words, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, special.index(token)) for token in special[2:]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def network_of(tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    """A BERT of two layers, not trained yet."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LONGEST,
            num_labels=len(KINDS),
        )
    )


class Batches:
    """Texts as padded batches, in a new order each time if `seed` is given."""

    def __init__(
        self, tokenizer, texts, labels=None, size: int = 64, seed: int | None = None, **options
    ) -> None:
        self.tokenizer, self.texts, self.labels, self.size = tokenizer, list(texts), labels, size
        self.draw = None if seed is None else random.Random(seed)
        self.options = {"padding": True, "truncation": True, "max_length": LONGEST} | options

    def __iter__(self):
        order = list(range(len(self.texts)))
        if self.draw is not None:
            self.draw.shuffle(order)
        for start in range(0, len(order), self.size):
            part = order[start : start + self.size]
            batch = self.tokenizer(
                [self.texts[i] for i in part],
                return_tensors="pt",
                return_token_type_ids=False,
                **self.options,
            )
            if self.labels is not None:
                batch["labels"] = torch.tensor([self.labels[i] for i in part])
            yield batch


def train(network: nn.Module, batches: Batches, epochs: int) -> None:
    """Train with AdamW and a rate that falls to zero."""
    steps = epochs * -(-len(batches.texts) // batches.size)
    optimiser = torch.optim.AdamW(network.parameters(), 5e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-4, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for batch in batches:
            optimiser.zero_grad()
            network(**batch).loss.backward()
            optimiser.step()
            schedule.step()
    network.eval()


# --- the guard ---------------------------------------------------------------------------------------


def difference_by_padding(guard: gramwatch.Guard, tokenizer, texts: list[str]) -> dict:
    """How scores and verdicts of texts differ if each is alone, and if all are padded to the most tokens."""
    alone = [guard(batch) for batch in Batches(tokenizer, texts, size=1)]
    (padded,) = Batches(tokenizer, texts, size=len(texts), padding="max_length")
    detection = guard(padded)
    score, is_ood = (torch.cat([getattr(one, name) for one in alone]) for name in ("score", "is_ood"))
    return {
        "texts": len(texts),
        "largest difference": float((score - detection.score).abs().max()),
        "other verdicts": int((is_ood != detection.is_ood).sum()),
    }


def pointing(guard: gramwatch.Guard, tokenizer, texts: list[str], foreign: list[str]) -> dict:
    """Whether contributions by token point at foreign words that are planted in texts.

    Four words of another text are put between the words of a text. A token is inside if it is a piece of
    them. `auroc` is the mean over texts of the AUROC of tokens inside against outside, `top` the share of
    texts whose largest contribution is inside, `chance` the mean share of tokens inside.
    """
    draw, hits = random.Random(0), []
    for text in texts:
        words, planted = text.split(), draw.choice(foreign).split()[:4]
        at = draw.randrange(1, len(words) + 1)
        mixed = [*words[:at], *planted, *words[at:]]
        (batch,) = Batches(tokenizer, [mixed], is_split_into_words=True)
        inside = torch.tensor([word is not None and at <= word < at + 4 for word in batch.word_ids(0)])
        if not inside.any():
            continue  # cut off, in a long text
        explanation = guard.explain(batch)
        amounts = torch.tensor([token.contribution for token in explanation.tokens(0, tokenizer)])
        before = guard(next(iter(Batches(tokenizer, [text]))))
        hits.append(
            {
                "auroc": gramwatch.numerics.metrics.auroc(amounts[~inside], amounts[inside]),
                "top": bool(inside[amounts.argmax()]),
                "chance": float(inside.double().mean()),
                "flagged": bool(explanation.detection.is_ood) and not bool(before.is_ood),
            }
        )

    def means(entries: list[dict]) -> dict:
        names = ("auroc", "top", "chance")
        return {
            "texts": len(entries),
            **{name: sum(one[name] for one in entries) / len(entries) for name in names},
        }

    because = [one for one in hits if one["flagged"]]
    return {"all": means(hits)} | ({"flagged because of it": means(because)} if because else {})


def run(archive: Path, messages: Path, epochs: int, seed: int) -> dict:
    """Train, guard, judge and explain, once. Return the figures."""
    torch.manual_seed(seed)
    began = time.process_time()
    texts = Texts(archive, messages, seed)
    tokenizer = tokenizer_of([text for text, _ in texts.train])
    network = network_of(tokenizer)

    def batches(part, **options):
        return Batches(tokenizer, *zip(*part, strict=True), **options)

    train(network, batches(texts.train, size=32, seed=seed), epochs)
    trained = time.process_time()

    guard = gramwatch.Guard(network)
    guard.fit(batches(texts.train)).calibrate(batches(texts.calibration))
    guard.metadata["classes"] = list(KINDS)
    fitted = time.process_time()

    test = [text for text, _ in texts.test]
    others = {name: Batches(tokenizer, kind_texts) for name, kind_texts in texts.others.items()}
    evaluation = gramwatch.evaluate(guard, Batches(tokenizer, test), others)
    print(evaluation.overview())
    detections = {
        name: [guard(batch) for batch in Batches(tokenizer, kind_texts)]
        for name, kind_texts in {"test": test, **texts.others}.items()
    }
    predicted = torch.cat([detection.predicted for detection in detections["test"]])
    flagged = {
        name: torch.cat([detection.is_ood for detection in parts]) for name, parts in detections.items()
    }

    for number in flagged["editorials"].nonzero().flatten().tolist()[:1]:
        (batch,) = Batches(tokenizer, [texts.others["editorials"][number]])
        explanation = guard.explain(batch)
        print(explanation)
        print(explanation.tokens(0, tokenizer))

    return {
        "texts": {"train": len(texts.train), "calibration": len(texts.calibration)}
        | {name: len(flags) for name, flags in flagged.items()},
        "accuracy": float((predicted == torch.tensor([label for _, label in texts.test])).double().mean()),
        "auroc": {
            method: dict(zip(evaluation.sets, row, strict=True))
            for method, row in zip(evaluation.methods, evaluation.figures().tolist(), strict=True)
        },
        "flagged": {name: float(flags.double().mean()) for name, flags in flagged.items()},
        "planted": pointing(guard, tokenizer, test[::3], texts.others["French"]),
        "padding": difference_by_padding(guard, tokenizer, test[::12]),
        "processor seconds": {"train": round(trained - began), "fit": round(fitted - trained)},
    }


def main(given: list[str] | None = None) -> list[dict]:
    """Read the options, run, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, help="source archive of vaderSentiment")
    parser.add_argument("--messages", type=Path, help="wheel of Django")
    parser.add_argument("--folder", type=Path, default=Path("texts"), help="where pip puts the archives")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1, help="so many networks, each with texts drawn anew")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(given)
    archive = options.texts or downloaded("vaderSentiment==3.3.2", options.folder, "--no-binary", ":all:")
    messages = options.messages or downloaded("Django==5.2.8", options.folder)
    figures = [run(archive, messages, options.epochs, seed) for seed in range(options.runs)]
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


if __name__ == "__main__":
    main()
