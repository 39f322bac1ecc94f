"""The target's answers from a running server (vLLM, SGLang, ...): quicker than our decoder, and held to the same law.

Prompts go out as our own token ids, and answers come back as ids. Before anything is asked it is checked that the
server means the same model by its name, has room for the longest answer, cuts text into the same tokens, and writes
greedily what the target here would write. A server that gives text alone is taken at its word only where the text's
tokens are as many as it says it wrote.

How vLLM and SGLang sample was read in their sources: vllm/v1/sample/sampler.py and sampling_params.py of 0.32,
sglang/srt/layers/sampler.py and sampling/sampling_params.py of 0.5.23.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.decoding.rows import stream_seed
from models.decoding.stops import REPLACEMENT
from train.answers.completion_server import Completion, CompletionServer, ServedModel

if TYPE_CHECKING:
    from models.target.model import Target
    from train.answers.answers import AnswerOptions

# index of the prompt, ids of its answer, reason to end
OnAnswer = Callable[[int, list[int], str], None]

# Where a text's own tokens cannot be known: the answer is kept, but empty, so that it is not asked for again, and
# trainers leave it out.
UNSURE = "unsure"
# vLLM raises a lower temperature to this one, and says so in its own log alone.
LEAST_TEMPERATURE = 0.01
# Greedy tokens that are compared before a run, and how far below the target's own best, in logits, each may lie.
# Rounding to bfloat16 was seen to turn choices that are 0.25 apart; other weights soon choose what lies far below.
NUM_PROBES = 4
PROBE_TOKENS = 16
LARGEST_GAP = 1.0
# Some of everything that tokenizers disagree on.
PROBE_TEXT = "The 1,234.5 naïve cafés don't\n\n\tif (x != y) { return 한국어 + 日本語 + '🙂'; }  // end"


def greet(target: Target, prompts: Sequence[Sequence[int]], options: AnswerOptions) -> ServedModel:
    """The model at `options.url` that answers as the target would. ValueError or ConnectionError where there is none.

    prompts: token ids of all that will be asked.
    """
    return asyncio.run(_greet(target, prompts, options))


async def _greet(target: Target, prompts: Sequence[Sequence[int]], options: AnswerOptions) -> ServedModel:
    async with _server(options) as server:
        model = _choose_model(await server.models(), target.name, options)
        _check_law(model.owner, options)
        _check_room(target, model, prompts, options)
        await _check_tokenizer(server, model, target)
        probes = sorted(prompts, key=len)[:NUM_PROBES]
        greedy = replace(options, temperature=0.0, max_new_tokens=min(PROBE_TOKENS, options.max_new_tokens))
        bodies = [_body(target, model, prompt, greedy, 0) for prompt in probes]
        replies = await asyncio.gather(*(server.complete(body) for body in bodies))
    asked = zip(probes, bodies, replies, strict=True)
    answers = [_read(target, prompt, reply, body["max_tokens"])[0] for prompt, body, reply in asked]
    if not any(answers):
        raise ValueError(
            f"{options.url} gives no token ids, and its text and its count of tokens (usage.completion_tokens: "
            f"{replies[0].num_tokens}) do not tell them either; use a server that gives ids "
            "(vLLM and SGLang: return_token_ids)"
        )
    for prompt, answer in zip(probes, answers, strict=True):
        _check_weights(target, prompt, answer, options)
    _tell(model, all(reply.token_ids is not None for reply in replies), options)
    return model


def ask_all(
    model: ServedModel,
    target: Target,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    options: AnswerOptions,
    on_answer: OnAnswer,
) -> None:
    """Have the prompts of these numbers answered, `options.batch_size` of them at a time; on_answer hears of each.

    The first failure ends all. A prompt's random stream is its own: it depends on the seed and its number.
    """
    asyncio.run(_ask_all(model, target, prompts, iter(numbers), options, on_answer))


async def _ask_all(
    model: ServedModel,
    target: Target,
    prompts: Sequence[Sequence[int]],
    numbers: Iterator[int],
    options: AnswerOptions,
    on_answer: OnAnswer,
) -> None:
    async def work(server: CompletionServer) -> None:
        for number in numbers:  # shared by all workers: each takes the next
            body = _body(target, model, prompts[number], options, number)
            reply = await server.complete(body)
            on_answer(number, *_read(target, prompts[number], reply, body["max_tokens"]))

    try:
        async with _server(options) as server, asyncio.TaskGroup() as group:
            for _ in range(options.batch_size):
                group.create_task(work(server))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


def _server(options: AnswerOptions) -> CompletionServer:
    return CompletionServer(options.url, options.timeout_s, options.patience_s, options.batch_size)


def _body(
    target: Target, model: ServedModel, prompt: Sequence[int], options: AnswerOptions, number: int
) -> dict[str, Any]:
    """What is asked. Every value that changes the law is written out: a server has defaults of its own for each."""
    is_greedy = options.temperature == 0.0
    body = {
        "model": model.id,
        "prompt": list(prompt),
        "max_tokens": min(options.max_new_tokens, target.max_context() - len(prompt)),
        "temperature": options.temperature,
        "top_p": 1.0 if is_greedy else options.top_p,
        "top_k": -1 if is_greedy or not options.top_k else options.top_k,
        "min_p": 0.0 if is_greedy else options.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "stop_token_ids": list(target.eos_token_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    if not is_greedy:
        body["seed"] = stream_seed(options.seed, number) % 2**31  # some servers keep no more bits
    if model.owner == "vllm":
        # Otherwise the tokenizer's EOS ends a text even where the model's own list of them lacks it. (SGLang's switch
        # of this name would switch off stop_token_ids, too.)
        body["ignore_eos"] = True
    return body


def _choose_model(models: Sequence[ServedModel], name: str, options: AnswerOptions) -> ServedModel:
    """The served model that is the target: the one that the options name, or one of the target's own name."""
    wanted = options.served_model or name
    for model in models:
        if wanted in (model.id, model.root) or (Path(name).exists() and _same_folder(name, model.root)):
            return model
    names = ", ".join(repr(model.id) for model in models) or "nothing"
    option = f"answers.served_model={options.served_model!r}" if options.served_model else f"the target is {name!r}"
    raise ValueError(
        f"{options.url} serves {names}, but {option}; serve the target, or, where these are the same weights under "
        "another name, set answers.served_model to it"
    )


