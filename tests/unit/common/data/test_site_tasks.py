"""A site's own task: windows and spans, what a model is fed with, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from fedstill.common.config import ConfigError, ModelConfig, SiteTask
from fedstill.common.config.files import check, load_run
from fedstill.common.data.site_tasks import Item, Windows, Work, read_items
from fedstill.common.data.tasks import TaskError
from fedstill.common.models.bert2bert import MixedModel, load_mixed
from fedstill.common.models.text_model import ModelError
from fedstill.strategies.atc.corruption import Corrupted


@pytest.fixture(scope="module")
def bert() -> MixedModel:
    return load_mixed(ModelConfig(name="tiny-bert", max_length=24), 2, 5)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_long_passage_has_windows_that_overlap_and_the_span_is_the_answer(bert: MixedModel) -> None:
    words = "the film was made by a man who loved the city and the sea and all of the people in it very much indeed"
    item = Item(("who loved it", words), ("all of the people",), words.index("all of the people"))
    task = SiteTask(kind="question-answering", train=Path("x"), query_length=4, stride=6)
    windows = Windows(bert, task, [item])
    assert len(windows.item) > 1
    spans, found = windows.spans(), []
    for number, (start, end) in enumerate(spans):
        if end:
            ids = windows.inputs.batch([number])["input_ids"][0, start : end + 1]
            found.append(bert.tokenizer.decode(ids))
    assert found
    assert set(found) == {"all of the people"}
    assert any(not end for _, end in spans)
    # scores that point at the span give the answer, whichever window it is in
    bert.span_scores = lambda inputs: torch.stack([  # type: ignore[method-assign]
        torch.nn.functional.one_hot(torch.tensor(span), inputs["input_ids"].shape[1]).T.float() * (1 + span[1] > 1)
        for span in spans])  # fmt: skip
    assert windows.answers(bert) == ["all of the people"]
    del bert.span_scores


def test_a_question_without_an_answer_is_learned_and_said_at_the_first_token(bert: MixedModel, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "who met bob", "context": "ann met bob", "answer": "ann"},
        {"question": "who met eve", "context": "ann met bob", "answer": []},
        {"question": "where was it", "context": "ann met bob", "answer": ""},
    ]
    file = write(tmp_path / "a.jsonl", rows)
    work = Work(SiteTask(kind="question-answering", train=file, test=file), 1)
    assert [item.answers for item in work.train] == [("ann",), ("",), ("",)]
    windows = Windows(bert, work.task, work.train)
    assert [span.tolist() for span in windows.spans()] == [[5, 5], [0, 0], [0, 0]]  # [CLS] who met bob [SEP] ann ...
    # windows score 2 a side for `ann`, and for the first token 1, 3 and 2: more than for the span only in the second
    tops = iter([torch.tensor([1.0, 3.0, 2.0])])

    def scores(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        made = torch.zeros(*inputs["input_ids"].shape, 2)
        made[:, 5], made[:, 0] = 2.0, next(tops)[:, None]
        return made

    bert.span_scores = scores  # type: ignore[method-assign, assignment]
    assert work.scores(bert) == {"exact_match": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}
    tops = iter([torch.tensor([1.0, 3.0, 2.0])])
    assert windows.answers(bert) == ["ann", "ann", "ann"]  # where every question has an answer, one is always given
    del bert.span_scores


def test_denoising_wants_the_text_as_it_was_and_mlm_leaves_special_tokens_alone(bert: MixedModel) -> None:
    texts = bert.encode(["a good film . the best . i saw", "bad ."])
    rng = np.random.default_rng(1)
    batch = Corrupted(bert, texts, "denoising", rng).batch(np.array([0, 1]))
    wanted = [row[row >= 0].tolist() for row in batch["original"]]
    plain = [texts.batch([n])["input_ids"][0].tolist() for n in range(2)]
    assert wanted == [ids[1:] for ids in plain]  # without [CLS], and [SEP] ends it
    assert batch["input_ids"][0, 0] == bert.tokenizer.cls_token_id
    assert (batch["input_ids"] == bert.tokenizer.mask_token_id).any()
    spoilt = Corrupted(bert, texts, "mlm", rng)
    for _ in range(20):
        found = spoilt.batch(np.array([0, 1]))
        special = torch.isin(texts.batch([0, 1])["input_ids"], torch.tensor(bert.tokenizer.all_special_ids))
        assert (found["masked"][special] == -100).all()


def test_encoder_and_decoder_begin_as_the_encoder_and_masks_meet_the_word_vectors(bert: MixedModel) -> None:
    state = bert.whole_state()
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(state[f"encoder.{words}"], state[f"decoder.bert.{words}"])
    assert {name.split(".")[0] for name in state} == {"encoder", "decoder", "mlm", "pooler", "classifier", "contrast"}
    assert set(bert.trainable_state()) == {name for name in state if name.startswith("encoder.")}
    hidden = torch.randn(3, 128)
    dense = state["mlm.dense.weight"], state["mlm.dense.bias"]
    bent = torch.nn.functional.gelu(hidden @ dense[0].T + dense[1])
    normed = torch.nn.functional.layer_norm(bent, (128,), state["mlm.norm.weight"], state["mlm.norm.bias"])
    expected = normed @ state[f"encoder.{words}"].T + state["mlm.bias"]
    assert torch.allclose(bert.tokens(hidden), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_mlm_head_is_the_checkpoints_where_it_has_one(family: str, tmp_path: Path) -> None:
    """A masked language model as transformers saves it: its own logits come out; without a head, a new one is drawn."""
    plain = load_mixed(ModelConfig(name=f"tiny-{family}"), 2, 5)
    settings = plain.net.encoder.config
    torch.manual_seed(3)
    theirs = AutoModelForMaskedLM.from_config(settings).eval()
    for name, value in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)  # zeros would agree with a new head's
    theirs.save_pretrained(tmp_path)
    plain.tokenizer.save_pretrained(tmp_path)
    ours = load_mixed(ModelConfig(name=str(tmp_path)), 2, 5).eval()
    batch = ours.encode(["a good film .", "the best of them"]).batch([0, 1])
    with torch.inference_mode():
        wanted, found = theirs(**batch).logits, ours.tokens(ours.states(batch))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    theirs.base_model.save_pretrained(tmp_path)  # the encoder alone
    heads = [load_mixed(ModelConfig(name=str(tmp_path)), 2, seed).mlm.dense.weight for seed in (5, 5, 6)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])  # drawn from the seed


def test_models_that_cannot_write_are_refused() -> None:
    with pytest.raises(ModelError, match=r"tiny-xlnet.*BERT-like or a T5-like"):
        load_mixed(ModelConfig(name="tiny-xlnet"), 2, 1)


def test_a_frozen_encoder_is_refused_since_whole_models_are_trained() -> None:
    for freeze in ("encoder", 1):
        with pytest.raises(
            ModelError, match="model tiny-bert: a run with task mixed trains whole models; take freeze out"
        ):
            load_mixed(ModelConfig.model_validate({"name": "tiny-bert", "freeze": freeze}), 2, 1)


def test_a_task_that_cannot_be_is_refused_with_the_cure(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"question": "q", "context": "it is red", "answer": "blue"}] * 3)
    task = SiteTask(kind="question-answering", train=file)
    with pytest.raises(TaskError, match=r"row 1: the answer 'blue' is not a part of its context; correct it"):
        read_items(task, 1)
    with pytest.raises(TaskError, match=r"no column 'text' \(task.text of summarisation\); columns: question"):
        read_items(SiteTask(kind="summarisation", train=file), 1)
    labels = write(tmp_path / "b.jsonl", [{"text": "t", "label": "x"}, {"text": "t", "label": "y"}] * 3)
    with pytest.raises(TaskError, match=r"list every label in task\.labels"):
        Work(SiteTask(kind="classification", train=labels, labels=["x", "z"]), 1)
    for values, said in (
        ({"kind": "translation", "train": "x"}, "kind: Input should be 'classification'"),
        ({"kind": "question-answering", "train": "x", "text": "context"}, "names 2 columns"),
        ({"kind": "summarisation", "train": "x", "labels": ["a"]}, "belong to classification"),
        ({"kind": "summarisation", "train": "x", "fewest": 9, "most": 3}, "is above task.most = 3: lower it"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(SiteTask, values, "site.toml")
    with pytest.raises(ConfigError, match=r'set task.name = "mixed", or take \[sites.task\] out'):
        load_run('[[sites]]\nname = "a"\n[sites.task]\nkind = "summarisation"\ntrain = "x"\n')


def test_without_a_test_file_a_tenth_is_kept_back(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": f"text {n}", "summary": f"{n}"} for n in range(30)]
    task = SiteTask(kind="summarisation", train=write(tmp_path / "a.jsonl", rows))
    train, test = read_items(task, 1)
    assert (len(train), len(test)) == (27, 3)
    assert {item.text for item in train} | {item.text for item in test} == {str(row["text"]) for row in rows}
