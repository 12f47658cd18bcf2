"""Decoder-only models of two layers, written into folders as save_pretrained does."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from fedstill.common.models.builtin import builtin_folder


def make_decoders(folder: Path) -> dict[str, str]:
    """A GPT-2 (tied head, no pad token), a Llama (own head) and a Qwen (shared keys, spare rows), 2 layers of 32."""
    trained = Tokenizer.from_file(str(builtin_folder("tiny-roberta")[0] / "tokenizer.json"))
    trained.post_processor = None
    size = trained.get_vocab_size()
    made = {}
    for config in (
        GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=2, eos_token_id=2),
        LlamaConfig(vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                    tie_word_embeddings=False),
        Qwen2Config(vocab_size=size + 8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, intermediate_size=64, tie_word_embeddings=True),
    ):  # fmt: skip
        target = folder / config.model_type
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(target)
        PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="</s>").save_pretrained(target)
        made[config.model_type] = str(target)
    return made
