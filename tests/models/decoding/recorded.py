"""Outputs of every drafter and every rule for fixed seeds, to hold them fast while code moves.

`python -m tests.models.decoding.recorded` writes them to recorded.json beside this file; `test_recorded` compares. A
change that is meant to change an output writes the file anew and says so. What measures its own time may put blocks
together differently from run to run: of a hybrid the greedy tokens alone are kept, of adaptive lengths nothing.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.base import Drafter
from models.drafters.heads import HeadsDrafter
from models.drafters.hybrid import HybridDrafter
from models.drafters.model import ModelDrafter
from models.drafters.text.lookahead import LookaheadDrafter
from models.drafters.text.ngram import NgramDrafter
from models.drafters.text.suffix import SuffixDrafter
from models.drafters.tree import DynamicTreeDrafter, StaticTreeDrafter
from models.drafters.universal import make_universal
from models.ensemble import EnsembleHead, EnsembleOptions
from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.base import Rule
from models.verification.ensemble import DynamicEnsemble
from models.verification.options import RULES, VerifierOptions, make_rule
from tests.models.decoding.scripted import random_prompts
from tests.models.drafters.universal.vocabularies import make_toy_draft, make_toy_target

FILE = Path(__file__).with_name("recorded.json")
K = 4
NEW_TOKENS = 16
PROMPTS = [prompt * 2 for prompt in random_prompts(4, longest=12, seed=6)]
TOY_PROMPTS = [[5, 7, 4], [9], [3, 8, 8, 2]]
GREEDY, SAMPLED = SamplingParams(0.0), SamplingParams(0.9, top_k=40, top_p=0.95)
TREES = ("lookahead", "tree dynamic", "tree static")
PARAMETERS: dict[str, dict[str, Any]] = {
    "static": {"target_weight": 0.5},
    "lenience": {"lenience": 0.3},
    "mentored": {"kl_bound": 0.2},
    "cascade": {"deferral": "opt", "alpha": 0.2},
    "typical": {"epsilon": 0.09, "delta": 0.3},
    "gap": {"top_k": 10, "gap": 0.6},
    "thresholds": {"threshold_single": 0.3, "threshold_acc": 0.9},
    "fly": {"entropy": 0.1, "window": 2},
}


def make_head(target: Target, kind: str) -> DraftHead:
    """An untrained head, moved off its start by a fixed seed."""
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=K))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head.eval()


def make_sibling(target: Target) -> Target:
    """The target with noise on its weights: a draft model that is often right."""
    draft = Target(copy.deepcopy(target.model), target.tokenizer, "sibling")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.model.parameters():
            if weight.dim() > 1:
                weight += torch.randn(weight.shape, generator=generator) * 0.05 * weight.std()
    return draft


def make_drafters(target: Target) -> Iterator[tuple[str, Drafter]]:
    """Every drafter of the target's own vocabulary, by name."""
    for kind in HEAD_KINDS:
        yield f"heads {kind}", HeadsDrafter(make_head(target, kind))
    yield "model", ModelDrafter(make_sibling(target), target)
    yield "ngram", NgramDrafter(target, 1, 4)
    yield "suffix", SuffixDrafter(target, 1, 0.1, 0)
    yield "lookahead", LookaheadDrafter(target, 4, 4, 3)
    yield "tree dynamic", DynamicTreeDrafter(make_head(target, "mtp"), 12, 3)
    yield "tree static", StaticTreeDrafter(make_head(target, "mtp"), 12, 3, [[0.5, 0.2, 0.1]] * K)
    yield "hybrid", HybridDrafter(SuffixDrafter(target, 1, 0.1, 0), HeadsDrafter(make_head(target, "mtp")))


def make_dynamic(target: Target) -> Rule:
    """The learned ensemble, for a draft as wide as the target, with weights that depend on what it sees."""
    torch.manual_seed(3)
    head = EnsembleHead(
        EnsembleOptions(kind="mlp", draft_size=target.hidden_size, target_size=target.hidden_size, initial_weight=0.5)
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return DynamicEnsemble(head.weigh)


def runs(
    target: Target, prompts: list[list[int]], drafter: Drafter | None, rule: Rule | None, sampling: SamplingParams
) -> list[dict[str, Any]]:
    """The results of the prompts, three at a time, so that rows leave and join."""
    longest = drafter.max_draft_tokens or K if drafter else 0
    decoder = Decoder(target, drafter, min(K, longest), rule)
    params = GenerationParams(NEW_TOKENS, sampling, seed=17)
    results = decoder.generate(prompts, params, max_batch_size=3)
    return [
        {
            "tokens": result.tokens,
            "fates": "".join(verdict[0] + verdict[2] for verdict in result.verdicts),
            "certificate": round(result.certificate, 4),
        }
        for result in results
    ]


def record() -> dict[str, list[dict[str, Any]]]:
    """Name of a run -> its results."""
    target, outputs = make_tiny_target(), {}
    for temperature, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        outputs[f"plain, {temperature}"] = runs(target, PROMPTS, None, None, sampling)
        for name, drafter in make_drafters(target):
            if name == "hybrid" and temperature == "sampled":
                continue
            rules = ("lossless", "block") if name in TREES else tuple(RULES)
            for kind in rules if temperature == "sampled" else rules[:2]:
                rule = make_rule(VerifierOptions(kind, **PARAMETERS.get(kind, {})))
                results = runs(target, PROMPTS, drafter, rule, sampling)
                if name == "hybrid":
                    results = [{"tokens": result["tokens"]} for result in results]
                outputs[f"{name}, {kind}, {temperature}"] = results
        toy, toy_draft = make_toy_target(), make_toy_draft(num_hidden_layers=1)
        for method in ("slem", "slrs", "tli"):
            drafter = make_universal(method, toy_draft, toy)
            outputs[f"universal {method}, lossless, {temperature}"] = runs(toy, TOY_PROMPTS, drafter, None, sampling)
    for name, drafter in make_drafters(target):
        if name in ("heads mtp", "model"):
            outputs[f"{name}, dynamic, sampled"] = runs(target, PROMPTS, drafter, make_dynamic(target), SAMPLED)
    processors = ProcessorParams(repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=4)
    decoder = Decoder(target, HeadsDrafter(make_head(target, "mtp")), K)
    params = GenerationParams(NEW_TOKENS, SAMPLED, seed=5, processors=processors)
    outputs["heads mtp, processors"] = [{"tokens": result.tokens} for result in decoder.generate(PROMPTS, params, 3)]
    return outputs


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(results)}" for name, results in record().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
