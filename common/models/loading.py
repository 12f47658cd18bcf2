"""Models by name: built-in, from the hub, or from a folder, each with a head for the task."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from fedstill.common.config.model import LoraConfig
from fedstill.common.data.tasks import Task, hub_reachable
from fedstill.common.models.builtin import BUILTINS, builtin_folder, quiet
from fedstill.common.models.causal import CausalModel
from fedstill.common.models.frozen import HEAD, FrozenEncoder, LowerLayers
from fedstill.common.models.spread import layer_list, place
from fedstill.common.models.text_model import ModelError, TextModel, pick_devices
from fedstill.common.randomness import seeded

if TYPE_CHECKING:
    from fedstill.common.config import ModelConfig

LORA_FROM = 100_000_000  # parameters of a decoder-only model from which it trains adapters, if nobody says otherwise
ENCODER_OF_TWO = ("t5", "mt5", "umt5")  # text-to-text models, of which a frozen encoder is one half
WITH_POOLER = ("bert", "roberta", "xlm-roberta", "camembert")  # a layer that a frozen encoder has no use for
TOKENIZERS = 8  # that a process keeps
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def load_model(config: ModelConfig, task: Task, seed: int) -> TextModel:
    """Load the configured model with a head for the task; new weights are drawn from the seed."""
    devices = pick_devices(config.device)
    device = devices[0]
    source, changes, local = locate(config.name)
    from transformers import AutoConfig

    offline = {"local_files_only": local}
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {n: i for i, n in enumerate(task.labels)}}
    with quiet(), seeded(seed):
        settings = try_loading(config.name, "configuration", AutoConfig.from_pretrained, source, **offline)
        _check_label_order(config.name, settings, task)
        _check_settings(config, settings)
        for key, value in (changes | names).items():
            setattr(settings, key, value)
        if config.attention is not None:
            settings._attn_implementation = config.attention
        tokenizer = _load_tokenizer(config, source, offline)
        auto = device.type == "cuda" and torch.cuda.is_bf16_supported()
        bf16 = config.precision == "bfloat16" or (config.precision == "auto" and auto)
        rest: Rest = (tokenizer, task, config.max_length, device, bf16)
        model: TextModel
        if config.freeze == "encoder" or (Path(source) / HEAD).is_file():
            model = _frozen_encoder(config, source, settings, offline, rest, devices)
        else:
            net = _load_net(config, source, settings, offline)
            check_tokenizer(config.name, tokenizer, net, config.max_length)
            lora = _lora_by_default(net) if config.lora is None else config.lora
            lower = config.freeze if isinstance(config.freeze, int) else 0
            if config.recompute:
                if not net.supports_gradient_checkpointing:
                    raise ModelError(
                        f"model {config.name}: its family cannot recompute activations; take recompute out"
                    )
                net.gradient_checkpointing_enable({"use_reentrant": False})
            if lora:
                net = _with_lora(net, lora, config.name, lower)
            model = (CausalModel if answers_by_words(config, settings) else TextModel)(place(net, devices), *rest)
            if config.compile:
                _compile(config, model)
            if lower:
                model.lower = LowerLayers(model.net, lower, model.dtype, config.cache_mb)
    model.pretrained = comes_trained(config.name)
    return model


_tokenizers: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # reading one takes as long as a small model


def _load_tokenizer(config: ModelConfig, source: str, offline: dict[str, bool]) -> Any:
    """Load a tokenizer, once a process where its folder has not changed."""
    from transformers import AutoTokenizer

    files = [path for path in sorted(Path(source).glob("*")) if path.is_file() and path.suffix != ".safetensors"]
    states = [(path.name, stat.st_mtime_ns, stat.st_size) for path in files for stat in [path.stat()]]
    key = (source, config.keep, *states)
    if key not in _tokenizers:
        loaded = try_loading(config.name, "tokenizer", AutoTokenizer.from_pretrained, source, **offline)
        loaded.truncation_side = "right" if config.keep == "start" else "left"
        if not files:  # a hub's name, whose files may change
            return loaded
        _tokenizers[key] = loaded
        while len(_tokenizers) > TOKENIZERS:
            _tokenizers.popitem(last=False)
    _tokenizers.move_to_end(key)
    return _tokenizers[key]


def _load_net(config: ModelConfig, source: str, settings: Any, offline: dict[str, bool]) -> Any:
    """Load the model with a head, or with its way of writing words."""
    import transformers

    kind: Any = transformers.AutoModelForSequenceClassification
    if settings.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    elif answers_by_words(config, settings):
        kind = transformers.AutoModelForCausalLM
    net, report = try_loading(
        config.name,
        "weights",
        kind.from_pretrained,
        source,
        config=settings,
        dtype=_dtype(config),
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **_quantized(config),
        **offline,
    )
    _check_weights(config.name, net, report)
    if not config.keep_head and kind is transformers.AutoModelForSequenceClassification:
        _draw_head(net, report)
    return net


def _dtype(config: ModelConfig) -> torch.dtype:
    return torch.float64 if config.precision == "float64" else torch.float32


def decoder_only(settings: Any) -> bool:
    """Return whether this is a language model without an encoder, such as GPT-2, Llama or Qwen."""
    from transformers.models.auto import modeling_auto

    kind = settings.model_type
    return (
        kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and kind != "xlnet"
    )


def answers_by_words(config: ModelConfig, settings: Any) -> bool:
    """Return whether a decoder-only model's label words are scored, as by default, instead of a head's outputs."""
    return decoder_only(settings) and config.answer != "head"


def _check_settings(config: ModelConfig, settings: Any) -> None:
    if config.precision == "float64" and settings.model_type == "xlnet":
        raise ModelError(f"model {config.name}: XLNet computes its positions in float32; take precision float64 out")
    if config.answer is not None and not decoder_only(settings):
        raise ModelError(
            f"model {config.name}: answer = {config.answer!r} is a choice for decoder-only models, and this is a "
            f"{settings.model_type}; take it out"
        )


def _quantized(config: ModelConfig) -> dict[str, Any]:
    """The arguments that load a model in 4 bits."""
    if config.quantize is None:
        return {}
    if pick_devices(config.device)[0].type != "cuda":
        raise ModelError(f"model {config.name}: quantize = '4bit' needs a CUDA device; take quantize out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"model {config.name}: quantize = '4bit' needs bitsandbytes: pip install 'fedstill[4bit]'")
    from transformers import BitsAndBytesConfig

    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return {"quantization_config": four}


def _compile(config: ModelConfig, model: TextModel) -> None:
    """Compile a model's passes in place, so that its parameters keep their names; refuse a machine that cannot."""
    if model.device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ModelError(
                f"model {config.name}: compile = true needs a C++ compiler, and this machine has none; install g++ or "
                "clang (CXX names another one), or take compile out"
            ) from error
    elif importlib.util.find_spec("triton") is None:
        raise ModelError(f"model {config.name}: compile = true on {model.device} needs triton; take compile out")
    for part in [model.net, *([model.base().get_encoder()] if model.writes else [])]:  # T5's encoder is called alone
        part.compile(dynamic=True)  # batches differ in length


