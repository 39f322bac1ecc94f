"""Tokenizers of several kinds, trained here, and tiny models that have learned one text in each."""

import functools
import json

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from models.target.model import Target
from models.target.tiny import make_tiny_target

ENGLISH = "The cat sat on the mat. The cats were sitting there, and then the other cat went to the matting. "
KOREAN = "고양이가 매트 위에 앉았다. 고양이는 거기에 있었다. "
EMOJI = "I like 🙂 and 👩‍👩‍👧 and 🇰🇷 too! "
CODE = "def f(x):\n\tif x:\n\t\treturn  x + 1\n\treturn None\n"
CORPUS = [ENGLISH, KOREAN, EMOJI, CODE]
TEXT = ENGLISH[:45] + KOREAN[:18] + EMOJI[:12] + CODE[:38]
END = "<|end|>"
KINDS = ("bytes", "byte_bpe", "wordpiece", "unigram", "fallback_bpe")


def wrap(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, **special)


@functools.cache
def make_tokenizer(kind: str, vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """bytes and byte_bpe are byte-level; fallback_bpe writes unknown characters as byte tokens, with a BOS before."""
    if kind in ("bytes", "byte_bpe"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(
            CORPUS * 4,
            trainers.BpeTrainer(
                vocab_size=257 if kind == "bytes" else vocab_size,
                special_tokens=[END],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        return wrap(backend)
    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", END], show_progress=False)
        backend.train_from_iterator(CORPUS * 4, trainer)
        return wrap(backend, unk_token="[UNK]")
    if kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
        )
        backend.train_from_iterator([ENGLISH, CODE] * 4, trainer)  # lacks Korean and emoji
        return wrap(backend, unk_token="<unk>")
    return _fallback_bpe()


def _fallback_bpe() -> PreTrainedTokenizerFast:
    """As Gemma's: spaces are "▁", unknown characters bytes, every text begins with a BOS."""
    special = ["<unk>", "<s>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, max_token_length=8, show_progress=False)
    learned.train_from_iterator([ENGLISH, CODE] * 4, trainer)
    settings = json.loads(learned.to_str())
    settings["model"]["byte_fallback"] = True
    settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(settings))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrap(backend, unk_token="<unk>", bos_token="<s>")


def make_model(kind: str, seed: int = 0, **overrides: object) -> Target:
    """A random tiny model with this tokenizer; its output head has five rows more than there are tokens."""
    tokenizer = make_tokenizer(kind)
    size = max(tokenizer.get_vocab().values()) + 6
    eos = tokenizer.eos_token_id
    tiny = make_tiny_target(seed, vocab_size=size, eos_token_id=eos, **overrides)
    return Target(tiny.model, tokenizer, kind)


@functools.cache
def make_trained_model(kind: str, seed: int = 0, num_steps: int = 50) -> Target:
    """A tiny model that has learned TEXT by heart, closed by its EOS, from any of its first places on."""
    model = make_model(kind, seed, hidden_size=64, num_hidden_layers=2)
    return _fit(model, TEXT, num_steps)


def _fit(model: Target, text: str, num_steps: int) -> Target:
    """Trained, in place, on one text closed by its EOS."""
    ids_1T = torch.tensor([[*model.tokenizer.encode(text), model.tokenizer.eos_token_id]])
    model.model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        loss = model.model(input_ids=ids_1T, labels=ids_1T).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.model.eval().requires_grad_(False)
    return model


# A world small enough to list: texts of the letters a, b, c and spaces, cut in other places by either side.
TOY_TARGET = [END, "a", "b", "c", "Ġ", "ab", "bc", "abc", "ca", "Ġa", "aa", "cc"]
TOY_TARGET_MERGES = [("a", "b"), ("ab", "c"), ("b", "c"), ("c", "a"), ("Ġ", "a"), ("a", "a"), ("c", "c")]
TOY_DRAFT = ["d", "Ġ", "c", "b", "a", END, "ba", "cb"]
TOY_DRAFT_MERGES = [("b", "a"), ("c", "b")]


TOY_TEXT = "abcab ca bc aa cab acc b abc ab abca cc"
TOY_STEPS = 40  # both models agree often and not always


@functools.cache
def _toy_tokenizer(is_target: bool) -> PreTrainedTokenizerFast:
    tokens, merges = (TOY_TARGET, TOY_TARGET_MERGES) if is_target else (TOY_DRAFT, TOY_DRAFT_MERGES)
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


@functools.cache
def make_toy_target(seed: int = 3) -> Target:
    """A model of the 12 tokens TOY_TARGET that has seen a little of TOY_TEXT; its EOS is token 0."""
    tiny = make_tiny_target(seed, vocab_size=12, eos_token_id=0)
    return _fit(Target(tiny.model, _toy_tokenizer(True), "toy target"), TOY_TEXT, TOY_STEPS)


def make_toy_draft(seed: int = 4, **overrides: object) -> Target:
    """A model of the 8 tokens TOY_DRAFT, smaller, with two rows of padding, of the same text; its EOS is token 5."""
    settings = {"num_hidden_layers": 2, "hidden_size": 16, **overrides}
    tiny = make_tiny_target(seed, vocab_size=10, eos_token_id=5, **settings)
    return _fit(Target(tiny.model, _toy_tokenizer(False), "toy draft"), TOY_TEXT, TOY_STEPS)
