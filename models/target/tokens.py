"""Whether a tokenizer's ids have rows in the model's embeddings, looked at once, when the model is loaded.

Fewer tokens than rows are usual: embeddings are padded. A token beyond the rows (added without resizing them) has no
meaning to the model. Published models have such tokens that text alone does not hold (Gemma 3's <image_soft_token>), so
a model is refused where one is needed for chat text or as its bos, eos or pad, and otherwise the token is named when it
comes: training and decoding look at their texts first, and the guard below sees all that the model reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_NAMED = 3
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Plain chats, as templates take them: with and without a system turn, which some refuse.
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
CHATS = ([USER, ANSWER, USER], [{"role": "system", "content": "a"}, USER, ANSWER, USER])


def num_usable(model: PreTrainedModel) -> int:
    """Ids below this have a row both where the model reads and where it writes."""
    rows = [model.get_input_embeddings().weight.shape[0]]
    head = model.get_output_embeddings()
    return int(min(rows if head is None else [*rows, head.weight.shape[0]]))


def require_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """ValueError where special tokens or chats need ids beyond the model's rows; else guard it against the others."""
    rows = num_usable(model)
    beyond = {id: token for token, id in tokenizer.get_vocab().items() if id >= rows}
    for source, where in ((tokenizer, "tokenizer"), (model.generation_config, "generation_config.json")):
        for option in SPECIAL:
            for id in _ids(getattr(source, option, None)):
                # Some configs say -1 for no padding, and never read it.
                if id >= rows or (id < 0 and option == "eos_token_id"):
                    raise ValueError(
                        f"model {name!r}: {option} of its {where} is {named([id], beyond)}, and its embeddings have "
                        f"{rows} rows; resize them (model.resize_token_embeddings(len(tokenizer)), train, "
                        f"save_pretrained), or set a {option.removesuffix('_id')} that they have"
                    )
    if not beyond:
        return
    if found := [id for id in _chat_ids(tokenizer) if id >= rows]:
        raise ValueError(
            f"model {name!r}: its tokenizer writes every prompt with {named(found, beyond)}, and its embeddings have "
            f"{rows} rows; resize them (model.resize_token_embeddings(len(tokenizer)), train, save_pretrained), or "
            "give the tokenizer and chat template that belong to the model"
        )
    _guard(model.get_input_embeddings(), rows, beyond, name)


def require_known(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], limit: int, where: str) -> None:
    """ValueError that names the tokens of a text (where: which one) that are not below the limit."""
    if beyond := {id for id in ids if not 0 <= id < limit}:
        tokens = {id: token for token, id in tokenizer.get_vocab().items() if id in beyond}
        raise ValueError(
            f"{where} has {named(beyond, tokens)}: the model's ids are 0 to {limit - 1}; take the token out of the "
            "text, or resize the model's embeddings and train them"
        )


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(id) for id in value] if isinstance(value, (list, tuple)) else [int(value)]


def named(ids: Iterable[int], tokens: Mapping[int, str]) -> str:
    """The ids with their tokens, for a message."""
    distinct = sorted(set(ids))
    texts = [f"{id} ({tokens[id]!r})" if id in tokens else str(id) for id in distinct]
    return "id " + ", ".join(texts[:NUM_NAMED]) + (f" and {len(texts) - NUM_NAMED} more" if texts[NUM_NAMED:] else "")


def _chat_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of plain text and plain chats, with all that the tokenizer and its template add by themselves."""
    ids = list(tokenizer("a")["input_ids"])
    for chat in CHATS if tokenizer.chat_template else ():
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError):
            continue  # whoever renders a conversation that it refuses is told then
        ids += tokenizer(str(text), add_special_tokens=False)["input_ids"]
    return ids


def _guard(embeddings: nn.Module, rows: int, beyond: dict[int, str], name: str) -> None:
    """Have every pass compare its ids: only models with tokens beyond their rows pay for it."""

    def check(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args and bool((args[0] >= rows).any()):
            found = named(args[0][args[0] >= rows].tolist(), beyond)
            raise ValueError(
                f"the text has a token that model {name!r} has no embedding for: {found}, of {rows} rows; take it out "
                "of the text, or resize the embeddings and train them"
            )

    embeddings.register_forward_pre_hook(check)
