"""Decoder-only models: label words after a prompt, or a head on the last token, in models made from a seed."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fedstill.common.config import LearnerConfig, LoraConfig, ModelConfig
from fedstill.common.data.tasks import TASKS, Task, TaskError
from fedstill.common.models import loading
from fedstill.common.models.causal import CausalModel
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import ModelError, TextModel
from tests.decoders import make_decoders

SHARED = Path(__file__).parents[5] / "shared"
REVIEWS = TASKS["film-reviews"]
TEXTS = ["A fine film.", "Dull, slow and far too long for the little story that it has to tell.", "", "I liked it !"]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_decoders(tmp_path_factory.mktemp("decoders"))


def load(folder: str, task: Task = REVIEWS, length: int = 32, **settings: object) -> TextModel:
    config = ModelConfig.model_validate({"name": folder, "max_length": length, "device": "cpu", **settings})
    return load_model(config, task, seed=1).eval()


def logits(model: TextModel, texts: list = TEXTS) -> torch.Tensor:
    with torch.no_grad():
        return model(model.encode(texts).batch(range(len(texts))))


def by_hand(folder: str, prompt: str, words: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the words after one prompt, token by token, with plain transformers."""
    net = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    scores = []
    for word in words:
        ids = tokenizer(prompt).input_ids
        total = 0.0
        for token in word:
            with torch.no_grad():
                total += float(net(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
            ids = [*ids, token]
        scores.append(total)
    found = torch.tensor(scores)
    return found - found.mean()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("words", [("bad", "good"), ("bad film", "bad story", "good")])
def test_a_class_is_scored_by_its_word_after_the_prompt(models: dict[str, str], family: str, words: tuple) -> None:
    task = Task("t", tuple(f"l{i}" for i in range(len(words))), label_words=words, prompt="Review: {text}\nIt was")
    model = load(models[family], task)
    assert isinstance(model, CausalModel)
    assert (max(map(len, model.words)) > 1) == (len(words) == 3)
    together = logits(model)
    for row, text in enumerate(TEXTS):
        wanted = by_hand(models[family], task.prompt.replace("{text}", text), model.words)
        torch.testing.assert_close(together[row], wanted, atol=1e-4, rtol=1e-4)


def test_a_long_text_is_cut_and_the_prompt_stays_whole(models: dict[str, str]) -> None:
    task = Task("t", ("bad", "good"), prompt="Review: {text}\nIt was")
    long = " ".join(["word"] * 60)
    for keep in ("start", "end"):
        model = load(models["llama"], task, length=16, keep=keep)
        ids = model.encode([long]).batch([0])["input_ids"][0]
        assert 12 <= len(ids) <= 16
        shown = model.tokenizer.decode(ids)
        assert shown.startswith("Review:")
        assert shown.endswith("It was")


def test_a_pair_fills_both_places(models: dict[str, str]) -> None:
    task = Task("t", ("no", "yes"), text_columns=("a", "b"), prompt="{text} means {second} :")
    model = load(models["llama"], task, length=20)
    pair = (" ".join(["one"] * 40), "two two")
    shown = model.tokenizer.decode(model.encode([pair]).batch([0])["input_ids"][0])
    assert shown.count("two") == 2
    assert " means " in shown
    assert shown.count("one") > 8


def test_a_head_on_the_last_token_is_a_choice(models: dict[str, str]) -> None:
    for folder in models.values():
        model = load(folder, answer="head")
        assert not isinstance(model, CausalModel)
        together = logits(model)
        alone = torch.cat([logits(model, [text]) for text in TEXTS])
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)
        assert "score.weight" in model.trainable_state()


def test_a_head_finds_the_last_token_whatever_pad_number_the_configuration_has(
    models: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "other-pad"
    shutil.copytree(models["gpt2"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 1}))
    for _ in range(2):  # the second one gets the tokenizer that the first one has given a pad token
        model = load(str(folder), answer="head")
        assert model.tokenizer.pad_token_id != 1
        alone = torch.cat([logits(model, [text]) for text in TEXTS])
        torch.testing.assert_close(logits(model), alone, atol=2e-5, rtol=1e-4)


def test_a_model_without_a_pad_token_and_with_a_tied_head_trains_saves_and_comes_back(
    models: dict[str, str], tmp_path: Path
) -> None:
    model = load(models["gpt2"])
    assert model.tokenizer.pad_token_id is not None
    assert "lm_head.weight" not in model.trainable_state() or "transformer.wte.weight" not in model.trainable_state()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save(tmp_path)
    torch.testing.assert_close(logits(load(str(tmp_path))), logits(model))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_lower_layers_can_be_frozen_and_the_encoder_too(models: dict[str, str], family: str) -> None:
    task = Task("t", ("bad", "good"))
    torch.testing.assert_close(
        logits(load(models[family], task, freeze=1)), logits(load(models[family], task)), atol=1e-5, rtol=0
    )
    frozen = load(models[family], task, freeze="encoder")
    assert frozen.pooling == "last"
    assert sorted(frozen.trainable_state()) == ["head.1.bias", "head.1.weight"]
    several = Task("t", ("bad film", "bad story"))
    with pytest.raises(ModelError, match="choose words of one token"):
        logits(load(models[family], several, freeze=1))


def test_large_ones_train_adapters_unless_told_otherwise(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not load(models["llama"]).adapted
    monkeypatch.setattr(loading, "LORA_FROM", 1000)
    model = load(models["llama"])
    assert model.adapted
    assert all("lora" in name for name in model.trainable_state())
    assert not load(models["llama"], lora=False).adapted
    assert not load("tiny-bert").adapted  # an encoder is trained whole, as in the papers


def test_adapters_stay_above_frozen_layers(models: dict[str, str]) -> None:
    model = load(models["llama"], freeze=1, lora=LoraConfig(r=2))
    names = list(model.trainable_state())
    assert names
    assert all(".layers.1." in name for name in names)


@pytest.mark.parametrize("prompt", ["Is it good?", "{second}"])
def test_a_prompt_without_the_text_is_refused(prompt: str) -> None:
    with pytest.raises(TaskError, match=r"has no \{text\}; put it in"):
        Task("t", ("a", "b"), prompt=prompt)


def test_bad_settings_are_refused_with_the_cure(models: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="is the beginning of 'good film'"):
        load(models["llama"], Task("t", ("good", "good film")))
    with pytest.raises(ModelError, match=r"raise max_length or shorten task.prompt"):
        load(models["llama"], Task("t", ("a", "b"), prompt="one two three four five six {text}"), length=5)
    with pytest.raises(ModelError, match="answer = 'words' is a choice for decoder-only models"):
        load("tiny-bert", answer="words")
    with pytest.raises(ModelError, match="needs a CUDA device; take quantize out"):
        load(models["llama"], quantize="4bit", lora=LoraConfig())
    with pytest.raises(ValueError, match="add lora"):
        LearnerConfig(quantize="4bit")
    with pytest.raises(ModelError, match='set answer = "head"'):
        load(models["llama"]).check_takes_embeddings()


def test_four_bits_ask_for_bitsandbytes_where_there_is_a_gpu(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed here; the message is for machines without it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with pytest.raises(
        ModelError, match=r"llama: quantize = '4bit' needs bitsandbytes: pip install 'fedstill\[4bit\]'"
    ):
        load(models["llama"], device="auto", quantize="4bit", lora=LoraConfig())


@pytest.mark.shared
def test_a_real_llama_prefers_the_right_word_after_training() -> None:
    folder = SHARED / "weights" / "llama-stories15m"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: it has the real Llama of this test")
    task = Task("t", ("sad", "happy"), prompt="{text} She was very")
    model = load(str(folder), task, length=24)
    found = logits(model, ["Lily lost her toy and cried.", "Lily got a big cake and smiled."])
    assert found[1, 1] - found[1, 0] > found[0, 1] - found[0, 0]
