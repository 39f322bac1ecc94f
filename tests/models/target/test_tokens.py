"""Tokens beyond a model's embeddings: refused where every prompt has one, named where a text does, else no matter."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.decoding.decoder import Decoder
from models.drafters.model import load_draft
from models.target.model import Target, TargetOptions, load_target
from models.target.tiny import CHAT_TEMPLATE, TINY_VOCAB, make_tiny_target, make_tiny_tokenizer
from models.target.tokens import num_usable, require_known, require_rows
from train.data.examples import require_known_tokens
from train.data.prompts import Example

# The tiny tokenizer has 259 tokens and the tiny model 264 rows: <x0> to <x4> fit, <x5> has id 264.
FREE = TINY_VOCAB - 259
BEYOND = f"<x{FREE}>"


def options(folder: Path) -> TargetOptions:
    return TargetOptions(name=str(folder), dtype="float32", device="cpu")


def save(folder: Path, num_added: int, change: Callable[[Any, Any], object] = lambda tokenizer, model: None) -> Path:
    """A tiny model whose tokenizer was given more tokens, without resizing the embeddings."""
    target = make_tiny_target(seed=1)
    target.tokenizer.add_tokens([f"<x{index}>" for index in range(num_added)])
    change(target.tokenizer, target.model)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """As Gemma 3 of 1B is published: one token beyond the rows, which no text has by itself."""
    return load_target(options(save(tmp_path_factory.mktemp("image") / "model", FREE + 1)))


@pytest.mark.parametrize("num_added", [0, 1, FREE])
def test_fewer_tokens_than_rows_are_usual(num_added: int, tmp_path: Path) -> None:
    target = load_target(options(save(tmp_path, num_added)))
    assert target.num_usable == TINY_VOCAB
    assert not target.model.get_input_embeddings()._forward_pre_hooks, "nothing to look for"
    assert target.num_tokens == 259 + num_added


def test_a_token_that_no_text_has_does_no_harm(image: Target, tmp_path: Path) -> None:
    """It is never emitted, and everything else decodes as without it."""
    plain = load_target(options(save(tmp_path, FREE)))
    prompt = plain.tokenizer("hello")["input_ids"]
    assert Decoder(image).generate([prompt])[0].tokens == Decoder(plain).generate([prompt])[0].tokens
    assert image.num_tokens == TINY_VOCAB


@pytest.mark.parametrize("where", ["pass", "embed", "decoder", "training"])
def test_a_text_with_it_names_it(where: str, image: Target) -> None:
    """Instead of an IndexError, or on a GPU an assertion of the device."""
    ids = image.tokenizer(f"a {BEYOND} b")["input_ids"]
    assert max(ids) == TINY_VOCAB
    example = Example("7", "chat", "train", ids, [True] * len(ids))
    read = {
        "pass": lambda: image.hidden(torch.tensor([ids])),
        "embed": lambda: image.embed(torch.tensor(ids)),
        "decoder": lambda: Decoder(image).generate([[5], ids]),
        "training": lambda: require_known_tokens(image, [example]),
    }[where]
    with pytest.raises(ValueError, match=rf"id {TINY_VOCAB} \('{BEYOND}'\)") as error:
        read()
    assert "\n" not in str(error.value)
    assert {"decoder": "prompt 1 has", "training": "example '7' has"}.get(where, "the text has") in str(error.value)


def set_special(name: str, token: str) -> Callable[[Any, Any], object]:
    return lambda tokenizer, model: setattr(tokenizer, name, token)


def set_template(text: str) -> Callable[[Any, Any], object]:
    return lambda tokenizer, model: setattr(tokenizer, "chat_template", text)


REFUSED: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "eos": (set_special("eos_token", BEYOND), r"eos_token_id of its tokenizer is id 264 \('<x5>'\)"),
    "pad": (set_special("pad_token", BEYOND), r"pad_token_id of its tokenizer is id 264 \('<x5>'\)"),
    "bos": (set_special("bos_token", BEYOND), r"bos_token_id of its tokenizer is id 264 \('<x5>'\)"),
    "template": (set_template(CHAT_TEMPLATE.replace("<|start|>", BEYOND)), r"writes every prompt with id 264 \('<x5>'"),
    "end of turns": (set_template(CHAT_TEMPLATE.replace("<|end|>", BEYOND)), r"writes every prompt with id 264"),
    "generation prompt": (
        set_template(CHAT_TEMPLATE.replace("assistant", BEYOND)), r"writes every prompt with id 264 \('<x5>'\)",
    ),
    "of assistants": (
        set_template(CHAT_TEMPLATE.replace("{{ message['role'] }}", f"{{{{ '{BEYOND}' if message.role[0] == 'a' }}}}")),
        "writes every prompt with id 264",
    ),
    "without system turns": (
        set_template("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + BEYOND),
        "writes every prompt with id 264",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_every_prompt_needs_is_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        load_target(options(save(tmp_path, FREE + 1, change)))
    assert "\n" not in str(error.value)
    assert f"have {TINY_VOCAB} rows" in str(error.value)


@pytest.mark.parametrize("num_added", [0, FREE + 1])
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("eos_token_id", 264, 264), ("eos_token_id", [2, 264], 264), ("eos_token_id", [100_000, 2], 100_000),
     ("eos_token_id", -1, -1), ("pad_token_id", 264, 264), ("bos_token_id", 264, 264)],
)  # fmt: skip
def test_ids_of_the_generation_config(name: str, value: object, told: int, num_added: int, tmp_path: Path) -> None:
    """Written into the file: transformers itself would not save some of them."""
    folder = save(tmp_path, num_added)
    written = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(written | {name: value}))
    with pytest.raises(
        ValueError, match=rf"{name} of its generation_config\.json is id {told}\b.*have {TINY_VOCAB} rows"
    ):
        load_target(options(folder))


def test_a_pad_of_minus_one_is_none(tmp_path: Path) -> None:
    """As Llama's first configs have it."""
    folder = save(tmp_path, FREE + 1)
    written = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(written | {"pad_token_id": -1}))
    assert load_target(options(folder)).num_usable == TINY_VOCAB


