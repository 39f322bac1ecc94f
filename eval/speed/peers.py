"""transformers' own static ensemble (`assistant_ensemble_weight`) as a way of decoding, counted as this project counts.

It takes one prompt at a time and tells no counts: `eval.speed.passes` reads them off what it shows the target.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from eval.speed.methods import GenerateMethod, Outcome, cut_at_eos
from eval.speed.passes import count_passes, shown_to
from models.target.model import Target


@dataclass(frozen=True, kw_only=True)
class AssistedMethod(GenerateMethod):
    """transformers' assisted generation with a separate draft model.

    target_weight: w in (0, 1]; 1 is lossless. ValueError for another one, or a draft of another output size.
    """

    draft: Target
    num_draft_tokens: int
    target_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.target_weight <= 1.0:
            raise ValueError(f"peer_weights={self.target_weight}: transformers takes weights above 0, and at most 1")
        if self.draft.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"peer_weights: transformers needs output heads of one size, and those of draft and target have "
                f"{self.draft.vocab_size} and {self.target.vocab_size} rows; set peer_weights=[]"
            )

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        """See `Method.run`."""
        outcome = Outcome([])
        settings = self._settings(max_new_tokens)
        if self.target_weight < 1.0:
            settings["assistant_ensemble_weight"] = self.target_weight
        # What is drafted is read from the draft's own configuration; 0.0 switches off a stop that is on by default.
        drafting = GenerationConfig(
            num_assistant_tokens=self.num_draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        target, draft = self.target.model, self.draft.model
        with torch.random.fork_rng(), _configured(target, GenerationConfig()), _configured(draft, drafting):
            torch.manual_seed(seed)
            for prompt in prompts:
                config = GenerationConfig(**settings)
                ids_1T = torch.tensor([list(prompt)], device=self.target.device)
                with shown_to(target) as shown:
                    output_1T = target.generate(
                        ids_1T,
                        attention_mask=torch.ones_like(ids_1T),
                        generation_config=config,
                        assistant_model=draft,
                    )
                tokens = cut_at_eos(output_1T[0, len(prompt) :].tolist(), self.target.eos_token_ids)
                outcome.tokens.append(tokens)
                outcome.counters.append(count_passes(shown, len(prompt), tokens))
        return outcome


@contextmanager
def _configured(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """With this generation config in place of the model's own, whose penalties and filters no other point has."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
