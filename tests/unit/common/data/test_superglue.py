"""SuperGLUE as text-to-text: lines by hand, words by name, scores by task, tasks over sites."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.common.config import TaskConfig
from fedstill.common.data.partitions import partition
from fedstill.common.data.splits import DataError, TextSet
from fedstill.common.data.tasks import TaskError, load_task, task_scores
from fedstill.common.data.tasks.superglue import PARTS

SHARED = Path("/work/shared/data/superglue")
ROWS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "BoolQ": (
        {"question": "is it so", "passage": "Yes -- it is, (i.e. always).", "label": True},
        [("boolq question: is it so. passage: Yes it is ie always", "Yes")],
    ),
    "CB": (
        {"premise": "He came. She left!", "hypothesis": "she left", "label": "contradiction"},
        [("cb hypothesis: she left. premise: He came She left", "Contradiction")],
    ),
    "COPA": (
        {"premise": "It rained.", "choice1": "We swam.", "choice2": "We got wet.", "question": "effect", "label": 1},
        [("copa choice1: We swam. choice2: We got wet. premise: It rained. question: effect", "Choice_two")],
    ),
    "MultiRC": (
        {
            "passage": {
                "text": "Ann's well-known. Bob isn't.",
                "questions": [
                    {"question": "Who?", "answers": [{"text": "Ann.", "label": 1}, {"text": "Bob.", "label": 0}]}
                ],
            }
        },
        [
            ("multirc question: Who. answer: Ann. paragraph: Anns wellknown Bob isnt", "True"),
            ("multirc question: Who. answer: Bob. paragraph: Anns wellknown Bob isnt", "False"),
        ],
    ),
    "ReCoRD": (
        {
            "passage": {
                "text": "Ann met Bob. Ann left.",
                "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 13, "end": 15}],
            },
            "qas": [{"query": "It was @placeholder who left.", "answers": [{"start": 13, "end": 15, "text": "Ann"}]}],
        },
        [
            ("record answer: Ann. query: It was @placeholder who left. passage: Ann met Bob Ann left", "Correct"),
            ("record answer: Bob. query: It was @placeholder who left. passage: Ann met Bob Ann left", "Wrong"),
        ],
    ),
    "RTE": (
        {"premise": "A, B.", "hypothesis": "B.", "label": "not_entailment"},
        [("rte hypothesis: B. premise: A B", "Not_entailment")],
    ),
    "WiC": (
        {"word": "place", "sentence1": "My place?", "sentence2": "A place.", "label": False},
        [("wic word: place. sentence1: My place. sentence2: A place", "Mismatch")],
    ),
    "WSC": (
        {
            "text": "Tom told Ned, and then he left him.",
            "target": {"span1_index": 0, "span1_text": "Tom", "span2_index": 7, "span2_text": "him."},
            "label": True,
        },
        [("wsc: Tom told Ned and then he left * him *", "Same")],
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (row, _) in ROWS.items():
        (tmp_path / name).mkdir()
        for split in ("train", "val"):
            (tmp_path / name / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_every_task_has_its_line_and_its_words(folder: Path) -> None:
    task, pools = load_task(TaskConfig(name="superglue", folder=folder))
    wanted = [line for _, lines in ROWS.values() for line in lines]
    assert [(t, task.labels[n]) for t, n in zip(pools.train.texts, pools.train.labels, strict=True)] == wanted  # type: ignore[arg-type]
    assert pools.train.domains == tuple(d for name in ROWS for d in [name.lower()] * len(ROWS[name][1]))
    assert len(task.labels) == 16  # Entailment is shared by CB and RTE
    words = {name: {task.labels[n] for n in numbers} for name, numbers in task.choices}
    assert words["rte"] == {"Entailment", "Not_entailment"}
    assert words["cb"] == {"Entailment", "Contradiction", "Neutral"}


def test_what_is_absent_is_named_with_the_cure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ReCoRD/train.jsonl").unlink()
    with pytest.raises(TaskError, match=r"ReCoRD/train.jsonl not there.*task.parts = \['boolq', 'cb'"):
        load_task(TaskConfig(name="superglue", folder=folder))
    task, pools = load_task(TaskConfig(name="superglue", folder=folder, parts=["wic", "cb"]))
    assert pools.train.domains == ("cb", "wic")
    assert len(task.labels) == 5
    with pytest.raises(TaskError, match=r"task.parts names sst; known: boolq"):
        load_task(TaskConfig(name="superglue", folder=folder, parts=["sst"]))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    with pytest.raises(TaskError, match=r"needs task.folder.*or FEDSTILL_DATA"):
        load_task(TaskConfig(name="superglue"))
    monkeypatch.setenv("FEDSTILL_DATA", str(folder.parent))
    (folder.parent / "superglue").symlink_to(folder)
    assert load_task(TaskConfig(name="superglue", parts=["cb"]))[1].train.domains == ("cb",)
    (folder / "CB/val.jsonl").write_text('{"premise": "a", "hypothesis": "b"}\n')
    with pytest.raises(TaskError, match=r"CB/val.jsonl: a row is not as SuperGLUE has it .'label'"):
        load_task(TaskConfig(name="superglue", folder=folder, parts=["cb"]))


def test_scores_are_by_task_among_its_own_words_and_their_mean(folder: Path) -> None:
    task, _ = load_task(TaskConfig(name="superglue", folder=folder, parts=["cb", "copa"]))
    labels, domains = np.array([0, 1, 3, 4]), ["cb", "cb", "copa", "copa"]
    outputs = np.array([[2, 0, 0, 9, 0], [3, 1, 0, 0, 0], [9, 0, 0, 1, 0], [0, 0, 0, 2, 3.0]])
    found = task_scores(task, labels, outputs, domains)
    assert found == {"accuracy": 0.75, "mean_over_tasks": 0.75, "accuracy_cb": 0.5, "accuracy_copa": 1.0}
    among_all, _ = load_task(TaskConfig(name="superglue", folder=folder, parts=["cb", "copa"], own_words=False))
    assert task_scores(among_all, labels, outputs, domains)["accuracy_copa"] == 0.5
    assert task_scores(among_all, labels, outputs, domains)["accuracy_cb"] == 0.0
    three = task_scores(task, labels[1:], outputs[1:], domains[1:])
    assert three["mean_over_tasks"] == pytest.approx(0.5)  # (0 + 1) / 2, not 2 of 3


def dealt(alpha: float, sites: int) -> list[Counter[str]]:
    domains = tuple(name for name in "abcdefgh" for _ in range(300))
    texts = TextSet(tuple(map(str, range(2400))), None, domains)
    shares = partition(texts, sites, "tasks-dirichlet", alpha, seed=4, minimum=8)
    assert sorted(np.concatenate(shares).tolist()) == list(range(2400))
    return [Counter(domains[row] for row in share) for share in shares]


def test_tasks_are_dealt_by_dirichlet_and_at_0_a_site_has_one() -> None:
    assert dealt(0.0, 8) == [Counter({name: 300}) for name in "abcdefgh"]
    largest = {a: np.mean([max(c.values()) / sum(c.values()) for c in dealt(a, 20)]) for a in (0.05, 0.5, 50.0)}
    assert largest[0.05] > 0.7 > largest[0.5] > 0.3 > largest[50.0]
    with pytest.raises(DataError, match="alpha must be above 0"):
        partition(TextSet(("a",) * 20, np.zeros(20, np.int64)), 2, "dirichlet-clients", 0.0)
    with pytest.raises(DataError, match="divides by domain, but these texts have none"):
        partition(TextSet(("a",) * 20, np.zeros(20, np.int64)), 2, "tasks-dirichlet", 0.5)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the SuperGLUE files under /work/shared are not here")
def test_the_real_files_give_the_papers_examples() -> None:
    parts = ["cb", "copa", "multirc", "rte", "wic", "wsc"]
    task, pools = load_task(TaskConfig(name="superglue", folder=SHARED, parts=parts))
    assert Counter(pools.train.domains) == {
        "wic": 5428, "rte": 2490, "multirc": 963, "wsc": 554, "copa": 400, "cb": 250
    }  # fmt: skip
    assert set(PARTS) - set(parts) == {"boolq", "record"}
    assert pools.train.domains is not None
    assert pools.train.labels is not None
    first = {name: pools.train.domains.index(name) for name in parts}
    words = {name: task.labels[pools.train.labels[row]] for name, row in first.items()}
    assert words == {
        "cb": "Entailment", "copa": "Choice_one", "multirc": "False", "rte": "Not_entailment", "wic": "Mismatch",
        "wsc": "Difference",
    }  # fmt: skip
    line = str(pools.train.texts[first["wsc"]])
    assert line.startswith("wsc: Mark told Pete")
    assert line.endswith("his book * He * should have been more skeptical")