def test_a_template_that_needs_more_than_a_chat(tmp_path: Path) -> None:
    """What it says of plain turns is for whoever renders some; loading goes on."""
    folder = save(tmp_path, FREE + 1, set_template("{{ raise_exception('documents are needed') }}"))
    assert load_target(options(folder)).num_usable == TINY_VOCAB


def test_draft_models_are_looked_at_too(tmp_path: Path) -> None:
    target = make_tiny_target()
    folder = save(tmp_path, FREE + 1, set_special("eos_token", BEYOND))
    with pytest.raises(ValueError, match="eos_token_id of its tokenizer is id 264"):
        load_draft(replace(options(folder), draft=str(folder)), target)


def test_the_smaller_of_both_ends_counts() -> None:
    """A token that can be read and not written would be no label."""
    model = make_tiny_target(family="qwen3").model
    assert num_usable(model) == TINY_VOCAB
    model.set_output_embeddings(torch.nn.Linear(32, 200, bias=False))
    assert num_usable(model) == 200
    with pytest.raises(ValueError, match="have 200 rows"):
        require_rows(model, make_tiny_tokenizer(), "x")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(-3, TINY_VOCAB + 5), min_size=1, max_size=8))
def test_every_id_out_of_range_is_named(ids: list[int], image: Target) -> None:
    beyond = sorted({id for id in ids if not 0 <= id < TINY_VOCAB})
    if not beyond:
        require_known(image.tokenizer, ids, image.num_usable, "it")
        image.hidden(torch.tensor([ids]))
        return
    with pytest.raises(ValueError, match=r"^it has id ") as error:
        require_known(image.tokenizer, ids, image.num_usable, "it")
    for id in beyond[:3]:
        assert re.search(rf"[ ,]{id}\b", str(error.value))
    assert ("more" in str(error.value)) == (len(beyond) > 3)
