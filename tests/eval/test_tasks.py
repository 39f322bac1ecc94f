"""The bench sees held-out prompts alone, as many as asked for, that leave room for an answer."""

import json
import re
from pathlib import Path

import pytest

from eval.tasks import COMPLETION, make_groups
from models.target.tiny import make_tiny_tokenizer
from train.data.prompts import DataOptions, load_prompts, render_prompt
from train.data.sources.instructions import heldout_entities

LENGTHS = {"short": 4, "long": 32}
TOKENIZER = make_tiny_tokenizer()


@pytest.fixture
def data(tmp_path: Path) -> DataOptions:
    """Chat and maths prompts of both splits; the content says which."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"{task} {split} number {n} {'x' * (100 * n)}", "task": task, "split": split}
        for task in ("chat", "maths")
        for split in ("train", "test")
        for n in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataOptions(source="jsonl", path=str(path))


def test_heldout_prompts_in_groups(data: DataOptions) -> None:
    groups = make_groups(TOKENIZER, data, ["maths", "chat"], 3, LENGTHS, context_length=4096)
    assert [group.name for group in groups] == ["maths short", "maths long", "chat short", "chat long"]
    assert [group.max_new_tokens for group in groups] == [4, 32, 4, 32]
    for group in groups:
        assert len(group.prompts) == 3
        assert all(f"{group.task} test" in TOKENIZER.decode(ids) for ids in group.prompts)
    assert groups[0].prompts == groups[1].prompts


def test_every_prompt_leaves_room_for_the_longest_answer(data: DataOptions) -> None:
    for group in make_groups(TOKENIZER, data, [], 2, LENGTHS, context_length=280):
        assert max(map(len, group.prompts)) + 32 <= 280
    with pytest.raises(ValueError, match=r"prompts_per_task=5: task 'chat' has 6 test prompts, of which 3 have"):
        make_groups(TOKENIZER, data, [], 5, LENGTHS, context_length=280)


def test_unknown_task_names_those_there_are(data: DataOptions) -> None:
    with pytest.raises(ValueError, match=r"tasks names 'poetry'.*chat, maths"):
        make_groups(TOKENIZER, data, ["poetry"], 1, LENGTHS, context_length=4096)


def test_nothing_held_out_is_an_error(data: DataOptions) -> None:
    data.tasks = ["maths"]
    assert {group.task for group in make_groups(TOKENIZER, data, [], 1, LENGTHS, context_length=4096)} == {"maths"}
    text = Path(data.path).read_text().replace('"test"', '"train"')
    Path(data.path).write_text(text)
    with pytest.raises(ValueError, match=r"no test prompt.*data.heldout_fraction"):
        make_groups(TOKENIZER, data, [], 1, LENGTHS, context_length=4096)


def test_generated_instructions_and_source_code(tmp_path: Path) -> None:
    """All five tasks from the two sources that need no download; code is continued as raw text."""
    body = "\n".join(f"    value_{n} = argument + {n}" for n in range(12))
    for n in range(40):
        (tmp_path / f"module_{n}.py").write_text(f"import os\n\n\ndef function_{n}(argument):\n{body}\n    return os\n")
    data = DataOptions(source="mixed", sources=["instructions", f"stdlib={tmp_path}"])
    tasks = ["chat", "chat_ko", COMPLETION, "summarise", "maths"]
    groups = make_groups(TOKENIZER, data, tasks, 2, {"short": 8}, context_length=2048)
    assert [group.task for group in groups] == tasks
    rendered = {tuple(render_prompt(TOKENIZER, prompt)): prompt for prompt in load_prompts(data)}
    for group in groups:
        prompts = [rendered[tuple(ids)] for ids in group.prompts]
        assert all(prompt.split == "test" for prompt in prompts)
        assert all((prompt.text is not None) == (group.task == COMPLETION) for prompt in prompts)


def test_fresh_prompts_are_new_and_about_training_material() -> None:
    """None of them occurs among this seed's prompts, of either split, and none mentions what is held out."""
    data = DataOptions(tasks=["maths"], languages=["en"])
    groups = make_groups(TOKENIZER, data, ["maths"], 20, {"long": 32}, context_length=4096, split="fresh")
    assert [group.name for group in groups] == ["maths long, fresh"]
    known = {tuple(render_prompt(TOKENIZER, prompt)) for prompt in load_prompts(data)}
    assert not known & {tuple(ids) for ids in groups[0].prompts}
    heldout = re.compile(rf"\b(?:{'|'.join(heldout_entities('en', data.heldout_fraction))})\b")
    texts = [TOKENIZER.decode(ids) for ids in groups[0].prompts]
    assert not any(heldout.search(text) for text in texts)
    # The check can fail: held-out prompts do mention them.
    assert any(heldout.search(prompt.content()) for prompt in load_prompts(data) if prompt.split == "test")


def test_other_sources_have_no_fresh_prompts(data: DataOptions) -> None:
    with pytest.raises(ValueError, match="source=jsonl has no fresh prompts"):
        make_groups(TOKENIZER, data, ["maths"], 1, LENGTHS, context_length=4096, split="fresh")
