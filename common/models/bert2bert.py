"""The model of sites with different tasks: a shared encoder and decoder, and private parts on top (ATC)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from fedstill.common.config import ModelConfig, SiteTask
from fedstill.common.models.builtin import quiet
from fedstill.common.models.loading import check_tokenizer, comes_trained, locate, try_loading
from fedstill.common.models.text_model import ModelError, TextModel, pick_device
from fedstill.common.models.tokens import onto
from fedstill.common.randomness import seeded
from fedstill.common.states import State

GROUPS = ("encoder", "decoder", "mlm")  # what may travel; pooler, classifier and contrast head never do
IGNORED = -100


class MaskHead(nn.Module):
    """BERT's prediction of masked tokens; its last layer is tied to the encoder's word vectors."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, states: Tensor, words: Tensor) -> Tensor:
        """Return logits over the vocabulary for every token."""
        return nn.functional.linear(self.norm(gelu(self.dense(states))), words, self.bias)


class MixedModel(TextModel):
    """BERT2BERT, or a text-to-text model as it is. By default only the encoder travels."""

    def __init__(self, net: Any, tokenizer: Any, outputs: int, config: ModelConfig, device: torch.device) -> None:
        nn.Module.__init__(self)  # TextModel's own constructor needs a task that everybody knows
        self.tokenizer, self.max_length, self.device = tokenizer, config.max_length, device
        self.bf16 = config.precision == "bfloat16"
        self.family = (
            net.config.model_type if net.config.model_type != "encoder-decoder" else net.encoder.config.model_type
        )
        self.writes, self.adapted, self.pretrained = True, False, True
        self.smoothing, self.dtype = 0.0, torch.float32
        settings = net.encoder.config
        width = settings.hidden_size
        self.pooler = nn.Linear(width, width)
        old = getattr(net.encoder, "pooler", None)
        if old is not None:
            self.pooler.load_state_dict(old.dense.state_dict())
            net.encoder.pooler = None
        self.net = net
        self.mlm = MaskHead(width, net.encoder.get_input_embeddings().num_embeddings)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(width, outputs) if outputs else None
        self.contrast = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width))
        first = tokenizer.cls_token_id
        self.first = [] if first is None else [first]
        last = next(
            i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None
        )
        self.last = [last]
        self.mask = _mask_token(tokenizer)
        self.to(device)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch with targets: `masked`, `original`, `targets`, `labels` or `spans`."""
        inputs = onto(batch, self.device)
        wanted = {name: inputs.pop(name) for name in WANTED if name in inputs}
        ((name, answer),) = wanted.items()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self._loss(name, answer, inputs)

    def _loss(self, name: str, answer: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if name == "masked":
            masked = answer != IGNORED
            logits = self.tokens(self.states(inputs)[masked])
            return cross_entropy(logits.float(), answer[masked], reduction="sum") / max(1, int(masked.sum()))
        if name == "labels":
            return cross_entropy(self.scores(inputs), answer)
        if name == "spans":
            both = self.span_scores(inputs)
            return (cross_entropy(both[..., 0], answer[:, 0]) + cross_entropy(both[..., 1], answer[:, 1])) / 2
        inputs.pop("token_type_ids", None)
        first = self.net.prepare_decoder_input_ids_from_labels(answer)
        output = self.net(**inputs, decoder_input_ids=first, use_cache=False)
        smoothing = self.smoothing if name == "targets" else 0.0
        return cross_entropy(
            output.logits.float().flatten(0, 1), answer.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
        )

    @property
    def width(self) -> int:
        """The width of a hidden state."""
        return self.mlm.dense.in_features

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the encoder's last layer."""
        hidden: Tensor = self.net.encoder(**inputs).last_hidden_state
        return hidden

    def tokens(self, states: Tensor) -> Tensor:
        """Return the MLM head's logits."""
        logits: Tensor = self.mlm(states, self.net.encoder.get_input_embeddings().weight)
        return logits

    def scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return class logits, from the first token, or from the mean for models without such a token."""
        assert self.classifier is not None
        states = self.states(inputs)
        if self.first:
            whole = states[:, 0]
        else:
            weights = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
            whole = (states * weights).sum(dim=1) / weights.sum(dim=1)
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(whole))))
        return logits.float()

    def span_scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score each token as first and last of the answer (texts x tokens x 2); padding is ruled out."""
        assert self.classifier is not None
        scores = self.classifier(self.dropout(self.states(inputs))).float()
        hidden = inputs["attention_mask"].unsqueeze(-1) == 0
        masked: Tensor = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        return masked

    def represent(self, features: Tensor, tokens: Tensor, through: Literal["decoder", "encoder"] = "decoder") -> Tensor:
        """Return h: the decoder on synthetic tokens and features, then the contrast head, averaged over tokens.

        That h never passes the encoder, so that eq. 3 gives it no gradient; `through` the encoder reads the tokens.
        """
        if through == "encoder":
            output = self.states({"input_ids": tokens})
        else:
            decoder = self.net.decoder.base_model
            output = decoder(input_ids=tokens, encoder_hidden_states=features, use_cache=False).last_hidden_state
        vectors: Tensor = self.contrast(output).float().mean(dim=1)
        return vectors

    def write(self, inputs: Mapping[str, Tensor], task: SiteTask) -> list[str]:
        """Generate texts by beam search."""
        prompt = {name: inputs[name].to(self.device) for name in ("input_ids", "attention_mask")}
        written = self.net.generate(
            **prompt,
            num_beams=task.beams,
            do_sample=False,
            length_penalty=task.length_penalty,
            no_repeat_ngram_size=3,
            min_new_tokens=task.fewest,
            max_new_tokens=task.most,
        )
        return [str(text).strip() for text in self.tokenizer.batch_decode(written, skip_special_tokens=True)]

    # --- states ---

    def group(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of groups of parameters by their names on the wire; tied tensors once."""
        return {name: value for name, value in self._whole().items() if group_of(name) in names}

    def _travelling(self) -> dict[str, Tensor]:
        return self.group(("encoder",))

    def _whole(self) -> dict[str, Tensor]:
        return {name.removeprefix("net."): value for name, value in self.named_parameters()}

    def whole_state(self, copy: bool = True) -> dict[str, Tensor]:
        """Return everything, private parts included, for the site's own checkpoint."""
        state = {name: tensor.detach().cpu() for name, tensor in self._whole().items()}
        return {name: tensor.clone() for name, tensor in state.items()} if copy else state

    def load_whole_state(self, state: Mapping[str, Tensor] | State) -> None:
        """Restore what `whole_state` returned."""
        self.fill(self._whole(), state)

    def save(self, folder: Path) -> None:
        """Save the shared encoder (all of a text-to-text model) and the tokenizer as plain transformers folders."""
        with quiet():
            (self.net.encoder if self.net.config.model_type == "encoder-decoder" else self.net).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


WANTED = ("masked", "original", "targets", "labels", "spans")


def group_of(name: str) -> str:
    """Return the group of a parameter, by its name on the wire."""
    part = name.split(".")[0]
    # T5 has one embedding for both halves, named before either; its output layer belongs to the decoder.
    return {"shared": "encoder", "lm_head": "decoder"}.get(part, part)


def moved_by(objective: str) -> tuple[str, ...]:
    """Return the groups of parameters that an objective of ASSIGN trains."""
    return ("encoder", "mlm") if objective == "mlm" else ("encoder", "decoder")


def _mask_token(tokenizer: Any) -> int:
    """Return the mask token, or T5's first sentinel, or the unknown token."""
    sentinel = tokenizer.get_vocab().get("<extra_id_0>")
    candidates = [token for token in (tokenizer.mask_token_id, sentinel, tokenizer.unk_token_id) if token is not None]
    if not candidates:
        raise ModelError("the tokenizer has neither a mask nor an unknown token; use another model")
    return int(candidates[0])


def load_mixed(config: ModelConfig, outputs: int, seed: int) -> MixedModel:
    """Build BERT2BERT from the configured encoder, or load a text-to-text model; new parts are drawn from the seed."""
    for key in ("lora", "freeze", "answer", "quantize"):
        if getattr(config, key):
            raise ModelError(f"model {config.name}: a run with task mixed trains whole models; take {key} out")
    if config.precision == "float64":
        raise ModelError(f"model {config.name}: a run with task mixed has no precision float64; take it out")
    if not isinstance(config.device, str) or config.device == "all":
        raise ModelError(f"device: a run with task mixed keeps a model on one device, not {config.device}; name one")
    device = pick_device(config.device)
    source, changes, local = locate(config.name)
    from transformers import AutoConfig, AutoTokenizer

    offline = {"local_files_only": local}
    with quiet(), seeded(seed):
        settings = try_loading(config.name, "configuration", AutoConfig.from_pretrained, source, **offline)
        for key, value in changes.items():
            setattr(settings, key, value)
        tokenizer = try_loading(config.name, "tokenizer", AutoTokenizer.from_pretrained, source, **offline)
        load = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True, **offline}
        net, head = _text_to_text(config.name, source, settings, load)
        check_tokenizer(config.name, tokenizer, net.encoder, config.max_length)
        tokenizer.truncation_side = "right" if config.keep == "start" else "left"
        model = MixedModel(net, tokenizer, outputs, config, device)
        if head:
            model.mlm.load_state_dict(head)
        model.pretrained = comes_trained(config.name)
        _set_ends(net, model)
    return model


