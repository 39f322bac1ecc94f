"""Roll back and go on == a fresh forward, for every length, ragged, with grouped heads and sliding windows."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, Cache, DynamicCache

from models.cache.ragged import RaggedCache
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target

TOLERANCE = 2e-4  # float32 hidden states of order 1..10, computed in passes of different shapes
BLOCK = 4


def make_cache(target: Target, batch_size: int) -> RaggedCache:
    return RaggedCache(target.config, batch_size, target.device, target.dtype)


def feed(target: Target, cache: RaggedCache, rows: list[list[int]]) -> torch.Tensor:
    """One pass over these new tokens (padded on the right); advances by each row's own number."""
    width = max(len(row) for row in rows)
    ids_BT = torch.tensor([row + [7] * (width - len(row)) for row in rows])
    hidden_BTH = target.hidden(ids_BT, cache.attention_masks(width), cache.positions(width), cache)
    cache.advance([len(row) for row in rows])
    return hidden_BTH


def check_row(target: Target, text: list[int], hidden_TH: torch.Tensor) -> None:
    """These are the hidden states at the end of `text`, as a forward without any cache gives them."""
    expected_TH = target.hidden(torch.tensor([text]))[0, -len(hidden_TH) :]
    assert (hidden_TH - expected_TH).abs().max() < TOLERANCE


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return make_tiny_target(family=request.param)


@pytest.mark.parametrize("prompt_length", [1, 3, 14, 15, 16, 17, 30, 64, 65])
def test_roll_back_and_go_on_single_row(target: Target, prompt_length: int) -> None:
    """Every number kept of a block, around the sliding window (16) and the buffer's first size (64)."""
    for kept in range(BLOCK + 1):
        text = random_tokens(prompt_length, seed=1)
        cache = make_cache(target, 1)
        check_row(target, text, feed(target, cache, [text])[0])
        block = random_tokens(BLOCK, seed=2)
        check_row(target, text + block, feed(target, cache, [block])[0])
        cache.rollback([BLOCK - kept])
        text += block[:kept]
        for new in (random_tokens(3, seed=3), random_tokens(1, seed=4)):
            text += new
            check_row(target, text, feed(target, cache, [new])[0])
        assert cache.lengths == [len(text)]


def test_roll_back_and_go_on_ragged(target: Target) -> None:
    """Many blocks with a different number kept in each row; prompts of different lengths."""
    generator = torch.Generator().manual_seed(5)
    texts = [random_tokens(length, seed=length) for length in (2, 40, 17, 1, 16)]
    cache = make_cache(target, len(texts))
    hidden_BTH = feed(target, cache, texts)
    for text, hidden_TH in zip(texts, hidden_BTH, strict=True):
        check_row(target, text, hidden_TH[: len(text)])
    for step in range(12):
        blocks = [random_tokens(1 if step % 4 == 3 else BLOCK, seed=100 * step + b) for b in range(len(texts))]
        hidden_BTH = feed(target, cache, blocks)
        for text, block, hidden_TH in zip(texts, blocks, hidden_BTH, strict=True):
            check_row(target, text + block, hidden_TH)
        kept = [int(torch.randint(0, len(block) + 1, (), generator=generator)) for block in blocks]
        cache.rollback([len(block) - k for block, k in zip(blocks, kept, strict=True)])
        texts = [text + block[:k] for text, block, k in zip(texts, blocks, kept, strict=True)]
        assert cache.lengths == [len(text) for text in texts]


def test_rows_leave_and_join(target: Target) -> None:
    """Whatever rows are picked, in whatever order, and with new ones behind them."""
    texts = [random_tokens(length, seed=length) for length in (5, 33, 12, 20)]
    cache = make_cache(target, len(texts))
    feed(target, cache, texts)
    for rows, joining in [
        ([3, 1, 2], [60, 2]),
        ([0, 4, 2, 3], []),
        ([2, 0], [9]),
        ([1], [70, 1, 3]),
        ([0, 1, 2, 3], []),
    ]:
        cache.select_rows(rows)
        texts = [texts[row] for row in rows]
        if joining:
            new = [random_tokens(length, seed=length + 50) for length in joining]
            other = make_cache(target, len(new))
            feed(target, other, new)
            cache.extend(other)
            texts += new
        blocks = [random_tokens(BLOCK, seed=len(text)) for text in texts]
        hidden_BTH = feed(target, cache, blocks)
        texts = [text + block for text, block in zip(texts, blocks, strict=True)]
        for text, hidden_TH in zip(texts, hidden_BTH, strict=True):
            check_row(target, text, hidden_TH)


