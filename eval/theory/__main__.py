"""Theory beside practice: exact sums next to the decoder's own counts, the certificate's slack, and the frontier.

    python -m eval.theory

Some twenty seconds on one core: the target is tiny and random, nothing is loaded. --seed decides every random number.

Shape suffixes: M models (or prompts), V vocabulary.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import torch

from eval.theory.enumerable import EnumerableModel, TableDrafter, from_target, random_model
from eval.theory.exact import averaged_accepted, decode_exactly, expected_accepted, output_distance
from eval.theory.frontier import dynamic_point, static_point
from models.decoding.decoder import Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.cascades import SpeculativeCascade
from models.verification.ensemble import StaticEnsemble
from models.verification.lenience import Lenience
from models.verification.thresholds import ProbabilityGap, TypicalAcceptance
from models.verification.token import TokenRule

VOCAB_SIZE = 5
SAMPLING = SamplingParams(temperature=1.2)
PROMPTS = ([1, 4, 2], [3], [0, 2, 2, 4])
RULES: dict[str, TokenRule] = {
    "lossless": StaticEnsemble(1.0),
    "static w = 0.5": StaticEnsemble(0.5),
    "static w = 0": StaticEnsemble(0.0),
    "lenience 0.5": Lenience(0.5),
    "lenience 0.1": Lenience(0.1),
    "cascade opt 0.3": SpeculativeCascade("opt", 0.3),
    "cascade v3 0.5": SpeculativeCascade("v3", 0.5),
    "typical": TypicalAcceptance(),
    "gap 2, 0.4": ProbabilityGap(2, 0.4),
}
COUNTED = ("lossless", "static w = 0.5", "lenience 0.5")  # decoded too
BUDGETS = (None, 0.3, 0.1)
LARGEST_SEED = 2**63
WEIGHTS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)


def main(words: Sequence[str] | None = None) -> None:
    """Print the three tables."""
    arguments = parse_arguments(words)
    generator = torch.Generator().manual_seed(arguments.seed)
    target = make_tiny_target(seed=arguments.seed, vocab_size=VOCAB_SIZE)
    drafter = make_drafter(target)
    tables = from_target(target, drafter, PROMPTS, depth=5, sampling=SAMPLING)
    models = random_model(arguments.models, vocab_size=3, depth=4, generator=generator, zero_share=0.2)
    print_lines(accepted_lines(target, drafter, tables, arguments.samples, arguments.seed))
    print_lines(certificate_lines(models))
    for num_draft_tokens in (1, 3):
        print_lines(frontier_lines(tables, num_draft_tokens, length=4))


def make_drafter(target: Target) -> TableDrafter:
    """A drafter whose places are far from independent: it overrates some tokens, and errs most after them."""
    nothing = TableDrafter(torch.zeros(VOCAB_SIZE, VOCAB_SIZE))
    after_one = from_target(target, nothing, PROMPTS, depth=2, sampling=SamplingParams(temperature=1.0)).p[1]
    table_VV = after_one.mean(dim=0).log().float()
    table_VV[3:] *= -1.0
    table_VV[:, 3:] += 1.0
    return TableDrafter(table_VV)


def accepted_lines(
    target: Target, drafter: TableDrafter, tables: EnumerableModel, num_samples: int, seed: int
) -> Iterator[str]:
    """Accepted tokens of the block that follows the prefill's token, and certificates: exact and counted."""
    yield f"First block, and certificate of K + 2 tokens; {len(PROMPTS)} prompts, {num_samples} samples of each"
    yield (
        f"{'rule':16} {'K':>2} {'exact':>8} {'counted':>8} {'+-':>7} {'averaged':>9} "
        f"{'certificate':>12} {'counted':>8} {'+-':>7}"
    )
    for name in COUNTED:
        for num_draft_tokens in (1, 2, 3):
            rule, length = RULES[name], num_draft_tokens + 2
            exact = float(expected_accepted(tables, rule, num_draft_tokens, start=1).mean())
            averaged = float(averaged_accepted(tables, rule, num_draft_tokens, start=1).mean())
            certificate = float(decode_exactly(tables, rule, length, num_draft_tokens, start=1).certificate_M.mean())
            results = decode(target, drafter, rule, num_draft_tokens, num_samples, seed)
            counted, error = mean_and_error([sum(takewhile(bool, result.accepted[1:])) for result in results])
            spent, spent_error = mean_and_error([result.certificate for result in results])
            yield (
                f"{name:16} {num_draft_tokens:2} {exact:8.4f} {counted:8.4f} {error:7.4f} {averaged:9.4f} "
                f"{certificate:12.4f} {spent:8.4f} {spent_error:7.4f}"
            )


