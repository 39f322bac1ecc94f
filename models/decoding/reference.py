"""Plain autoregressive decoding, one sequence and one token at a time: the truth that tests compare the decoder with.

Shares with the decoder `sampling.py` and `processors.py`, which say what the law is, and nothing else: transformers'
own cache and causal masks, no drafting, no batch.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ..processors.prefix import ProcessorParams, Processors
from ..sampling import SamplingParams, sample_from, transform_logits
from ..target.model import Target


@torch.no_grad()
def decode_plainly(
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    generator: torch.Generator | None = None,
    eos_token_ids: Collection[int] | None = None,
    processors: ProcessorParams | None = None,
) -> list[int]:
    """New tokens after `prompt`, a closing EOS included.

    `generator` is needed when sampling. eos_token_ids None: the target's own.
    """
    sampling = sampling or SamplingParams()
    eos = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
    cache = DynamicCache(config=target.config)
    ids_1T = torch.tensor([list(prompt)], device=target.device)
    processing = Processors(processors or ProcessorParams(), eos, target.vocab_size)
    tokens: list[int] = []
    while True:
        logits_V = processing.apply(_next_logits(target, ids_1T, cache), prompt, tokens)
        token = _draw(logits_V, sampling, generator)
        tokens.append(token)
        if token in eos or len(tokens) >= max_new_tokens:
            return tokens
        ids_1T = torch.tensor([[token]], device=target.device)


def _next_logits(target: Target, ids_1T: Tensor, cache: DynamicCache) -> Tensor:
    """Logits [V] float32 after the last of these tokens."""
    output = target.model(input_ids=ids_1T, cache=cache, use_cache=True, logits_to_keep=1)
    return target.hide_padding(output.logits[0, -1].float())


def _draw(logits_V: Tensor, sampling: SamplingParams, generator: torch.Generator | None) -> int:
    if sampling.is_greedy:
        return int(logits_V.argmax())
    if generator is None:
        raise ValueError(f"temperature={sampling.temperature} needs a generator; give one, or temperature 0.")
    uniform = torch.rand((), generator=generator, dtype=torch.float64).to(logits_V.device)
    return int(sample_from(transform_logits(logits_V, sampling), uniform))
