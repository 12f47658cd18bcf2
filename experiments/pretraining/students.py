"""The small models before they learn: tokenizers made from the texts, bodies of four families, warm word vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from fedstill.common.models.builtin import TOKENIZERS, minilm_folder
from fedstill.common.randomness import seeded

VOCABULARY = 7000
WIDTH, LAYERS, HEADS = 192, 3, 6
POSITIONS = 256
# Standard deviation of the word vectors at the start. The usual 0.02 would be gone after twenty steps of 0.001.
SPREAD = {"bert": 0.2, "roberta": 0.2, "xlnet": 0.2, "t5": 1.0}
_ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {**_ENCODER, "max_position_embeddings": POSITIONS},
    "roberta": {**_ENCODER, "max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1},
    "xlnet": {"d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 4 * WIDTH},
    "t5": {
        "d_model": WIDTH,
        "d_kv": WIDTH // HEADS,
        "d_ff": 4 * WIDTH,
        "num_layers": LAYERS,
        "num_decoder_layers": 2,
        "num_heads": HEADS,
        "decoder_start_token_id": 0,
    },
}
# A text-to-text model scores a class by its word, which should be one piece of the vocabulary.
LABEL_WORDS = [
    "negative", "positive", "neutral", "good", "bad", "great", "terrible", "yes", "no", "maybe", "true", "false",
    "entailment", "contradiction", "different", "same", "equivalent", "duplicate", "paraphrase", "acceptable",
    "unacceptable", "world", "sports", "business", "science", "technology", "politics", "joy", "anger", "sadness",
    "fear", "disgust", "surprise", "happiness", "love", "very", "somewhat", "question", "answer", "related",
    "unrelated", "high", "medium", "low", "toxic", "normal", "spam", "correct", "incorrect", "not",
]  # fmt: skip


def make_tokenizer(family: str, texts: Sequence[str]) -> Any:
    """The family's tokenizer for these texts; all of them read small letters only, so that few pieces go far."""
    lowered = [text.lower() for text in texts] + LABEL_WORDS * 100
    size = VOCABULARY - 1 if family == "t5" else VOCABULARY  # one is left for the mark of a missing word
    made = TOKENIZERS[family](lowered, size)
    if family in ("bert", "xlnet"):
        made.model_max_length = POSITIONS if family == "bert" else 512
        return made
    backend = made.backend_tokenizer
    backend.normalizer = normalizers.Lowercase()
    if family == "roberta":  # the first word of a text is the piece that it is elsewhere
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    names = {**made.special_tokens_map, "mask_token": "<mask>"}
    # Not of the family's own class: that would build its parts anew on loading, and forget the small letters.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=POSITIONS if family == "roberta" else 512,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def untrained(family: str, tokenizer: Any, seed: int) -> Any:
    """A body of the family with random layers."""
    numbers = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for role in ("bos_token_id", "eos_token_id"):
        if getattr(tokenizer, role) is not None:
            numbers[role] = getattr(tokenizer, role)
    config = AutoConfig.for_model(family, **{**ARCHITECTURES[family], **numbers})
    with seeded(seed):
        if family == "t5":
            return AutoModelForSeq2SeqLM.from_config(config)
        extra = {"add_pooling_layer": False} if family in ("bert", "roberta") else {}
        return AutoModel.from_config(config, **extra)


def make_student(family: str, texts: Sequence[str], seed: int, telling: Tensor) -> tuple[Any, Any]:
    """Body and tokenizer; the word vectors are MiniLM's, projected by `telling` (384 x width), the layers random."""
    tokenizer = make_tokenizer(family, texts)
    net = untrained(family, tokenizer, seed)
    known, rows = _minilm_vectors(tokenizer)
    own = net.get_input_embeddings().weight
    projected = (known - known[rows].mean(dim=0)) @ telling
    with torch.no_grad():
        own.mul_(SPREAD[family] / own.std())  # the special tokens too: beside a faint one, its position would be all
        own[rows] = (projected * (SPREAD[family] / projected[rows].std()))[rows]
        if family == "t5":  # its layers begin loud, and would hide the words from those above; the others' begin softly
            for name, value in net.named_parameters():
                if name.endswith((".o.weight", ".wo.weight")):
                    value.mul_(0.2)
    return net, tokenizer


def _minilm_vectors(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """What MiniLM's first layer would read for the letters of every piece, and which pieces have letters."""
    words = AutoTokenizer.from_pretrained(minilm_folder())
    embed = AutoModel.from_pretrained(minilm_folder()).embeddings.eval()
    found, rows = torch.zeros(len(tokenizer), 384), torch.zeros(len(tokenizer), dtype=torch.bool)
    for token, number in tokenizer.get_vocab().items():
        letters = tokenizer.convert_tokens_to_string([token]).replace("▁", "").removeprefix("##").strip()
        pieces = [] if number in tokenizer.all_special_ids else words(letters, add_special_tokens=False)["input_ids"]
        if pieces:
            middle = torch.arange(len(pieces))[None] + 8  # of a text: its ends have vectors of their own
            with torch.inference_mode():
                found[number] = embed(input_ids=torch.tensor([pieces]), position_ids=middle)[0].mean(dim=0)
            rows[number] = True
    return found, rows