def decode(
    target: Target, drafter: TableDrafter, rule: TokenRule, num_draft_tokens: int, num_samples: int, seed: int
) -> list[DecodeResult]:
    """K + 2 tokens num_samples times for each prompt in turn: the prefill's, a block of K, and more if it is cut."""
    decoder = Decoder(target, drafter, num_draft_tokens, verifier=rule)
    params = GenerationParams(num_draft_tokens + 2, SAMPLING, seed, eos_token_ids=())
    return decoder.generate([prompt for prompt in PROMPTS for _ in range(num_samples)], params, max_batch_size=512)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over all samples of all prompts, and its standard error: prompts are fixed, samples are not."""
    values_MN = torch.tensor(values, dtype=torch.float64).view(len(PROMPTS), -1)
    return float(values_MN.mean()), float(values_MN.var(dim=1).mean() / values_MN.numel()) ** 0.5


def certificate_lines(models: EnumerableModel) -> Iterator[str]:
    """How much of the certificate the true distance between the two laws uses up."""
    length = models.depth
    yield f"True distance / expected certificate, {length} tokens, {models.num_models} random models, K = 1, 2, 3"
    yield f"{'rule':16} {'budget':>7} {'median':>7} {'largest':>8} {'violations':>11} {'certificate':>12}"
    for name, rule in RULES.items():
        if name == "lossless":
            continue  # 0 / 0
        for budget in BUDGETS:
            outcomes = [
                decode_exactly(models, rule, length, num_draft_tokens, budget) for num_draft_tokens in (1, 2, 3)
            ]
            distance = torch.cat([output_distance(models, outcome, length) for outcome in outcomes])
            certificate = torch.cat([outcome.certificate_M for outcome in outcomes])
            share = (distance / certificate)[certificate > 1e-9]
            median, largest = (float(share.median()), float(share.max())) if len(share) else (math.nan, math.nan)
            violations = int((distance > certificate + 1e-12).sum())
            limit = "none" if budget is None else f"{budget}"
            yield f"{name:16} {limit:>7} {median:7.3f} {largest:8.5f} {violations:11} {float(certificate.mean()):12.4f}"


def frontier_lines(tables: EnumerableModel, num_draft_tokens: int, length: int) -> Iterator[str]:
    """Tokens a block that a static w and the best dynamic w have at the same expected certificate."""
    yield f"Mean block length at equal expected certificate, {length} tokens, K = {num_draft_tokens}"
    yield f"{'static w':>8} {'certificate':>12} {'static':>8} {'dynamic':>8} {'gain':>7}"
    for weight in WEIGHTS:
        static = static_point(tables, length, num_draft_tokens, weight)
        dynamic = dynamic_point(tables, length, num_draft_tokens, static.distance)
        lengths = [length / (length - point.accepted) for point in (static, dynamic)]
        yield (f"{weight:8} {static.distance:12.4f} {lengths[0]:8.4f} {lengths[1]:8.4f} {lengths[1] - lengths[0]:7.4f}")


def print_lines(lines: Iterable[str]) -> None:
    """One table, and a blank line."""
    for line in lines:
        print(line)
    print()


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m eval.theory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000, help="decoded sequences of each prompt (default 1000)")
    parser.add_argument("--models", type=int, default=1000, help="random models for the certificate (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, tables and samples (default 1)")
    return parser


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options, checked."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    for name in ("samples", "models"):
        if getattr(arguments, name) < 2:
            parser.error(f"--{name}={getattr(arguments, name)}: must be at least 2")
    if not 0 <= arguments.seed < LARGEST_SEED:
        parser.error(f"--seed={arguments.seed}: must be at least 0 and below 2^63")
    return arguments


if __name__ == "__main__":
    main()
