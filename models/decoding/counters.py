"""What is counted while decoding (drafted, accepted, emitted, blocks), and where the time went."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts of one sequence, or of many added up.

    The prefill is a target pass too, but no block: it emits the first token, and neither is part of the block counts. A
    block is one later target pass in which the row took part. Nothing behind a stop counts: where an accepted token
    ends the sequence, the drafted tokens after it were neither accepted nor drafted. A drafted tree counts as a chain
    as long as the tree is deep.
    """

    blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0  # of the accepted, those that lossless token verification would have rejected
    emitted: int = 0  # all tokens returned, the prefill's included
    sequences: int = 0  # = tokens that prefills emitted
    # By place in the block: how often a token was drafted there, and how often accepted.
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def record_block(self, num_drafted: int, num_accepted: int, num_emitted: int, num_relaxed: int = 0) -> None:
        """Add one block that drafted, kept and emitted this many tokens."""
        self.blocks += 1
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.relaxed += num_relaxed
        self.emitted += num_emitted
        _lengthen(self.drafted_at, num_drafted)
        _lengthen(self.accepted_at, num_drafted)
        for place in range(num_drafted):
            self.drafted_at[place] += 1
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 where nothing was drafted. The bonus token never counts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_place(self) -> list[float]:
        """accepted_at / drafted_at: the share of blocks whose first k drafted tokens were all kept."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def mean_block_length(self) -> float:
        """Emitted tokens per block; 0 without a block.

        1 + accepted / blocks, less the token that a last block does not add when a drafted token ends the sequence.
        """
        return (self.emitted - self.sequences) / self.blocks if self.blocks else 0.0


def add_up(counters: Iterable[Counters]) -> Counters:
    """Sum over sequences."""
    total = Counters()
    for one in counters:
        total.blocks += one.blocks
        total.drafted += one.drafted
        total.accepted += one.accepted
        total.relaxed += one.relaxed
        total.emitted += one.emitted
        total.sequences += one.sequences
        for ours, theirs in ((total.drafted_at, one.drafted_at), (total.accepted_at, one.accepted_at)):
            _lengthen(ours, len(theirs))
            for place, count in enumerate(theirs):
                ours[place] += count
    return total


def _lengthen(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


@dataclass
class Timings:
    """Seconds of wall clock in each part of one `generate`, and the number of passes behind them.

    Read without waiting for the device: on a GPU work is booked where its result is first needed. The sum is right.
    """

    prefill_s: float = 0.0  # target passes over prompts, and the first token
    target_s: float = 0.0  # target passes over blocks, output head included
    draft_s: float = 0.0  # proposing, and taking in hidden states
    verify_s: float = 0.0  # probabilities, verdict, and rolling back
    target_passes: int = 0  # batched passes over blocks
    prefills: int = 0
