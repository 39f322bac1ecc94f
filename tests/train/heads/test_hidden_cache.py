"""The hidden-state cache: what it holds, how it goes on, and what it refuses."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from tests.models.decoding.scripted import random_prompts
from train.data.prompts import Example
from train.heads import hidden_cache
from train.heads.hidden_cache import (
    CachedRows,
    CacheOptions,
    answer_positions,
    build_cache,
    cache_bytes,
    log_normalisers,
    split_rows,
)

# Float32 hidden states of order 1..10, computed in padded batches and alone.
TOLERANCE = 5e-5
OPTIONS = CacheOptions(shard_examples=4, batch_tokens=60)


def make_examples(count: int = 10) -> list[Example]:
    """Ragged texts whose last half is the answer; one has two answers."""
    texts = random_prompts(count, longest=30, seed=2)
    texts = [[*text, 7, 8, 9] for text in texts]
    examples = [
        Example(f"e{i}", "chat", "train", text, [at >= len(text) // 2 for at in range(len(text))])
        for i, text in enumerate(texts)
    ]
    longest = max(range(count), key=lambda i: len(texts[i]))
    mask = [at % 7 < 3 for at in range(len(texts[longest]))]
    examples[longest] = replace(examples[longest], loss_mask=mask)
    return examples


def build(
    target: Target, folder: Path, examples: list[Example] | None = None, digest: str = "text", **changes: object
) -> CachedRows:
    with_normaliser, reads = bool(changes.pop("with_normaliser", True)), changes.pop("reads", ())
    options = replace(OPTIONS, **changes)
    return build_cache(target, examples or make_examples(), options, folder, digest, with_normaliser, reads)


@pytest.mark.parametrize("family", FAMILIES)
def test_holds_the_targets_hidden_states(family: str, tmp_path: Path) -> None:
    """As the target gives them for one example alone; normalisers are the logits' own, zero where no answer follows."""
    target = make_tiny_target(family=family)
    examples = make_examples()
    rows = build(target, tmp_path)
    assert len(rows) == len(examples)
    assert rows.lengths == [len(example.input_ids) for example in examples]
    for i, example in enumerate(examples):
        row = rows[i]
        ids = torch.tensor([example.input_ids])
        assert torch.equal(row.input_ids, ids[0])
        assert row.loss_mask.tolist() == example.loss_mask
        assert row.hidden is not None
        assert row.log_normaliser is not None
        torch.testing.assert_close(row.hidden, target.hidden(ids)[0], atol=TOLERANCE, rtol=0)
        with torch.no_grad():
            expected = target.model(input_ids=ids).logits[0].float().logsumexp(dim=-1)
        followed = [
            at + 1 < len(example.loss_mask) and example.loss_mask[at + 1] for at in range(len(example.loss_mask))
        ]
        assert ((row.log_normaliser != 0).tolist()) == followed
        wanted = torch.tensor(followed)
        torch.testing.assert_close(row.log_normaliser[wanted], expected[wanted], atol=1e-3, rtol=0)


