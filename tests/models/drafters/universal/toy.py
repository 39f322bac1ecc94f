"""Oracles for the toy world: each method's drafts from fresh forwards of the draft model, without cache or tree."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.rows import GenerationParams, stream_seed
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target
from tests.models.drafters.universal.vocabularies import TOY_DRAFT, TOY_TARGET

NUM_DRAFT_IDS = len(TOY_DRAFT)
DRAFT_END, TARGET_END = TOY_DRAFT.index("<|end|>"), TOY_TARGET.index("<|end|>")
PROB_TOLERANCE = 1e-4  # float32 probabilities whose logits were computed in passes of different shapes
# Ragged; the third is no likely text, and behind the last a likely one ends.
PROMPTS = [[7, 5, 4, 8], [7], [1, 2, 3, 4, 4, 8, 6], [5, 4], [11, 10], [5, 4, 7, 1, 4, 11]]
SAMPLED = GenerationParams(9, SamplingParams(1.1, top_k=6), seed=3, eos_token_ids=())
Law = Callable[[tuple[int, ...]], Tensor]  # ids drafted so far -> the draft model's next law, float64 [D]


def text_of(ids: Sequence[int], tokens: Sequence[str]) -> str:
    return "".join(tokens[index] for index in ids).replace("Ġ", " ")


def draft_ids(target_ids: Sequence[int], draft: Target) -> list[int]:
    """The whole text in the draft model's ids, its END at the target's."""
    pieces = text_of(target_ids, TOY_TARGET).split("<|end|>")
    ids = [draft.tokenizer.encode(pieces[0])]
    ids += [[DRAFT_END, *draft.tokenizer.encode(piece)] for piece in pieces[1:]]
    return [index for part in ids for index in part]


@torch.no_grad()
def fresh_logits(draft: Target, ids: Sequence[int]) -> Tensor:
    """Float32 [D] after these ids."""
    return draft.model(input_ids=torch.tensor([list(ids)])).logits[0, -1, :NUM_DRAFT_IDS].float()


def first_token(text: str, tokenizer: object) -> int | None:
    """The target's first token of a text; None where it has none. The target knows no "d"."""
    ids = tokenizer.encode(text.split("d")[0])
    return ids[0] if ids else None


def is_open(text: str) -> bool:
    """Whether some token begins with the text and is longer."""
    tokens = [token.replace("Ġ", " ") for token in TOY_TARGET if token != "<|end|>"]
    return any(token.startswith(text) and token != text for token in tokens)


@dataclass(frozen=True)
class Drafted:
    """A sequence of draft ids: its text behind the tokens drawn from it, and whether the text ends there."""

    ids: tuple[int, ...]
    rest: str
    mass: float
    is_ended: bool = False


def grown(law: Law, drafted: Drafted) -> list[Drafted]:
    """All sequences that this one goes on to, each until its next token is clear."""
    if drafted.is_ended or not is_open(drafted.rest):
        return [drafted]
    laws, found = law(drafted.ids), []
    for index in range(NUM_DRAFT_IDS):
        if laws[index] > 0:
            text = "" if index == DRAFT_END else text_of([index], TOY_DRAFT)
            mass = drafted.mass * float(laws[index])
            found += grown(law, Drafted((*drafted.ids, index), drafted.rest + text, mass, index == DRAFT_END))
    return found


def psi(law: Law, drawn: Sequence[int], tokenizer: object) -> Tensor:
    """Law of the target's next token after those drawn, float64 [V], by listing all sequences there are."""

    def next_token(drafted: Drafted) -> int | None:
        return first_token(drafted.rest, tokenizer) if drafted.rest else TARGET_END

    drafts = grown(law, Drafted((), "", 1.0))
    for token in drawn:
        length = len(TOY_TARGET[token])
        kept = [drafted for drafted in drafts if drafted.rest and next_token(drafted) == token]
        kept = [replace(drafted, rest=drafted.rest[length:]) for drafted in kept]
        drafts = [found for drafted in kept for found in grown(law, drafted)]
    result_V = torch.zeros(len(TOY_TARGET), dtype=torch.float64)
    for drafted in drafts:
        if (token := next_token(drafted)) is not None:
            result_V[token] += drafted.mass
    return result_V / result_V.sum() if result_V.sum() > 0 else result_V


