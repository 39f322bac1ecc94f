"""The contract of draft heads: trained modules that read the target's hidden states and propose further tokens.

Head k at position t reads the hidden state h_t and, for kinds that want them, the tokens x_{t+1} .. x_{t+k}; it
predicts token t + 1 + k (k = 1..K). Its output is a *state* of the target's width, from which an output head makes
logits. Frozen parts (embeddings, output head) are the target's own, held by reference: they are never saved and never
trained.

Shape suffixes: B batch, T time, K draft, M nodes of one level of a tree, V vocabulary, D draft vocabulary, H hidden;
for a head with `reads`, the target's hidden states are (1 + R) H wide (see `Target.hidden`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..target.model import Target


@dataclass
class HeadOptions:
    """Hyper-parameters that a checkpoint carries.

    kind: medusa, hydra, mtp or eagle3. num_draft_tokens: K at training time. num_layers: residual blocks a head
    (medusa), hidden layers of the MLP (hydra), transformer layers (mtp; eagle3 has one). own_output_head: train output
    heads of their own, started from the target's, instead of the target's frozen one. draft_vocab_size: most frequent
    training tokens that a head may draft; 0 is the whole vocabulary. reads: numbers of the
    target's layers behind which an eagle3 head reads the residual stream, three and rising; empty is its own choice.
    blank_first: an mtp head does without the embedding in a text's first pair of state and token, as vLLM and SGLang
    have it, so that they draft exactly what it drafts here.
    """

    kind: str = "mtp"
    num_draft_tokens: int = 4
    num_layers: int = 1
    own_output_head: bool = False
    draft_vocab_size: int = 0
    reads: list[int] = field(default_factory=list)
    blank_first: bool = False


@dataclass
class HeadState:
    """What a head remembers of a batch while it drafts.

    Kinds add their own fields. step: drafted so far in this block.
    """

    step: int


class DraftHead(nn.Module, ABC):
    """Base of all kinds. Parameters are float32 until `.to(dtype)`; only they appear in the state dict."""

    kind: ClassVar[str]
    recursive: ClassVar[bool]
    # How a state and the embedding of a token are put side by side.
    concatenation: ClassVar[str] = "[state; embedding]"
    # The target's layers that it reads beside the final hidden state, for `Target.hidden`.
    reads_layers: ClassVar[bool] = False
    reads: tuple[int, ...] = ()

    def __init__(self, target: Target, options: HeadOptions, draft_vocab: Tensor | None = None) -> None:
        """draft_vocab: sorted ids [D] of the reduced vocabulary, or None for all."""
        super().__init__()
        if options.num_draft_tokens < 1 or options.num_layers < 1:
            raise ValueError(
                f"heads.num_draft_tokens={options.num_draft_tokens} and heads.num_layers={options.num_layers}: "
                "both must be at least 1"
            )
        if options.reads and not self.reads_layers:
            raise ValueError(f"heads.reads={options.reads}: {self.kind} heads read none of the layers; leave it out")
        if options.blank_first and self.kind != "mtp":
            raise ValueError(f"heads.blank_first=true: it is for heads=mtp, not for {self.kind}; leave it out")
        self.options = options
        self.num_draft_tokens = options.num_draft_tokens
        self.hidden_size = target.hidden_size
        self.vocab_size = target.vocab_size
        self.draft_vocab = None if draft_vocab is None else draft_vocab.to(target.device)
        self.target = _Unregistered(target)
        self.output_heads = nn.ParameterList()
        # Detached: a Parameter set as an attribute would be registered, trained and saved.
        weight: Tensor = target.output_head.weight.detach()
        bias: Tensor | None = target.output_head.bias
        if self.draft_vocab is not None:
            weight = weight[self.draft_vocab]
            bias = None if bias is None else bias[self.draft_vocab]
        self._frozen_bias = None if bias is None else bias.detach()
        if options.own_output_head:
            copies = 1 if self.recursive else options.num_draft_tokens
            self.output_heads.extend(nn.Parameter(weight.float().clone()) for _ in range(copies))
        self._frozen_weight = weight

    # Training

    @abstractmethod
    def forward(self, hidden_BTH: Tensor, input_ids_BT: Tensor, bases_BS: Tensor | None = None) -> Tensor:
        """Teacher-forced states [K, B, S, H]: entry [k-1, b, i] is head k's at position t = bases_BS[b, i] of row b.

        It predicts token t + 1 + k. bases_BS: the positions that drafts start from, default all T. Rows are
        left-aligned; right padding is allowed and changes nothing before it. Where token t + k does not exist the state
        is unspecified, and has no label.
        """

    def output_weight(self, step: int) -> Tensor:
        """Weight [V or D, H] that turns a state of step 1..K into logits.

        Requires grad only if it is the head's own.
        """
        if not self.output_heads:
            return self._frozen_weight
        return self.output_heads[0 if self.recursive else step - 1]

    def logits(self, states: Tensor, step: int) -> Tensor:
        """States [..., H] of one step -> logits [..., V or D], float32, with the target's own scaling and capping."""
        weight = self.output_weight(step)
        raw = F.linear(states.to(weight.dtype), weight, self.frozen_bias(weight.dtype))
        return self.target.get.finish_logits(raw).float()

    def frozen_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The target's output bias over the head's vocabulary, where its family has one."""
        return None if self._frozen_bias is None else self._frozen_bias.to(dtype)

    @torch.no_grad()
    def frozen_logits(self, hidden: Tensor) -> Tensor:
        """The target's own logits over the head's vocabulary: hidden states [..., H] -> [..., V or D], float32."""
        weight = self._frozen_weight
        raw = F.linear(hidden.to(weight.dtype), weight, self.frozen_bias(weight.dtype))
        return self.target.get.finish_logits(raw).float()

    def fit_start(self, texts: Sequence[Tensor]) -> None:
        """Better first weights from a few thousand tokens of training text (each text: ids [T]); by default none."""

    # Drafting

    @abstractmethod
    def start(self, batch_size: int) -> Any:
        """A fresh drafting state (a `HeadState`) for so many rows."""

    @abstractmethod
    def absorb(self, state: Any, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """Take in verified context: of row b, the first counts[b] pairs (h_i, x_{i+1}), the rest being right padding.

        The last pair's token is the root: emitted, not yet seen by the target. What was drafted before is forgotten.
        """

    @abstractmethod
    def draft_state(self, state: Any, tokens_B: Tensor | None) -> Tensor:
        """Head state [B, H] of draft step `state.step`; tokens_B is None at step 1, then what was drafted before."""

    @abstractmethod
    def level_states(self, state: Any, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        """Head states [B, M, H] of the next level of a draft tree, which is step `state.step` at all of its nodes.

        Both None: the root alone, M = 1. Otherwise the tokens of M nodes, and below which node of the last level each
        of them stands. With M = 1 throughout it is what `draft_state` gives.
        """

    @abstractmethod
    def select_rows(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the drafting state, in this order. Call between blocks."""

    @abstractmethod
    def extend(self, state: Any, other: Any) -> None:
        """Append other's rows. Call between blocks."""

    def draft_logits(self, state: HeadState, tokens_B: Tensor | None) -> Tensor:
        """The logits of `draft_step`."""
        return self.draft_step(state, tokens_B)[1]

    @torch.no_grad()
    def draft_step(self, state: HeadState, tokens_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """The block's next draft step: head state [B, H], and logits [B, V], float32.

        The logits are -inf outside the draft vocabulary. Otherwise as `draft_hidden`.
        """
        hidden_BH = self.draft_hidden(state, tokens_B)
        return hidden_BH, self.widen(self.logits(hidden_BH, state.step))

    @torch.no_grad()
    def draft_hidden(self, state: HeadState, tokens_B: Tensor | None) -> Tensor:
        """The head state [B, H] of the block's next draft step, for one whose token is given.

        tokens_B: None starts a block, else what the last step drafted. ValueError past what the head was trained for.
        """
        self._begin_step(state, is_first=tokens_B is None)
        return self.draft_state(state, tokens_B)

    @torch.no_grad()
    def level_logits(self, state: HeadState, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        """Logits [B, M, V] of the next level of a draft tree; see `level_states` and `draft_step`."""
        self._begin_step(state, is_first=tokens_BM is None)
        return self.widen(self.logits(self.level_states(state, tokens_BM, parents_BM), state.step))

    def _begin_step(self, state: HeadState, is_first: bool) -> None:
        state.step = 1 if is_first else state.step + 1
        if state.step > self.num_draft_tokens and not self.recursive:
            raise ValueError(
                f"{self.kind} heads were trained for {self.num_draft_tokens} draft tokens and cannot give "
                f"{state.step}; choose fewer draft tokens, or heads=mtp, which may draft more than it was trained for"
            )

    def widen(self, logits: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., D] -> over the whole [..., V]."""
        if self.draft_vocab is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        wide[..., self.draft_vocab] = logits
        return wide

    def trainable_dtype(self) -> torch.dtype:
        """The dtype of the head's own parameters."""
        return next(self.parameters()).dtype


class _Unregistered:
    """Holds the target so that nn.Module neither registers, moves nor saves it."""

    def __init__(self, target: Target) -> None:
        self.get = target


def all_bases(input_ids_BT: Tensor) -> Tensor:
    """Every position of every row: [B, T]."""
    return torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device).expand(input_ids_BT.shape)


def tokens_after(input_ids_BT: Tensor, bases_BS: Tensor, steps: int) -> Tensor:
    """Token t + steps for every base t: [B, S]. Past the end it is the row's last one, whose state carries no label."""
    return input_ids_BT.gather(1, (bases_BS + steps).clamp(max=input_ids_BT.shape[1] - 1))


def at_bases(hidden_BTH: Tensor, bases_BS: Tensor) -> Tensor:
    """Entries [B, S, H] at the bases."""
    return hidden_BTH.gather(1, bases_BS[..., None].expand(-1, -1, hidden_BTH.shape[-1]))


def below(values_BMX: Tensor, parents_BM: Tensor) -> Tensor:
    """Each node's entry of its parent: [B, last M, X] -> [B, M, X]."""
    return values_BMX.gather(1, parents_BM[..., None].expand(-1, -1, values_BMX.shape[-1]))


def last_kept(hidden_BTH: Tensor, counts: Sequence[int]) -> Tensor:
    """Row b's entry counts[b] - 1: [B, T, H] -> [B, H]."""
    if len(counts) == 1:
        return hidden_BTH[:, counts[0] - 1]
    last_B = torch.tensor(counts, device=hidden_BTH.device) - 1
    return hidden_BTH[torch.arange(len(counts), device=hidden_BTH.device), last_B]
