"""What a completion answers, without the thoughts before it: the one place that all rewards have it from.

The answer is what stands behind the last thought; a thought that never ended leaves none. A tokenizer's own
`response_template` says where thoughts are; for the many that have none, these marks do.
"""

import re
from collections.abc import Sequence
from typing import Any

# Begin and end of a thought, as templates and model cards have them.
MARKS = (
    (r"<think>", r"</think>"),  # DeepSeek, Qwen, GLM, Nemotron, SmolLM3, Olmo, Phi, MiniMax
    (r"<thinking>", r"</thinking>"),
    (r"<thought>", r"</thought>"),  # EXAONE Deep
    (r"<reasoning>", r"</reasoning>"),  # the customary prompt of GRPO on GSM8K
    (r"<seed:think>", r"</seed:think>"),  # Seed-OSS
    (r"\[THINK\]", r"\[/THINK\]"),  # Mistral
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Cohere
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # OpenThinker, Sky-T1
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    (r"<\|channel>thought", r"<channel\|>"),  # Gemma 4
    (r"◁think▷", r"◁/think▷"),  # Kimi
    # Harmony (gpt-oss): whatever is not in the final channel is no answer.
    (r"<\|channel\|>(?:analysis|commentary)[^<]*<\|message\|>", r"<\|channel\|>final[^<]*<\|message\|>"),
)
OPENING = "|".join(opening for opening, _ in MARKS)
CLOSING = "|".join(closing for _, closing in MARKS)
# A mark in quotation marks is spoken of, and marks nothing.
MARK = re.compile(rf"(?<![`\"'])(?:(?P<opening>{OPENING})|(?:{CLOSING}))(?![`\"'])")
ENDS_OPEN = re.compile(rf"(?:{OPENING})\s*\Z")
PROMPT_TAIL_TOKENS = 32  # in which a template's opening of a thought lies, if it opens one


def opens_thought(prompt: str) -> bool:
    """Whether the prompt ends in an opened thought, in which a completion then begins."""
    return ENDS_OPEN.search(prompt[-256:]) is not None


def behind_thoughts(text: str, opened: bool = False) -> str:
    """What stands behind the last thought; "" where it has no end. opened: the text begins inside a thought."""
    *_, last = [None, *MARK.finditer(text)]
    if last is None:
        return "" if opened else text
    return "" if last["opening"] else text[last.end() :]


def read_answers(
    tokenizer: Any, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
) -> list[str]:
    """The answers of these completions, as text without special tokens.

    From token ids, since marks may be special tokens, which texts of completions are without, and since a template may
    open the thought in the prompt.
    """
    return [_read_answer(tokenizer, *ids) for ids in zip(prompt_ids, completion_ids, strict=True)]


def _read_answer(tokenizer: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
    ids = list(completion_ids)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    opened = opens_thought(tokenizer.decode(list(prompt_ids)[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False))
    if getattr(tokenizer, "response_template", None) is not None:
        try:
            message = tokenizer.parse_response(ids, prefix=list(prompt_ids))
        except (ValueError, TypeError):  # a response that is malformed in another way, as in a call of a tool
            pass
        else:
            content = message.get("content")
            return _without_special_tokens(tokenizer, behind_thoughts(content if isinstance(content, str) else ""))
    if not opened and MARK.search(text) is None:
        return tokenizer.decode(ids, skip_special_tokens=True)
    return _without_special_tokens(tokenizer, behind_thoughts(text, opened))


def _without_special_tokens(tokenizer: Any, text: str) -> str:
    tokens = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, tokens)), "", text) if tokens else text
