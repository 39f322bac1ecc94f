"""vLLM on exported heads against this project's decoder; `scripts/peers/check_vllm.sh` is its command.

ours: decode with our decoder, and write down prompts, tokens and acceptance. theirs: the same prompts in vLLM, whose
environment has nothing of this project. compare: the same tokens, and acceptance at each place within TOLERANCE.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

QUESTIONS = (
    "Tom has 4 boxes of 6 pens. How many pens is that?",
    "A train goes 60 km in an hour. How far does it go in 3 hours?",
    "Anna buys 3 apples at 2 dollars each and pays with 10 dollars. How much does she get back?",
    "There are 24 pupils in a class. Half of them walk to school. How many walk?",
    "A baker bakes 12 loaves in the morning and 18 in the evening. How many loaves is that?",
    "Ben had 50 marbles and lost 13 of them. How many does he have left?",
    "A shelf holds 9 books. How many books do 5 such shelves hold?",
    "Lucy reads 15 pages a day. After how many days has she read 90 pages?",
    "A farmer has 7 cows and 5 sheep. How many legs do they have together?",
    "Share 36 sweets among 4 children. How many does each of them get?",
    "A rope of 20 metres is cut into pieces of 4 metres. How many pieces are there?",
    "Max earns 8 dollars an hour. What does he earn in 6 hours?",
)
MAX_NEW_TOKENS = 96
# A share of blocks: vLLM counts drafts behind the end of a sequence, and we do not.
TOLERANCE = 0.02


def decode_ours(work: Path, checkpoint: Path) -> None:
    """Write ours.json, which holds all that the other side needs."""
    from models.checkpoint import load_heads
    from models.decoding.counters import add_up
    from models.decoding.decoder import Decoder
    from models.decoding.rows import GenerationParams
    from models.drafters.heads import HeadsDrafter
    from models.target.model import load_target
    from scripts.generate import find_target
    from train.data.prompts import Prompt, render_prompt

    target = load_target(replace(find_target("smollm2"), dtype="float32"))
    head = load_heads(checkpoint, target)
    chats = [({"role": "user", "content": question},) for question in QUESTIONS]
    prompts = [render_prompt(target.tokenizer, Prompt("prompt", "chat", messages=chat)) for chat in chats]
    decoder = Decoder(target, HeadsDrafter(head), head.num_draft_tokens)
    results = decoder.generate(prompts, GenerationParams(MAX_NEW_TOKENS), max_batch_size=4)
    counters = add_up(result.counters for result in results)
    found = {
        "model": target.model.config._name_or_path,
        "num_draft_tokens": head.num_draft_tokens,
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": [result.tokens for result in results],
        "acceptance_at": counters.acceptance_by_place,
    }
    (work / "ours.json").write_text(json.dumps(found))


def decode_theirs(work: Path) -> None:
    """Write theirs.json. Runs in vLLM's environment."""
    from vllm import LLM, SamplingParams

    asked = json.loads((work / "ours.json").read_text())
    count = asked["num_draft_tokens"]
    served = json.loads((work / "served" / "config.json").read_text())
    method = served.get("speculators_model_type") or ("medusa" if served["model_type"] == "medusa" else "mtp")
    # vLLM's MTP class reads the target's config, which has to say that there is such a layer.
    overrides = {"num_nextn_predict_layers": 1} if method == "mtp" else {}
    llm = LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=4,
        max_model_len=1024,
        disable_log_stats=False,
        hf_overrides=overrides,
        speculative_config={"method": method, "model": str(work / "served"), "num_speculative_tokens": count},
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    kept_at = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "acceptance_at": [kept / drafts for kept in kept_at],
    }
    (work / "theirs.json").write_text(json.dumps(found))


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs, a line each; nothing where they agree."""
    problems = []
    for index, (own, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if own != other:
            same = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
            where = f"from token {same} on" if same is not None else f"in length ({len(own)} and {len(other)} tokens)"
            problems.append(f"prompt {index}: texts differ {where}")
    rates = zip(ours["acceptance_at"], theirs["acceptance_at"], strict=True)
    problems += [
        f"place {place}: {own:.3f} of ours kept, {other:.3f} of vLLM's"
        for place, (own, other) in enumerate(rates, start=1)
        if abs(own - other) > TOLERANCE
    ]
    return problems


def report(work: Path) -> int:
    """Print both sides; returns the exit code, 1 where they disagree."""
    ours, theirs = (json.loads((work / f"{side}.json").read_text()) for side in ("ours", "theirs"))
    problems = compare(ours, theirs)
    num_tokens = sum(map(len, ours["tokens"]))
    num_equal = sum(own == other for own, other in zip(ours["tokens"], theirs["tokens"], strict=True))
    print(f"{num_equal} of {len(ours['tokens'])} greedy texts are equal ({num_tokens} tokens)")
    print("kept at place   " + "".join(f"{place:>8}" for place in range(1, ours["num_draft_tokens"] + 1)))
    for side, found in (("ours", ours), ("vLLM", theirs)):
        print(f"{side:<16}" + "".join(f"{rate:8.3f}" for rate in found["acceptance_at"]))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side", choices=("ours", "theirs", "compare"))
    parser.add_argument("work", type=Path, help="folder with the exported heads in `served`")
    parser.add_argument("--checkpoint", type=Path, help="the heads themselves, for ours")
    arguments = parser.parse_args(words)
    if arguments.side == "compare":
        return report(arguments.work)
    if arguments.side == "theirs":
        decode_theirs(arguments.work)
    elif arguments.checkpoint is None:
        parser.error("ours needs --checkpoint, the folder that train.mtp wrote")
    else:
        decode_ours(arguments.work, arguments.checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
