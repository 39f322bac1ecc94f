"""The target's own answers to the prompts: what draft heads are trained on, because it is what they will draft.

Owns the answer record and its files. Answers are token ids; they are never decoded and tokenised again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.decoding.sampling import SamplingParams
from models.target import Target
from train.data import DataOptions, dedupe, render_prompt
from train.prompts.record import Prompt
from train.ranks import is_main, is_mine, wait_for_all
from train.shards import ShardFolder, atomic_write, read_manifest

SUFFIX = ".jsonl"
ENGINES = ("target", "data")


@dataclass
class AnswerOptions:
    """Where answers come from, and how the target writes them.

    engine: target (it answers every prompt) or data (the data's own answers are the text, and nothing is generated).
    temperature: 0 is greedy. shard_prompts: prompts a file, the most that a stopped run does twice. batch_size:
    sequences in flight. max_prompt_tokens: longer prompts are left out, and counted. max_new_tokens: most tokens of an
    answer.
    top_k: tokens are drawn among so many likeliest ones; 0 for all. top_p: tokens are drawn among the likeliest ones
    that have this probability together; 1 for all. min_p: tokens below this share of the likeliest one's probability
    are not drawn; 0 for all. seed: of sampled answers.
    """

    engine: str = "target"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    max_prompt_tokens: int = 768
    batch_size: int = 64
    shard_prompts: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"answers.engine={self.engine!r} is unknown; choose one of {', '.join(ENGINES)}")
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "shard_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"answers.{name}={getattr(self, name)} must be at least 1")

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
    store = ShardFolder(folder, _manifest(target, rendered, options), SUFFIX)
    size = options.shard_prompts
    num_shards = -(-len(rendered) // size)
    missing = [index for index in store.missing(num_shards) if is_mine(index)]
    done = len(rendered) - sum(len(rendered[index * size : (index + 1) * size]) for index in missing)
    decoder = Decoder(target)
    is_quiet = not missing or not is_main()
    with tqdm(total=len(rendered), initial=done, desc="answering prompts", unit="prompt", disable=is_quiet) as bar:
        for index in missing:
            answers = _answer_shard(decoder, rendered[index * size : (index + 1) * size], options, index, bar)
            with atomic_write(store.path(index)) as path:
                write_answers(path, answers)
    wait_for_all()


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
    answers = {
        i: Answer(
            rendered[i][0].id,
            rendered[i][0].task,
            rendered[i][0].split,
            rendered[i][1],
            result.tokens,
            result.finish_reason,
        )
        for i, result in zip(order, results, strict=True)
    }
    return [answers[i] for i in range(len(rendered))]


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
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
    prompts = hashlib.sha256(repr([(prompt.split, ids) for prompt, ids in rendered]).encode()).hexdigest()[:16]
    return {
        "holds": "answers",
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        "prompts_fingerprint": prompts,
        "num_prompts": len(rendered),
        **asdict(options),
    }