Rest = tuple[Any, Task, int, torch.device, bool]  # tokenizer, task, longest text, device, bfloat16

_encoders: WeakValueDictionary[tuple[str, ...], Any] = WeakValueDictionary()  # frozen, so that sites can share one


def _frozen_encoder(
    config: ModelConfig,
    source: str,
    settings: Any,
    offline: dict[str, bool],
    rest: Rest,
    devices: list[torch.device],
) -> FrozenEncoder:
    """Load an encoder without its head, once a process, and put a new head on it, or the one saved beside it."""
    import transformers

    head, pooling = config.head or "linear", config.pooling or ("last" if decoder_only(settings) else "mean")
    saved = Path(source) / HEAD
    if saved.is_file():
        known = json.loads(saved.read_text(encoding="utf-8"))
        head, pooling = known["head"], known["pooling"]
    key = (source, settings.to_json_string(), str(devices), str(_dtype(config)))
    net = _encoders.get(key)
    if net is None:
        halves = settings.model_type in ENCODER_OF_TWO
        kind: Any = transformers.AutoModelForTextEncoding if halves else transformers.AutoModel
        extra = {"add_pooling_layer": False} if settings.model_type in WITH_POOLER else {}
        net = try_loading(
            config.name, "weights", kind.from_pretrained, source, config=settings, dtype=_dtype(config),
            use_safetensors=True, **extra, **offline,
        )  # fmt: skip
        _encoders[key] = net
    check_tokenizer(config.name, rest[0], net, config.max_length)
    model = FrozenEncoder(place(net, devices), *rest, head=head, pooling=pooling, cache_mb=config.cache_mb)
    if saved.is_file() and config.keep_head:
        model.load_head(Path(source))
    return model


def comes_trained(name: str) -> bool:
    """Return whether a model is pretrained; folders and hub models are taken to be."""
    return name not in BUILTINS or BUILTINS[name].pretrained


def locate(name: str) -> tuple[str, dict[str, Any], bool]:
    """Return where to load from, what to change in the configuration, and whether to stay off the network."""
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


