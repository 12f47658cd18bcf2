"""Frozen layers: cached and uncached predictions are the same, only what is trained travels, and a bad cache heals."""

import errno
import logging
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstill.common.config import LearnerConfig, LoraConfig, ModelConfig, TrainConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.models import feature_cache
from fedstill.common.models.feature_cache import FeatureCache
from fedstill.common.models.frozen import CachedTexts, CachedTokens, FrozenEncoder
from fedstill.common.models.learner import Learner
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import ModelError, TextModel
from fedstill.common.models.tokens import Encoded
from fedstill.common.practice import Practice

TEXTS = ["A fine film.", "Dull, slow and far too long for the little story that it has to tell.", "", "I liked it !"]
REVIEWS = TASKS["film-reviews"]
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(feature_cache, "cache_folder", lambda: tmp_path)
    return tmp_path / "features"


def load(name: str, **settings: object) -> TextModel:
    config = ModelConfig.model_validate({"name": name, "max_length": 24, "device": "cpu", **settings})
    return load_model(config, REVIEWS, seed=1).eval()


def logits(model: TextModel, texts: list[str] = TEXTS) -> torch.Tensor:
    with torch.no_grad():
        return model(model.encode(texts).batch(range(len(texts))))


def test_the_whole_model_and_the_one_with_cached_lower_layers_say_the_same() -> None:
    for name in ("small-bert", "small-roberta", "small-xlnet", "small-t5"):
        whole, frozen = load(name), load(name, freeze=2)
        assert isinstance(frozen.encode(TEXTS), CachedTokens)
        torch.testing.assert_close(logits(frozen), logits(whole), atol=1e-5, rtol=1e-5)
        again = load(name, freeze=2)  # all from the cache: its frozen layers never run
        again.lower._last_output = None
        torch.testing.assert_close(logits(again), logits(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["small-bert", "small-roberta", "small-xlnet", "small-t5"])
@pytest.mark.parametrize("settings", [{"freeze": "encoder", "head": "mlp"}, {"freeze": 1}])
def test_predictions_with_and_without_the_cache_are_the_same(name: str, settings: dict[str, object]) -> None:
    cached, uncached = load(name, **settings), load(name, **settings, cache_mb=0)
    assert isinstance(cached.encode(TEXTS), CachedTexts)
    assert type(uncached.encode(TEXTS)) is Encoded
    torch.testing.assert_close(logits(cached), logits(uncached), atol=1e-5, rtol=0)


def test_pooling_reads_the_mean_or_one_token() -> None:
    from transformers import AutoModel

    for name in ("small-bert", "small-xlnet"):  # padded on the right, and on the left
        model = load(name, freeze="encoder", pooling="mean")
        assert isinstance(model, FrozenEncoder)
        tokens = model.tokenize(TEXTS)
        plain = AutoModel.from_pretrained(model.net.config._name_or_path, dtype=torch.float32).eval()
        for row, text in enumerate(TEXTS):
            if not text:
                continue
            alone = model.tokenizer(text, truncation=True, max_length=24, return_tensors="pt")
            with torch.no_grad():
                states = plain(**alone).last_hidden_state[0]
            wanted = {"mean": states.mean(dim=0), "first": states[0], "last": states[-1]}
            for pooling, vector in wanted.items():
                model.pooling = pooling
                found = model.pooled(tokens.batch(range(len(TEXTS))))[row]
                torch.testing.assert_close(found, vector, atol=2e-5, rtol=1e-4)


def test_only_what_is_trained_changes_and_travels() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    for name in ("small-bert", "small-roberta", "small-xlnet", "small-t5"):
        for settings in ({"freeze": "encoder"}, {"freeze": 2}, {"freeze": 2, "lora": LoraConfig(r=2)}):
            model = load(name, **settings)
            learner = Learner("north", model, LearnerConfig(learning_rate=1e-2), TrainConfig(), 1)
            frozen, before = learner.frozen_sum(), learner.weights()
            texts = model.encode(TEXTS)
            learner.fit(texts, np.arange(4), lambda z, i: cross_entropy(z, labels[i]), 2, "local", Practice())
            assert learner.frozen_sum() == frozen
            after = learner.weights()
            assert any(not np.array_equal(before[key], after[key]) for key in before)
            assert sum(value.size for value in after.values()) == sum(p.numel() for p in learner.parameters)
            below = [key for key in after if ".layer.0." in key or ".layer.1." in key or ".block.1.layer" in key]
            if name != "small-t5":  # T5's decoder has blocks of its own
                assert not below
            if settings == {"freeze": "encoder"}:
                assert sorted(after) == ["head.1.bias", "head.1.weight"]


def test_the_layers_above_get_the_gradient_that_they_have_in_the_whole_model() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    for name in ("small-bert", "small-xlnet", "small-t5"):
        gradients = []
        for model in (load(name), load(name, freeze=2)):
            cross_entropy(model(model.encode(TEXTS).batch(range(4))), labels).backward()
            gradients.append({key: p.grad for key, p in model.net.named_parameters() if p.requires_grad})
        for key, gradient in gradients[1].items():
            if gradient is not None:
                torch.testing.assert_close(gradient, gradients[0][key], atol=1e-5, rtol=1e-4)


def test_a_saved_head_comes_back_with_its_encoder(tmp_path: Path) -> None:
    for name in ("small-bert", "small-t5"):
        model, folder = load(name, freeze="encoder", head="mlp", pooling="first"), tmp_path / name
        model.save(folder)
        again = load(str(folder), keep_head=True)
        assert isinstance(again, FrozenEncoder)
        assert (again.kind, again.pooling) == ("mlp", "first")
        torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=0)


