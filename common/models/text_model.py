"""A classifier of texts with its own tokenizer: one interface for encoders and text-to-text models."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.common.data.splits import Text
from fedstill.common.data.tasks import Task
from fedstill.common.models.builtin import quiet
from fedstill.common.models.tokens import Encoded, Remembered, onto
from fedstill.common.states import State, differences, shapes_of

if TYPE_CHECKING:
    from fedstill.common.models.frozen import LowerLayers


NO_EMBEDDINGS = (
    "this method feeds pseudo texts to the embeddings, and frozen layers are cached for real texts only; "
    "take freeze out"
)


_remembered = Remembered()


class ModelError(ValueError):
    """A model cannot be loaded or used; the text says what to do."""


def pick_devices(name: str | list[str] = "auto") -> list[torch.device]:
    """Return the devices of that name: one, or every CUDA device for `all`, or those of a list."""
    if name == "all":
        if not (count := torch.cuda.device_count()):
            raise ModelError("device = 'all' finds no CUDA device on this machine; use auto or cpu")
        return [torch.device("cuda", number) for number in range(count)]
    if isinstance(name, str):
        return [pick_device(name)]
    devices = [pick_device(one) for one in name]
    exact = [torch.device(device.type, device.index or 0) if device.type != "cpu" else device for device in devices]
    if len(set(exact)) < len(exact):
        raise ModelError(f"device = {name} names one device twice; name each once")
    return exact


def pick_device(name: str = "auto") -> torch.device:
    """Return the device of that name; `auto` is the first CUDA device, or the CPU if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"device {name!r} is not known; use auto, cpu, cuda, cuda:0, all, or a list of devices"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device 'mps' is not there on this machine; use auto or cpu")
    return device


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half precision as float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class TextModel(nn.Module):
    """A classifier of texts with its own tokenizer: `encode` once, then `forward` batch by batch."""

    lower: LowerLayers | None = None  # frozen layers, whose output is cached
    kinds: tuple[str, ...] = ()  # of devices that it is on, where they are several

    def __init__(self, net: Any, tokenizer: Any, task: Task, max_length: int, device: torch.device, bf16: bool) -> None:
        super().__init__()
        if len(devices := _devices(net)) > 1:
            self.net, self.kinds = net, tuple({device.type for device in devices})
        else:
            self.net = net.to(device)
        self.tokenizer = tokenizer
        self.task = task
        self.max_length = max_length
        self.device = device  # of inputs and logits; layers may be on others as well
        self.bf16 = bf16
        self.family: str = net.config.model_type
        self.dtype: torch.dtype = next(net.parameters()).dtype  # float64 where requested, else float32
        self.writes: bool = bool(net.config.is_encoder_decoder)
        self.adapted: bool = hasattr(net, "peft_config")
        self.pretrained = True  # whether its layers are pretrained
        if self.writes:
            self._words = _label_tokens(tokenizer, task).to(device)

    @property
    def devices(self) -> list[torch.device]:
        """Every device that has a part of the model."""
        return _devices(self.net)

    def encode(self, texts: Sequence[Text]) -> Encoded:
        """Tokenize the texts, for `Encoded.batch`."""
        tokens = self.tokenize(texts)
        return tokens if self.lower is None else self.lower.read(tokens, self.device)

    def tokenize(self, texts: Sequence[Text]) -> Encoded:
        """Return the tokens that the model reads of each text."""
        return _remembered.encode(self.tokenizer, texts, self.max_length)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits (texts x classes), in float32 or in the model's own float64."""
        inputs = onto(batch, self.device)
        with self._above_frozen(inputs), self.at_precision():
            return at_least_float32(self.score(inputs))

    @contextmanager
    def at_precision(self) -> Iterator[None]:
        """Compute in bfloat16 inside, if the model does."""
        with ExitStack() as stack:
            for kind in self.kinds or (self.device.type,):
                stack.enter_context(torch.autocast(kind, torch.bfloat16, enabled=self.bf16))
            yield

    def score(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return logits of tokens on this device."""
        logits: Tensor = self._write(inputs) if self.writes else self.net(**inputs).logits
        return logits

    @contextmanager
    def _above_frozen(self, inputs: dict[str, Tensor]) -> Iterator[None]:
        """Where lower layers are frozen, run only those above them inside, from cached states or from fresh ones."""
        if self.lower is None:
            yield
            return
        states = inputs.pop("states", None)
        with self.lower.replayed(self.lower.run(inputs) if states is None else states.to(self.dtype)):
            yield

    def vectors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return one vector a text: the mean of its last hidden states."""
        last = self.with_states(batch)[1][-1]
        mask = batch["attention_mask"].to(last).unsqueeze(-1)
        return (last * mask).sum(dim=1) / mask.sum(dim=1)

    def with_states(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits, and the encoder's hidden states (texts x tokens x width), embeddings to last layer."""
        inputs = onto(batch, self.device)
        with self._above_frozen(inputs), self.at_precision():
            if self.writes:
                encoded = self.base().get_encoder()(**inputs, output_hidden_states=True)
                logits, states = self._write(inputs, encoded.last_hidden_state), encoded.hidden_states
            else:
                output = self.net(**inputs, output_hidden_states=True)
                logits, states = output.logits, output.hidden_states
        return at_least_float32(logits), tuple(at_least_float32(state.to(self.device)) for state in states)

    # --- texts as points in embedding space ---

    def check_takes_embeddings(self) -> None:
        """Refuse a model that cannot take embeddings as inputs."""
        if self.lower is not None:
            raise ModelError(NO_EMBEDDINGS)
        base = self.base()
        entry = base.get_encoder().forward if self.writes else base.forward
        if "inputs_embeds" not in inspect.signature(entry).parameters:
            raise ModelError(
                f"a {self.family} model takes no inputs_embeds, so it cannot read pseudo texts in embedding space; "
                "use a model whose forward has inputs_embeds, such as BERT, RoBERTa or T5"
            )

    @property
    def embedding(self) -> nn.Embedding:
        """The word embeddings, without what the model adds to them (positions, norms)."""
        table: nn.Embedding = self.base().get_input_embeddings()
        return table

    def embed(self, tokens: Tensor) -> Tensor:
        """Return rows of the word embeddings, as the model itself looks them up."""
        vectors: Tensor = self.embedding(tokens.to(self.device))
        return vectors

    @contextmanager
    def frozen_embeddings(self) -> Iterator[None]:
        """Keep gradients from the word embeddings inside, and from an output layer tied to them."""
        weight = self.embedding.weight
        before = weight.requires_grad
        weight.requires_grad_(False)
        weight.grad = None
        try:
            yield
        finally:
            weight.requires_grad_(before)

    def from_embeddings(self, theta: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's answers to pseudo texts (texts x tokens x width), and the right ones.

        A classifier answers once a text: logits over classes, and the class. A text-to-text model answers at every
        token of the label's word, with the tokens before it given: logits over the vocabulary, and the token.
        """
        mask = torch.ones(theta.shape[:2], dtype=torch.long, device=self.device)
        with self.at_precision():
            if not self.writes:
                logits = self.net(inputs_embeds=theta, attention_mask=mask).logits
                return at_least_float32(logits), labels
            base, targets = self.base(), self._words[labels]
            states = base.get_encoder()(inputs_embeds=theta, attention_mask=mask).last_hidden_state
            output = self.net(
                encoder_outputs=(states,),
                attention_mask=mask,
                decoder_input_ids=base.prepare_decoder_input_ids_from_labels(targets),
                use_cache=False,
            )
        answered = targets >= 0
        return at_least_float32(output.logits)[answered], targets[answered]

    @property
    def partial(self) -> bool:
        """Whether only a part of the model is trained and travels."""
        return self.adapted or self.lower is not None

    def base(self) -> Any:
        """Return the model without its adapters' wrapper."""
        return self.net.get_base_model() if self.adapted else self.net

    def _write(self, inputs: dict[str, Tensor], states: Tensor | None = None) -> Tensor:
        """Score class c by the log-probability that the decoder writes label word c, its end included.

        The mean over classes is subtracted: log-probabilities of words are far below zero, and averaged with
        classifiers' logits that offset would outweigh the model's prediction.
        """
        texts, classes = len(inputs["input_ids"]), len(self._words)
        base = self.base()
        if states is None:
            states = base.get_encoder()(**inputs).last_hidden_state
        targets = self._words.repeat(texts, 1)
        output = self.net(
            encoder_outputs=(states.repeat_interleave(classes, dim=0),),
            attention_mask=inputs["attention_mask"].repeat_interleave(classes, dim=0),
            decoder_input_ids=base.prepare_decoder_input_ids_from_labels(targets),
            use_cache=False,
        )
        log_probs = at_least_float32(output.logits).log_softmax(dim=-1)
        # Padded positions hold -100; they read token 0 and are then left out of the sum.
        tokens = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        scores: Tensor = tokens.masked_fill(targets < 0, 0.0).sum(dim=-1)
        scores = scores.view(texts, classes)
        return scores - scores.mean(dim=-1, keepdim=True)

    def trainable_state(self, copy: bool = True) -> dict[str, Tensor]:
        """Return what travels: parameters and buffers, or what is trained if only a part is; as copies or views."""
        state = {name: tensor.detach().cpu() for name, tensor in self._travelling().items()}
        return {name: tensor.clone() for name, tensor in state.items()} if copy else state

    def load_trainable_state(self, state: Mapping[str, Tensor] | State) -> None:
        """Load a state of exactly these names and shapes, array by array."""
        self.fill(self._travelling(), state)

    def whole_state(self, copy: bool = True) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: here, what travels."""
        return self.trainable_state(copy)

    def load_whole_state(self, state: Mapping[str, Tensor] | State) -> None:
        """Restore what `whole_state` returned."""
        self.load_trainable_state(state)

    def fill(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor] | State) -> None:
        """Copy a state of exactly these names and shapes into tensors of this model."""
        wrong = differences(shapes_of(state), shapes_of(tensors))
        if wrong:
            shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise ModelError(
                f"this state does not fit a {self.family} model: {shown}; use the same model on both sides"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                value = state[name]
                tensor.copy_(value if isinstance(value, Tensor) else torch.from_numpy(np.array(value)))

    def trainable_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that travel, by their names on the wire."""
        return {name: tensor for name, tensor in self._travelling().items() if tensor.requires_grad}

    def frozen_state(self) -> dict[str, Tensor]:
        """Return what is not trained, does not travel and must be the same on both sides: empty for a whole model."""
        if not self.partial:
            return {}
        frozen = {name: value.detach().cpu() for name, value in self.net.named_parameters() if not value.requires_grad}
        # peft never uses the original head, which the trained one replaces
        return {name: value for name, value in frozen.items() if ".original_module." not in name}

    def _travelling(self) -> dict[str, Tensor]:
        if self.partial:
            return {name: value for name, value in self.net.named_parameters() if value.requires_grad}
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.net.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # tied weights, such as T5's three names of one embedding, travel once
                seen.add(id(tensor))
                tensors[name] = tensor
        return tensors

    def save(self, folder: Path) -> None:
        """Save model and tokenizer as plain transformers folders; adapters are merged into the weights first."""
        net = copy.deepcopy(self.net).merge_and_unload() if self.adapted else self.net
        with quiet():
            net.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def _devices(net: nn.Module) -> list[torch.device]:
    return sorted({parameter.device for parameter in net.parameters()}, key=str)


def _label_tokens(tokenizer: Any, task: Task) -> Tensor:
    """Return the tokens of each label word with the end of sequence, padded with -100."""
    rows: list[list[int]] = [tokenizer(text_target=word).input_ids for word in task.label_words]
    if len({tuple(row) for row in rows}) < len(rows):
        raise ModelError(
            f"the tokenizer cannot tell the label words {list(task.label_words)} apart; change task.label_words"
        )
    padded = torch.full((len(rows), max(map(len, rows))), -100)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    return padded
