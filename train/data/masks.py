"""Chat rendering to token ids, and the mask that says which of them are the assistant's own.

A model generates what follows the generation prompt, up to and including the token that ends its turn; exactly this is
supervised. Where a template has `{% generation %}` markers, they decide. Where it has none, an answer is found in the
full rendering by rendering the conversation once more with a marker in the answer's place: what follows the marker
must end the full rendering too, whatever the template does to other turns (strip thinking, move the system text).
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from models.text_files import find_surrogate
from train.data.template_kwargs import check_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands in for an answer: letters alone, so that no template trims, splits or escapes it.
PLACEHOLDER = "qzANSWERzq"
SHOWN = 40


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The chat template's rendering.

    Errors: ValueError without a template, for kwargs that it does not know, or when it refuses a turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so it takes raw text alone: use "
            "data=stdlib, or an instruction-tuned model"
        )
    if kwargs:
        check_kwargs(tokenizer, kwargs)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **(kwargs or {})
        )
    except Exception as error:  # a template is a program: it may fail in any way, beside those of Jinja
        raise _refusal(tokenizer, messages, error) from error
    assert isinstance(text, str)
    if find_surrogate(text) is not None:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} renders half of a character (a lone surrogate) for "
            f"{_shown(messages)}, which no tokenizer takes; write the whole character"
        )
    return text


def _refusal(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], error: Exception) -> ValueError:
    roles = ", ".join(message["role"] for message in messages)
    hint = "put the system text into the first user turn" if "system" in roles else "check the order of the turns"
    # Of Jinja's own errors the text says enough.
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return ValueError(
        f"the chat template of {tokenizer.name_or_path!r} refuses a conversation of the turns {roles} "
        f"({_shown(messages)}): {kind}{' '.join(str(error).split())}; {hint}"
    )


def _shown(messages: Sequence[Message]) -> str:
    """The beginning of the last turn, by which its conversation is found."""
    content = messages[-1]["content"] if messages else ""
    return repr(content if len(content) <= SHOWN else content[:SHOWN] + "...")


def render_ids(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the rendering. The template writes special tokens itself, so the tokenizer must add none."""
    text = render_text(tokenizer, messages, add_generation_prompt, kwargs)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def mask_answers(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a conversation: True for the tokens of every assistant turn and of the token that ends it.

    Errors: ValueError for a mask that is all zeros or all ones, for a template in which an answer cannot be found, and
    for the errors of `render_text`.
    """
    template = tokenizer.get_chat_template(tools=(kwargs or {}).get("tools")) if tokenizer.chat_template else ""
    if GENERATION_MARKER.search(template):
        ids, mask = _mask_by_markers(tokenizer, messages, kwargs)
    else:
        ids, mask = _mask_by_placeholder(tokenizer, messages, kwargs)
    if all(mask) or not any(mask):
        kind = "every token" if all(mask) and mask else "no token"
        raise ValueError(
            f"the loss mask of a conversation covers {kind} of {len(mask)}; its turns are "
            f"{', '.join(message['role'] for message in messages)}. It needs a user turn and an answer with text"
        )
    return ids, mask


def _mask_by_markers(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], kwargs: Mapping[str, Any] | None
) -> tuple[list[int], list[bool]]:
    render_text(tokenizer, messages, False, kwargs)  # for its errors
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **(kwargs or {})
    )
    return list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]


def _mask_by_placeholder(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], kwargs: Mapping[str, Any] | None
) -> tuple[list[int], list[bool]]:
    full = render_text(tokenizer, messages, False, kwargs)
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} gives no character offsets, and its template has no "
            "generation markers: have the target answer the prompts instead (python -m train.regenerate)"
        )
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special = special_ids(tokenizer)
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = _answer_span(tokenizer, messages, index, full, kwargs)
        # A token that reaches over the answer's edge is not the answer's alone and stays out.
        inside = [i for i, (left, right) in enumerate(offsets) if start <= left < right <= end]
        for i in inside:
            mask[i] = True
        for i in _end_of_turn(ids, offsets, full, end, special):
            mask[i] = True
    return ids, mask


def _answer_span(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    index: int,
    full: str,
    kwargs: Mapping[str, Any] | None,
) -> tuple[int, int]:
    """Characters [start, end) of the answer in the full rendering, without what ends the turn."""
    replaced = [*messages[:index], {**messages[index], "content": PLACEHOLDER}, *messages[index + 1 :]]
    before, _, after = render_text(tokenizer, replaced, False, kwargs).partition(PLACEHOLDER)
    prompt = render_text(tokenizer, messages[:index], True, kwargs)
    # What follows the generation prompt is generated, a thinking block included. If the generation prompt is no prefix
    # (it opens a thinking block that the template leaves out of earlier turns), the answer starts at the placeholder.
    start = next((len(text) for text in (prompt, before) if full.startswith(text)), None)
    end = len(full) - len(after)
    if start is None or end < start or not full.endswith(after):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} renders turn {index} (assistant) in a way that "
            "depends on its text, so its tokens cannot be told from the template's own; add {% generation %} markers "
            "to the template, or have the target answer the prompts (python -m train.regenerate)"
        )
    return start, end


def _end_of_turn(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], full: str, end: int, special: frozenset[int]
) -> list[int]:
    """Indices of the special token that follows the answer's end, and of blanks between; none if other text follows."""
    found = []
    for i, (left, right) in enumerate(offsets):
        if left < end:
            continue
        found.append(i)
        if ids[i] in special:
            return found
        if full[left:right].strip():
            return []
    return []


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Ids of all special tokens, those of the chat template (such as an end of turn) included."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])
