"""The small trained models: what is shipped, how it loads, and that it knows something."""

import hashlib
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.common.config import ModelConfig
from fedstill.common.data.tasks import TASKS, Task
from fedstill.common.models import builtin
from fedstill.common.models.builtin import BUILTINS, builtin_folder, shipped_folder
from fedstill.common.models.features import text_features
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import TextModel

SMALL = ["small-bert", "small-roberta", "small-xlnet", "small-t5"]
REVIEWS = TASKS["film-reviews"]
ROOT = Path(__file__).resolve().parents[4]
TEXTS = ["A fine film.", "Dull, slow and far too long for the little story that it has to tell.", "", "I liked it !"]
# Each two say the same in other words; two of different rows have nothing to do with each other.
PARAPHRASES = [
    ("The movie was wonderful from start to finish.", "A great film, I loved every minute."),
    ("This picture is boring and a waste of time.", "A dull, tedious film, do not bother."),
    ("The baby slept through the night.", "Our little girl did not wake up until morning."),
    ("Shares fell sharply on Wall Street today.", "The stock market dropped a lot on Monday."),
    ("Two dogs are running on the beach.", "A pair of puppies run along the sand."),
    ("How can I learn to play the guitar?", "What is the best way to study music at home?"),
    ("The president met the prime minister in Moscow.", "Leaders of both governments held talks in Russia."),
    ("My new car needs a better battery.", "The vehicle would not start until I replaced the engine cables."),
]
torch.set_num_threads(1)


def load(name: str, seed: int = 1, task: Task = REVIEWS, keep_head: bool = False) -> TextModel:
    settings = ModelConfig(name=name, max_length=32, device="cpu", precision="float32", keep_head=keep_head)
    return load_model(settings, task, seed).eval()


def logits(model: TextModel, texts: list[str] = TEXTS) -> Tensor:
    with torch.no_grad():
        return model(model.encode(texts).batch(range(len(texts))))


def random_twin(name: str, folder: Path) -> TextModel:
    """The same configuration and tokenizer, weights drawn from a seed."""
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    config = AutoConfig.from_pretrained(shipped_folder(name))
    torch.manual_seed(3)
    (AutoModelForSeq2SeqLM if name == "small-t5" else AutoModel).from_config(config).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped_folder(name)).save_pretrained(folder)
    return load(str(folder))


def hits(model: TextModel) -> int:
    """How many of the texts have their paraphrase as the nearest of all others."""
    found = text_features(model, [text for pair in PARAPHRASES for text in pair])
    found = found - found.mean(axis=0)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    alike = found @ found.T - 2 * np.eye(len(found))
    return int((alike.argmax(axis=1) == np.arange(len(found)) ^ 1).sum())


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_loads_in_single_precision_with_the_stated_size(name: str) -> None:
    model = load(name)
    assert model.family == BUILTINS[name].family == name.removeprefix("small-")
    assert BUILTINS[name].pretrained
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert sum(value.numel() for value in model.net.base_model.parameters()) == BUILTINS[name].parameters
    assert bool(torch.isfinite(logits(model)).all())


@pytest.mark.parametrize("name", SMALL)
def test_what_is_loaded_is_what_is_shipped(name: str) -> None:
    from safetensors.torch import load_file

    shipped = load_file(shipped_folder(name) / "model.safetensors")
    assert {value.dtype for value in shipped.values()} == {torch.float16}
    net = load(name).net
    body = net.state_dict() if name == "small-t5" else net.base_model.state_dict()
    for key, value in shipped.items():
        assert torch.equal(body[key], value.float()), key


def test_the_weights_are_small_and_the_cards_name_their_hashes() -> None:
    sizes = []
    for name in SMALL:
        weights = shipped_folder(name) / "model.safetensors"
        sizes.append(weights.stat().st_size)
        assert hashlib.sha256(weights.read_bytes()).hexdigest() in (shipped_folder(name) / "README.md").read_text()
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} < {
            path.name for path in shipped_folder(name).iterdir()
        }
    assert max(sizes) < 12e6
    assert sum(sizes) < 25e6


def test_the_wheel_carries_the_weights_and_a_flower_bundle_does_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert project["setuptools"]["package-data"]["fedstill.common.models"] == ["weights/**"]
    for pattern in project["flwr"]["app"]["fab-include"]:
        assert not any("weights" in path.parts for path in ROOT.glob(pattern))


def test_without_weights_beside_the_code_those_of_the_installed_package_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = shipped_folder("small-bert")
    elsewhere = tmp_path / "builtin.py"
    monkeypatch.setattr(builtin, "_package_folders", lambda: iter([elsewhere.parent, there.parents[1]]))
    assert builtin_folder("small-bert") == (there, {})
    monkeypatch.setattr(builtin, "_package_folders", lambda: iter([elsewhere.parent]))
    with pytest.raises(FileNotFoundError, match="install the package fedstill"):
        builtin_folder("small-bert")


@pytest.mark.parametrize("name", SMALL)
def test_a_trained_one_says_the_same_after_saving_and_loading(name: str, tmp_path: Path) -> None:
    model = load(name).train()
    batch, labels = model.encode(TEXTS).batch(range(4)), torch.tensor([1, 0, 0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = logits(model.eval())
    for _ in range(3):  # a tied output layer must stay tied and come back with what it learned
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    model.eval().save(tmp_path)
    assert not torch.allclose(before, logits(model))
    torch.testing.assert_close(logits(load(str(tmp_path), seed=9, keep_head=True)), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("name", SMALL)
def test_paraphrases_lie_nearer_to_each_other_than_in_a_random_twin(name: str, tmp_path: Path) -> None:
    known = hits(load(name))
    assert known >= 12  # of 16
    assert known > hits(random_twin(name, tmp_path))


@pytest.mark.parametrize("name", SMALL)
def test_capital_letters_make_no_difference(name: str) -> None:
    model = load(name)
    assert torch.equal(logits(model, ["A GREAT Film"]), logits(model, ["a great film"]))


@pytest.mark.parametrize("name", SMALL)
def test_the_longest_text_that_the_configuration_allows_is_read(name: str) -> None:
    model = load_model(ModelConfig(name=name, max_length=256, device="cpu", precision="float32"), REVIEWS, 1).eval()
    long = "word " * 400
    assert model.encode([long]).lengths().tolist() == [256]
    assert bool(torch.isfinite(logits(model, [long])).all())


def test_the_decoder_of_t5_writes_the_word_that_belongs_to_the_text() -> None:
    words = ("film", "baby", "government", "guitar")
    model = load("small-t5", task=Task("subjects", words))
    assert all(len(model.tokenizer(word).input_ids) == 2 for word in words)  # one piece and the end
    texts = [
        "the actors in this film are wonderful",
        "this is perfect for our baby and easy to wash",
        "the government said on friday that it will raise taxes",
        "he plays the guitar on stage",
    ]
    assert logits(model, texts).argmax(dim=1).tolist() == [0, 1, 2, 3]


def test_common_label_words_are_whole_pieces_of_t5() -> None:
    tokenizer = load("small-t5").tokenizer
    for task in TASKS.values():
        for word in task.label_words:
            if word.isalpha():
                assert len(tokenizer(word).input_ids) <= 3, word
    for word in ("negative", "positive", "neutral", "entailment", "contradiction", "yes", "no", "sports", "joy"):
        assert len(tokenizer(word).input_ids) == 2, word