def _text_to_text(name: str, source: str, settings: Any, load: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the model, and the checkpoint's own MLM head if it has one."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, EncoderDecoderModel

    if settings.is_encoder_decoder:
        net, report = try_loading(
            name, "weights", AutoModelForSeq2SeqLM.from_pretrained, source, config=settings, **load
        )
        _check_complete(name, report)
        return net, {}
    writing = copy.deepcopy(settings)
    writing.is_decoder = writing.add_cross_attention = True
    encoder, report = try_loading(name, "weights", AutoModel.from_pretrained, source, config=settings, **load)
    _check_complete(name, report)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, config=writing, **load)
        decoder, found = loaded
        return EncoderDecoderModel(encoder=encoder, decoder=decoder), _mask_head(decoder, set(found["missing_keys"]))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"model {name} ({settings.model_type}) cannot be a decoder; use a BERT-like or a T5-like model ({error})"
        ) from error


MASK_HEADS = (  # where dense layer, norm and bias of an MLM head lie in a checkpoint
    ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),  # BERT
    ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),  # RoBERTa
)


def _mask_head(decoder: Any, missing: set[str]) -> dict[str, Tensor]:
    """Return the MLM head with which the decoder was loaded, under MaskHead's names; nothing if it was drawn anew."""
    state, width = decoder.state_dict(), decoder.config.hidden_size
    for dense, norm, bias in MASK_HEADS:
        names = {f"{part}.{kind}": f"{place}.{kind}" for part, place in (("dense", dense), ("norm", norm))
                 for kind in ("weight", "bias")} | {"bias": bias}  # fmt: skip
        if missing.isdisjoint(names.values()) and all(name in state for name in names.values()):
            gelu_head = decoder.config.hidden_act == "gelu" and state[names["dense.weight"]].shape == (width, width)
            return {ours: state[theirs].clone() for ours, theirs in names.items()} if gelu_head else {}
    return {}


def _check_complete(name: str, report: dict[str, Any]) -> None:
    wrong = [key for key in report["missing_keys"] if "pooler" not in key] + list(report["mismatched_keys"])
    if wrong:
        raise ModelError(f"model {name}: {len(wrong)} weights are absent or of another size, such as {wrong[0]}")


def _set_ends(net: Any, model: MixedModel) -> None:
    """Set the tokens that begin and end a generated text."""
    if net.config.model_type == "encoder-decoder":
        for settings in (net.config, net.generation_config):
            settings.decoder_start_token_id = (model.first or model.last)[0]
            settings.pad_token_id, settings.eos_token_id = model.tokenizer.pad_token_id, model.last[0]
