"""Tasks from every source, their errors, and scores against numbers worked out by hand."""

import time
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import TaskConfig
from fedstill.common.data.tasks import TASKS, Task, TaskError, load_task, scores


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_film_reviews_are_balanced_in_two_domains_and_no_text_occurs_twice() -> None:
    task, pools = load_task(TaskConfig())
    assert task.labels == ("negative", "positive")
    assert task.label_words == task.labels
    assert pools.dropped == {"blank": 0, "repeated": 96}
    assert len(pools.train) == len(set(pools.train.texts)) == 33530 - 96
    assert set(pools.train.domains or ()) == {"imdb", "rotten_tomatoes"}
    assert pools.train.labels is not None
    assert abs(pools.train.labels.mean() - 0.5) < 0.01


def test_csv_with_named_columns_domains_and_blank_texts(tmp_path: Path) -> None:
    rows = 'said,mood,shop\n"good, really",up,a\n   ,up,a\nbad,down,b\n'
    config = TaskConfig(name="files", train=write(tmp_path / "t.csv", rows), text=["said"], label="mood", domain="shop")
    task, pools = load_task(config)
    assert task.labels == ("down", "up")
    assert pools.train.texts == ("good, really", "bad")
    assert pools.train.labels is not None
    assert pools.train.labels.tolist() == [1, 0]
    assert pools.train.domains == ("a", "b")
    assert pools.dropped == {"blank, train": 1}


def test_tsv_keeps_stray_quotation_marks_and_reads_pairs(tmp_path: Path) -> None:
    train = write(tmp_path / "t.tsv", 'a\tb\tlabel\n"one\ttwo\t0\nthree\tfour\t1\n')
    _, pools = load_task(TaskConfig(name="files", train=train, text=["a", "b"]))
    assert pools.train.texts == (('"one', "two"), ("three", "four"))


def test_jsonl_takes_class_numbers_for_named_labels_and_numbers_sort_as_numbers(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", '{"text": "x", "label": 1}\n\n{"text": "y", "label": "bad"}\n')
    _, pools = load_task(TaskConfig(name="files", train=train, labels=["bad", "good"]))
    assert pools.train.labels is not None
    assert pools.train.labels.tolist() == [1, 0]
    numbers = write(tmp_path / "n.csv", "text,label\n" + "".join(f"t{i},{i}\n" for i in (10, 9, 2)))
    assert load_task(TaskConfig(name="files", train=numbers))[0].labels == ("2", "9", "10")


def test_public_file_needs_no_labels(tmp_path: Path) -> None:
    train = write(tmp_path / "t.csv", "text,label,kind\nx,0,a\ny,1,b\n")
    public = write(tmp_path / "p.csv", "text\nfree\n")
    _, pools = load_task(TaskConfig(name="files", train=train, public=public, domain="kind"))
    assert pools.public is not None
    assert pools.public.labels is None
    assert pools.public.texts == ("free",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "txt,label\nx,0\n", "no column 'text' .task.text.; columns: txt, label; did you mean 'txt'"),
        ("t.csv", "text,label\nx,0\ny,maybe\n", r"t\.csv, row 2: label 'maybe' is none of 0, 1"),
        ("t.csv", "text,label\n", "there are no rows"),
        ("t.csv", "text,label\n ,0\n", "every text in column text is blank"),
        ("t.jsonl", '{"text": "x", "label": 0}\n{oops\n', r"t\.jsonl, line 2: is not JSON"),
        ("t.jsonl", "[1]\n", "line 1: every line must be a JSON object"),
        ("t.xls", "", "only .csv, .tsv, .jsonl and .json"),
    ],
)
def test_bad_files_are_refused_with_place_and_cure(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(TaskConfig(name="files", train=write(tmp_path / name, content), labels=["0", "1"]))


def test_absent_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"gone\.csv: cannot be read .*check the path"):
        load_task(TaskConfig(name="files", train=tmp_path / "gone.csv"))
    (tmp_path / "t.csv").write_bytes(b"text,label\n\xff\xfe,0\n")
    with pytest.raises(TaskError, match="is not UTF-8"):
        load_task(TaskConfig(name="files", train=tmp_path / "t.csv"))


def test_a_label_of_the_test_file_that_training_lacks_is_named(tmp_path: Path) -> None:
    train = write(tmp_path / "t.csv", "text,label\nx,no\ny,yes\n")
    test = write(tmp_path / "e.csv", "text,label\nz,perhaps\n")
    with pytest.raises(TaskError, match=r"e\.csv, row 1: label 'perhaps' is none of no, yes"):
        load_task(TaskConfig(name="files", train=train, test=test))


def test_hub_fails_in_seconds_where_it_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    start = time.monotonic()
    with pytest.raises(TaskError, match=r'nobody/nothing: the hub cannot be reached.*task.name = "files"'):
        load_task(TaskConfig(name="hub", hub="nobody/nothing"))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ("a",)}, "two or more different names"),
        ({"labels": ("a", "b"), "label_words": ("x", "x")}, "one different word for each"),
        ({"labels": ("a", "b"), "metric": "bleu"}, "'bleu' is not known"),
        ({"labels": ("a", "b"), "text_columns": ("x", "y", "z")}, "one column, or two for pairs"),
    ],
)
def test_tasks_that_make_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Task(name="t", **arguments)  # type: ignore[arg-type]


def test_unknown_task_names_the_known() -> None:
    with pytest.raises(
        TaskError, match=r"did you mean film-reviews[^?]*[?] choose one of: film-reviews, cola, .*superglue, files, hub"
    ):
        load_task(TaskConfig(name="film-review"))


def test_built_in_task_takes_the_words_of_the_configuration() -> None:
    task, _ = load_task(TaskConfig(label_words=["bad", "good"]))
    assert task.label_words == ("bad", "good")
    assert TASKS["film-reviews"].label_words == ("negative", "positive")


def test_scores_by_hand() -> None:
    # true 1 1 1 0 0, guessed 1 1 0 1 0: TP 2, FN 1, FP 1, TN 1
    true = [1, 1, 1, 0, 0]
    logits = np.array([[0, 1], [0, 2], [1, 0], [0, 1], [3, 0]])
    assert scores("accuracy", true, logits) == {"accuracy": 0.6}
    assert scores("f1", true, logits)["f1"] == pytest.approx(2 / 3)
    # (TP*TN - FP*FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)) = (2 - 1) / sqrt(3*3*2*2)
    assert scores("mcc", true, logits)["mcc"] == pytest.approx(1 / 6)
    # F1 of class 0 is 1/2: weighted (3 * 2/3 + 2 * 1/2) / 5, macro (2/3 + 1/2) / 2
    assert scores("f1_weighted", true, logits)["f1_weighted"] == pytest.approx(0.6)
    assert scores("f1_macro", true, logits)["f1_macro"] == pytest.approx(7 / 12)
    with pytest.raises(TaskError, match="cannot score"):
        scores("f1", true, logits[:3])
