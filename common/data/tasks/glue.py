"""Wang et al., "GLUE", ICLR 2019: the eight tasks that are classifications, as its folders and the hub have them.

The dev files are tested on: GLUE keeps the labels of its test files to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedstill.common.data.tasks.library import Files, Hub, Known
from fedstill.common.data.tasks.rows import Row, open_text, read_rows
from fedstill.common.data.tasks.task import INFERENCE_TRIANGLE, Task, on_a_line

HOME = "gluebenchmark.com, Tasks"
TRAIN = ("train.tsv", "train.json", "train.jsonl", "train.csv")
DEV = ("dev.tsv", "validation.tsv", "dev.json", "dev.jsonl", "validation.csv")
COLA = ("source", "label", "mark", "sentence")
NO_LABEL = frozenset({"-", "-1", "", "None"})
PAIR = {"sentence1": ("sentence1", "text_a"), "sentence2": ("sentence2", "text_b")}
TWO_WAY = ("entailment", "not_entailment")


def _files(name: str, train: tuple[str, ...] = TRAIN, dev: tuple[str, ...] = DEV) -> Files:
    folders = (name, f"{name}_subset", name.lower().replace("-", ""))
    return Files(tuple(f"{root}{folder}" for folder in folders for root in ("glue/", "")), train, dev)


def _hub(config: str) -> Hub:
    return Hub("nyu-mll/glue", config)


def _cola(path: Path) -> Iterable[Row]:
    return read_rows(path, columns=COLA)


def _wnli(path: Path) -> Iterable[Row]:
    return read_rows(path, columns=("index", "sentence1", "sentence2", "label"))


def _mrpc(path: Path) -> Iterable[Row]:
    """Read MRPC: GLUE's own script writes the file without quotes; many copies quote the texts."""
    with open_text(path) as file:
        cells = [cell for line in file for cell in line.rstrip("\r\n").split("\t") if cell.startswith('"')]
    return read_rows(path, quoted=bool(cells) and all(_between_marks(cell) for cell in cells))


def _between_marks(cell: str) -> bool:
    return len(cell) > 1 and cell.endswith('"') and '"' not in cell[1:-1].replace('""', "")


GLUE = [
    Known(
        Task("cola", ("unacceptable", "acceptable"), "mcc", "CoLA: is it good English?", ("sentence",)),
        _files("CoLA"), HOME, _hub("cola"), read=_cola,
    ),
    Known(
        Task(
            "sst2", ("negative", "positive"), title="SST-2: phrases of film reviews", text_columns=("sentence",),
            coordinates=on_a_line(2),
        ),
        _files("SST-2"), HOME, _hub("sst2"),
    ),
    Known(
        Task(
            "mrpc", ("different", "same"), "f1", "MRPC: do two sentences of the news say the same?",
            ("sentence1", "sentence2"),
        ),
        _files("MRPC", ("train.tsv", "msr_paraphrase_train.txt"), ("dev.tsv", "validation.tsv")), HOME, _hub("mrpc"),
        read=_mrpc,
        names={
            "sentence1": ("sentence1", "#1 String"), "sentence2": ("sentence2", "#2 String"),
            "label": ("label", "Quality", "\ufeffQuality"),
        },
    ),
    Known(
        Task(
            "qqp", ("different", "same"), "f1", "QQP: do two questions ask the same?", ("question1", "question2"),
        ),
        _files("QQP"), HOME, _hub("qqp"), skip=NO_LABEL,
        names={
            "question1": ("question1", "text_a"), "question2": ("question2", "text_b"),
            "label": ("is_duplicate", "label"),
        },
    ),
    *(
        Known(
            Task(
                name, tuple(INFERENCE_TRIANGLE), title=f"MNLI, {test} dev set; domains are genres",
                text_columns=("premise", "hypothesis"), domain_column="genre",
                coordinates=tuple(INFERENCE_TRIANGLE.values()),
            ),
            Files(
                ("glue/MNLI", "MNLI", "multinli_1.0", "mnli", "glue/MNLI_subset", "MNLI_subset", "nli"),
                ("train.tsv", "multinli_1.0_train.jsonl*", "train.jsonl", "mnli_train.jsonl", "train.json"),
                (f"dev_{test}.tsv", f"multinli_1.0_dev_{test}.jsonl*", *more),
            ),
            f"{HOME}, or cims.nyu.edu/~sbowman/multinli", Hub("nyu-mll/multi_nli", test=(f"validation_{test}",)),
            skip=NO_LABEL,
            names={
                "premise": ("premise", "sentence1", "text_a"), "hypothesis": ("hypothesis", "sentence2", "text_b"),
                "label": ("gold_label", "label"),
            },
        )
        for name, test, more in (
            ("mnli", "matched", ("dev.jsonl", "mnli_dev.jsonl", "dev.json")), ("mnli-mm", "mismatched", ()),
        )
    ),
    Known(
        Task(
            "qnli", TWO_WAY, title="QNLI: does the sentence answer the question?",
            text_columns=("question", "sentence"),
        ),
        _files("QNLI"), HOME, _hub("qnli"),
        names={"question": ("question", "text_a"), "sentence": ("sentence", "text_b")},
    ),
    Known(
        Task("rte", TWO_WAY, title="RTE: does the text entail the sentence?", text_columns=("sentence1", "sentence2")),
        _files("RTE"), HOME, _hub("rte"), names=PAIR,
    ),
    Known(
        Task(
            "wnli", ("not_entailment", "entailment"), title="WNLI: is the pronoun read rightly?",
            text_columns=("sentence1", "sentence2"),
        ),
        _files("WNLI"), HOME, _hub("wnli"), read=_wnli, names=PAIR,
    ),
]  # fmt: skip
