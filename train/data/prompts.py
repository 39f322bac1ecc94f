"""Prompts from every source, and their rendering to token ids by the tokenizer's own chat template.

Owns the data options and the choice of source. The sources live in `train.data.sources`, loss masks in
`train.data.masks`; nothing here answers a prompt, which is the work of `train.regenerate`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.text_files import find_surrogate
from train.data.masks import mask_answers, render_ids
from train.data.sources import hub, instructions, jsonl, stdlib, stories
from train.data.sources.record import Message, Prompt, mix_by_task
from train.data.sources.seen import one_split_each

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DataOptions",
    "Example",
    "Prompt",
    "dedupe",
    "load_prompts",
    "render_asked",
    "render_example",
    "render_prompt",
]

SOURCES = ("instructions", "stories", "stdlib", *hub.KNOWN, "jsonl", "hub", "mixed")
LANGUAGES = ("en", "ko")


@dataclass
class DataOptions:
    """The `data` group of the configuration. Empty strings and lists mean "not set".

    source: where prompts come from, by the names of the group's files. dataset: name on the hub; for the known sets it
    and the columns override what is known. dataset_config: which of its configurations. dataset_split: which of its
    splits. prompt_column: the column of prompts. answer_column: the column of answers; without one there are none.
    max_prompts: so many of the shuffled prompts, all splits together; 0 for all. seed: of generated prompts and of the
    order. heldout_fraction: share of the prompts that is never trained on: half of it is for selection, half for the
    test. tasks: prompts of these tasks alone; empty for all. languages: en, ko or both, of generated prompts. sources:
    what `mixed` puts together, in proportion to their sizes.
    """

    source: str = "instructions"
    # A local JSONL (plain or compressed) or Parquet file or folder, read in place of the hub (gsm8k, mbpp, ...) or of
    # Python's own library (stdlib).
    path: str = ""
    dataset: str = ""
    dataset_config: str = ""
    dataset_split: str = ""
    # Read max_prompts rows of the hub's set as they come, instead of fetching all of it and drawing among all rows.
    streaming: bool = False
    prompt_column: str = ""
    answer_column: str = ""
    # The task of rows that name none (jsonl, hub).
    default_task: str = "chat"
    max_prompts: int = 0
    seed: int = 0
    heldout_fraction: float = 0.1
    tasks: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=lambda: ["en", "ko"])
    sources: list[str] = field(default_factory=list)
    # Passed to the chat template, for instance {enable_thinking: false}; what the template does not know is refused.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One training text. `loss_mask[i]` says whether token i is part of an answer; both lists have one length."""

    id: str
    task: str
    split: str
    input_ids: list[int]
    loss_mask: list[bool]


def load_prompts(options: DataOptions) -> list[Prompt]:
    """The source's prompts of all splits, deduplicated and shuffled by the seed, so that any prefix is a fair sample.

    `max_prompts` keeps such a prefix: the split of a prompt depends on its content and never on seed or limit, and no
    content is in two splits. Errors:
    ValueError for an option out of range, an unreadable file, an unreachable hub, or when no prompt is left.
    """
    _check(options)
    entries = options.sources if options.source == "mixed" else [options.source]
    loaded = [prompt for entry in entries for prompt in _load_source(entry, options)]
    prompts = mix_by_task(_distinct(one_split_each(loaded)), options.seed)
    if options.tasks:
        prompts = [prompt for prompt in prompts if prompt.task in options.tasks]
    if not prompts:
        found = ", ".join(sorted({prompt.task for prompt in loaded})) or "none"
        raise ValueError(
            f"data.tasks={options.tasks}: no prompt left; the tasks of data.source={options.source} are {found}"
        )
    return prompts[: options.max_prompts or None]


def _load_source(entry: str, options: DataOptions) -> list[Prompt]:
    """The prompts of one source; an entry of `data.sources` may bring its own path, as in "gsm8k=/data/gsm8k"."""
    source, _, own_path = entry.partition("=")
    path, fraction = own_path or options.path, options.heldout_fraction
    if source == "instructions":
        return instructions.generate(options.seed, fraction, options.languages)
    if source == "stories":
        return stories.generate(options.seed, fraction)
    if source == "stdlib":
        return stdlib.load(options.seed, fraction, Path(path) if path else None)
    if source == "jsonl":
        if not path:
            raise ValueError(
                "data.source=jsonl needs data.path=FILE, one JSON object a line with `prompt` or `messages`"
            )
        return jsonl.load(Path(path), options.default_task, fraction)
    hub_set = _hub_set(source, path, options)
    return hub.load(source, hub_set, path, fraction, options.max_prompts, options.seed, options.streaming)


def _hub_set(source: str, path: str, options: DataOptions) -> hub.HubSet:
    """The known set, or an unknown one, with what the options say instead."""
    if source == "hub" and not ((options.dataset or path) and options.prompt_column):
        raise ValueError(
            "data.source=hub needs data.dataset=NAME (or data.path=FILE) and data.prompt_column=COLUMN; got "
            f"data.dataset={options.dataset!r}, data.prompt_column={options.prompt_column!r}"
        )
    known = hub.KNOWN.get(source) or hub.HubSet("", "", "train", "", "", options.default_task)
    return replace(
        known,
        dataset=options.dataset or known.dataset,
        config=options.dataset_config or known.config,
        split=options.dataset_split or known.split,
        others=() if options.dataset_split else known.others,
        prompt_column=options.prompt_column or known.prompt_column,
        answer_column=options.answer_column or known.answer_column,
    )


