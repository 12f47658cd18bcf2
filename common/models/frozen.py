"""Frozen layers: they run once a text, and what is trained reads their cached output.

`freeze = "encoder"`: the whole encoder; a head is trained on each text's pooled vector (`FrozenEncoder`).
`freeze = 4`: embeddings and the lower four layers; the rest is trained on each token's vector (`LowerLayers`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedstill.common.data.splits import Text
from fedstill.common.data.tasks import Task
from fedstill.common.models.builtin import quiet
from fedstill.common.models.feature_cache import FeatureCache, Floats
from fedstill.common.models.spread import layer_list
from fedstill.common.models.text_model import NO_EMBEDDINGS, ModelError, TextModel
from fedstill.common.models.tokens import Encoded, onto

BATCH = 32  # texts that run through frozen layers together
HEAD, HEAD_WEIGHTS = "head.json", "head.safetensors"  # beside a saved encoder
UNREAD = ("id2label", "label2id", "_name_or_path", "transformers_version", "dtype", "architectures", "problem_type")

Pooling = Literal["mean", "first", "last"]
HeadKind = Literal["linear", "mlp"]


@dataclass(frozen=True)
class CachedTexts(Encoded):
    """Texts with one vector each."""

    rows: Floats

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the rows' vectors."""
        return {"features": torch.from_numpy(np.array(self.rows[np.asarray(rows, np.int64)]))}

    def followed_by(self, second: Encoded) -> Self:
        """Concatenate two sets of the same model."""
        assert isinstance(second, CachedTexts)
        tokens = Encoded.followed_by(self, second)
        return replace(self, **_tokens(tokens), rows=np.concatenate([self.rows, second.rows]))


@dataclass(frozen=True)
class CachedTokens(CachedTexts):
    """Texts with one vector for each token: the output of the last frozen layer."""

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the rows' tokens as ever, and their vectors as `states`, padded with zeros."""
        mask, place = self.places(np.asarray(rows, np.int64))
        states = np.zeros((*mask.shape, self.rows.shape[1]), np.float32)
        states[mask] = self.rows[place]
        return {**Encoded.batch(self, rows), "states": torch.from_numpy(states)}


def _tokens(encoded: Encoded) -> dict[str, Any]:
    return {field.name: getattr(encoded, field.name) for field in fields(Encoded)}


class FrozenPart:
    """What both kinds share: a name for the frozen weights, and the cache of their output."""

    def __init__(self, model: nn.Module, settings: Any, what: str, width: int, cache_mb: int) -> None:
        self.model, self.settings, self.what, self.width, self.cache_mb = model, settings, what, width, cache_mb

    @cached_property
    def cache(self) -> FeatureCache:
        """The cache of just these weights, this configuration and this way of reading them."""
        told = {key: value for key, value in self.settings.to_dict().items() if key not in UNREAD}
        about = json.dumps([self.what, told], sort_keys=True, default=str)
        key = hashlib.sha256(f"{about}/{_weights_sum(self.model)}".encode()).hexdigest()
        return FeatureCache(key, self.width, self.cache_mb << 20)

    def rows(
        self, tokens: Encoded, counts: NDArray[np.int64], run: Callable[[dict[str, Tensor]], Sequence[Floats]]
    ) -> Floats | None:
        """The output for every text, from the cache or from `run`, which takes a batch and returns a part a text."""

        def compute(texts: Sequence[int]) -> Floats:
            order = np.asarray(texts, np.int64)[np.argsort(tokens.lengths()[list(texts)], kind="stable")]
            parts: dict[int, Floats] = {}
            for start in range(0, len(order), BATCH):
                numbers = order[start : start + BATCH]
                parts |= dict(zip(numbers.tolist(), run(tokens.batch(numbers)), strict=True))
            return np.concatenate([np.empty((0, self.width), np.float32), *(parts[number] for number in texts)])

        if not self.cache_mb:
            return None
        return self.cache.rows(tokens.hashes(), counts, compute)


ENCODED = 64  # sets of texts that a process remembers: sites with the same encoder read the same public texts
_encoded: dict[tuple[Any, ...], CachedTexts] = {}
_sums: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # sites of one process share a frozen encoder


def _weights_sum(model: nn.Module) -> str:
    if model not in _sums:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        _sums[model] = digest.hexdigest()
    return _sums[model]


