"""Every key of a model and of how it trains."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedstill.common.config.section import Section

Precision = Literal[
    "auto", "float32", "bfloat16", "float64"
]  # float64: to separate a method's mathematics from rounding


class LoraConfig(Section):
    """Train low-rank adapters instead of the whole model (peft)."""

    r: int = Field(8, ge=1)  # rank of the adapters
    alpha: int = Field(16, ge=1)  # their scale is alpha / r
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout on the adapters' input
    # names of the layers that get adapters; by default peft's for this family, else all linear layers
    targets: list[str] | None = None


class ModelConfig(Section):
    """What `load_model` needs to know about a model."""

    name: str
    max_length: int = Field(64, ge=4)
    keep: Literal["start", "end"] = "start"
    lora: LoraConfig | Literal[False] | None = None
    freeze: Literal["encoder"] | int | None = None
    head: Literal["linear", "mlp"] | None = None
    pooling: Literal["mean", "first", "last"] | None = None
    cache_mb: int = 4096
    answer: Literal["words", "head"] | None = None
    quantize: Literal["4bit"] | None = None
    keep_head: bool = False
    precision: Precision = "auto"
    attention: Literal["sdpa", "eager"] | None = None
    recompute: bool = False
    compile: bool = False
    device: str | list[str] = "auto"


class TrainConfig(Section):
    """How every learner of the run trains, unless a site or the central model says otherwise."""

    # by default the model's own: 1e-3 for untrained models, 3e-4 for small, 1e-4 for medium, 2e-5 for base ones; T5 and
    # central models up to medium size take more (docs/MODELS.md)
    learning_rate: float | None = Field(None, gt=0)
    batch_size: int = Field(32, ge=1)  # texts per step
    max_length: int = Field(128, ge=4)  # tokens per text; longer texts are cut
    keep: Literal["start", "end"] = "start"  # the part of a longer text to keep: long reviews end with the verdict
    weight_decay: float = Field(0.0, ge=0)  # of AdamW
    epoch_steps: int | None = Field(None, ge=1)  # steps in a local epoch, instead of one pass
    clip: float | None = Field(None, gt=0)  # the norm to which each gradient is clipped
    # share of a falling schedule spent on warm-up; by default none, or the model's own where it brings its rate as well
    warmup: float | None = Field(None, ge=0, lt=1)
    # its last part, in which the rate falls; by default all of it, or the model's own where it brings its rate as well
    fall: float | None = Field(None, gt=0, le=1)


class LearnerConfig(Section):
    """One model: the central one or a site's. Empty values come from [train]."""

    model: str = "tiny-bert"  # a built-in name (`fedstill models`), an AutoModel name, or a folder
    learning_rate: float | None = Field(None, gt=0)  # of local training; by default train.learning_rate
    distill_rate: float | None = Field(None, gt=0)  # of distillation; by default the learning rate, or the model's own
    batch_size: int | None = Field(None, ge=1)  # by default train.batch_size
    max_length: int | None = Field(None, ge=4)  # by default train.max_length
    # train adapters instead of the whole model; by default decoder-only models from 100 M parameters do; false: never
    lora: LoraConfig | Literal[False] | None = None
    # layers that are not trained and run once a text: "encoder" for all, or how many from below
    freeze: Literal["encoder"] | Annotated[int, Field(ge=1)] | None = None
    head: Literal["linear", "mlp"] | None = None  # of a frozen encoder; linear by default, mlp has one hidden layer
    # what the head of a frozen encoder reads: the tokens' mean, or one token; by default mean, last for decoder-only
    pooling: Literal["mean", "first", "last"] | None = None
    # how much of the disk cached features may take, of all models on this machine; 0: compute them on every pass
    cache_mb: int = Field(4096, ge=0)
    # of decoder-only models: score the label words after the prompt (by default), or a head on the last token
    answer: Literal["words", "head"] | None = None
    quantize: Literal["4bit"] | None = None  # load the weights in 4 bits (bitsandbytes, CUDA only) and train adapters
    keep_head: bool = False  # use the classifier of a checkpoint that has one, instead of a new one
    # `cpu`, `cuda:1` ...; auto: a GPU if there is one. For a model that one device cannot hold, a list, over which its
    # layers are spread in order, or `all` CUDA devices
    device: str | Annotated[list[str], Field(min_length=1)] = "auto"
    # of the forward pass; auto: bfloat16 where the GPU has it
    precision: Precision = "auto"
    # sdpa: torch's fused attention, flash where the GPU has it; eager: plain; by default transformers' choice
    attention: Literal["sdpa", "eager"] | None = None
    recompute: bool = False  # compute activations again in the backward pass instead of keeping them: for large models
    # torch.compile: the model's passes as machine code, made at the first batches, for minutes; needs g++ or clang
    compile: bool = False
    # parts into which each batch of local training and distillation is cut: the same step in less memory
    accumulate: int = Field(1, ge=1)
    threads: int | None = Field(None, ge=1)  # CPU threads of torch; by default torch's own choice

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        if self.compile and self.freeze is not None:
            raise ValueError("compile takes whole models, and freeze runs a part of one from a cache: take one out")
        if isinstance(self.device, list) and len(set(self.device)) < len(self.device):
            raise ValueError(f"device = {self.device} names one device twice: name each once")
        if self.device == "all" or (isinstance(self.device, list) and len(self.device) > 1):
            for key in ("compile", "quantize"):
                if getattr(self, key):
                    raise ValueError(f"{key} takes a model on one device: name one as device, or take {key} out")
        if self.freeze == "encoder":
            if self.lora:
                raise ValueError(
                    'freeze = "encoder" leaves no layer for LoRA: freeze a number of layers, or take lora out'
                )
            if self.recompute:
                raise ValueError('freeze = "encoder" has no backward pass through its layers: take recompute out')
            if self.answer is not None:
                raise ValueError('freeze = "encoder" answers by its head: take answer out')
        elif self.head is not None or self.pooling is not None:
            key = "head" if self.head is not None else "pooling"
            raise ValueError(f'{key} belongs to freeze = "encoder": set that, or take {key} out')
        if self.quantize is not None and self.freeze is None and not self.lora:
            raise ValueError('quantize = "4bit" keeps the weights as they are: add lora, so that something is trained')
        return self

    def model_settings(self, train: TrainConfig) -> ModelConfig:
        """Return the part of this section that defines the model."""
        return ModelConfig(
            name=self.model,
            max_length=self.max_length or train.max_length,
            keep=train.keep,
            lora=self.lora,
            freeze=self.freeze,
            head=self.head,
            pooling=self.pooling,
            cache_mb=self.cache_mb,
            answer=self.answer,
            quantize=self.quantize,
            keep_head=self.keep_head,
            precision=self.precision,
            attention=self.attention,
            recompute=self.recompute,
            compile=self.compile,
            device=self.device,
        )