def test_copied_rows_go_their_own_ways(target: Target) -> None:
    """Two prompts, five rows; each then reads something else, and one rolls back what the others keep."""
    prompts = [random_tokens(9, 1), random_tokens(4, 2)]
    cache = make_cache(target, 2)
    feed(target, cache, prompts)
    order = [1, 0, 0, 1, 0]
    cache.copy_rows(order)
    more = [random_tokens(3, 10 + row) for row in range(5)]
    feed(target, cache, more)
    cache.rollback([0, 0, 2, 0, 0])
    last = [random_tokens(2, 20 + row) for row in range(5)]
    hidden_BTH = feed(target, cache, last)
    for row, source in enumerate(order):
        kept = more[row][:1] if row == 2 else more[row]
        check_row(target, prompts[source] + kept + last[row], hidden_BTH[row])


def test_same_with_eager_attention() -> None:
    """Additive masks, and no mask where one query sees everything."""
    target = make_tiny_target(family="mistral")
    target.model.set_attn_implementation("eager")
    test_roll_back_and_go_on_ragged(target)
    test_roll_back_and_go_on_single_row(target, 15)


def test_padding_of_a_fresh_buffer_is_never_read() -> None:
    """Uninitialised memory may hold NaN, and a weight of zero times NaN is NaN: buffers begin as zeros."""
    target = make_tiny_target()
    cache = make_cache(target, 2)
    feed(target, cache, [[5], [5, 6, 7]])
    assert all((layer.keys[:, :, 3:] == 0).all() and (layer.values[:, :, 3:] == 0).all() for layer in cache.layers)


def test_reset_and_rollback_limits() -> None:
    target = make_tiny_target()
    cache = make_cache(target, 2)
    feed(target, cache, [[5], [5, 6, 7]])
    with pytest.raises(ValueError, match=r"exceed the row lengths \[1, 3\]"):
        cache.rollback([2, 0])
    cache.reset()
    text = random_tokens(4, seed=0)
    check_row(target, text, feed(target, cache, [text, text])[1])


@pytest.mark.parametrize(
    ("family", "overrides", "found"),
    [
        ("mamba", {}, "no attention heads"),
        ("rwkv", {}, "no attention heads"),
        ("qwen3_next", {}, "linear_attention"),
        ("jamba", {}, "linear|hybrid|mamba"),
        ("lfm2", {"full_attn_idxs": [0]}, "conv"),
        ("llama4_text", {}, "chunked_attention"),
        ("gemma3n_text", {}, "dummy"),
    ],
)
def test_refuses_what_cannot_roll_back(family: str, overrides: dict[str, list[int]], found: str) -> None:
    with pytest.raises(ValueError, match=f"cannot roll back: .*({found})"):
        RaggedCache(AutoConfig.for_model(family, **overrides), batch_size=1)


def test_refuses_attention_without_masks() -> None:
    config = AutoConfig.for_model("llama")
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="one of sdpa, eager"):
        RaggedCache(config, batch_size=1)


CHANGES: dict[str, Callable[[Cache], None]] = {
    "crop none": lambda cache: cache.crop(0),
    "crop two": lambda cache: cache.crop(-2),
    "crop more than there is": lambda cache: cache.crop(-8),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, -2])),
    "select by a mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_transformers_own_changes_are_those_of_its_cache(name: str) -> None:
    """Entry for entry what DynamicCache holds, and what it hands on in the next pass, after a row has left as well."""
    target = make_tiny_target()
    ours, theirs = make_cache(target, 4), DynamicCache(config=target.config)
    generator = torch.Generator().manual_seed(0)

    def both_update(num_rows: int, num_new: int) -> None:
        for layer in range(len(ours.layers)):
            new = torch.randn(2, num_rows, 2, num_new, 8, generator=generator)
            for got, expected in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
                assert torch.equal(got, expected)
        ours.advance([num_new] * num_rows)

    both_update(4, 5)
    ours.select_rows([0, 1, 2])
    theirs.batch_select_indices(torch.arange(3))
    for cache in (ours, theirs):
        CHANGES[name](cache)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.is_croppable == theirs.is_croppable
    both_update(ours.batch_size, 3)


def test_transformers_own_changes_heed_lengths(target: Target) -> None:
    """On ragged rows, and the model reads on from there."""
    texts = [random_tokens(length, seed=length) for length in (2, 20, 6)]
    cache = make_cache(target, len(texts))
    feed(target, cache, texts)
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 1, 2, 2, 4, 0]))
    cache.batch_select_indices(torch.tensor([0, 3, 1]))
    kept = [texts[2][:3], texts[1][:17], []]
    assert cache.lengths == [3, 17, 0]
    new = [random_tokens(BLOCK, seed=row) for row in range(3)]
    hidden_BTH = feed(target, cache, new)
    for row in range(3):
        check_row(target, kept[row] + new[row], hidden_BTH[row])


def test_crop_takes_no_final_length() -> None:
    """As older versions of transformers did."""
    for cache in (make_cache(make_tiny_target(), 1), DynamicCache()):
        cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
        with pytest.raises(ValueError, match=r"crop.*1"):
            cache.crop(1)