def _distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Drop prompts with the words of an earlier one."""
    return list({prompt.content(): prompt for prompt in reversed(list(prompts))}.values())[::-1]


def _check(options: DataOptions) -> None:
    entries = [entry.partition("=")[0] for entry in options.sources]
    if options.source not in SOURCES:
        raise ValueError(f"data.source={options.source!r} is unknown; choose one of {', '.join(SOURCES)}")
    if not 0 <= options.heldout_fraction <= 1:
        raise ValueError(f"data.heldout_fraction={options.heldout_fraction} must lie in [0, 1]")
    if options.chat_template_kwargs and set(entries or [options.source]) == {"stdlib"}:
        raise ValueError("data.chat_template_kwargs: data.source=stdlib is raw text, without a template; leave it out")
    if options.streaming:
        _check_streaming(options)
    if options.max_prompts < 0:
        raise ValueError(f"data.max_prompts={options.max_prompts} must be positive, or 0 for all prompts")
    if not options.languages or not set(options.languages) <= set(LANGUAGES):
        raise ValueError(f"data.languages={options.languages} must name at least one of {', '.join(LANGUAGES)}")
    if (options.source == "mixed") != bool(entries):
        raise ValueError(
            f"data.sources={options.sources} with data.source={options.source}: a list of sources belongs to "
            "data=mixed, and data=mixed needs one"
        )
    if options.source == "mixed" and options.path:
        raise ValueError("data.path with data=mixed: say which source it is for, as in 'data.sources=[\"gsm8k=FILE\"]'")
    if unknown := [entry for entry in entries if entry not in SOURCES or entry == "mixed"]:
        raise ValueError(f"data.sources names {', '.join(unknown)}; choose among {', '.join(SOURCES[:-1])}")


def _check_streaming(options: DataOptions) -> None:
    """ValueError where nothing comes as a stream, or it would never end."""
    of_hub = [entry for entry in options.sources or [options.source] if entry in (*hub.KNOWN, "hub")]
    if not of_hub or options.path:
        raise ValueError(f"data.streaming=true is for sets of the hub; data.source={options.source} is read as it is")
    if not options.max_prompts:
        raise ValueError("data.streaming=true reads data.max_prompts rows and no more: set data.max_prompts")


def fresh_prompts(options: DataOptions) -> list[Prompt]:
    """Generated prompts that no training run with these options has seen, about what its training prompts are about.

    Held-out prompts ask more: their topics, names and sums occur in no training prompt. Errors: ValueError for another
    source, whose held-out prompts are already of this kind.
    """
    if options.source != "instructions":
        raise ValueError(
            f"data.source={options.source} has no fresh prompts: only generated ones (data=instructions) can be made "
            "anew; its test split holds new prompts of the same kind"
        )
    everything = replace(options, max_prompts=0)
    known = {prompt.content() for prompt in load_prompts(everything)}
    others = load_prompts(replace(everything, seed=options.seed + 1))
    return [prompt for prompt in others if prompt.split == "train" and prompt.content() not in known]


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids that the target answers, see `render_asked`. Errors: as there, with the place of the prompt."""
    try:
        return render_asked(tokenizer, prompt.messages if prompt.text is None else prompt.text, chat_template_kwargs)
    except ValueError as error:
        raise ValueError(f"{prompt.place or f'prompt {prompt.id!r}'}: {error}") from error


def render_asked(
    tokenizer: "PreTrainedTokenizerBase",
    asked: str | Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of raw text or of messages: the one rendering of prompts, for training, measuring and decoding.

    Messages are rendered by the chat template, up to the answer's first token; raw text is tokenised as it is, with the
    special tokens that the tokenizer adds itself (a BOS where it has one). Errors: ValueError for messages where the
    tokenizer has no template, or where the template refuses a turn or does not know one of the kwargs.
    """
    if isinstance(asked, str):
        if find_surrogate(asked) is not None:
            raise ValueError("it holds half of a character (a lone surrogate), which no tokenizer takes")
        ids = list(tokenizer(asked)["input_ids"])
    else:
        ids = render_ids(tokenizer, asked, add_generation_prompt=True, kwargs=chat_template_kwargs)
    if not ids:
        raise ValueError("it renders to no token at all; leave it out")
    return ids


def render_example(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Prompt,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Example:
    """A training example from a prompt that has its answer already; all assistant turns are supervised.

    A raw text's answer is tokenised on its own, and no EOS is added. Errors: ValueError without an answer, and those of
    `mask_answers`.
    """
    if prompt.answer is None:
        raise ValueError(f"prompt {prompt.id!r} has no answer; have the target write one (python -m train.regenerate)")
    if prompt.text is not None:
        prompt_ids = render_prompt(tokenizer, prompt)
        answer_ids = list(tokenizer(prompt.answer, add_special_tokens=False)["input_ids"])
        if not answer_ids:
            raise ValueError(f"prompt {prompt.id!r} has an answer without a token, so nothing would be supervised")
        mask = [False] * len(prompt_ids) + [True] * len(answer_ids)
        return Example(prompt.id, prompt.task, prompt.split, prompt_ids + answer_ids, mask)
    messages: Sequence[Message] = [*prompt.messages, {"role": "assistant", "content": prompt.answer}]
    try:
        ids, mask = mask_answers(tokenizer, messages, chat_template_kwargs)
    except ValueError as error:
        raise ValueError(f"{prompt.place or f'prompt {prompt.id!r}'}: {error}") from error
    return Example(prompt.id, prompt.task, prompt.split, ids, mask)


def dedupe(rendered: Iterable[tuple[Prompt, list[int]]]) -> list[tuple[Prompt, list[int]]]:
    """Drop prompts whose rendered ids occurred before; the first one stays, in its place."""
    seen: set[tuple[int, ...]] = set()
    kept = []
    for prompt, ids in rendered:
        if tuple(ids) not in seen:
            seen.add(tuple(ids))
            kept.append((prompt, ids))
    return kept
