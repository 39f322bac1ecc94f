"""The target's own answers to the prompts: what draft heads are trained on, because it is what they will draft.

Owns the answer record and its files. Answers are token ids; they are never decoded and tokenised again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.files import atomic_write
from models.sampling import SamplingParams
from models.target.model import Target
from train.answers.completion_server import ServedModel, check_url
from train.answers.served import ask_all, greet
from train.data.prompts import DataOptions, dedupe, render_prompt
from train.data.sources.record import Prompt, old_split
from train.runtime.ranks import is_main, is_mine, main_first, wait_for_all
from train.runtime.shards import ShardFolder, read_manifest

SUFFIX = ".jsonl"
TARGET, SERVER, DATA = "target", "server", "data"
ENGINES = (TARGET, SERVER, DATA)
# Options that say how a server is spoken to, and nothing of what it answers.
WAYS_OF_ASKING = ("url", "served_model", "timeout_s", "patience_s")


@dataclass
class AnswerOptions:
    """Where answers come from, and how the target writes them.

    engine: target (it answers every prompt), server (the same model, served by vLLM, SGLang or the like at `url`), or
    data (the data's own answers are the text, and nothing is generated). temperature: 0 is greedy. shard_prompts:
    prompts a file, the most that a stopped run does twice. batch_size: sequences, or requests to a server, in flight.
    max_prompt_tokens: longer prompts are left out, and counted. max_new_tokens: most tokens of an answer.
    top_k: tokens are drawn among so many likeliest ones; 0 for all. top_p: tokens are drawn among the likeliest ones
    that have this probability together; 1 for all. min_p: tokens below this share of the likeliest one's probability
    are not drawn; 0 for all. seed: of sampled answers.
    url: a server's address, such as http://localhost:8000/v1. served_model: its name for the target, where that is
    another than model.name. timeout_s: how long one answer may take. patience_s: how long a server that fails is asked
    again before the run stops.
    """

    engine: str = TARGET
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    max_prompt_tokens: int = 768
    batch_size: int = 64
    shard_prompts: int = 256
    seed: int = 0
    url: str = ""
    served_model: str = ""
    timeout_s: float = 600.0
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"answers.engine={self.engine!r} is unknown; choose one of {', '.join(ENGINES)}")
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "shard_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"answers.{name}={getattr(self, name)} must be at least 1")
        if self.timeout_s <= 0 or self.patience_s < 0:
            raise ValueError(
                f"answers.timeout_s={self.timeout_s} must be positive, "
                f"and answers.patience_s={self.patience_s} 0 or more"
            )
        if self.engine == SERVER:
            check_url(self.url)
        elif self.url or self.served_model:
            raise ValueError(
                f"answers.url and answers.served_model are for answers.engine=server; answers.engine is {self.engine!r}"
            )

    def sampling(self) -> SamplingParams:
        """How the target samples."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Answer:
    """One answered prompt, as token ids."""

    id: str
    task: str
    split: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str


def answer_prompts(
    target: Target, prompts: Sequence[Prompt], data: DataOptions, options: AnswerOptions, folder: Path
) -> None:
    """Let the target answer all prompts, shard by shard, into `folder`; goes on where a stopped run was.

    A shard's content depends on its prompts and the options alone, so a stopped run ends as an uninterrupted one, and
    several processes, which share the shards out, make what one would make.
    """
    rendered = render_unique(target, prompts, data, options.max_prompt_tokens)
    if not rendered:
        raise ValueError(
            f"data.source={data.source}: no prompt is left to answer; check data.tasks, data.languages and the limits"
        )
    manifest = _manifest(target, rendered, options)
    if options.engine == SERVER:
        with main_first():  # nothing is written before the server has been found to be the right one
            served = _require_server(target, rendered, options, folder, manifest)
    store = ShardFolder(folder, manifest, SUFFIX)
    size = options.shard_prompts
    shards = [rendered[start : start + size] for start in range(0, len(rendered), size)]
    missing = [index for index in store.missing(len(shards)) if is_mine(index)]
    done = len(rendered) - sum(len(shards[index]) for index in missing)
    is_quiet = not missing or not is_main()
    with tqdm(total=len(rendered), initial=done, desc="answering prompts", unit="prompt", disable=is_quiet) as bar:
        if options.engine == SERVER and missing:
            assert served is not None
            _ask_for_shards(target, served, shards, missing, options, store, bar)
        elif missing:
            decoder = Decoder(target)
            for index in missing:
                _write_shard(store, index, _answer_shard(decoder, shards[index], options, index, bar))
    wait_for_all()


def _write_shard(store: ShardFolder, index: int, answers: Iterable[Answer]) -> None:
    with atomic_write(store.path(index)) as path:
        write_answers(path, answers)


def render_unique(
    target: Target, prompts: Iterable[Prompt], data: DataOptions, max_prompt_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """Prompts with their token ids; repeated and overlong ones dropped, with a line that says how many."""
    rendered = [(prompt, render_prompt(target.tokenizer, prompt, data.chat_template_kwargs)) for prompt in prompts]
    unique = dedupe(rendered)
    limit = min(max_prompt_tokens, target.max_context() - 1)
    kept = [(prompt, ids) for prompt, ids in unique if len(ids) <= limit]
    if len(kept) < len(rendered):
        print(
            f"left out {len(rendered) - len(unique)} repeated prompts and "
            f"{len(unique) - len(kept)} of more than {limit} tokens"
        )
    return kept


def _answer_shard(
    decoder: Decoder, rendered: Sequence[tuple[Prompt, list[int]]], options: AnswerOptions, index: int, bar: tqdm
) -> list[Answer]:
    sampling = options.sampling()
    # One random stream a shard and a row in it: no two prompts of the whole run share one.
    params = GenerationParams(options.max_new_tokens, sampling, seed=options.seed * 1_000_003 + index)
    # Long prompts first: rows of like length prefill together, and no straggler is left for the end.
    order = sorted(range(len(rendered)), key=lambda i: -len(rendered[i][1]))
    results = decoder.generate(
        [rendered[i][1] for i in order], params, options.batch_size, on_done=lambda *_: bar.update()
    )
    given = dict(zip(order, ((result.tokens, result.finish_reason) for result in results), strict=True))
    return _with_answers(rendered, given)


def _with_answers(
    rendered: Sequence[tuple[Prompt, list[int]]], given: Mapping[int, tuple[list[int], str]]
) -> list[Answer]:
    """The records of a shard, from what was answered to each of its rows."""
    return [
        Answer(prompt.id, prompt.task, prompt.split, prompt_ids, *given[row])
        for row, (prompt, prompt_ids) in enumerate(rendered)
    ]


def _require_server(
    target: Target,
    rendered: Sequence[tuple[Prompt, list[int]]],
    options: AnswerOptions,
    folder: Path,
    manifest: dict[str, Any],
) -> ServedModel | None:
    """The model to ask; None where every answer is there, and the server may have gone long ago."""
    num_shards = -(-len(rendered) // options.shard_prompts)
    if read_manifest(folder) is not None and not ShardFolder(folder, manifest, SUFFIX).missing(num_shards):
        return None
    return greet(target, [ids for _, ids in rendered], options)


def _ask_for_shards(
    target: Target,
    served: ServedModel,
    shards: Sequence[Sequence[tuple[Prompt, list[int]]]],
    missing: Sequence[int],
    options: AnswerOptions,
    store: ShardFolder,
    bar: tqdm,
) -> None:
    """Ask for what is missing, over the borders of shards; each is written when its last answer is there."""
    size = options.shard_prompts
    given: dict[int, dict[int, tuple[list[int], str]]] = {index: store.journal(index).read() for index in missing}

    def write_if_whole(index: int) -> None:
        if len(given[index]) == len(shards[index]):
            _write_shard(store, index, _with_answers(shards[index], given.pop(index)))
            store.journal(index).remove()

    def take(number: int, ids: list[int], finish_reason: str) -> None:
        index, row = divmod(number, size)
        store.journal(index).add(row, (ids, finish_reason))
        given[index][row] = (ids, finish_reason)
        bar.update()
        write_if_whole(index)

    numbers = [index * size + row for index in missing for row in range(len(shards[index])) if row not in given[index]]
    bar.update(sum(map(len, given.values())))
    for index in missing:
        write_if_whole(index)
    prompts = [ids for shard in shards for _, ids in shard]
    ask_all(served, target, prompts, numbers, options, take)


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """One JSON object a line."""
    # What UTF-8 cannot hold is written as \\udXXX, which is how JSON spells it: no shard fails half way.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for answer in answers:
            file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")


def read_answers(folder: Path) -> list[Answer]:
    """All answers of a finished folder, in order. ValueError for a missing, unfinished or damaged one."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds no answers (no manifest.json); make them with `python -m train.regenerate`")
    paths = sorted(folder.glob(f"shard-*{SUFFIX}"))
    answers: list[Answer] = []
    for path in paths:
        # Not splitlines(): a string may hold other line separators, such as U+2028, as they are.
        for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), start=1):
            try:
                answers.append(Answer(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number} is damaged ({error}); delete the file and run train.regenerate again"
                ) from error
    if len(answers) != manifest["num_prompts"]:
        raise ValueError(
            f"{folder} holds {len(answers)} of {manifest['num_prompts']} answers; "
            "run the same train.regenerate command to finish it"
        )
    return answers


def _manifest(target: Target, rendered: Sequence[tuple[Prompt, list[int]]], options: AnswerOptions) -> dict[str, Any]:
    # By the old names of the splits: what was answered when there were two is the same text.
    asked = [(old_split(prompt.split), ids) for prompt, ids in rendered]
    prompts = hashlib.sha256(repr(asked).encode()).hexdigest()[:16]
    # A server mixes our requests with others as it likes: how many are in flight at once decides nothing.
    left_out = (*WAYS_OF_ASKING, "batch_size") if options.engine == SERVER else WAYS_OF_ASKING
    return {
        "holds": "answers",
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        "prompts_fingerprint": prompts,
        "num_prompts": len(rendered),
        **{name: value for name, value in asdict(options).items() if name not in left_out},
        **({"served_model": options.served_model or target.name} if options.engine == SERVER else {}),
    }
