"""Draft heads and verification in transformers' own `generate`: `model.generate(..., custom_generate=speculative)`.

`generate` makes its logits processors and stopping criteria as ever and hands them over; what they ask for is told to
this project's decoder in its own options, and what it cannot do is refused. Without sampling the output is that of
`generate`; with it, the output has the same law, drawn from torch's global generator (`torch.manual_seed`). One thing
differs on purpose: ids that only pad the output head, which no token has, are never emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from ..checkpoint import heads_record, load_ensemble, load_heads
from ..decoding.decoder import Decoder, OnTokens
from ..decoding.rows import DecodeResult, GenerationParams
from ..drafters.heads import HeadsDrafter
from ..target.model import Target
from ..verification.base import Rule
from ..verification.ensemble import DynamicEnsemble
from .generate_arguments import INSTEAD, read_criteria, read_processors
from .hf import fetch_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# What `generate` passes on to a model's forward, and a decoder of ours has ways of its own for.
IGNORED = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep")
EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
MAX_SEED = 2**62


def load_speculative(
    heads: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_draft_tokens: int | None = None,
    verifier: Rule | None = None,
    ensemble: str | Path | None = None,
    revision: str = "main",
) -> SpeculativeGenerate:
    """What `custom_generate` takes, from a checkpoint's folder or a repository of the hub, for the model it is for.

    The model is frozen and set to eval mode. num_draft_tokens: K, default what the heads were trained for. verifier: a
    rule of `models.verification`, default lossless; ensemble: the folder of a trained one instead. ValueError
    for another model than the heads', and as `fetch_folder`, `load_heads` and `load_ensemble`.
    """
    if verifier is not None and ensemble is not None:
        raise ValueError("verifier and ensemble are both given: leave out one of them")
    target = Target(model, tokenizer, model.config._name_or_path or type(model).__name__)
    folder = fetch_folder(heads, revision)
    head = load_heads(folder, target)
    if ensemble is not None:
        verifier = DynamicEnsemble(load_ensemble(ensemble, target, heads_record(folder)).weigh)
    count = head.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    return SpeculativeGenerate(Decoder(target, HeadsDrafter(head), count, verifier))


class SpeculativeGenerate:
    """A decoder as a `custom_generate`. results: of the last call, a row each, with its counters."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.results: list[DecodeResult] = []

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        on_tokens: OnTokens | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """input_ids [B, T], padded anywhere that the attention mask says -> [B, T + new], as `generate` returns it.

        on_tokens: hears of each row's new tokens as they come, since `generate` keeps its streamer to itself.
        ValueError for another model, and for what the decoder cannot do.
        """
        if model is not self.decoder.target.model:
            raise ValueError(
                f"custom_generate was loaded for another {type(self.decoder.target.model).__name__} than this "
                f"{type(model).__name__}; load it for the model whose generate you call"
            )
        _refuse_modes(generation_config, model_kwargs)
        prompts = unpad(input_ids, model_kwargs.get("attention_mask"))
        width = input_ids.shape[1]
        pads = [width - len(prompt) for prompt in prompts]
        limit, eos_token_ids, stop_strings = read_criteria(stopping_criteria, width, self.decoder.target.tokenizer)
        do_sample = bool(generation_config.do_sample)
        sampling, processors = read_processors(logits_processor, do_sample, width, pads, eos_token_ids)
        seed = 0 if sampling.is_greedy else int(torch.randint(MAX_SEED, ()))
        params = GenerationParams(limit, sampling, seed, stop_strings, eos_token_ids, processors)
        self.results = self.decoder.generate(prompts, params, on_tokens=on_tokens, shown_prompts=input_ids.tolist())
        # As generate has it: without a padding token, the first EOS pads.
        pad = generation_config.pad_token_id
        pad = next(iter(eos_token_ids), 0) if pad is None else pad
        new_BT = _pad_right([result.tokens for result in self.results], pad).to(input_ids)
        sequences = torch.cat([input_ids, new_BT], dim=1)
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences


def unpad(input_ids_BT: Tensor, mask_BT: Tensor | None) -> list[list[int]]:
    """Each row's prompt, without what the mask hides."""
    if mask_BT is None:
        return input_ids_BT.tolist()
    return [ids_T[mask_T.bool()].tolist() for ids_T, mask_T in zip(input_ids_BT, mask_BT, strict=True)]


def _pad_right(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.long)


def _refuse_modes(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r}: this decoder is greedy or samples; {INSTEAD}")
    if asked := [name for name in EXTRA_OUTPUTS if getattr(config, name, None)]:
        raise ValueError(f"{asked[0]}=True: this decoder returns sequences alone; {INSTEAD}")
    if other := [key for key, value in model_kwargs.items() if value is not None and key not in IGNORED]:
        raise ValueError(f"{other[0]} is an input that this decoder does not know: it takes input_ids; {INSTEAD}")
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values of an earlier call: this decoder has a cache of its own; leave it out")
