"""Tiny random targets for tests and smoke runs: the real transformers classes with a few thousand weights."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from .model import DTYPES, Target

SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
TINY_VOCAB = 256 + len(SPECIAL_TOKENS) + 5
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Where the families differ in what matters here: tied heads, qk-norm, sliding layers, soft-capping, head_dim.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 16},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 24},
    "gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "head_dim": 24, "query_pre_attn_scalar": 24},
}


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges (one token a byte) and a small ChatML-like template."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_target(seed: int = 0, dtype: str = "float32", family: str = "llama", **overrides: Any) -> Target:
    """A random target of a real family: hidden 32, 3 layers, 4 heads over 2 key-value heads, 264 tokens.

    Weights are drawn wide enough that greedy text is not one token repeated, from a private generator.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **{**settings, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    # Gemma multiplies embeddings by sqrt(hidden size): undone here, and made up for in the final norm, since a tied
    # head would otherwise find each token's own embedding first of all, and repeat it.
    gain = config.hidden_size**0.5 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 / gain if "embed" in name or "lm_head" in name else 2.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight.shape[-1] ** 0.5)
        if gain != 1.0:
            model.get_decoder().norm.weight.fill_(gain - 1.0)  # its gain is 1 + weight
    model.tie_weights()
    return Target(model.to(DTYPES[dtype]), make_tiny_tokenizer(), "tiny")
