"""Tokenizers and tokenized texts that the sites of one process share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import ModelConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.models.builtin import builtin_folder
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import TextModel
from fedstill.common.models.tokens import Remembered, encode

TEXTS = ("a fine film", "a dull one", "neither of the two")


def loaded(name: str, length: int = 16, keep: str = "start") -> TextModel:
    return load_model(ModelConfig.model_validate({"name": name, "max_length": length, "keep": keep}), TASKS["sst2"], 1)


def test_models_of_a_kind_share_a_tokenizer_and_the_tokens_of_the_same_texts() -> None:
    one, two, other = loaded("tiny-bert"), loaded("tiny-bert"), loaded("tiny-roberta")
    assert one.tokenizer is two.tokenizer
    assert one.encode(TEXTS) is two.encode(list(TEXTS))
    assert one.encode(TEXTS) is not one.encode(TEXTS[::-1])
    assert one.encode(TEXTS) is not other.encode(TEXTS)


@pytest.mark.parametrize("change", [{"length": 4}, {"keep": "end", "length": 4}])
def test_a_shorter_cut_or_the_texts_end_are_other_tokens(change: dict[str, object]) -> None:
    whole, cut = loaded("tiny-roberta"), loaded("tiny-roberta", **change)  # type: ignore[arg-type]
    assert whole.encode(TEXTS).lengths().tolist() != cut.encode(TEXTS).lengths().tolist()
    expected = encode(cut.tokenizer, TEXTS, 4)
    assert np.array_equal(cut.encode(TEXTS).columns["input_ids"], expected.columns["input_ids"])


def test_both_ends_of_a_text_are_kept_apart() -> None:
    start, end = (loaded("tiny-roberta", 4, keep) for keep in ("start", "end"))
    assert start.encode(TEXTS).columns["input_ids"].tolist() != end.encode(TEXTS).columns["input_ids"].tolist()


def test_a_folder_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("tiny-bert")[0], folder)
    before = loaded(str(folder))
    said = json.loads((folder / "tokenizer.json").read_text())
    words = said["model"]["vocab"]
    words["film"], words["one"] = words["one"], words["film"]
    (folder / "tokenizer.json").write_text(json.dumps(said))
    after = loaded(str(folder))
    assert (
        before.encode(TEXTS[:1]).columns["input_ids"].tolist() != after.encode(TEXTS[:1]).columns["input_ids"].tolist()
    )


def test_the_texts_used_longest_ago_are_forgotten_beyond_the_limit() -> None:
    tokenizer = loaded("tiny-bert").tokenizer
    size = encode(tokenizer, TEXTS[:1], 8).nbytes()
    kept = Remembered(most=2 * size)
    first = kept.encode(tokenizer, TEXTS[:1], 8)
    kept.encode(tokenizer, TEXTS[1:2], 8)
    assert kept.encode(tokenizer, TEXTS[:1], 8) is first
    kept.encode(tokenizer, TEXTS[2:], 4)  # of the same size: the second one goes
    assert kept.encode(tokenizer, TEXTS[:1], 8) is first
    assert kept.held <= kept.most
    assert len(kept._sets) == 2
    big = kept.encode(tokenizer, TEXTS * 100, 8)  # larger than all: it comes through and is not kept
    assert len(big) == 300
    assert kept.encode(tokenizer, TEXTS[:1], 8) is first