def test_holds_the_layers_that_a_head_reads(tmp_path: Path) -> None:
    """Behind the hidden states, as transformers gives them; the same normalisers; another choice is another run's."""
    target = make_tiny_target(family="gemma3_text")
    reads = (0, 2, 3)
    rows, plain = build(target, tmp_path / "wide", reads=reads), build(target, tmp_path / "plain")
    for i, example in enumerate(make_examples()):
        with torch.no_grad():
            output = target.model(input_ids=torch.tensor([example.input_ids]), output_hidden_states=True)
        streams = [output.hidden_states[0][0], output.hidden_states[2][0]]
        final, low, middle, _ = rows[i].hidden.chunk(4, dim=-1)
        torch.testing.assert_close(final, output.hidden_states[-1][0], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(torch.stack([low, middle]), torch.stack(streams), atol=TOLERANCE, rtol=0)
        assert torch.equal(rows[i].log_normaliser, plain[i].log_normaliser)
    examples = make_examples()
    assert cache_bytes(target, examples, False, reads) == 4 * cache_bytes(target, examples, False)
    with pytest.raises(ValueError, match=r"reads is \[0, 2, 3\], now \[0, 1, 2\]"):
        build(target, tmp_path / "wide", reads=(0, 1, 2))
    with pytest.raises(ValueError, match=r"reads is \[0, 2, 3\], now None"):
        build(target, tmp_path / "wide")


@pytest.mark.parametrize("enabled", [True, False])
def test_training_and_heldout_rows_are_their_own(enabled: bool, tmp_path: Path) -> None:
    """With a cache, which holds hidden states, and without, where the rows are text alone."""
    splits = make_examples()[:6], make_examples()[6:]
    both = split_rows(make_tiny_target(), *splits, replace(OPTIONS, enabled=enabled), tmp_path, "text")
    for rows, examples in zip(both, splits, strict=True):
        assert [rows[i].input_ids.tolist() for i in range(len(rows))] == [one.input_ids for one in examples]
        assert (rows[0].hidden is not None) == enabled
        assert rows[0].log_normaliser is None


def test_without_normalisers(tmp_path: Path) -> None:
    row = build(make_tiny_target(), tmp_path, with_normaliser=False)[3]
    assert row.hidden is not None
    assert row.log_normaliser is None


def test_keeps_the_targets_dtype_and_size(tmp_path: Path) -> None:
    """The disk need told beforehand is what the tensors take."""
    target = make_tiny_target(dtype="bfloat16")
    rows = build(target, tmp_path)
    assert rows[0].hidden is not None
    assert rows[0].hidden.dtype == torch.bfloat16
    needed = cache_bytes(target, make_examples(), with_normaliser=True)
    assert needed == sum(rows.lengths) * (32 * 2 + 4)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert needed <= written < needed + 1000 * 3


def test_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    target = make_tiny_target()
    one, other = build(target, tmp_path / "a", batch_tokens=1), build(target, tmp_path / "b", batch_tokens=10_000)
    for i in range(len(one)):
        torch.testing.assert_close(one[i].hidden, other[i].hidden, atol=TOLERANCE, rtol=0)


def test_only_a_missing_shard_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as before; a whole cache is opened without running the target."""
    target = make_tiny_target()
    build(target, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"shard-0000{i}.safetensors" for i in range(3)]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards}
    shards[1].unlink()
    build(target, tmp_path)
    assert all(path.read_bytes() == content for path, (content, _) in before.items())
    assert [path.stat().st_mtime_ns == time for path, (_, time) in before.items()] == [True, False, True]
    monkeypatch.setattr(target, "hidden", None)
    assert len(build(target, tmp_path)) == 10


def test_an_interrupt_leaves_whole_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_target()
    build(target, tmp_path / "whole")
    original, calls = hidden_cache.save_file, []

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half a shard")
            raise KeyboardInterrupt
        original(tensors, path)

    monkeypatch.setattr(hidden_cache, "save_file", save)
    with pytest.raises(KeyboardInterrupt):
        build(target, tmp_path / "cut")
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["manifest.json", "shard-00000.safetensors"]
    build(target, tmp_path / "cut")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("change", ["target", "dtype", "tokenizer", "text", "shards", "normalisers", "fewer examples"])
def test_a_stale_cache_is_refused(change: str, tmp_path: Path) -> None:
    """Whatever it was made from has changed: one line that says what, and nothing is overwritten."""
    build(make_tiny_target(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    target, examples, digest, changes = make_tiny_target(), make_examples(), "text", {}
    if change == "target":
        target, named = make_tiny_target(seed=1), "target_fingerprint"
    elif change == "dtype":
        target, named = make_tiny_target(dtype="bfloat16"), "dtype is 'float32', now 'bfloat16'"
    elif change == "tokenizer":
        target.tokenizer.chat_template += " "
        named = "tokenizer_fingerprint"
    elif change == "text":
        digest, named = "other text", "text_fingerprint is 'text', now 'other text'"
    elif change == "shards":
        changes, named = {"shard_examples": 5}, "shard_examples is 4, now 5"
    elif change == "normalisers":
        changes, named = {"with_normaliser": False}, "with_normaliser is True, now False"
    else:
        examples, named = examples[:-1], "num_examples is 10, now 9"
    with pytest.raises(
        ValueError, match=rf"holds the work of another run: .*{named}.*choose another folder, or delete"
    ):
        build(target, tmp_path, examples, digest, **changes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut short", "empty", "another shard"])
def test_a_damaged_shard_is_named(damage: str, tmp_path: Path) -> None:
    target = make_tiny_target()
    build(target, tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    if damage == "cut short":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "empty":
        shard.write_bytes(b"")
    else:
        shutil.copy(tmp_path / "shard-00002.safetensors", shard)
    with pytest.raises(
        ValueError, match=r"shard-00001\.safetensors (is damaged|holds \d+ hidden states, expected \d+).*delete it"
    ):
        build(target, tmp_path)
    shard.unlink()
    assert len(build(target, tmp_path)) == 10


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    target = make_tiny_target()
    build(target, tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .*delete .* and run again"):
        build(target, tmp_path)


def test_too_little_disk_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_target()
    needed = cache_bytes(target, make_examples(), True)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed - 1))
    monkeypatch.setattr(target, "hidden", None)
    with pytest.raises(ValueError, match=r"the hidden-state cache needs .* MB under .*cache\.enabled=false"):
        build(target, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed))
    assert len(build(target, tmp_path)) == 10
    # What is there already needs no room.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 0))
    assert len(build(target, tmp_path)) == 10


def test_answer_positions() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0]]).bool()
    assert answer_positions(mask).int().tolist() == [[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]]


def test_log_normalisers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_target(family="gemma2")
    hidden = target.hidden(torch.arange(3, 40)[None])[0]
    wanted = torch.arange(37) % 3 > 0
    whole = log_normalisers(target, hidden, wanted)
    monkeypatch.setattr(hidden_cache, "NORMALISER_ROWS", 4)
    torch.testing.assert_close(log_normalisers(target, hidden, wanted), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole[wanted], target.logits(hidden[wanted]).logsumexp(-1), atol=1e-5, rtol=0)
    assert (whole[~wanted] == 0).all()
    assert whole.dtype == torch.float32


def test_manifest_says_what_it_was_made_from(tmp_path: Path) -> None:
    target = make_tiny_target()
    build(target, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["target_fingerprint"] == target.fingerprint()
    assert manifest["tokenizer_fingerprint"] == target.tokenizer_fingerprint()
    assert manifest["text_fingerprint"] == "text"


def test_processes_share_shards_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes its own and no other's; what they open is whole when the last is done, as one would have made it."""
    target = make_tiny_target()
    build(target, tmp_path / "one")
    folder = tmp_path / "two"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="shard-00000"):  # the other's, which in a job is waited for
        build(target, folder)
    assert [path.name for path in folder.glob("shard-*")] == ["shard-00001.safetensors"]
    monkeypatch.setenv("RANK", "0")
    assert len(build(target, folder)) == len(make_examples())
    assert len(list(folder.glob("shard-*"))) == 3
    for path in (tmp_path / "one").glob("*"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
