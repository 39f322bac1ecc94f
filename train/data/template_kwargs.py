"""What may be told to a chat template beside the turns: `data.chat_template_kwargs`, checked against the template."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from models.target.template import GENERATION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What every template is given: the turns, and functions.
GIVEN = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")
# Arguments of `apply_chat_template` that go on to the template; the others are this project's to set.
PASSED_ON = ("tools", "documents")


def check_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """ValueError for a name that the tokenizer's chat template does not know, or that is no matter of the template."""
    taken = [name for name in inspect.signature(tokenizer.apply_chat_template).parameters if name not in PASSED_ON]
    if set_elsewhere := sorted(set(kwargs) & {*taken, *GIVEN}):
        raise ValueError(
            f"chat_template_kwargs names {set_elsewhere[0]!r}, which is set for every prompt alike; leave it out"
        )
    known = known_names(tokenizer.get_chat_template(tools=kwargs.get("tools")))
    if unknown := sorted(map(str, set(kwargs) - known)):
        names = ", ".join(sorted(known - set(tokenizer.special_tokens_map))) or "none at all"
        raise ValueError(
            f"chat_template_kwargs names {unknown[0]!r}, which the chat template of {tokenizer.name_or_path!r} does "
            f"not know; it knows {names}"
        )


@lru_cache(maxsize=16)
def known_names(template: str) -> frozenset[str]:
    """The variables that a chat template reads and does not set itself."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the tokenizer's chat template is no Jinja (line {error.lineno}: {error.message})") from error
    return frozenset(jinja2.meta.find_undeclared_variables(parsed)) - {*GIVEN}


def parse_kwargs(words: Iterable[str], option: str) -> dict[str, Any]:
    """NAME=VALUE words, values as YAML has them. ValueError for a word of another form."""
    from omegaconf import OmegaConf

    words = list(words)
    if bad := [word for word in words if "=" not in word]:
        raise ValueError(f"{option} {bad[0]}: write NAME=VALUE, such as enable_thinking=false")
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    assert isinstance(parsed, dict)
    return {str(name): value for name, value in parsed.items()}
