"""Emotions in conversations: DailyDialog, MELD and IEMOCAP, with past turns; the five emotions that all have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.common.data.tasks.library import Files, Hub, Known
from fedstill.common.data.tasks.rows import Row, open_text, read_rows
from fedstill.common.data.tasks.task import VALENCE_AROUSAL, Task, TaskError

if TYPE_CHECKING:
    from fedstill.common.config import TaskConfig

BY_NUMBER = ("none", "anger", "disgust", "fear", "happiness", "sadness", "surprise")  # as DailyDialog numbers them
SAME = {
    "neutral": "none", "no emotion": "none", "neu": "none", "joy": "happiness", "hap": "happiness",
    "happy": "happiness", "excited": "happiness", "exc": "happiness", "angry": "anger", "ang": "anger",
    "sad": "sadness", "surprised": "surprise", "sur": "surprise",
}  # fmt: skip
OTHERS = frozenset(
    (
        "disgust",
        "dis",
        "disgusted",
        "fear",
        "fea",
        "fearful",
        "frustration",
        "frustrated",
        "fru",
        "other",
        "oth",
        "xxx",
        "",
    )
)
BETWEEN = " | "


def _conversations(path: Path) -> Iterator[Row]:
    """Read a json list of conversations, each a list of turns; DailyDialog's two text files; or MELD's table."""
    if path.suffix == ".txt":
        yield from _with_emotion_file(path)
    elif path.suffix == ".json":
        try:
            with open_text(path) as file:
                conversations = json.load(file)
            for number, turns in enumerate(conversations):
                for turn in turns:
                    yield {"talk": f"{path}/{number}", "said": turn["text"], "emotion": turn.get("label", "")}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TaskError(
                f"{path}: is not a list of conversations, each a list of turns with text and label ({error!r})"
            ) from error
    else:
        for row in read_rows(path):
            talk = f"{path}/{row.get('Dialogue_ID')}"
            yield {"talk": talk, "said": row.get("Utterance"), "emotion": row.get("Emotion")}


def _with_emotion_file(path: Path) -> Iterator[Row]:
    emotion_path = path.with_name(path.name.replace("dialogues_", "dialogues_emotion_"))
    with open_text(path) as file:
        talks = [line.strip().removesuffix("__eou__").split("__eou__") for line in file if line.strip()]
    try:
        with open_text(emotion_path) as file:
            emotions = [line.split() for line in file if line.strip()]
    except OSError as error:
        raise TaskError(f"{emotion_path}: cannot be read ({error.strerror}); it belongs beside {path.name}") from error
    if [len(talk) for talk in talks] != [len(numbers) for numbers in emotions]:
        raise TaskError(f"{emotion_path}: has other turns than {path.name}; get both files again")
    for number, (talk, talk_emotions) in enumerate(zip(talks, emotions, strict=True)):
        for utterance, emotion in zip(talk, talk_emotions, strict=True):
            yield {"talk": f"{path}/{number}", "said": utterance, "emotion": emotion}


def _from_hub(rows: Iterable[Row]) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if "dialog" in row:
            for utterance, emotion in zip(row["dialog"], row["emotion"], strict=True):
                yield {"talk": number, "said": utterance, "emotion": emotion}
        else:
            yield row


def with_past(rows: Iterable[Row], config: TaskConfig) -> Iterator[Row]:
    """Join a turn with the turns before it, newest first: truncation cuts the oldest."""
    for _, talk in groupby(_from_hub(rows), key=lambda row: row["talk"]):
        past: list[str] = []
        for row in talk:
            utterance, label = " ".join(str(row["said"] or "").split()), str(row["emotion"]).strip().lower()
            label = BY_NUMBER[int(label)] if label.isdigit() and int(label) < len(BY_NUMBER) else SAME.get(label, label)
            before = past[: -config.turns - 1 : -1] if config.turns else []
            # an empty turn has no text, whatever came before it
            yield {"text": BETWEEN.join([utterance, *before]) if utterance else "", "label": label}
            past += [utterance] if utterance else []


def _set(name: str, title: str, files: Files, home: str, hub: Hub | None = None) -> Known:
    task = Task(name, tuple(VALENCE_AROUSAL), "f1_macro", title, coordinates=tuple(VALENCE_AROUSAL.values()))
    return Known(task, files, home, hub, read=_conversations, shape=with_past, skip=OTHERS)


DIALOGUES = [
    _set(
        "dailydialog", "DailyDialog: everyday talk, five emotions",
        Files(
            ("erc/DailyDialog", "DailyDialog", "ijcnlp_dailydialog"),
            ("train/dialogues_train.txt", "train_data.json", "dev_data.json"),
            ("test/dialogues_test.txt", "test_data.json"),
        ),
        "yanran.li/dailydialog", Hub("li2017dailydialog/daily_dialog", test=("test",), revision="refs/convert/parquet"),
    ),
    _set(
        "meld", "MELD: the series Friends, five emotions",
        Files(("erc/MELD", "MELD", "meld"), ("train_sent_emo.csv",), ("test_sent_emo.csv", "dev_sent_emo.csv")),
        "github.com/declare-lab/MELD (data/MELD)",
    ),
    _set(
        "iemocap", "IEMOCAP: acted talk, five emotions",
        Files(("erc/IEMOCAP", "IEMOCAP", "iemocap"), ("train_data.json",), ("test_data.json", "dev_data.json")),
        "sail.usc.edu/iemocap (on request; as json: conversations, each a list of turns with text and label)",
    ),
]  # fmt: skip
