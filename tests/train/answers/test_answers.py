"""The target's own answers: what they are, that they go on, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.decoding.reference import decode_plainly
from models.target.model import Target
from models.target.tiny import make_tiny_target
from train.answers import answers as answers_module
from train.answers.answers import Answer, AnswerOptions, answer_prompts, read_answers, write_answers
from train.data.prompts import DataOptions, render_prompt
from train.data.sources.record import Prompt

OPTIONS = AnswerOptions(max_new_tokens=12, batch_size=3, shard_prompts=4)
DATA = DataOptions(source="jsonl")


def make_prompts(count: int = 10) -> list[Prompt]:
    return [
        Prompt(
            id=f"p{i}",
            task="maths" if i % 2 else "chat",
            messages=({"role": "user", "content": f"{'word ' * (i % 4)}{i}?"},),
            split="selection" if i % 5 == 0 else "train",
        )
        for i in range(count)
    ]


def answer(
    folder: Path, target: Target | None = None, prompts: list[Prompt] | None = None, **changes: Any
) -> list[Answer]:
    target = target or make_tiny_target()
    answer_prompts(target, make_prompts() if prompts is None else prompts, DATA, replace(OPTIONS, **changes), folder)
    return read_answers(folder)


def test_greedy_answers_are_the_references(tmp_path: Path) -> None:
    """Token for token, in the prompts' order, with their ids, tasks, splits and reasons to end."""
    target = make_tiny_target()
    prompts = make_prompts()
    answers = answer(tmp_path, target)
    assert [(one.id, one.task, one.split) for one in answers] == [(p.id, p.task, p.split) for p in prompts]
    for prompt, one in zip(prompts, answers, strict=True):
        assert one.prompt_ids == render_prompt(target.tokenizer, prompt, {})
        assert one.answer_ids == decode_plainly(target, one.prompt_ids, OPTIONS.max_new_tokens)
        ended = one.answer_ids[-1] in target.eos_token_ids
        assert (one.finish_reason == "length") == (not ended)
    assert [path.name for path in sorted(tmp_path.glob("shard-*"))] == [f"shard-0000{i}.jsonl" for i in range(3)]
    lines = [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("shard-*"))]
    assert lines == [4, 4, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deterministic(temperature: float, tmp_path: Path) -> None:
    """The same bytes whatever the batch size; another seed gives other samples, and greedy none."""
    first = answer(tmp_path / "a", temperature=temperature)
    assert answer(tmp_path / "b", temperature=temperature) == first
    assert answer(tmp_path / "c", temperature=temperature, batch_size=1) == first
    assert (answer(tmp_path / "d", temperature=temperature, seed=1) == first) == (temperature == 0.0)
    for path in (tmp_path / "a").glob("*"):
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()


def test_no_two_prompts_share_a_random_stream(tmp_path: Path) -> None:
    """A shard's first prompts do not answer like the next shard's: with one flat law, answers would repeat."""
    target = make_tiny_target()
    answers = answer(tmp_path, target, temperature=50.0, shard_prompts=2)
    assert len({tuple(one.answer_ids) for one in answers}) == len(answers)


def test_only_missing_shards_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answer(tmp_path, temperature=1.0)
    shards = sorted(tmp_path.glob("shard-*"))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards}
    shards[1].unlink()
    assert answer(tmp_path, temperature=1.0) == whole
    assert all(path.read_bytes() == content for path, (content, _) in before.items())
    assert [path.stat().st_mtime_ns == time for path, (_, time) in before.items()] == [True, False, True]
    monkeypatch.setattr(answers_module.Decoder, "generate", None)
    assert answer(tmp_path, temperature=1.0) == whole


