"""The draft's own answers as training text (on-policy distillation: arXiv 2310.08461, algorithm 1; arXiv 2306.13649).

On the text that it writes itself a draft meets its own mistakes, which is where it will stand after a block's first
accepted tokens; what the target would say there is asked of the target anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.sampling import SamplingParams
from models.target.model import Target
from train.data.examples import Row, collate


def answer_anew(
    draft: Target, batch: dict[str, Tensor], temperature: float, eos_token_ids: tuple[int, ...], seed: int
) -> dict[str, Tensor]:
    """A batch of the same prompts with answers that `draft` samples, no longer than the longest that it had.

    The batch is as `collate` makes it; of a conversation everything after the first answer's start is dropped.
    """
    mask_BT = batch["loss_mask"]
    lengths = mask_BT.sum(dim=1)
    # A prompt has at least one token, which a draft needs to begin with.
    firsts = mask_BT.int().argmax(dim=1).clamp(min=1).tolist()
    prompts = [ids[:first].tolist() for ids, first in zip(batch["input_ids"], firsts, strict=True)]
    params = GenerationParams(int(lengths.max()), SamplingParams(temperature), seed=seed, eos_token_ids=eos_token_ids)
    draft.model.eval()
    results = Decoder(draft).generate(prompts, params)
    rows = []
    for prompt, result in zip(prompts, results, strict=True):
        mask = torch.tensor([False] * len(prompt) + [True] * len(result.tokens))
        rows.append(Row(torch.tensor(prompt + result.tokens), mask))
    return collate(rows)
