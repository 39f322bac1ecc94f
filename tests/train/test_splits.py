"""Training, selection and test share no prompt, whatever the order, the limit, the seed or the spelling."""

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.target.tiny import make_tiny_target
from train.answers.answers import AnswerOptions, answer_prompts, read_answers, write_answers
from train.data.prompts import DataOptions, load_prompts
from train.data.sources import hub
from train.data.sources.record import Prompt, halve, hash_split, loosened
from train.data.sources.seen import fingerprint, leave_out, one_split_each, seen_in, seen_record
from train.data.texts import load_texts

# Words that are alike but for case, width and accents' form, and spaces between them.
WORDS = st.sampled_from(["Add", "add", "ADD", "two", "Two", "three", "caf\u00e9", "cafe\u0301", "\uff12", "2", "four"])
SPACES = st.sampled_from([" ", "  ", "\n", "\t"])
CONTENTS = st.lists(st.tuples(WORDS, SPACES), min_size=1, max_size=4).map(
    lambda parts: "".join(word + space for word, space in parts) + "end"
)


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> DataOptions:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DataOptions(source="jsonl", path=str(path))


@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(CONTENTS, min_size=1, max_size=30),
    fraction=st.sampled_from([0.1, 0.5, 0.9]),
    order=st.integers(0, 99),
    limit=st.integers(1, 30),
)
def test_splits_are_disjoint_and_stable(contents: list[str], fraction: float, order: int, limit: int) -> None:
    """Of rows in another order, under another seed and limit, each that is kept is where it was."""
    with tempfile.TemporaryDirectory() as name:
        data = write(Path(name), [{"prompt": content} for content in contents])
        whole = load_prompts(replace(data, heldout_fraction=fraction))
        shuffled = random.Random(order).sample(contents, len(contents))
        other = write(Path(name), [{"prompt": content} for content in shuffled], "other.jsonl")
        part = load_prompts(replace(other, heldout_fraction=fraction, seed=order, max_prompts=limit))
    splits = {loosened(prompt.content()): prompt.split for prompt in whole}
    assert set(splits) == set(map(loosened, contents))  # no content is lost altogether
    assert all(splits[loosened(prompt.content())] == prompt.split for prompt in [*whole, *part])


@given(content=CONTENTS, fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_more_held_out_is_a_superset_in_the_same_halves(content: str, fractions: tuple[float, float]) -> None:
    small, large = sorted(fractions)
    assert hash_split(content, small) in ("train", hash_split(content, large))
    assert halve(content) == halve(f"  {content.upper().lower()}\n") != "train"


def test_named_splits_are_kept(tmp_path: Path) -> None:
    """`validation` selects; `heldout`, of files of when there were two splits, is halved by content."""
    names = ("train", "selection", "validation", "test", "heldout")
    rows = [{"prompt": f"{name} {i}", "split": name} for name in names for i in range(20)]
    found = {prompt.content(): prompt.split for prompt in load_prompts(write(tmp_path, rows))}
    means = {"validation": "selection", **{name: name for name in ("train", "selection", "test")}}
    for content, split in found.items():
        assert split == means.get(content.split()[0], halve(content))
    assert {split for content, split in found.items() if content.startswith("heldout")} == {"selection", "test"}


@pytest.mark.parametrize("again", ["Say 1.", "say  1.\n"])
def test_a_prompt_in_two_named_splits_is_refused_in_one_line(again: str, tmp_path: Path) -> None:
    data = write(tmp_path, [{"prompt": "Say 1.", "split": "train"}, {"prompt": again, "split": "test"}])
    expected = r"rows\.jsonl:2: the prompt of .*rows\.jsonl:1 again.*'train'.*'test'"
    with pytest.raises(ValueError, match=expected) as told:
        load_prompts(data)
    assert "\n" not in str(told.value)


def test_a_copy_in_another_source_stays_where_it_is_furthest_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [{"prompt": "Say 1.", "split": "train"}, {"prompt": "Say 2.", "split": "train"}], "a.jsonl")
    write(tmp_path, [{"prompt": "SAY 1.", "split": "test"}, {"prompt": "Say 2.", "split": "selection"}], "b.jsonl")
    sources = [f"jsonl={tmp_path / name}" for name in ("a.jsonl", "b.jsonl")]
    for entries in (sources, sources[::-1]):
        prompts = load_prompts(DataOptions(source="mixed", sources=entries))
        assert {prompt.content(): prompt.split for prompt in prompts} == {"SAY 1.": "test", "Say 2.": "selection"}
        assert "left out 2 prompts that occur again" in capsys.readouterr().out


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("others", [(), ("test",), ("validation",), ("validation", "test")])
def test_a_sets_own_splits_are_kept(others: tuple[str, ...], fraction: float, tmp_path: Path) -> None:
    """Held-out rows of the training split go where the set has none of its own."""
    hub_set = replace(hub.KNOWN["gsm8k"], others=("validation", "test"))
    for name in ("train", *others):
        write(tmp_path, [{"question": f"{name} {i}?", "answer": "1"} for i in range(40)], f"{name}.jsonl")
    if not others:
        write(tmp_path, [{"question": "?", "answer": "1"}], "notes.jsonl")
    prompts = hub.load("gsm8k", hub_set, str(tmp_path), fraction)
    found = {name: {p.split for p in prompts if p.content().startswith(name)} for name in ("train", *others)}
    lacking = {"selection", "test"} - {hub.MEANING[name] for name in others}
    assert found.pop("train") == ({"train"} | lacking if fraction else {"train"})
    assert found == ({name: {hub.MEANING[name]} for name in others} if fraction else {name: set() for name in others})