class FrozenEncoder(TextModel):
    """An encoder that is never trained, and a head on its pooled output."""

    def __init__(
        self,
        net: Any,
        tokenizer: Any,
        task: Task,
        max_length: int,
        device: torch.device,
        bf16: bool,
        head: HeadKind = "linear",
        pooling: Pooling = "mean",
        cache_mb: int = 0,
    ) -> None:
        super().__init__(net.requires_grad_(False).eval(), tokenizer, task, max_length, device, bf16)
        self.writes, self.kind, self.pooling = False, head, pooling
        width = net.config.hidden_size
        self.head = make_head(head, width, len(task.labels)).to(device, self.dtype)
        what = f"{pooling} of {self.dtype}{' in bfloat16' if bf16 else ''}"
        self._part = FrozenPart(net, net.config, what, width, cache_mb)

    def encode(self, texts: Sequence[Text]) -> Encoded:
        """Tokenize the texts and run the encoder once on each that the cache does not have."""
        place = (self._part.cache.key, self.max_length, self.tokenizer.truncation_side, tuple(texts))
        if place not in _encoded or not self._part.cache_mb:
            tokens = super().encode(texts)
            rows = self._part.rows(
                tokens, np.ones(len(tokens), np.int64), lambda batch: list(self.pooled(batch).cpu().numpy()[:, None])
            )
            if rows is None:
                return tokens
            while len(_encoded) >= ENCODED:
                _encoded.pop(next(iter(_encoded)))
            _encoded[place] = CachedTexts(**_tokens(tokens), rows=rows)
        return _encoded[place]

    def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the encoder: one vector a text."""
        inputs = onto(batch, self.device)
        with torch.no_grad(), self.at_precision():
            states, mask = self.net(**inputs).last_hidden_state, inputs["attention_mask"]
        if self.pooling == "mean":
            weights = mask.unsqueeze(-1).to(states)
            pooled: Tensor = (states * weights).sum(dim=1) / weights.sum(dim=1)
        else:
            column = mask.argmax(dim=1) if self.pooling == "first" else mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
            pooled = states[torch.arange(len(states), device=states.device), column]
        return pooled.float() if pooled.dtype == torch.bfloat16 else pooled

    def vectors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the pooled vectors."""
        return onto(batch, self.device)["features"].to(self.dtype) if "features" in batch else self.pooled(batch)

    def score(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the head's logits."""
        logits: Tensor = self.head(self.vectors(inputs))
        return logits

    def train(self, mode: bool = True) -> Self:
        """Set the head's mode; the encoder stays as it is in prediction."""
        self.training = mode
        self.head.train(mode)
        return self

    def with_states(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Refuse: the layers' outputs are not there."""
        raise ModelError(
            'this method reads the hidden layers, and freeze = "encoder" keeps only one vector a text; '
            "freeze a number of layers, or take freeze out"
        )

    def check_takes_embeddings(self) -> None:
        """Refuse: cached vectors are those of real texts."""
        raise ModelError(NO_EMBEDDINGS)

    @property
    def partial(self) -> bool:
        """Only the head is trained and travels."""
        return True

    def frozen_state(self) -> dict[str, Tensor]:
        """Return the encoder, which must be the same on both sides where heads are averaged."""
        return {name: value.detach().cpu() for name, value in self.net.named_parameters()}

    def _travelling(self) -> dict[str, Tensor]:
        return {f"head.{name}": value for name, value in self.head.named_parameters()}

    def save(self, folder: Path) -> None:
        """Save encoder and tokenizer as plain transformers folders, and the head beside them."""
        with quiet():
            self.net.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        save_file({name: value.detach().cpu() for name, value in self._travelling().items()}, folder / HEAD_WEIGHTS)
        (folder / HEAD).write_text(json.dumps({"head": self.kind, "pooling": self.pooling}))

    def load_head(self, folder: Path) -> None:
        """Load the head that `save` wrote."""
        self.load_trainable_state(load_file(folder / HEAD_WEIGHTS))


def make_head(kind: HeadKind, width: int, classes: int) -> nn.Sequential:
    """Return a new head. The norm has no weights: it brings vectors of every family to one scale."""
    norm = nn.LayerNorm(width, elementwise_affine=False)
    if kind == "linear":
        return nn.Sequential(norm, nn.Linear(width, classes))
    return nn.Sequential(norm, nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, classes))


class LowerLayers:
    """Embeddings and lower layers of a model that are frozen; the others read their cached output."""

    def __init__(self, net: Any, count: int, dtype: torch.dtype, cache_mb: int) -> None:
        base = net.get_base_model() if hasattr(net, "peft_config") else net
        self.encoder = base.get_encoder() if base.config.is_encoder_decoder else base.base_model
        self.owner, self.attribute = layer_list(self.encoder, "freeze")
        layers: nn.ModuleList = getattr(self.owner, self.attribute)
        if not 1 <= count <= len(layers):
            raise ModelError(f"freeze = {count}: the model has {len(layers)} layers; freeze 1 to {len(layers)} of them")
        self.below = nn.ModuleList(layers[:count])
        self._freeze(count)
        self._learn_form()
        self.replay = Replay(layers[0], self.form)
        self.above = nn.ModuleList([self.replay, *layers[count:]])
        lower = nn.ModuleDict({"embeddings": base.get_input_embeddings(), "layers": self.below})
        settings = self.encoder.config
        self._part = FrozenPart(lower, settings, f"{count} layers in {dtype}", settings.hidden_size, cache_mb)

    def _freeze(self, count: int) -> None:
        """Freeze what stands before the layers, and the lower ones; what stands behind them is trained."""
        prefix = next(name for name, module in self.encoder.named_modules() if module is self._layers)
        for name, parameter in self.encoder.named_parameters():
            number = name.removeprefix(prefix + ".").split(".")[0] if name.startswith(prefix + ".") else ""
            if number and int(number) >= count:
                return
            parameter.requires_grad_(False)

    @property
    def _layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self.owner, self.attribute)
        return layers

    def _learn_form(self) -> None:
        """Find out by two texts of three tokens what a layer returns."""
        device = next(self.encoder.parameters()).device
        tokens = torch.ones((2, 3), dtype=torch.long, device=device)
        output = self._last_output({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
        states = output[0] if isinstance(output, tuple) else output
        self.form = Form(len(output) if isinstance(output, tuple) else 0, states.shape[0] == 3)

    def _last_output(self, inputs: Mapping[str, Tensor]) -> Any:
        outputs: list[Any] = []
        training = self.encoder.training
        self.encoder.eval()
        hook = self.below[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            with torch.no_grad(), self._only(self.below):
                self.encoder(**inputs)
        finally:
            hook.remove()
            self.encoder.train(training)
        return outputs[0]

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run the frozen layers: one vector for each token (texts x tokens x width)."""
        output = self._last_output(inputs)
        states: Tensor = output[0] if self.form.parts else output
        return states.transpose(0, 1) if self.form.turned else states

    def read(self, tokens: Encoded, device: torch.device) -> Encoded:
        """Run the frozen layers once on each text that the cache does not have."""

        def run(batch: dict[str, Tensor]) -> list[Floats]:
            states = self.run(onto(batch, device)).float().cpu().numpy()
            mask = batch["attention_mask"].numpy().astype(bool)
            return [text[kept] for text, kept in zip(states, mask, strict=True)]

        rows = self._part.rows(tokens, tokens.lengths(), run)
        return tokens if rows is None else CachedTokens(**_tokens(tokens), rows=rows)

    @contextmanager
    def replayed(self, states: Tensor) -> Iterator[None]:
        """Let the model run from these states upwards inside."""
        self.replay.states = states.transpose(0, 1) if self.form.turned else states
        try:
            with self._only(self.above):
                yield
        finally:
            self.replay.states = None

    @contextmanager
    def _only(self, layers: nn.ModuleList) -> Iterator[None]:
        whole = self._layers
        setattr(self.owner, self.attribute, layers)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, whole)


@dataclass(frozen=True)
class Form:
    """What a family's layer returns: its states alone or first of `parts`; `turned`: tokens x texts x width."""

    parts: int
    turned: bool


class Replay(nn.Module):
    """Stands in for the frozen layers and returns their cached output."""

    def __init__(self, first: nn.Module, form: Form) -> None:
        super().__init__()
        self.form, self.states = form, None
        self._first = [first]  # not a submodule: its weights are the model's

    states: Tensor | None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        """Return the cached states in the form of the family's layers."""
        states = self.states
        assert states is not None
        if not self.form.parts:
            return states
        rest: list[Any] = [None] * (self.form.parts - 1)
        attention: Any = getattr(getattr(self._first[0], "layer", [None])[0], "SelfAttention", None)
        if attention is not None:  # T5: the first layer makes the position bias that all others use
            place = attention.relative_attention_bias.weight.device  # not the states', where layers are on several
            rest[0] = attention.compute_bias(states.shape[1], states.shape[1], device=place)
        return (states, *rest)