def test_sites_of_one_process_share_a_frozen_encoder_but_not_their_heads() -> None:
    one, two = load("small-bert", freeze="encoder"), load("small-bert", freeze="encoder")
    assert one.net is two.net
    assert one.head is not two.head


def test_methods_that_need_embeddings_or_layers_refuse_with_the_reason() -> None:
    for settings in ({"freeze": "encoder"}, {"freeze": 1}):
        with pytest.raises(ModelError, match="take freeze out"):
            load("small-bert", **settings).check_takes_embeddings()
    model = load("small-bert", freeze="encoder")
    with pytest.raises(ModelError, match="freeze a number of layers"):
        model.with_states(model.encode(TEXTS).batch([0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": "encoder", "lora": LoraConfig()}, "leaves no layer for LoRA"),
        ({"head": "mlp"}, 'head belongs to freeze = "encoder"'),
        ({"pooling": "first", "freeze": 2}, 'pooling belongs to freeze = "encoder"'),
        ({"freeze": 0}, "greater than or equal to 1"),
        ({"freeze": "encoder", "answer": "words"}, "take answer out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig.model_validate(settings)


def test_more_layers_than_there_are_cannot_be_frozen() -> None:
    with pytest.raises(ModelError, match="the model has 3 layers; freeze 1 to 3"):
        load("small-bert", freeze=4)


# --- the cache ---


def rows_of(cache: FeatureCache, texts: list[bytes]) -> tuple[np.ndarray | None, list[int]]:
    """The cache's rows of texts that have as many rows as letters, and which had to be computed."""
    asked: list[int] = []

    def compute(numbers):  # type: ignore[no-untyped-def]
        asked.extend(numbers)
        return np.concatenate([np.full((len(texts[n].strip()), 2), texts[n][0], np.float32) for n in numbers])

    return cache.rows(texts, np.array([len(text.strip()) for text in texts]), compute), asked


def names(*texts: str) -> list[bytes]:
    return [text.encode().ljust(8) for text in texts]


def test_each_text_is_computed_once_whatever_the_order(own_cache: Path) -> None:
    cache = FeatureCache("k" * 64, 2, 1 << 20)
    first, asked = rows_of(cache, names("a", "bb", "a"))
    assert asked == [0, 1]
    assert first[:, 0].tolist() == [97, 98, 98, 97]
    second, asked = rows_of(FeatureCache("k" * 64, 2, 1 << 20), names("ccc", "bb"))
    assert asked == [0]
    assert second[:, 0].tolist() == [99, 99, 99, 98, 98]
    third, asked = rows_of(cache, names("ccc"))
    assert asked == []
    assert isinstance(third, np.memmap)


def test_other_weights_another_length_and_another_pooling_have_a_cache_of_their_own() -> None:
    keys = set()
    for name, settings in [
        ("small-bert", {}),
        ("small-roberta", {}),
        ("small-bert", {"pooling": "first"}),
    ]:
        keys.add(load(name, freeze="encoder", **settings)._part.cache.key)
    changed = load("small-bert", freeze="encoder")
    with torch.no_grad():
        next(changed.net.parameters()).add_(1e-3)
    feature_cache_key = FrozenEncoder(changed.net, changed.tokenizer, REVIEWS, 24, changed.device, False)._part
    from fedstill.common.models import frozen

    frozen._sums.clear()
    keys.add(feature_cache_key.cache.key)
    assert len(keys) == 4
    frozen._sums.clear()
    with torch.no_grad():
        next(changed.net.parameters()).sub_(1e-3)
    long = "one two three four five six seven"
    short, whole = load("small-bert", freeze="encoder", max_length=5), load("small-bert", freeze="encoder")
    assert short.tokenize([long]).hashes() != whole.tokenize([long]).hashes()


@pytest.mark.parametrize("damage", ["flip", "cut", "other weights", "gone"])
def test_a_damaged_segment_is_thrown_away_and_computed_again(
    own_cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of(FeatureCache("k" * 64, 2, 1 << 20), names("a", "bb"))
    (segment,) = own_cache.glob("*/segment-*")
    feature_cache._opened.clear()  # as another process would
    file = segment / feature_cache.ROWS
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "other weights":
        about = segment / "about.json"
        about.write_text(about.read_text().replace("k" * 64, "j" * 64))
    else:
        (segment / "about.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        found, asked = rows_of(FeatureCache("k" * 64, 2, 1 << 20), names("a", "bb"))
    assert asked == [0, 1]
    assert found[:, 0].tolist() == [97, 98, 98]
    assert "is damaged" in caplog.text
    assert len(list(own_cache.glob("*/segment-*"))) == 1


def test_a_full_disk_keeps_features_in_memory(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    found, _ = rows_of(FeatureCache("k" * 64, 2, 1 << 20), names("a", "bb"))
    assert found[:, 0].tolist() == [97, 98, 98]
    assert "No space left on device" in caplog.text
    assert "FEDSTILL_CACHE" in caplog.text
    assert not list(own_cache.glob("*/.draft-*"))


def test_the_oldest_segments_go_when_the_cache_outgrows_its_limit(own_cache: Path) -> None:
    import os

    for age, letter in ((300, "a"), (200, "b"), (100, "c")):
        rows_of(FeatureCache(letter * 64, 2, 1 << 20), names(letter * 7))
        (segment,) = (own_cache / (letter * 32)).glob("segment-*")
        size = sum(file.stat().st_size for file in segment.iterdir())
        os.utime(segment, (1e9 - age, 1e9 - age))
    rows_of(FeatureCache("d" * 64, 2, 3 * size), names("d" * 7))
    left = sorted(folder.parent.name[0] for folder in own_cache.glob("*/segment-*"))
    assert left == ["b", "c", "d"]


def test_what_is_larger_than_the_limit_is_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    found, asked = rows_of(FeatureCache("k" * 64, 2, 10), names("a", "bb"))
    assert found is None
    assert asked == []
    assert "raise cache_mb" in caplog.text


def test_drafts_of_a_killed_process_are_swept(own_cache: Path) -> None:
    draft = own_cache / ("k" * 32) / ".draft-x"
    draft.mkdir(parents=True)
    rows_of(FeatureCache("k" * 64, 2, 1 << 20), names("a"))
    assert not draft.exists()


def _count(root: str, queue: "multiprocessing.Queue[int]") -> None:
    cache = FeatureCache("k" * 64, 2, 1 << 20, Path(root))
    queue.put(len(rows_of(cache, names(*(chr(97 + i) for i in range(20))))[1]))


def test_processes_that_start_together_compute_each_text_once(own_cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_count, args=(str(own_cache), queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    counts = sorted(queue.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert counts == [0, 0, 0, 20]
    shutil.rmtree(own_cache)
