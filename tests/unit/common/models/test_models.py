"""Models of four families behind one interface: label scoring, padding, LoRA, saving, and every refusal."""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import processors
from torch import Tensor

from fedstill.common.config import LoraConfig, ModelConfig
from fedstill.common.data.tasks import TASKS, Task
from fedstill.common.models import builtin
from fedstill.common.models.builtin import builtin_models
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import ModelError, TextModel, pick_device

FAMILIES = ["tiny-bert", "tiny-roberta", "tiny-xlnet", "tiny-t5"]
TEXTS = ["A fine film.", "Dull, slow and far too long for the little story that it has to tell.", "", "I liked it !"]
REVIEWS = TASKS["film-reviews"]
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Built-in models of these tests are made afresh, in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def load(
    name: str,
    seed: int = 1,
    task: Task = REVIEWS,
    lora: LoraConfig | None = None,
    length: int = 32,
    keep_head: bool = False,
) -> TextModel:
    settings = ModelConfig(name=name, max_length=length, lora=lora, keep_head=keep_head, device="cpu")
    return load_model(settings, task, seed).eval()


def logits(model: TextModel, texts: list[str] | list[tuple[str, str]] = TEXTS) -> Tensor:
    with torch.no_grad():
        return model(model.encode(texts).batch(range(len(texts))))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_item_does_not_feel_its_batch_mates_and_empty_text_is_a_valid_row(name: str) -> None:
    model = load(name)
    assert model.family == name.removeprefix("tiny-")
    together = logits(model)
    assert together.shape == (4, 2)
    assert together.dtype == torch.float32
    assert bool(torch.isfinite(together).all())
    alone = torch.cat([logits(model, [text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_folder_loads_with_plain_transformers_and_says_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, T5ForConditionalGeneration

    model = load(name)
    model.save(tmp_path)
    kind = T5ForConditionalGeneration if model.family == "t5" else AutoModelForSequenceClassification
    plain = kind.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert plain.config.id2label == {0: "negative", 1: "positive"}
    assert plain.config.label2id == {"negative": 0, "positive": 1}
    rows = tokenizer(TEXTS, padding=True, truncation=True, max_length=32, return_tensors="pt")
    batch = model.encode(TEXTS).batch(range(4))
    assert torch.equal(rows["input_ids"], batch["input_ids"])
    assert torch.equal(rows["attention_mask"], batch["attention_mask"])
    if model.family != "t5":
        with torch.no_grad():
            torch.testing.assert_close(plain(**rows).logits, logits(model))
    torch.testing.assert_close(logits(load(str(tmp_path), seed=9, keep_head=True)), logits(model))


def test_t5_scores_a_label_by_the_probability_of_writing_it() -> None:
    task = Task("t", ("no", "yes", "who knows"), label_words=("dreadful", "good", "neither good nor bad"))
    model = load("tiny-t5", task=task)
    expected = torch.zeros(len(TEXTS), 3)
    for row, text in enumerate(TEXTS):
        inputs = model.tokenizer(text, return_tensors="pt", truncation=True, max_length=32)
        for column, word in enumerate(task.label_words):
            labels = model.tokenizer(word, return_tensors="pt").input_ids
            with torch.no_grad():  # the loss is the mean over tokens, the end of sequence among them
                expected[row, column] = -model.net(**inputs, labels=labels).loss * labels.shape[1]
    expected -= expected.mean(dim=-1, keepdim=True)  # only differences count, and they are to be of the size of logits
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_cross_entropy_on_the_logits_teaches_every_family(name: str) -> None:
    model = load(name).train()
    texts = ["good"] * 4 + ["bad"] * 4
    batch, labels = model.encode(texts).batch(range(8)), torch.tensor([1] * 4 + [0] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    for _ in range(15):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    assert logits(model.eval(), texts).argmax(dim=1).tolist() == labels.tolist()


def test_pairs_reach_the_model_as_two_segments() -> None:
    model = load("tiny-bert")
    batch = model.encode([("one", "two"), ("one", "two three")]).batch([0, 1])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert not torch.equal(logits(model, [("good", "bad")]), logits(model, [("bad", "good")]))
    with pytest.raises(ValueError, match="single texts and pairs are mixed"):
        model.encode(["one", ("one", "two")])


def test_xlnet_is_padded_on_the_left_and_has_segments() -> None:
    batch = load("tiny-xlnet").encode(["good", "good good good"]).batch([0, 1])
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 2], [0, 0, 0, 0, 2]]


def test_encoded_rows_come_in_the_order_asked_and_are_cut() -> None:
    model = load("tiny-roberta", length=8)
    encoded = model.encode(TEXTS)
    assert encoded.columns["input_ids"].dtype == np.int32
    assert encoded.lengths().max() == 8
    assert torch.equal(encoded.batch([3, 0])["input_ids"], encoded.batch([0, 3])["input_ids"].flip(0))


def test_a_tokenizer_that_gives_nothing_still_gives_a_row() -> None:
    model = load("tiny-t5")
    model.tokenizer = copy.deepcopy(model.tokenizer)  # other models of this process share it
    model.tokenizer.backend_tokenizer.post_processor = processors.Sequence([])  # no end of sequence
    batch = model.encode(["", "good"]).batch([0, 1])
    assert batch["attention_mask"].sum(dim=1).tolist() == [1, 1]
    assert bool(torch.isfinite(model(batch)).all())


def test_the_seed_draws_the_head_and_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = load("tiny-bert", 1), load("tiny-bert", 1), load("tiny-bert", 2)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_moves_from_one_model_to_another(name: str) -> None:
    source, target = load(name, 1), load(name, 2)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.01)
    target.load_trainable_state(source.trainable_state())
    assert torch.equal(logits(source), logits(target))
    assert sum(tensor.numel() for tensor in source.trainable_state().values()) == sum(
        parameter.numel() for parameter in source.parameters()
    )


def test_a_state_of_other_names_or_shapes_is_refused() -> None:
    model = load("tiny-bert")
    state = model.trainable_state()
    state["classifier.bias"] = torch.zeros(3)
    state["extra"] = state.pop("classifier.weight")
    with pytest.raises(ModelError) as caught:
        model.load_trainable_state(state)
    for part in ("classifier.weight is missing", "extra is not part", "classifier.bias has shape (3,) instead of (2,)"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_lora_trains_adapters_and_head_only_and_saves_merged(name: str, tmp_path: Path) -> None:
    model = load(name, lora=LoraConfig(r=4))
    state = model.trainable_state()
    heads = {"bert": "classifier", "roberta": "classifier", "xlnet": "logits_proj"}
    names = ["lora_"] + ([heads[model.family]] if model.family in heads else [])
    assert all(any(part in key for part in [*names, "sequence_summary"]) for key in state)
    assert all(any(part in key for key in state) for part in names)
    assert {key for key, value in model.net.named_parameters() if value.requires_grad} == set(state)
    assert sum(tensor.numel() for tensor in state.values()) < 0.1 * sum(p.numel() for p in model.parameters())
    model.load_trainable_state({key: tensor + 0.05 for key, tensor in state.items()})
    assert not torch.allclose(logits(model), logits(load(name)))
    model.save(tmp_path)
    torch.testing.assert_close(logits(load(str(tmp_path), keep_head=True)), logits(model), atol=1e-4, rtol=1e-3)


def test_lora_targets_that_fit_nothing_are_refused_with_the_layers_there_are() -> None:
    with pytest.raises(ModelError, match=r"lora.targets = \['qkv'\] fits no layer; linear layers: .*'query'"):
        load("tiny-bert", lora=LoraConfig(targets=["qkv"]))


def test_builtin_models_are_listed_with_their_true_sizes() -> None:
    listed = {model.name: model for model in builtin_models()}
    assert set(FAMILIES) < set(listed)
    for name, entry in listed.items():
        model = load(name)
        assert model.family == entry.family
        assert sum(parameter.numel() for parameter in model.net.base_model.parameters()) == entry.parameters


def test_minilm_keeps_its_first_layers_with_their_real_weights() -> None:
    from safetensors.torch import load_file

    model = load("minilm-2")
    assert model.net.config.num_hidden_layers == 2
    source = load_file(builtin.minilm_folder() / "model.safetensors")
    key = "encoder.layer.1.output.dense.weight"
    assert torch.equal(model.net.state_dict()[f"bert.{key}"], source.get(key, source.get(f"bert.{key}")))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_builtin_made_twice_is_the_same_to_the_last_byte(name: str, tmp_path: Path) -> None:
    first, _ = builtin.builtin_folder(name)
    builtin._make(builtin.BUILTINS[name], tmp_path)
    for file in ("model.safetensors", "tokenizer.json"):
        assert (first / file).read_bytes() == (tmp_path / file).read_bytes()


def test_whoever_comes_second_uses_what_the_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    make = builtin._make

    def slow(which: builtin.Builtin, folder: Path) -> None:
        make(which, folder)
        make(which, (tmp_path / f"{which.name}-{builtin.VERSION}"))  # the other process ends first

    monkeypatch.setattr(builtin, "_make", slow)
    folder, _ = builtin.builtin_folder("tiny-bert")
    assert (folder / "fedstill.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_folder_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone: is not there; check the path"):
        load(str(tmp_path / "gone"))
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(str(folder))
    load("tiny-bert").save(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model\.safetensors in it; other formats can run code"):
        load(str(folder))
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load(str(folder))


def test_a_folder_with_other_weights_labels_or_sizes_is_refused(tmp_path: Path) -> None:
    load("tiny-bert").save(tmp_path)
    swapped = Task("t", ("positive", "negative"))
    with pytest.raises(ModelError, match=r"orders its labels \['negative', 'positive'\].*change task.labels"):
        load(str(tmp_path), task=swapped)
    assert logits(load(str(tmp_path), task=Task("t", ("a", "b", "c")))).shape == (4, 3)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="16 weights are absent or of another size"):
        load(str(tmp_path))


def test_lengths_beyond_the_model_are_refused() -> None:
    with pytest.raises(ModelError, match="at most 512 tokens; set max_length"):
        load("tiny-roberta", length=513)


def test_unknown_names_fail_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ModelError, match="the hub cannot be reached and this name is not in the local cache"):
        load("nobody/nothing")
    assert time.monotonic() - start < 20
    with pytest.raises(ModelError, match="did you mean 'tiny-roberta'"):
        load("tiny-robert")


def test_label_words_must_differ_for_the_tokenizer() -> None:
    with pytest.raises(ModelError, match="cannot tell the label words"):
        load("tiny-t5", task=Task("t", ("a", "b"), label_words=("good", "good ")))


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(ModelError, match="'gpu' is not known"):
        pick_device("gpu")
    if torch.cuda.device_count() < 9:
        with pytest.raises(ModelError, match="'cuda:8' is not there: this machine has"):
            pick_device("cuda:8")


def test_bfloat16_answers_in_float32_and_close() -> None:
    config = ModelConfig(name="tiny-bert", max_length=32, precision="bfloat16", device="cpu")
    model = load_model(config, REVIEWS, 1).eval()
    assert logits(model).dtype == torch.float32
    torch.testing.assert_close(logits(model), logits(load("tiny-bert")), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-roberta", "tiny-xlnet"])
def test_a_checkpoints_own_head_is_taken_over_only_when_asked(tmp_path: Path, name: str) -> None:
    task = TASKS["film-reviews"]
    first = load_model(ModelConfig(name=name), task, seed=1)
    first.save(tmp_path)
    head = {n: p for n, p in first.net.named_parameters() if not n.startswith(first.net.base_model_prefix)}
    assert head
    for seed, keep in ((2, True), (2, False), (3, False)):
        again = load_model(ModelConfig(name=str(tmp_path), keep_head=keep), task, seed=seed)
        mine = dict(again.net.named_parameters())
        matrices = [n for n, p in head.items() if p.dim() > 1]
        assert all(torch.equal(mine[n], head[n]) == keep for n in matrices), (seed, keep)
        body = [n for n in mine if n not in head]
        assert all(torch.equal(mine[n], dict(first.net.named_parameters())[n]) for n in body)
    two, three = (load_model(ModelConfig(name=str(tmp_path)), task, seed=seed) for seed in (2, 3))
    assert not any(
        torch.equal(dict(two.net.named_parameters())[n], dict(three.net.named_parameters())[n]) for n in matrices
    )