def _same_folder(name: str, root: str) -> bool:
    return bool(root) and Path(root).expanduser().resolve() == Path(name).expanduser().resolve()


def _check_law(owner: str, options: AnswerOptions) -> None:
    """ValueError where this server's order of top-k, top-p and min-p gives another law than ours (see sampling.py)."""
    if options.temperature == 0.0:
        return
    if options.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"answers.temperature={options.temperature} with answers.engine=server: servers raise it to "
            f"{LEAST_TEMPERATURE}; use 0 (greedy), or at least that"
        )
    top_k, top_p, min_p = options.top_k > 0, options.top_p < 1.0, options.min_p > 0.0
    clashes = {
        "vllm": (top_p and min_p, "top_p with min_p"),
        "sglang": (top_p and (top_k or min_p), "top_p with top_k or min_p"),
    }
    clash, what = clashes.get(owner, (top_k or min_p, "top_k or min_p"))
    if clash:
        raise ValueError(
            f"answers.engine=server: {owner or 'this server'} does not apply {what} as this project does, and its "
            "answers would have another law; drop one of them, or use answers.engine=target"
        )


def _check_room(target: Target, model: ServedModel, prompts: Sequence[Sequence[int]], options: AnswerOptions) -> None:
    longest = max(map(len, prompts))
    needed = min(longest + options.max_new_tokens, target.max_context())
    if model.max_context is not None and model.max_context < needed:
        raise ValueError(
            f"{options.url} takes {model.max_context} tokens, but the longest prompt ({longest}) and its answer need "
            f"{needed}; start the server with more (vLLM: --max-model-len, SGLang: --context-length), or lower "
            "answers.max_prompt_tokens or answers.max_new_tokens"
        )