def try_loading(name: str, what: str, load: Any, *args: Any, **kwargs: Any) -> Any:
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
    labels = [str(label) for _, label in sorted((settings.id2label or {}).items())]
    if sorted(labels) == sorted(task.labels) and labels != list(task.labels):
        raise ModelError(f"model {name} orders its labels {labels}, the task {list(task.labels)}; change task.labels")


def _check_weights(name: str, net: Any, report: dict[str, Any]) -> None:
    """Refuse new weights outside the head. A pooler belongs to the head: models trained on words alone have none."""
    body = net.base_model_prefix + "."
    wrong = [key for key in report["missing_keys"] if key.startswith(body) and "pooler" not in key]
    wrong += [key[0] for key in report["mismatched_keys"] if key[0].startswith(body)]
    if net.config.is_encoder_decoder or decoder_only(net.config):
        head = () if net.get_output_embeddings() is not None else ("score",)  # the head of answer = "head" is new
        absent = [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]
        wrong = sorted(key for key in absent if not key.startswith(head))
    if wrong:
        raise ModelError(f"model {name}: {len(wrong)} weights are absent or of another size, such as {wrong[0]}")


def _draw_head(net: Any, report: dict[str, Any]) -> None:
    """Replace a head that came with the checkpoint: trained for something else, and the same whatever the seed."""
    if net.config.is_encoder_decoder:
        return
    drawn = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    for part, module in net.named_children():
        names = [f"{part}.{name}" for name, _ in module.named_parameters()]
        if part != net.base_model_prefix and any(name not in drawn for name in names):
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=getattr(net.config, "initializer_range", 0.02))
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
                elif isinstance(layer, nn.LayerNorm):
                    layer.reset_parameters()


def check_tokenizer(name: str, tokenizer: Any, net: Any, max_length: int) -> None:
    # Without its files the library silently makes a tokenizer of special tokens alone.
    if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise ModelError(f"model {name}: it has no fast tokenizer; put its tokenizer.json into the folder")
    size = net.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ModelError(
            f"model {name}: its tokenizer has {len(tokenizer)} tokens, the model {size}; they do not belong together"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if net.config.pad_token_id is None or tokenizer.pad_token in (tokenizer.eos_token, tokenizer.unk_token):
        net.config.pad_token_id = tokenizer.pad_token_id  # a head on the last token looks for tokens other than it
    positions = getattr(net.config, "max_position_embeddings", None) or -1
    if net.config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= net.config.pad_token_id + 1  # these count positions from the padding number on
    if 0 < positions < max_length:
        raise ModelError(f"model {name} takes texts of at most {positions} tokens; set max_length to that or lower")


def _lora_by_default(net: Any) -> LoraConfig | None:
    """Large decoder-only models train adapters; `lora = false` trains all of them."""
    large = sum(value.numel() for value in net.parameters()) >= LORA_FROM
    return LoraConfig() if large and decoder_only(net.config) else None


def _with_lora(net: Any, lora: LoraConfig, name: str, frozen: int) -> Any:
    """Add adapters above the `frozen` lower layers."""
    import peft

    body = net.base_model_prefix
    head = [part for part, child in net.named_children() if part != body and any(True for _ in child.parameters())]
    causal = decoder_only(net.config) and net.get_output_embeddings() is not None
    writes = net.config.is_encoder_decoder or causal
    left_out = [] if writes else [part for part in _linear_names(net) if part.split(".")[0] in head]
    left_out += _below(net, frozen)
    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets: Any = lora.targets or known.get(net.config.model_type) or "all-linear"
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=left_out or None,
        modules_to_save=None if writes else head,
        task_type="CAUSAL_LM" if causal else "SEQ_2_SEQ_LM" if writes else "SEQ_CLS",
    )
    try:
        return peft.get_peft_model(net, settings)
    except ValueError as error:
        inside = sorted({part.rsplit(".", 1)[-1] for part in _linear_names(net)})
        raise ModelError(f"model {name}: lora.targets = {targets} fits no layer; linear layers: {inside}") from error


def _below(net: Any, frozen: int) -> list[str]:
    """The names of all modules in the frozen lower layers."""
    if not frozen:
        return []
    owner, attribute = layer_list(net.get_encoder() if net.config.is_encoder_decoder else net.base_model, "freeze")
    layers = getattr(owner, attribute)
    inside = {id(module) for layer in layers[:frozen] for module in layer.modules()}
    return [name for name, module in net.named_modules() if id(module) in inside]


def _linear_names(net: nn.Module) -> list[str]:
    return [part for part, child in net.named_modules() if isinstance(child, nn.Linear)]
