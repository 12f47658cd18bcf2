"""Models by name: built-in, from the hub, or from a folder; one interface for encoders and text-to-text models."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.common.builtin import BUILTINS, Builtin, builtin_folder, builtin_models, quiet
from fedstill.common.data import Text
from fedstill.common.randomness import seeded
from fedstill.common.states import State, differences, shapes_of
from fedstill.common.tasks import Task, hub_reachable
from fedstill.common.tokens import Encoded, encode

if TYPE_CHECKING:
    from fedstill.common.config import LoraConfig, ModelConfig

__all__ = ["Builtin", "Encoded", "ModelError", "TextModel", "builtin_models", "load_model", "pick_device"]

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class ModelError(ValueError):
    """A model that cannot be loaded or used; the text says what to do."""


def pick_device(name: str = "auto") -> torch.device:
    """The device of that name; `auto` is the first CUDA device, or the CPU where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device 'mps' is not there on this machine; use auto or cpu")
    return device


class TextModel(nn.Module):
    """A classifier of texts with its own tokenizer: `encode` once, then `forward` batch by batch."""

    def __init__(self, net: Any, tokenizer: Any, task: Task, max_length: int, device: torch.device, bf16: bool) -> None:
        super().__init__()
        self.net = net.to(device)
        self.tokenizer = tokenizer
        self.task = task
        self.max_length = max_length
        self.device = device
        self.bf16 = bf16
        self.family: str = net.config.model_type
        self.writes: bool = bool(net.config.is_encoder_decoder)
        self.adapted: bool = hasattr(net, "peft_config")
        if self.writes:
            self._words = _label_tokens(tokenizer, task).to(device)

    def encode(self, texts: Sequence[Text]) -> Encoded:
        """Token numbers of the texts, for `Encoded.batch`."""
        return encode(self.tokenizer, texts, self.max_length)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits (texts x classes) in float32."""
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self._write(inputs) if self.writes else self.net(**inputs).logits
        found: Tensor = logits.float()
        return found

    def with_states(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, and the encoder's hidden states (texts x tokens x width) from the embeddings to the last layer."""
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            if self.writes:
                encoded = self._base().get_encoder()(**inputs, output_hidden_states=True)
                logits, states = self._write(inputs, encoded.last_hidden_state), encoded.hidden_states
            else:
                output = self.net(**inputs, output_hidden_states=True)
                logits, states = output.logits, output.hidden_states
        return logits.float(), tuple(state.float() for state in states)

    # --- texts as points in embedding space ---

    def check_takes_embeddings(self) -> None:
        """Refuse a model that cannot start from embeddings."""
        base = self._base()
        entry = base.get_encoder().forward if self.writes else base.forward
        if "inputs_embeds" not in inspect.signature(entry).parameters:
            raise ModelError(
                f"a {self.family} model takes no inputs_embeds, so it cannot read pseudo texts in embedding space; "
                "use a model whose forward has inputs_embeds, such as BERT, RoBERTa or T5"
            )

    @property
    def embedding(self) -> nn.Embedding:
        """The word embeddings; what the model adds to them (positions, norms) is not part of it."""
        found: nn.Embedding = self._base().get_input_embeddings()
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the word embeddings, as the model itself would look them up."""
        found: Tensor = self.embedding(tokens.to(self.device))
        return found

    @contextmanager
    def frozen_embeddings(self) -> Iterator[None]:
        """No gradient reaches the word embeddings inside, nor an output layer that is tied to them."""
        weight = self.embedding.weight
        before = weight.requires_grad
        weight.requires_grad_(False)
        weight.grad = None
        try:
            yield
        finally:
            weight.requires_grad_(before)

    def from_embeddings(self, theta: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What the model says of pseudo texts (texts x tokens x width) wherever it has to answer, and what is right.

        A classifier answers once a text: logits over classes, and the class. A text-to-text model answers at every
        token of the label's word, with the tokens before it given: logits over the vocabulary, and the token.
        """
        mask = torch.ones(theta.shape[:2], dtype=torch.long, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            if not self.writes:
                logits = self.net(inputs_embeds=theta, attention_mask=mask).logits
                return logits.float(), labels
            base, targets = self._base(), self._words[labels]
            states = base.get_encoder()(inputs_embeds=theta, attention_mask=mask).last_hidden_state
            output = self.net(
                encoder_outputs=(states,),
                attention_mask=mask,
                decoder_input_ids=base.prepare_decoder_input_ids_from_labels(targets),
                use_cache=False,
            )
        there = targets >= 0
        return output.logits.float()[there], targets[there]

    def _base(self) -> Any:
        return self.net.get_base_model() if self.adapted else self.net

    def _write(self, inputs: dict[str, Tensor], states: Tensor | None = None) -> Tensor:
        """Class c scores the log-probability that the decoder writes label word c, its end included.

        Less the mean over classes: a word's log-probability is far below zero for all of them, and averaged with
        the logits of classifiers that offset would weigh more than what the model says.
        """
        texts, classes = len(inputs["input_ids"]), len(self._words)
        base = self._base()
        if states is None:
            states = base.get_encoder()(**inputs).last_hidden_state
        targets = self._words.repeat(texts, 1)
        output = self.net(
            encoder_outputs=(states.repeat_interleave(classes, dim=0),),
            attention_mask=inputs["attention_mask"].repeat_interleave(classes, dim=0),
            decoder_input_ids=base.prepare_decoder_input_ids_from_labels(targets),
            use_cache=False,
        )
        said = output.logits.float().log_softmax(dim=-1)
        # Padded places hold -100; they read token 0 and are then left out of the sum.
        tokens = said.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        scores: Tensor = tokens.masked_fill(targets < 0, 0.0).sum(dim=-1)
        scores = scores.view(texts, classes)
        return scores - scores.mean(dim=-1, keepdim=True)

    def trainable_state(self, copy: bool = True) -> dict[str, Tensor]:
        """What travels: parameters and buffers, or adapters and head alone with LoRA; copies, or the tensors."""
        found = {name: tensor.detach().cpu() for name, tensor in self._travelling().items()}
        return {name: tensor.clone() for name, tensor in found.items()} if copy else found

    def load_trainable_state(self, state: Mapping[str, Tensor] | State) -> None:
        """Take over a state of exactly these names and shapes, array by array."""
        self.fill(self._travelling(), state)

    def whole_state(self, copy: bool = True) -> dict[str, Tensor]:
        """What a checkpoint keeps: here, what travels."""
        return self.trainable_state(copy)

    def load_whole_state(self, state: Mapping[str, Tensor] | State) -> None:
        """Take up what `whole_state` gave."""
        self.load_trainable_state(state)

    def fill(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor] | State) -> None:
        """Copy a state of exactly these names and shapes into tensors of this model."""
        wrong = differences(shapes_of(state), shapes_of(own))
        if wrong:
            shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise ModelError(
                f"this state does not fit a {self.family} model: {shown}; use the same model on both sides"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                value = state[name]
                tensor.copy_(value if isinstance(value, Tensor) else torch.from_numpy(np.array(value)))

    def trainable_parameters(self) -> dict[str, Tensor]:
        """The parameters among what travels, by the names they travel under."""
        return {name: tensor for name, tensor in self._travelling().items() if tensor.requires_grad}

    def frozen_state(self) -> dict[str, Tensor]:
        """What does not travel under adapters: it must be the same on both sides. Empty without LoRA."""
        if not self.adapted:
            return {}
        frozen = {name: value.detach().cpu() for name, value in self.net.named_parameters() if not value.requires_grad}
        # the head that peft put aside for the trained one is never used
        return {name: value for name, value in frozen.items() if ".original_module." not in name}

    def _travelling(self) -> dict[str, Tensor]:
        if self.adapted:
            return {name: value for name, value in self.net.named_parameters() if value.requires_grad}
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.net.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # tied weights, such as T5's three names of one embedding, travel once
                seen.add(id(tensor))
                found[name] = tensor
        return found

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as plain transformers folders; adapters are merged into the weights first."""
        net = copy.deepcopy(self.net).merge_and_unload() if self.adapted else self.net
        with quiet():
            net.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def load_model(config: ModelConfig, task: Task, seed: int) -> TextModel:
    """The model that the configuration names, with a head for the task; new weights are drawn from the seed."""
    device = pick_device(config.device)
    source, changes, local = _locate(config.name)
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

    offline = {"local_files_only": local}
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {n: i for i, n in enumerate(task.labels)}}
    with quiet(), seeded(seed):
        settings = _try(config.name, "configuration", AutoConfig.from_pretrained, source, **offline)
        _check_label_order(config.name, settings, task)
        for key, value in (changes | names).items():
            setattr(settings, key, value)
        tokenizer = _try(config.name, "tokenizer", AutoTokenizer.from_pretrained, source, **offline)
        kind = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForSequenceClassification
        net, report = _try(
            config.name,
            "weights",
            kind.from_pretrained,
            source,
            config=settings,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **offline,
        )
        _check_weights(config.name, net, report)
        _check_tokenizer(config.name, tokenizer, net, config.max_length)
        tokenizer.truncation_side = "right" if config.keep == "start" else "left"
        if config.lora is not None:
            net = _with_lora(net, config.lora, config.name)
    auto = device.type == "cuda" and torch.cuda.is_bf16_supported()
    bf16 = config.precision == "bfloat16" or (config.precision == "auto" and auto)
    return TextModel(net, tokenizer, task, config.max_length, device, bf16)


def _locate(name: str) -> tuple[str, dict[str, Any], bool]:
    """Where to load from, what to change of the configuration, and whether the network must be left alone."""
    if name in BUILTINS:
        try:
            folder, changes = builtin_folder(name)
        except OSError as error:
            raise ModelError(
                f"built-in model {name}: {error}; FEDSTILL_CACHE names a folder it may write to"
            ) from error
        return str(folder), changes, True
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model folder {folder}: there is no config.json in it; give a folder of save_pretrained")
        if not any((folder / weights).is_file() for weights in WEIGHTS):
            raise ModelError(
                f"model folder {folder}: there is no model.safetensors in it; other formats can run code and are "
                "refused: save it again with save_pretrained"
            )
        return str(folder), {}, True
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model folder {folder}: is not there; check the path")
    near = difflib.get_close_matches(name, BUILTINS, n=1)
    if near and "/" not in name:
        raise ModelError(f"model {name!r} is not known; did you mean {near[0]!r}? (`fedstill models` lists them)")
    return name, {}, not hub_reachable()


def _try(name: str, what: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **kwargs)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        if Path(name).expanduser().is_dir():
            cure = f"the folder {name} needs the {what} as save_pretrained writes it"
        elif kwargs.get("local_files_only"):
            cure = (
                "the hub cannot be reached and this name is not in the local cache: use a built-in model "
                "(`fedstill models` lists them), or copy the model here and give its folder"
            )
        else:
            cure = "check the name on the hub, or give the folder of a model"
        raise ModelError(f"model {name}: its {what} cannot be loaded; {cure} ({reason})") from error


def _check_label_order(name: str, settings: Any, task: Task) -> None:
    there = [str(label) for _, label in sorted((settings.id2label or {}).items())]
    if sorted(there) == sorted(task.labels) and there != list(task.labels):
        raise ModelError(f"model {name} orders its labels {there}, the task {list(task.labels)}; change task.labels")


def _check_weights(name: str, net: Any, report: dict[str, Any]) -> None:
    """Only the head may be new. A pooler belongs to it: models trained on words alone have none."""
    body = net.base_model_prefix + "."
    wrong = [key for key in report["missing_keys"] if key.startswith(body) and "pooler" not in key]
    wrong += [key[0] for key in report["mismatched_keys"] if key[0].startswith(body)]
    if net.config.is_encoder_decoder:
        wrong = sorted([*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])])
    if wrong:
        raise ModelError(f"model {name}: {len(wrong)} weights are absent or of another size, such as {wrong[0]}")


def _check_tokenizer(name: str, tokenizer: Any, net: Any, max_length: int) -> None:
    # Where the files are absent the library makes a tokenizer of special tokens alone and says nothing.
    if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise ModelError(f"model {name}: it has no fast tokenizer; put its tokenizer.json into the folder")
    size = net.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ModelError(
            f"model {name}: its tokenizer has {len(tokenizer)} tokens, the model {size}; they do not belong together"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        net.config.pad_token_id = tokenizer.pad_token_id
    positions = getattr(net.config, "max_position_embeddings", None) or -1
    if net.config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= net.config.pad_token_id + 1  # these count positions from behind the padding number
    if 0 < positions < max_length:
        raise ModelError(f"model {name} takes texts of at most {positions} tokens; set max_length to that or lower")


def _with_lora(net: Any, lora: LoraConfig, name: str) -> Any:
    import peft

    body = net.base_model_prefix
    head = [part for part, child in net.named_children() if part != body and any(True for _ in child.parameters())]
    writes = net.config.is_encoder_decoder
    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets: Any = lora.targets or known.get(net.config.model_type) or "all-linear"
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=None if writes else [part for part in _linear_names(net) if part.split(".")[0] in head],
        modules_to_save=None if writes else head,
        task_type="SEQ_2_SEQ_LM" if writes else "SEQ_CLS",
    )
    try:
        return peft.get_peft_model(net, settings)
    except ValueError as error:
        inside = sorted({part.rsplit(".", 1)[-1] for part in _linear_names(net)})
        raise ModelError(f"model {name}: lora.targets = {targets} fits no layer; linear layers: {inside}") from error


def _linear_names(net: nn.Module) -> list[str]:
    return [part for part, child in net.named_modules() if isinstance(child, nn.Linear)]


def _label_tokens(tokenizer: Any, task: Task) -> Tensor:
    """Tokens of each label word with the end of sequence, padded with -100."""
    rows: list[list[int]] = [tokenizer(text_target=word).input_ids for word in task.label_words]
    if len({tuple(row) for row in rows}) < len(rows):
        raise ModelError(
            f"the tokenizer cannot tell the label words {list(task.label_words)} apart; change task.label_words"
        )
    padded = torch.full((len(rows), max(map(len, rows))), -100)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    return padded