async def _check_tokenizer(server: CompletionServer, model: ServedModel, target: Target) -> None:
    theirs = await server.tokenize(model.id, PROBE_TEXT)
    ours = list(target.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    if theirs is not None and theirs != ours:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        raise ValueError(
            f"{server.url} cuts text into other tokens than {target.name!r} does (from token {at + 1} of a probe on: "
            f"{theirs[at : at + 3]} there, {ours[at : at + 3]} here); it serves another model, or another tokenizer"
        )


@torch.no_grad()
def _check_weights(target: Target, prompt: Sequence[int], answer: Sequence[int], options: AnswerOptions) -> None:
    """ValueError where a greedy token lies far below the target's own best: one pass of the target over the text."""
    if not answer:
        return
    ids_BT = torch.tensor([[*prompt, *answer]], device=target.device)
    logits_TV = target.hide_padding(target.logits(target.hidden(ids_BT)[0, len(prompt) - 1 : -1]))
    chosen_T = logits_TV.gather(1, ids_BT[0, len(prompt) :, None])[:, 0]
    gaps_T = logits_TV.amax(dim=-1) - chosen_T
    if not bool((gaps_T <= LARGEST_GAP).all()):
        at = int((~(gaps_T <= LARGEST_GAP)).nonzero()[0])
        raise ValueError(
            f"{options.url} writes {answer[at]} as token {at + 1} of a greedy answer, which the target here holds "
            f"{gaps_T[at]:.2f} below its own choice, {int(logits_TV[at].argmax())} (rounding explains {LARGEST_GAP} at "
            "most); it serves other weights: another revision, an adapter, or a coarse quantisation"
        )


def _tell(model: ServedModel, gives_ids: bool, options: AnswerOptions) -> None:
    print(f"{options.url} serves {model.id!r} ({model.owner or 'unknown software'}), and its tokens are the target's")
    if not gives_ids:
        print(
            "it gives no token ids: text is tokenised anew, and answers whose tokens cannot be told from it stay empty "
            f"({UNSURE}); a newer server gives ids (vLLM, SGLang: return_token_ids)"
        )
    if model.owner not in ("vllm", "sglang") and options.temperature > 0:
        print("that it samples at this temperature and top_p, and changes nothing else, is taken on trust")


def _read(target: Target, prompt: Sequence[int], reply: Completion, limit: int) -> tuple[list[int], str]:
    """The answer's ids, EOS included, and why it ended. ValueError for one that the target could not have given."""
    _check_prompt(prompt, reply)
    if reply.finish_reason not in ("stop", "length"):
        raise ValueError(f"the server ended an answer with finish_reason={reply.finish_reason!r}; see its own log")
    ended = reply.finish_reason == "stop"
    ids = reply.token_ids
    if ids is None:
        ids = _ids_of_text(target, reply, ended)
        if ids is None:
            return [], UNSURE
    elif ended and reply.stopped_at in target.eos_token_ids and ids[-1:] != [reply.stopped_at]:
        ids = [*ids, int(reply.stopped_at)]  # some leave out what they stopped at
    _check_ids(target, ids, ended, reply, limit)
    return ids, "eos" if ended else "length"


def _check_prompt(prompt: Sequence[int], reply: Completion) -> None:
    if reply.prompt_ids is not None and reply.prompt_ids != list(prompt):
        raise ValueError(
            f"the server read other prompt ids than were sent ({reply.prompt_ids[:8]}... for {list(prompt[:8])}...); "
            "it must not add or cut anything"
        )
    if reply.num_prompt_tokens is not None and reply.num_prompt_tokens != len(prompt):
        raise ValueError(
            f"the server read {reply.num_prompt_tokens} tokens of a prompt that has {len(prompt)}; "
            "it must take token ids as they are (vLLM and SGLang do)"
        )


def _ids_of_text(target: Target, reply: Completion, ended: bool) -> list[int] | None:
    """The ids of a text whose tokens are as many as the server counted; None where that leaves a doubt.

    An EOS is put behind it where there is only one that it can have been.
    """
    tokenizer = target.tokenizer
    ids = list(tokenizer(reply.text, add_special_tokens=False)["input_ids"])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if ended:
        if reply.stopped_at in target.eos_token_ids:
            eos = int(reply.stopped_at)
        elif len(target.eos_token_ids) == 1:
            eos = target.eos_token_ids[0]
        else:
            return None
        ids = ids if ids[-1:] == [eos] else [*ids, eos]
    is_whole = text == reply.text and REPLACEMENT not in text
    return ids if is_whole and reply.num_tokens == len(ids) else None


def _check_ids(target: Target, ids: Sequence[int], ended: bool, reply: Completion, limit: int) -> None:
    if bad := [token for token in ids if token >= target.num_tokens]:
        raise ValueError(
            f"the server wrote token id {bad[0]}; the ids of {target.name!r} end at {target.num_tokens - 1}"
        )
    stops = [place for place, token in enumerate(ids) if token in target.eos_token_ids]
    if stops != ([len(ids) - 1] if ended else []):
        where = f"at place {stops[0] + 1} of {len(ids)}" if stops else "nowhere"
        raise ValueError(
            f"the server ended an answer with {reply.finish_reason!r} (at {reply.stopped_at!r}), and an EOS of "
            f"{target.name!r} {sorted(target.eos_token_ids)} stands {where}; it must stop at these ids alone"
        )
    if len(ids) > limit or (not ended and len(ids) != limit):
        raise ValueError(
            f"the server wrote {len(ids)} tokens and ended with {reply.finish_reason!r}; asked for {limit} at most: "
            "is its context, or its own limit, shorter?"
        )
