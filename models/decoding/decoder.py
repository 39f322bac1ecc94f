"""The loop: prefill, draft, one target pass, verdict, roll back, stop, count; for a batch of ragged rows.

Between passes the cache holds all tokens of a row but the last emitted one, its root. A block drafts d_1 .. d_K, runs
the target once over [root, d_1 .. d_K], keeps n drafted tokens and one token more, and keeps n + 1 entries of the
cache. Without a drafter K = 0, and the same loop is plain decoding. Where trees are drafted (`tree_block`), the target
runs over all nodes, and what was kept then looks like a chain.

Rows are independent: a row's tokens depend on its prompt, the params and its own random stream, never on its
neighbours.

Shape suffixes: B rows, T positions, K drafted tokens, V vocabulary, H hidden (with the layers that the drafter reads).
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache.attention import packed_attention
from ..cache.ragged import RaggedCache
from ..drafters.base import BranchDrafter, Draft, Drafter, LayerReader
from ..processors.block import BlockProcessor
from ..processors.prefix import Processors
from ..target.model import Target
from ..target.tokens import require_known
from ..verification.base import Block, Rule, Verdict
from ..verification.token import TokenVerification
from .batch import Batch, fill_holes, merged, pad_right
from .chain_block import ChainBlock
from .counters import Timings
from .judge import Judge
from .length import FixedLength, Length
from .rows import DecodeResult, GenerationParams, Row, TokenVerdict
from .stops import TokenBytes
from .target_pass import TargetPass
from .tree_block import TreeBlock
from .tree_judge import check_tree_rule

# (index of the prompt, tokens emitted by a block, how each came to be)
OnTokens = Callable[[int, list[int], list[TokenVerdict]], None]
# (index of the prompt, its result), as soon as it has ended
OnDone = Callable[[int, DecodeResult], None]


@dataclass(frozen=True)
class BlockRecord:
    """One block of a batch as its rule saw it. Row b of the block belongs to prompt indices[b].

    num_emitted[b]: tokens that the row took from it, the first stop being the last of them.
    """

    indices: list[int]
    block: Block
    verdict: Verdict
    num_emitted: list[int]


OnBlock = Callable[[BlockRecord], None]


@dataclass(frozen=True)
class _Hooks:
    on_tokens: OnTokens | None
    on_block: OnBlock | None


class Decoder:
    """Decodes with a target and, where there is one, a drafter whose blocks a verification rule judges.

    By default the rule is lossless: the output has the target's own law. `timings` tells where the last `generate`
    spent its time.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        verifier: Rule | None = None,
        distance_budget: float = math.inf,
        length: Length | None = None,
    ) -> None:
        """`num_draft_tokens` is K, the longest block; 0 exactly when there is no drafter.

        verifier: the rule, by default lossless token verification. distance_budget: most that the certificate of a
        sequence may reach (see `DecodeResult`). length: how much of K each block drafts, by default all. Raises
        ValueError where drafter and K, or drafter and target, do not fit.
        """
        if drafter is None and num_draft_tokens != 0:
            raise ValueError(f"num_draft_tokens={num_draft_tokens} without a drafter: must be 0.")
        if drafter is not None:
            longest = drafter.max_draft_tokens
            if num_draft_tokens < 1 or (longest is not None and num_draft_tokens > longest):
                allowed = "at least 1" if longest is None else f"1 to {longest} with this drafter"
                raise ValueError(
                    f"num_draft_tokens={num_draft_tokens}: must be {allowed}; for plain decoding leave out the drafter."
                )
            if drafter.vocab_size != target.vocab_size:
                raise ValueError(
                    f"the drafter's vocabulary has {drafter.vocab_size} tokens, that of target {target.name!r} "
                    f"{target.vocab_size}: use a drafter made for this target."
                )
        self.target = target
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.judge = Judge(verifier or TokenVerification(), distance_budget)
        self.length = length or FixedLength(num_draft_tokens)
        self.num_nodes = drafter.num_nodes if isinstance(drafter, BranchDrafter) else 0  # of a drafted tree
        if self.num_nodes:
            check_tree_rule(self.judge.rule)
        self.context_length: int | None = getattr(target.config, "max_position_embeddings", None)
        self._model = TargetPass(target, self.context_length, drafter.reads if isinstance(drafter, LayerReader) else ())
        self.timings = Timings()
        RaggedCache(target.config, batch_size=0)  # refuses a target that cannot roll back, before any work

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams | None = None,
        max_batch_size: int | None = None,
        on_tokens: OnTokens | None = None,
        on_done: OnDone | None = None,
        on_block: OnBlock | None = None,
        shown_prompts: Sequence[Sequence[int]] | None = None,
    ) -> list[DecodeResult]:
        """Decode all prompts (token ids), at most max_batch_size (default: all) at a time; results in their order.

        A row that ends makes room for a waiting prompt. A sequence that fills the target's context ends with reason
        "length". `on_tokens` hears of each row's new tokens block by block; they add up to the result's tokens.
        `on_block` hears of each sampled block whole: its tensors live no longer than the call, unless copied.
        shown_prompts: what processors (see `ProcessorParams`) and stop strings are shown in each prompt's place, such
        as the prompt with its padding; default the prompts. Raises ValueError for an empty prompt, one that leaves no
        room in the context, a token id out of range, or `on_block` with a drafter of trees.
        """
        params = params or GenerationParams()
        if on_block is not None and self.num_nodes:
            raise ValueError("on_block is for drafts that are chains: leave it out, or use a drafter of chains.")
        if params.sampling.is_greedy and not self.judge.rule.is_lossless:
            warnings.warn(
                f"temperature=0 leaves the target one token at each place, so {type(self.judge.rule).__name__} relaxes "
                "nothing and the output is the lossless one; sample (temperature > 0) to relax it.",
                stacklevel=2,
            )
        max_batch_size = len(prompts) if max_batch_size is None else max_batch_size
        if prompts and max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size}: must be at least 1.")
        rows = zip(prompts, prompts if shown_prompts is None else shown_prompts, strict=True)
        token_bytes = TokenBytes(self.target.tokenizer) if params.stop_strings else None
        waiting = deque(self._make_row(index, *row, params, token_bytes) for index, row in enumerate(rows))
        results: list[DecodeResult | None] = [None] * len(prompts)
        self.timings = Timings()
        self.length.begin()
        with packed_attention(self.target.model, self.drafter.network if self.drafter else None):
            for row in self._finished_rows(waiting, max_batch_size, params, _Hooks(on_tokens, on_block)):
                results[row.index] = result = row.result()
                if on_done is not None:
                    on_done(row.index, result)
        return [result for result in results if result is not None]

    def _finished_rows(
        self, waiting: deque[Row], max_batch_size: int, params: GenerationParams, hooks: _Hooks
    ) -> Iterator[Row]:
        """Decode the waiting rows and yield each when it ends."""
        batch: Batch | None = None
        while waiting or batch is not None:
            num_free = max_batch_size - (len(batch.rows) if batch else 0)
            # A prefill holds up the running rows, so room is filled a few prompts at a time.
            if waiting and num_free >= min(len(waiting), max(1, max_batch_size // 4)):
                touched = [waiting.popleft() for _ in range(min(num_free, len(waiting)))]
                batch = merged(batch, self._prefill(touched, params, hooks), self.drafter)
            else:
                assert batch is not None
                touched = list(batch.rows)
                batch = self._decode_block(batch, params, hooks)
            yield from (row for row in touched if row.is_finished)

    def _make_row(
        self,
        index: int,
        prompt: Sequence[int],
        shown_prompt: Sequence[int],
        params: GenerationParams,
        token_bytes: TokenBytes | None,
    ) -> Row:
        if not prompt:
            raise ValueError(f"prompt {index} is empty: give at least one token, such as the tokenizer's BOS.")
        require_known(self.target.tokenizer, prompt, self.target.num_usable, f"prompt {index}")
        limit = params.max_new_tokens
        if self.context_length is not None:
            if len(prompt) >= self.context_length:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens: the context of target {self.target.name!r} is "
                    f"{self.context_length}, so at most {self.context_length - 1} leave room for an answer. Shorten it."
                )
            limit = min(limit, self.context_length - len(prompt))
        eos_token_ids = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        return Row(index, prompt, params, limit, eos_token_ids, self.target.tokenizer, token_bytes, shown_prompt)

    def _prefill(self, rows: list[Row], params: GenerationParams, hooks: _Hooks) -> Batch | None:
        """Run the target over the prompts, once over each, and emit each row's first token."""
        started = time.perf_counter()
        device = self.target.device
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(row.prompt) for row in rows))}
        ids_BT = pad_right([list(prompt) for prompt in numbers], device)
        cache = RaggedCache(self.target.config, len(numbers), device, self.target.dtype)
        hidden_BTH = self._model.run(ids_BT, cache)
        cache.advance([len(prompt) for prompt in numbers])
        lengths = [len(row.prompt) for row in rows]
        if len(numbers) < len(rows):
            of_row = [numbers[tuple(row.prompt)] for row in rows]
            cache.copy_rows(of_row)
            ids_BT, hidden_BTH = ids_BT[of_row], hidden_BTH[of_row]
        last_B = torch.tensor(lengths, device=device) - 1
        rows_B = torch.arange(len(rows), device=device)
        raw_BTV = self._model.logits(hidden_BTH[rows_B, last_B])[:, None]
        draft = Draft(ids_BT[:, :0])
        logits_BTV, uniforms_BU = raw_BTV, None
        if (processor := self._block_processor(rows, params)) is not None:
            logits_BTV = self.target.hide_padding(processor.target(raw_BTV, draft.tokens_BK, [0] * len(rows)))
        if not params.sampling.is_greedy:
            uniforms_BU = torch.stack([row.uniforms(1) for row in rows]).to(device)
        nothing_B0H = self.target.final(hidden_BTH)[:, :0]
        judged = self.judge.judge(
            rows, logits_BTV, raw_BTV, draft, [0] * len(rows), uniforms_BU, params.sampling, nothing_B0H
        )
        for row, emission in zip(rows, judged.emissions, strict=True):
            from_prompt = replace(emission, verdicts=["prefill"] * len(emission.tokens))
            _report(row, row.emit_first(from_prompt), hooks.on_tokens)
        self.timings.prefill_s += time.perf_counter() - started
        self.timings.prefills += 1

        batch = Batch(list(rows), cache, self.drafter.start([row.prompt for row in rows]) if self.drafter else None)
        next_tokens_BT = ids_BT.roll(-1, dims=1)
        next_tokens_BT[rows_B, last_B] = judged.verdict.next_token_B
        return self._go_on(batch, hidden_BTH, next_tokens_BT, lengths)

    def _decode_block(self, batch: Batch, params: GenerationParams, hooks: _Hooks) -> Batch | None:
        """Draft, verify and emit one block for every row."""
        rows, device = batch.rows, self.target.device
        started = clock = time.perf_counter()
        # A block emits one token more than it keeps of the draft: no row drafts what it could not emit.
        num_drafted = [min(self.num_draft_tokens, row.remaining - 1) for row in rows]
        may_draft = max(num_drafted) > 0
        # The drafter is asked for whole blocks, whatever may still be emitted: what a row drafts must not depend on how
        # much its neighbours may. What cannot be emitted is cut off afterwards.
        width = self.length.choose(len(rows), self.num_draft_tokens) if may_draft else 0
        num_drafted = [min(width, count) for count in num_drafted]
        num_places = self.num_nodes or self.num_draft_tokens
        uniforms_BU = None
        if not params.sampling.is_greedy:
            # Always the same number per block, so that a row's stream does not depend on its neighbours.
            uniforms_BU = torch.stack([row.uniforms(2 * num_places + 1) for row in rows]).to(device)
        processor = self._block_processor(rows, params)
        draft = Draft(torch.zeros(len(rows), 0, dtype=torch.long, device=device))
        if width > 0:
            assert self.drafter is not None
            draft_uniforms_BK = None if uniforms_BU is None else uniforms_BU[:, : self.num_nodes or width]
            draft = self.drafter.propose(batch.draft_state, width, params.sampling, draft_uniforms_BK, processor)
            if draft.counts is not None:
                num_drafted = [min(pair) for pair in zip(num_drafted, draft.counts, strict=True)]
            draft = draft.narrowed(max(num_drafted))
            draft.check_ids(self.target.vocab_size)
        self._book("draft_s", clock)

        verify_uniforms_BU = None if uniforms_BU is None else uniforms_BU[:, num_places:]
        if draft.branches is not None:
            tree = TreeBlock(self._model, batch.cache, self.judge.rule, self.timings)
            kept_path = tree.decode(rows, draft.branches, num_drafted, verify_uniforms_BU, params.sampling, processor)
            judged, hidden_BTH, input_BT = kept_path.judged, kept_path.hidden_BTH, kept_path.tokens_BT
        else:
            chain = ChainBlock(self._model, batch.cache, self.judge, self.timings)
            judged, hidden_BTH, input_BT = chain.decode(
                rows, draft, num_drafted, verify_uniforms_BU, params.sampling, processor
            )
        clock, verdict = time.perf_counter(), judged.verdict
        num_emitted = [row.emit_block(emission) for row, emission in zip(rows, judged.emissions, strict=True)]
        if processor is not None:
            processor.raise_if_reached(num_emitted)
        for row, count in zip(rows, num_emitted, strict=True):
            _report(row, count, hooks.on_tokens)
        if hooks.on_block is not None and judged.block is not None:
            hooks.on_block(BlockRecord([row.index for row in rows], judged.block, verdict, num_emitted))
        counts = [emission.num_accepted for emission in judged.emissions]
        kept = [count + 1 for count in counts]
        batch.cache.advance(kept)
        next_tokens_BT = input_BT.roll(-1, dims=1)
        next_tokens_BT.scatter_(1, verdict.num_accepted_B[:, None], verdict.next_token_B[:, None])
        self._book("verify_s", clock)
        batch_left = self._go_on(batch, hidden_BTH, next_tokens_BT, kept)
        if may_draft:
            self.length.observe(width, counts, time.perf_counter() - started)
        return batch_left

    def _block_processor(self, rows: Sequence[Row], params: GenerationParams) -> BlockProcessor | None:
        """What changes the logits at each place of the rows' next block; None where nothing does."""
        if params.processors.is_empty:
            return None
        eos_token_ids = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        processors = Processors(params.processors, eos_token_ids, self.target.vocab_size)
        prompts, tokens, shown = zip(*((row.prompt, row.tokens, row.shown_prompt) for row in rows), strict=True)
        return BlockProcessor(processors, prompts, tokens, shown, [row.history for row in rows])

    def _go_on(self, batch: Batch, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: list[int]) -> Batch | None:
        """Drop the rows that have ended, and let the drafter take in the pass for those that go on."""
        kept = fill_holes([row.is_finished for row in batch.rows])
        if not kept:
            return None
        if kept != list(range(len(batch.rows))):
            batch.rows = [batch.rows[row] for row in kept]
            batch.cache.select_rows(kept)
            index_B = torch.tensor(kept, device=hidden_BTH.device)
            hidden_BTH, next_tokens_BT = hidden_BTH[index_B], next_tokens_BT[index_B]
            counts = [counts[row] for row in kept]
            if self.drafter is not None:
                self.drafter.select_rows(batch.draft_state, kept)
        if self.drafter is not None:
            clock = time.perf_counter()
            longest = max(counts)
            self.drafter.absorb(batch.draft_state, hidden_BTH[:, :longest], next_tokens_BT[:, :longest], counts)
            self._book("draft_s", clock)
        return batch

    def _book(self, part: str, since: float) -> float:
        """Add the time since then to a part of the timings; returns now."""
        now = time.perf_counter()
        setattr(self.timings, part, getattr(self.timings, part) + now - since)
        return now


def _report(row: Row, num_emitted: int, on_tokens: OnTokens | None) -> None:
    if on_tokens is not None and num_emitted:
        on_tokens(row.index, row.tokens[-num_emitted:], row.verdicts[-num_emitted:])