@pytest.mark.parametrize("at", [1, 2, 3])
def test_interrupt(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a shard is answered, or half written: whole shards stay, and it ends alike."""
    whole = answer(tmp_path / "whole", temperature=1.0)
    for name in ("generate", "write_answers"):
        folder, calls = tmp_path / name, []
        place = answers_module.Decoder if name == "generate" else answers_module
        original = getattr(place, name)

        def stop(
            *args: Any, _original: Any = original, _calls: list[int] = calls, _name: str = name, **kwargs: Any
        ) -> Any:
            _calls.append(1)
            if len(_calls) == at:
                if _name == "write_answers":
                    args[0].write_text('{"half')
                raise KeyboardInterrupt
            return _original(*args, **kwargs)

        monkeypatch.setattr(place, name, stop)
        with pytest.raises(KeyboardInterrupt):
            answer(folder, temperature=1.0)
        monkeypatch.undo()
        assert len(list(folder.iterdir())) == at  # the manifest and the shards before
        with pytest.raises(ValueError, match=rf"holds {4 * (at - 1)} of 10 answers; run the same"):
            read_answers(folder)
        assert answer(folder, temperature=1.0) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("target", "target_fingerprint"),
        ("dtype", "dtype is 'float32', now 'bfloat16'"),
        ("prompts", "prompts_fingerprint"),
        ("split", "prompts_fingerprint"),
        ("temperature", "temperature is 0.0, now 0.5"),
        ("max_new_tokens", "max_new_tokens is 12, now 13"),
    ],
)
def test_a_stale_folder_is_refused(change: str, named: str, tmp_path: Path) -> None:
    answer(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    target, prompts, changes = make_tiny_target(), make_prompts(), {}
    if change == "target":
        target = make_tiny_target(seed=1)
    elif change == "dtype":
        target = make_tiny_target(dtype="bfloat16")
    elif change == "prompts":
        prompts[3] = replace(prompts[3], messages=({"role": "user", "content": "else"},))
    elif change == "split":
        prompts[3] = replace(prompts[3], split="selection")
    else:
        changes = {change: 0.5 if change == "temperature" else 13}
    with pytest.raises(ValueError, match=f"holds the work of another run: .*{named}"):
        answer(tmp_path, target, prompts, **changes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_repeated_and_overlong_prompts_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = make_prompts()
    prompts.append(replace(prompts[2], id="again"))
    prompts.append(replace(prompts[2], id="long", messages=({"role": "user", "content": "x" * 300},)))
    answers = answer(tmp_path, prompts=prompts, max_prompt_tokens=100)
    assert [one.id for one in answers] == [prompt.id for prompt in make_prompts()]
    assert "left out 1 repeated prompts and 1 of more than 100 tokens" in capsys.readouterr().out


def test_prompts_must_leave_room_in_the_context(tmp_path: Path) -> None:
    """Whatever max_prompt_tokens says; what room there is is used."""
    target = make_tiny_target(max_position_embeddings=64)
    room = 64 - len(render_prompt(target.tokenizer, make_prompts(1)[0], {}))
    fits = replace(make_prompts(1)[0], id="fits", messages=({"role": "user", "content": "0?" + "y" * (room - 3)},))
    answers = answer(
        tmp_path,
        target,
        [*make_prompts(2), fits, replace(fits, id="no", messages=({"role": "user", "content": "z" * 80},))],
    )
    assert [one.id for one in answers] == ["p0", "p1", "fits"]
    assert len(answers[-1].prompt_ids) + len(answers[-1].answer_ids) <= 64


def test_no_prompt_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source=jsonl: no prompt is left to answer"):
        answer(tmp_path, prompts=[])
    with pytest.raises(ValueError, match="no prompt is left to answer"):
        answer(tmp_path, max_prompt_tokens=3)


# Reading


@pytest.mark.parametrize(
    "line", ['{"id": "p5", "ta', "[]", '{"id": "p5"}', '{"id": "a", "task": "b", "nope": 1}', "", "null", "7"]
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    """With the file and the number of the line."""
    answer(tmp_path)
    shard = tmp_path / "shard-00001.jsonl"
    lines = shard.read_text().splitlines()
    lines[1] = line
    shard.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        ValueError, match=r"shard-00001\.jsonl:2 is damaged .*; delete the file and run train\.regenerate"
    ):
        read_answers(tmp_path)


def test_rows_are_counted(tmp_path: Path) -> None:
    answer(tmp_path)
    shard = tmp_path / "shard-00001.jsonl"
    shard.write_text("".join(line + "\n" for line in shard.read_text().splitlines()[:3]))
    with pytest.raises(ValueError, match=r"holds 9 of 10 answers; run the same train\.regenerate command to finish it"):
        read_answers(tmp_path)


def test_a_folder_without_answers(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"holds no answers \(no manifest\.json\); make them with `python -m train\.regenerate`"
    ):
        read_answers(tmp_path)


def test_write_and_read_back(tmp_path: Path) -> None:
    """Any text in an id; one JSON object a line, not escaped."""
    answers = [
        Answer("한국\n어", "chat", "train", [1, 2], [3], "eos"),
        Answer("\u2028", "chat", "train", [], [4], "length"),
    ]
    write_answers(tmp_path / "shard-00000.jsonl", answers)
    (tmp_path / "manifest.json").write_text(json.dumps({"num_prompts": 2}))
    assert read_answers(tmp_path) == answers
    assert "한국" in (tmp_path / "shard-00000.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["max_new_tokens", "max_prompt_tokens", "batch_size", "shard_prompts"])
def test_bad_options(name: str) -> None:
    with pytest.raises(ValueError, match=rf"answers\.{name}=0 must be at least 1"):
        AnswerOptions(**{name: 0})


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match=r"answers\.engine='oracle' is unknown; choose one of target, server, data"):
        AnswerOptions(engine="oracle")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_processes_share_shards_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    """Each writes its own and no other's; all together what one would have written, whoever is first.

    A start with another number goes on from what is there.
    """
    whole = answer(tmp_path / "one", shard_prompts=2)
    folder = tmp_path / "several"
    monkeypatch.setenv("WORLD_SIZE", "3")
    made: set[str] = set()
    for rank in order:
        monkeypatch.setenv("RANK", str(rank))
        answer_prompts(make_tiny_target(), make_prompts(), DATA, replace(OPTIONS, shard_prompts=2), folder)
        now = {path.name for path in folder.glob("shard-*")}
        assert now - made == {f"shard-{index:05d}.jsonl" for index in range(5) if index % 3 == rank}
        made = now
    (folder / "shard-00003.jsonl").unlink()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        answer_prompts(make_tiny_target(), make_prompts(), DATA, replace(OPTIONS, shard_prompts=2), folder)
        assert (folder / "shard-00003.jsonl").is_file() == (rank == 1)
    assert read_answers(folder) == whole
    for path in (tmp_path / "one").glob("*"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