class Witness:
    """Compares every block of a sampled run with the method's drafts made anew from the whole text."""

    def __init__(self, method: str, draft: Target, target: Target, params: GenerationParams) -> None:
        self.method, self.draft, self.target, self.params = method, draft, target, params
        self.num_accepted: list[int] = []
        self.laws: dict[tuple[int, ...], Tensor] = {}
        self.num_drafted: list[int] = []
        self.num_healed = 0

    def run(self, drafter: object, prompts: Sequence[list[int]], num_draft_tokens: int, max_batch_size: int) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.streams = [
            torch.Generator().manual_seed(stream_seed(self.params.seed, index)) for index in range(len(prompts))
        ]
        self.num_draft_tokens = num_draft_tokens
        decoder = Decoder(self.target, drafter, num_draft_tokens)
        results = decoder.generate(prompts, self.params, max_batch_size, self.on_tokens, on_block=self.on_block)
        for text, prompt, result in zip(self.texts, prompts, results, strict=True):
            assert text[len(prompt) :] == result.tokens

    def on_tokens(self, index: int, tokens: list[int], verdicts: Sequence[str]) -> None:
        if verdicts[0] == "prefill":
            self._uniforms(index, 1)
            self.texts[index] += tokens

    def on_block(self, record: BlockRecord) -> None:
        block, verdict = record.block, record.verdict
        for b, index in enumerate(record.indices):
            count = int(block.num_drafted_B[b])
            uniforms_K = self._uniforms(index, 2 * self.num_draft_tokens + 1)
            drafted = block.draft_tokens_BK[b, :count].tolist()
            ids = draft_ids(self.texts[index], self.draft)
            if self.method == "slem":
                assert block.draft_probs_BKV is None
                self._check_text(index, ids, drafted)
            else:
                assert self.method != "tli" or count == self._most_drafted(index)
                assert count == 0 or block.draft_probs_BKV is not None
                self._check_laws(ids, drafted, block.draft_probs_BKV[b, :count] if count else None, uniforms_K)
            num_accepted = int(verdict.num_accepted_B[b])
            emitted = [*drafted[:num_accepted], int(verdict.next_token_B[b])]
            self.texts[index] += emitted[: record.num_emitted[b]]
            self.num_accepted.append(num_accepted)
            self.num_drafted.append(count)

    def _most_drafted(self, index: int) -> int:
        num_left = self.params.max_new_tokens - (len(self.texts[index]) - self.prompt_lengths[index])
        return min(self.num_draft_tokens, num_left - 1)

    def _uniforms(self, index: int, count: int) -> Tensor:
        return torch.rand(count, generator=self.streams[index], dtype=torch.float64)

    def _check_laws(self, ids: list[int], drafted: list[int], probs_KV: Tensor | None, uniforms_K: Tensor) -> None:
        """q at each place, and that the tokens were drawn from it."""
        for place, token in enumerate(drafted):
            law = self._intersection if self.method == "tli" else self._psi
            assert (probs_KV[place] - law(ids, drafted[:place])).abs().max() < PROB_TOLERANCE
            assert token == sample_from(probs_KV[place], uniforms_K[place])

    def _intersection(self, ids: list[int], drawn: list[int]) -> Tensor:
        read = [TOY_DRAFT.index(TOY_TARGET[token]) for token in drawn]
        logits = fresh_logits(self.draft, [*ids, *read])
        logits_V = torch.full((len(TOY_TARGET),), -torch.inf)
        for token in ("<|end|>", "a", "b", "c", "Ġ"):
            logits_V[TOY_TARGET.index(token)] = logits[TOY_DRAFT.index(token)]
        return transform_logits(logits_V, self.params.sampling)

    def _psi(self, ids: list[int], drawn: list[int]) -> Tensor:
        def law(drafted: tuple[int, ...]) -> Tensor:
            text = (*ids, *drafted)
            if text not in self.laws:
                self.laws[text] = transform_logits(fresh_logits(self.draft, text), self.params.sampling)
            return self.laws[text]

        return psi(law, drawn, self.target.tokenizer)

    def _check_text(self, index: int, ids: list[int], drafted: list[int]) -> None:
        """The target's tokens for the most likely text; its tokenizer leaves out a "d"."""
        text = self.texts[index]
        num_steps = math.ceil(self.num_draft_tokens * max(1.0, len(ids) / len(text)))
        start, num_settled = self._healed(ids, text_of(text, TOY_TARGET).split("<|end|>")[-1])
        self.num_healed += num_settled > 0
        read, end = list(start), len(start) - (num_settled > 0) + num_steps
        while len(read) < end and (read == ids or read[-1] != DRAFT_END):
            read.append(int(fresh_logits(self.draft, read).argmax()))
        drawn = [index for index in read[len(start) - (num_settled > 0) :] if TOY_DRAFT[index] != "d"]
        written = text_of(drawn, TOY_DRAFT)[num_settled:]
        assert written.startswith(text_of(drafted, TOY_TARGET))
        if len(drafted) < self._most_drafted(index):
            assert written == text_of(drafted, TOY_TARGET)

    def _healed(self, ids: list[int], settled: str) -> tuple[list[int], int]:
        """The ids that a block starts with, and how many letters of the last are settled text: 0 where it stands.

        By listing: the most last ids, up to 4, that begin a longer token; the likeliest token behind the others that
        begins with their text, if the target's tokenizer would still end a token where the settled text ends.
        """
        num_fixed = len(ids) - ids[::-1].index(DRAFT_END) if DRAFT_END in ids else 0
        for num in range(min(4, len(ids) - max(1, num_fixed)), 0, -1):
            taken, longer = text_of(ids[-num:], TOY_DRAFT), []
            for candidate, token in enumerate(TOY_DRAFT):
                word = token.replace("Ġ", " ")
                longer += [(candidate, word)] if word.startswith(taken) and candidate != DRAFT_END else []
            if not any(word != taken for _, word in longer):
                continue
            logits = fresh_logits(self.draft, ids[:-num])
            for candidate, word in sorted(longer, key=lambda pair: -float(logits[pair[0]])):
                if word == taken:
                    return ids, 0
                joined = self.target.tokenizer.encode((settled + word[len(taken) :]).split("d")[0])
                if settled in {text_of(joined[:count], TOY_TARGET) for count in range(len(joined) + 1)}:
                    return [*ids[:-num], candidate], len(taken)
            return ids, 0
        return ids, 0