def test_the_record_of_a_checkpoint_says_what_it_must_not_be_asked() -> None:
    splits = {"a b": "train", "c": "selection", "d": "test"}
    prompts = [Prompt(id=text, task="chat", text=text, split=split) for text, split in splits.items()]  # type: ignore[arg-type]
    provenance = json.loads(json.dumps({"prompts": seen_record((p.split, p.content()) for p in prompts)}))
    kept = {
        split: [prompt.content() for prompt in leave_out(prompts, seen_in(provenance, split))]
        for split in ("train", "selection", "test", "fresh")
    }
    assert kept == {"train": ["a b", "c", "d"], "selection": ["c", "d"], "test": ["d"], "fresh": ["d"]}
    assert seen_in({}, "test") == set()
    assert fingerprint(" A\nb") in seen_in(provenance, "test")
    messages = ({"role": "user", "content": "A b"},)
    assert not leave_out([Prompt("x", "chat", messages)], seen_in(provenance, "test"))


def test_prompts_of_one_split_are_left_as_they_are() -> None:
    prompts = [Prompt(id=str(i), task="chat", text=text) for i, text in enumerate(("a", "A", "a"))]
    assert one_split_each(prompts) == prompts


def test_answers_of_when_there_were_two_splits_are_read_on(tmp_path: Path) -> None:
    """Their folder is taken up as it is, and its held-out rows go to the halves by the content of their prompts."""
    data = replace(write(tmp_path, [{"prompt": f"Say {i}."} for i in range(40)]), heldout_fraction=0.5)
    target, options, folder = make_tiny_target(), AnswerOptions(max_new_tokens=4), tmp_path / "answers"
    prompts = load_prompts(data)
    answer_prompts(target, prompts, data, options, folder)
    (shard,) = folder.glob("shard-*")
    answers = read_answers(folder)
    write_answers(shard, [replace(one, split="train" if one.split == "train" else "heldout") for one in answers])
    texts = load_texts(target, data, options, folder, 512)
    for split, examples in (("train", texts.train), ("selection", texts.selection)):
        assert {one.id for one in examples} == {prompt.id for prompt in prompts if prompt.split == split}
        assert {one.split for one in examples} == {split}
    assert any(prompt.split == "test" for prompt in prompts)
