"""The unlabelled texts of the pretraining: passages of film reviews, and training texts of data sets at hand.

No label is read. Left out are the film reviews that our tables and benchmarks test on, the reviews that
experiments/bench/small_models.py trains on, and every text that shares a run of words with one of them or with the
test sentences of SST: SST's sentences and the short film reviews come from one site, so one may hold the other.
"""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstill.common.config import DataConfig
from fedstill.common.data.splits import make_splits
from fedstill.common.data.tasks import film_reviews
from fedstill.common.data.tasks.rows import read_rows

SEED = 20240229
TEST_SEEDS = (*range(1, 21), 42, 43, 44)  # of our tables, which test on at most TEST of the film reviews
TEST = 1000
BENCH_SEEDS, BENCH_TEXTS = (1, 2, 3, 4, 5), 800  # the reviews that the benchmark of these models trains on
RUN = 6  # so many words in a row make a text suspect of being a part of one that is left out
LONGEST = 42  # words of a passage: about 64 tokens
WORD = re.compile(r"\w+|[^\w\s]")
SENTENCE = re.compile(r"(?<=[.!?])\s+")
COUNTS = {  # texts of every source, at most
    "imdb": 30_000,
    "rotten_tomatoes": 4_000,
    "sst2": 9_000,
    "amazon": 9_000,
    "snli": 3_000,
    "mnli": 3_000,
    "ag_news": 2_500,
    "qqp": 2_000,
    "meld": 1_500,
}


@dataclass(frozen=True)
class Corpus:
    """Texts with their source; passages of one review share a number in `reviews`, other texts have one alone."""

    texts: list[str]
    sources: list[str]
    reviews: np.ndarray

    def counts(self) -> dict[str, int]:
        """Texts by source."""
        return dict(Counter(self.sources))


def data_folder() -> Path:
    """$FEDSTILL_DATA, or ../shared/data beside the repository."""
    return Path(os.environ.get("FEDSTILL_DATA") or Path(__file__).resolve().parents[3] / "shared/data")


def left_out() -> set[str]:
    """Film reviews that a table tests on or the benchmark of these models reads."""
    found: set[str] = set()
    pools = film_reviews()
    for seed in TEST_SEEDS:
        private = BENCH_TEXTS if seed in BENCH_SEEDS else 0
        splits = make_splits(pools, DataConfig(test=TEST, private=private, public=0, labelled=0), seed)
        found.update(str(text) for text in (*splits.test.texts, *splits.private.texts))
    return found


def corpus(folder: Path, scale: float = 1.0) -> Corpus:
    """All texts in a random order that the seed fixes; `scale` takes a share of every source, for a trial."""
    kept_apart = left_out()
    suspect = {run for text in (*kept_apart, *_sst_tests(folder)) for run in _runs(text)}
    rng = np.random.default_rng(SEED)
    rows: list[tuple[str, str, int]] = []
    number = 0
    for source, reviews in _sources(folder, kept_apart).items():
        seen: set[str] = set()
        wanted = round(COUNTS[source] * scale)
        taken = 0
        for place in rng.permutation(len(reviews)):
            number += 1
            for text in _some(reviews[place], rng):
                if text in seen or (len(text.split()) >= RUN and not suspect.isdisjoint(_runs(text))):
                    continue
                seen.add(text)
                rows.append((text, source, number))
                taken += 1
            if taken >= wanted:
                break
    order = rng.permutation(len(rows))
    texts, sources, numbers = zip(*(rows[row] for row in order), strict=True)
    return Corpus(list(texts), list(sources), np.array(numbers))


def passages(text: str) -> list[str]:
    """A review in passages of two or three sentences, none longer than LONGEST words."""
    found: list[list[str]] = [[]]
    for sentence in SENTENCE.split(_clean(text)):
        words = sentence.split()
        if found[-1] and (len(found[-1]) + len(words) > LONGEST or _ends(found[-1]) == 3):
            found.append([])
        found[-1] = (found[-1] + words)[:LONGEST]
    return [" ".join(words) for words in found if len(words) > 3]


def _ends(words: list[str]) -> int:
    return sum(word[-1] in ".!?" for word in words)


def _some(parts: list[str], rng: np.random.Generator) -> list[str]:
    """At most four passages: the last two, where a review tells its verdict, and two of those before."""
    if len(parts) <= 4:
        return parts
    return [parts[place] for place in sorted(rng.choice(len(parts) - 2, 2, replace=False))] + parts[-2:]


def _clean(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html.unescape(text)).split())


def _runs(text: str) -> Iterator[str]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return (" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1))


def _sst_tests(folder: Path) -> list[str]:
    fine = (folder / "sentence/stsa.fine.test").read_text("utf-8").splitlines()
    return [line.split(" ", 1)[1] for line in fine] + [row["sentence"] for row in _rows(folder, "glue/SST-2/dev.tsv")]


def _rows(folder: Path, name: str) -> Iterable[dict[str, str]]:
    path = folder / name
    if not path.is_file():
        raise SystemExit(f"{path} is not there; set FEDSTILL_DATA to the folder that holds {name}")
    return read_rows(path)


def _pairs(folder: Path, name: str, keys: tuple[str, str]) -> list[list[str]]:
    found = {_clean(row[key]) for row in _rows(folder, name) for key in keys}
    return [[text] for text in sorted(found) if 4 <= len(text.split()) <= LONGEST]


def _sources(folder: Path, kept_apart: set[str]) -> dict[str, list[list[str]]]:
    """For every source its reviews or sentences, each as a list of passages; only training files are read."""
    train = film_reviews().train
    long, short = [], []
    for text, domain in zip(train.texts, train.domains or (), strict=True):
        if text not in kept_apart:
            (long if domain == "imdb" else short).append(passages(str(text)))
    names = ("automotive", "baby", "health", "sport")
    amazon = [row["text"] for name in names for row in _rows(folder, f"amazon_adafd/{name}/dev.csv")]
    news = (folder / "ag_news/alps_dev.tsv").read_text("utf-8").splitlines()
    sst = {_clean(row["sentence"]) for row in _rows(folder, "glue/SST-2/train.tsv")}
    return {
        "imdb": long,
        "rotten_tomatoes": short,
        "sst2": [[text] for text in sorted(sst) if len(text.split()) >= 4],
        "amazon": [passages(text) for text in amazon],
        "snli": _pairs(folder, "nli/snli_1.0_train_subset.jsonl.gz", ("sentence1", "sentence2")),
        "mnli": _pairs(folder, "glue/MNLI_subset/train.json", ("text_a", "text_b")),
        "ag_news": [passages(line.rsplit("\t", 1)[0].replace(" #39;", "'")) for line in news],
        "qqp": _pairs(folder, "glue/QQP_subset/train.json", ("text_a", "text_b")),
        "meld": [[_clean(row["Utterance"])] for row in _rows(folder, "erc/MELD/train_sent_emo.csv")],
    }
