"""Tiny targets: the real classes, the same for the same seed, with text that is not one token repeated."""

import pytest
import torch

from models.decoding.reference import decode_plainly
from models.target.tiny import FAMILIES, SPECIAL_TOKENS, TINY_VOCAB, make_tiny_target, make_tiny_tokenizer
from tests.models.decoding.scripted import random_prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_decides_all_weights(family: str) -> None:
    """And nothing is taken from the global generator, nor is it moved."""
    torch.manual_seed(1)
    one = make_tiny_target(family=family).model.state_dict()
    torch.manual_seed(2)
    other = make_tiny_target(family=family).model.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    seeded = make_tiny_target(seed=1, family=family).model.state_dict()
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], seeded["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_is_of_its_family_and_tiny(family: str) -> None:
    target = make_tiny_target(family=family)
    assert target.config.model_type == family
    assert target.vocab_size == TINY_VOCAB
    assert sum(parameter.numel() for parameter in target.model.parameters()) < 100_000
    for prompt in random_prompts(4, longest=25):
        assert len(set(decode_plainly(target, prompt, 30, eos_token_ids=()))) > 5


def test_overrides_and_dtype() -> None:
    target = make_tiny_target(dtype="bfloat16", num_hidden_layers=1, vocab_size=300)
    assert (target.dtype, len(target.layers()), target.vocab_size) == (torch.bfloat16, 1, 300)


def test_unknown_family() -> None:
    with pytest.raises(ValueError, match=r"family='bert' is unknown; choose one of llama, mistral, qwen3, gemma2"):
        make_tiny_target(family="bert")


@pytest.mark.parametrize("text", ["plain text", "  spaces\n\ttabs ", "안녕하세요, 세계!", "naïve — “quotes” 🙂", ""])
def test_tokenizer_is_lossless(text: str) -> None:
    """A token a byte, and back."""
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer = make_tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert len(tokenizer) == 256 + len(SPECIAL_TOKENS)


def test_chat_template() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = make_tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>system\nS<|end|>\n<|start|>user\nU<|end|>\n<|start|>assistant\n"
