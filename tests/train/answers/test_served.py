"""Answers from a server: the target's own, token for token, whatever the server does on the way, or a clear refusal."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.train.answers.test_answers import DATA, OPTIONS, answer, make_prompts
from tests.train.completion_server import Server, serve
from train.answers import completion_server
from train.answers import served as served_answers
from train.answers.answers import Answer, AnswerOptions, answer_prompts, read_answers
from train.answers.served import UNSURE
from train.data.examples import from_answers, trim
from train.data.texts import load_texts

NUM_PROMPTS = len(make_prompts())
# Random weights of which some answers end with an EOS within 12 tokens, and others do not.
ENDING_SEED, ASCII_SEED = 55, 14


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_server, "FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target()


@pytest.fixture(scope="module")
def ending() -> Target:
    """Some of its answers end with an EOS, others at the limit."""
    return make_tiny_target(seed=ENDING_SEED)


@pytest.fixture
def server(target: Target) -> Iterator[Server]:
    with serve(target) as server:
        yield server


def ask(server: Server, folder: Path, target: Target | None = None, **changes: Any) -> list[Answer]:
    changes = {"engine": "server", "url": server.url, "patience_s": 5.0, **changes}
    return answer(folder, target or make_tiny_target(), **changes)


def ascii_target() -> Target:
    """Writes printable ASCII alone, so that a byte-level tokenizer finds the tokens of its text again."""
    target = make_tiny_target(seed=ASCII_SEED, family="qwen3")
    with torch.no_grad():
        for token, id in target.tokenizer.get_vocab().items():
            if (len(token) > 1 and id != 2) or (len(token) == 1 and not (token.isascii() and token.isprintable())):
                target.output_head.weight[id] = 0.0
    return target


# What is asked, and what comes back


def test_answers_are_the_targets_own(ending: Target, tmp_path: Path) -> None:
    """Token for token, with the same records, shards and reasons to end; EOS is the answer's last id here as there."""
    ours = answer(tmp_path / "ours", ending)
    with serve(ending) as server:
        assert ask(server, tmp_path / "theirs", ending) == ours
    assert {one.finish_reason for one in ours} == {"eos", "length"}
    for path in (tmp_path / "ours").glob("shard-*"):
        assert (tmp_path / "theirs" / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == {p.name for p in (tmp_path / "ours").iterdir()}
    assert sorted(server.answered[4:]) == sorted(tuple(one.prompt_ids) for one in ours)


def test_the_law_is_written_out(server: Server, tmp_path: Path) -> None:
    """Nothing is left to a server's own defaults; each prompt has a seed of its own, the same in the next run."""
    law = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3}
    ask(server, tmp_path / "a", **law)
    first = server.real_bodies()
    server.bodies.clear()
    ask(server, tmp_path / "b", **law, batch_size=1)
    assert sorted(map(str, server.real_bodies())) == sorted(map(str, first))
    assert len({body["seed"] for body in first}) == NUM_PROMPTS
    for body in first:
        wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
        assert wanted.items() <= body.items()
        assert body["stop_token_ids"] == [2]
        assert body["ignore_eos"] is True
    server.bodies.clear()
    ask(server, tmp_path / "c", **{**law, "seed": 4})
    assert not {body["seed"] for body in server.real_bodies()} & {body["seed"] for body in first}


def test_requests_are_no_news(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hydra sets the root's level to INFO."""
    with caplog.at_level(logging.INFO):
        ask(server, tmp_path)
    assert [record for record in caplog.records if "HTTP" in record.getMessage()] == []


def test_greedy_asks_for_no_filter_and_no_seed(server: Server, tmp_path: Path) -> None:
    ask(server, tmp_path, top_k=5, top_p=0.5, min_p=0.1)
    for body in server.bodies:
        assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (0.0, -1, 1.0, 0.0)
        assert "seed" not in body


def test_sampled_answers_are_the_samplers(server: Server, target: Target, tmp_path: Path) -> None:
    """The same seeds give the same answers, and what is asked is what our decoder makes of it."""
    first = ask(server, tmp_path / "a", temperature=1.0)
    assert ask(server, tmp_path / "b", temperature=1.0) == first
    assert ask(server, tmp_path / "c", temperature=1.0, seed=1) != first


@pytest.mark.parametrize("batch_size", [1, 3])
def test_requests_in_flight_are_bounded(batch_size: int, server: Server, tmp_path: Path) -> None:
    """And are that many, over the borders of shards."""
    server.delay_s = 0.02
    ask(server, tmp_path, batch_size=batch_size)
    assert server.most_in_flight == max(batch_size, 1)


def test_an_answer_fits_the_context(tmp_path: Path) -> None:
    """The room that a prompt leaves is asked for, and no more, as our decoder has it."""
    target = make_tiny_target(max_position_embeddings=40)
    with serve(target, max_context=40) as server:
        assert ask(server, tmp_path / "a", target) == answer(tmp_path / "b", target)
        assert all(len(body["prompt"]) + body["max_tokens"] <= 40 for body in server.bodies)


def test_sglang_is_spoken_to_as_it_wants(ending: Target, tmp_path: Path) -> None:
    """It has `matched_stop` for `stop_reason`, and its ignore_eos would end nothing. An EOS left out is put back."""

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        choice = reply["choices"][0]
        choice["matched_stop"] = choice.pop("stop_reason")
        if choice["finish_reason"] == "stop":
            choice["token_ids"] = choice["token_ids"][:-1]
        return reply

    with serve(ending, owner="sglang", change=change) as server:
        assert ask(server, tmp_path / "a", ending) == answer(tmp_path / "b", ending)
        assert all("ignore_eos" not in body for body in server.bodies)


# Before a run


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"model": "other"}, {}, r"serves 'other', but the target is 'tiny'; .*set answers\.served_model to it"),
        ({}, {"served_model": "other"}, r"serves 'tiny', but answers\.served_model='other'"),
        ({"max_context": 40}, {}, r"takes 40 tokens, but the longest prompt \(\d+\) and its answer need"),
        ({"owner": "vllm"}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}, "vllm does not apply top_p with min_p"),
        ({"owner": "sglang"}, {"temperature": 1.0, "top_p": 0.9, "top_k": 9}, "sglang does not apply top_p with top_k"),
        ({"owner": ""}, {"temperature": 1.0, "top_k": 9}, "this server does not apply top_k or min_p"),
        ({}, {"temperature": 0.001}, r"answers\.temperature=0\.001 .*servers raise it to 0\.01"),
        ({"key": "secret"}, {}, r"refuses us \(401: this is a 401\); set OPENAI_API_KEY"),
        (
            {},
            {"url": "http://127.0.0.1:1/v1"},
            r"127\.0\.0\.1:1/v1/models cannot be asked .*start the server, or check",
        ),
        ({}, {"url": "URL/v2"}, r"v2/models answers 404: this is a 404"),
    ],
)
def test_a_server_that_will_not_do_is_refused(
    options: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, before anything is asked or written."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serve(target, **options) as server:
        if "url" in changes:
            changes = {
                "url": changes["url"].replace("URL/v1", server.url).replace("URL", server.url.removesuffix("/v1"))
            }
        with pytest.raises((ValueError, ConnectionError), match=message) as error:
            ask(server, tmp_path / "new", **changes)
        assert "\n" not in str(error.value)
        assert not server.bodies
    assert not (tmp_path / "new").exists()


def test_another_name_for_the_same_model(target: Target, tmp_path: Path) -> None:
    """By served_model; a served folder is known by itself."""
    with serve(target, model="alias") as server:
        assert ask(server, tmp_path / "a", served_model="alias") == answer(tmp_path / "b")
        assert {body["model"] for body in server.bodies} == {"alias"}
    folder = tmp_path / "folder"
    folder.mkdir()
    named = Target(target.model, target.tokenizer, str(folder))
    with serve(target, model=f"{folder.parent}/./folder") as server:
        server.models = lambda: {"data": [{"id": "x", "root": f"{folder.parent}/./folder"}]}  # type: ignore[method-assign]
        assert len(ask(server, tmp_path / "c", named)) == NUM_PROMPTS


def test_the_key_is_sent(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serve(target, key="secret") as server:
        assert len(ask(server, tmp_path)) == NUM_PROMPTS
        server.key = "changed"
        with pytest.raises(ValueError, match="OPENAI_API_KEY is not the key that it wants"):
            ask(server, tmp_path / "b")
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.rglob("*.json*"))


def test_other_weights_are_refused(target: Target, tmp_path: Path) -> None:
    """The same name, tokenizer and shapes, another seed; and one changed tensor of the same model."""
    with (
        serve(make_tiny_target(seed=1)) as server,
        pytest.raises(ValueError, match=r"token 1 of a greedy answer, which the target here holds .* other weights"),
    ):
        ask(server, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    changed = make_tiny_target()
    with torch.no_grad():
        changed.layers()[1].mlp.down_proj.weight.mul_(-1)
    with serve(changed) as server, pytest.raises(ValueError, match="other weights"):
        ask(server, tmp_path / "new")


def test_rounding_is_not_another_model(tmp_path: Path) -> None:
    """A bfloat16 server for a float32 target."""
    with serve(make_tiny_target(dtype="bfloat16")) as server:
        assert len(ask(server, tmp_path)) == NUM_PROMPTS


@pytest.mark.parametrize("has_tokenize", [True, False])
def test_another_tokenizer_is_refused(has_tokenize: bool, target: Target, tmp_path: Path) -> None:
    """By /tokenize where there is one; without, by what comes back of the ids."""

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        reply["choices"][0]["prompt_token_ids"] = [1, *body["prompt"]]
        return reply

    with serve(target, has_tokenize=has_tokenize, shift=1, change=change) as server:
        message = "from token 6 of a probe on" if has_tokenize else "read other prompt ids than were sent"
        with pytest.raises(ValueError, match=message):
            ask(server, tmp_path)


def test_counted_prompts(target: Target, tmp_path: Path) -> None:
    """A server that gives no ids is caught by its count of the prompt's tokens, such as a BOS of its own."""

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        reply["usage"]["prompt_tokens"] += 1
        return reply

    with (
        serve(target, gives_ids=False, change=change) as server,
        pytest.raises(ValueError, match=r"the server read \d+ tokens of a prompt that has \d+"),
    ):
        ask(server, tmp_path)


# Text alone


def test_text_alone_is_tokenised_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target's own tokens where text and count agree; an empty, marked answer where they do not, asked for once."""
    target = ascii_target()
    ours = answer(tmp_path / "ours", target)
    assert {one.finish_reason for one in ours} == {"eos", "length"}
    doubted = ours[6].prompt_ids

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == doubted and body["max_tokens"] == OPTIONS.max_new_tokens and len(server.bodies) > 4:
            reply["usage"]["completion_tokens"] += 1  # as when two tokens of it are one in the text's own cut
        return reply

    with serve(target, gives_ids=False, change=change) as server:
        theirs = ask(server, tmp_path / "theirs", target)
        assert "gives no token ids: text is tokenised anew" in capsys.readouterr().out
        num_asked = len(server.bodies)
        assert ask(server, tmp_path / "theirs", target) == theirs
        assert len(server.bodies) == num_asked
    assert theirs[6] == replace(ours[6], answer_ids=[], finish_reason=UNSURE)
    assert theirs[:6] + theirs[7:] == ours[:6] + ours[7:]
    assert len(trim(from_answers(theirs), 512)) == NUM_PROMPTS - 1


def test_text_that_is_no_whole_text_stays_unsure(target: Target, tmp_path: Path) -> None:
    """Half a character at the end, or bytes that are none: the ids cannot be known. Greedy probes are all such here."""
    with (
        serve(target, gives_ids=False) as server,
        pytest.raises(
            ValueError, match=r"gives no token ids, and its text and its count of tokens .* do not tell them"
        ),
    ):
        ask(server, tmp_path)


def test_two_eos_ids_leave_a_doubt() -> None:
    """Text does not say which of them ended it, unless the server does."""
    target = ascii_target()
    target.eos_token_ids = (1, 2)
    reply = completion_server.Completion("abc", "stop", None, None, None, None, 4)
    assert served_answers._ids_of_text(target, reply, True) is None
    told = served_answers._ids_of_text(target, replace(reply, stopped_at=1), True)
    assert told is not None
    assert told[-1] == 1
    target.eos_token_ids = (2,)
    assert served_answers._ids_of_text(target, reply, True) == [*told[:-1], 2]
    assert served_answers._ids_of_text(target, replace(reply, num_tokens=None), True) is None
    assert served_answers._ids_of_text(target, replace(reply, text="ab\ufffd", num_tokens=6), True) is None


# Replies that no target gives


def answer_with(server: Server, **fields: Any) -> None:
    """Every reply after the probes has these fields in its choice."""

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        if len(server.bodies) > 4:
            reply["choices"][0] |= fields
        return reply

    server.change = change


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"finish_reason": "abort"}, "finish_reason='abort'"),
        ({"finish_reason": None}, "finish_reason='None'"),
        ({"token_ids": [5, 264], "finish_reason": "length"}, "wrote token id 264; the ids of 'tiny' end at 258"),
        ({"token_ids": [5] * 13, "finish_reason": "length"}, "wrote 13 tokens .* asked for 12 at most"),
        ({"token_ids": [5] * 11, "finish_reason": "length"}, "wrote 11 tokens and ended with 'length'"),
        ({"token_ids": [5, 6], "finish_reason": "stop", "stop_reason": 6}, r"ended an answer with 'stop' \(at 6\)"),
        ({"token_ids": [5, 2, 6, 2], "finish_reason": "stop", "stop_reason": 2}, "stands at place 2 of 4"),
        ({"token_ids": [5] * 11 + [2], "finish_reason": "length"}, "stands at place 12 of 12"),
        ({"token_ids": "no", "finish_reason": "stop"}, "expected `text`, and lists of ids"),
        ({"text": None}, "expected `text`"),
    ],
)
def test_an_impossible_answer_ends_the_run(
    fields: dict[str, Any], message: str, server: Server, tmp_path: Path
) -> None:
    answer_with(server, **fields)
    with pytest.raises(ValueError, match=message) as error:
        ask(server, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("shard-*"))


# Failures on the way


@pytest.mark.parametrize(
    "failure",
    [500, 503, 429, (429, {"retry-after": "0.05"}), None, b'{"choices": [{"text": "cut sh', b""],
)
def test_what_passes_is_asked_again(failure: Any, server: Server, tmp_path: Path) -> None:
    """Each request fails twice; the answers are the target's all the same."""
    failures: dict[tuple[int, ...], int] = {}
    lock = threading.Lock()

    def change(body: dict[str, Any], reply: dict[str, Any]) -> Any:
        key = (*body["prompt"], body["max_tokens"])
        with lock:
            failures[key] = failures.get(key, 0) + 1
            return failure if failures[key] <= 2 else reply

    server.change = change
    ours = answer(tmp_path / "ours")
    assert ask(server, tmp_path / "theirs") == ours
    assert len(server.bodies) >= 3 * NUM_PROMPTS


def test_what_does_not_pass_is_not_asked_again(server: Server, tmp_path: Path) -> None:
    answer_400 = lambda body, reply: 400 if len(server.bodies) > 4 else reply  # noqa: E731
    server.change = answer_400
    with pytest.raises(ValueError, match=r"/v1/completions answers 400: this is a 400"):
        ask(server, tmp_path, batch_size=1)
    assert len(server.real_bodies()) == 1


def test_patience_ends(server: Server, tmp_path: Path) -> None:
    """What was answered stays, and the same command goes on: nothing answered is asked for again."""
    server.change = lambda body, reply: reply if len(server.answered) < 4 + 6 else 500
    with pytest.raises(ConnectionError, match=r"fails since 0\.2 s, answers\.patience_s \(500: this is a 500\)"):
        ask(server, tmp_path / "theirs", patience_s=0.2, batch_size=1)
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == [
        "manifest.json",
        "part-00001.jsonl",
        "shard-00000.jsonl",
    ]
    with pytest.raises(ValueError, match="holds 4 of 10 answers"):
        read_answers(tmp_path / "theirs")
    server.change = lambda body, reply: reply
    num_answered = len(server.answered)
    assert ask(server, tmp_path / "theirs", batch_size=2) == answer(tmp_path / "ours")
    assert len(server.answered) == num_answered + 4 + (NUM_PROMPTS - 6)  # the probes, and what was missing
    assert len(set(server.answered)) == NUM_PROMPTS


def test_slow_answers(server: Server, tmp_path: Path) -> None:
    """Waited for as long as timeout_s says, and then given up with the option's name."""
    server.delay_s = 0.15
    assert ask(server, tmp_path / "a", timeout_s=30.0) == answer(tmp_path / "b")
    server.delay_s = 2.0
    with pytest.raises(ConnectionError, match=r"no reply within 0\.2 s \(answers\.timeout_s\)"):
        ask(server, tmp_path / "c", timeout_s=0.2, patience_s=0.1)


@pytest.mark.parametrize("at", [1, 4, 6])
def test_interrupt(at: int, server: Server, tmp_path: Path) -> None:
    """A real Ctrl-C while answers are under way: at once, and nothing that was answered is asked for again."""

    def change(body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        if len(server.answered) == 4 + at:
            os.kill(os.getpid(), signal.SIGINT)
        return reply

    server.change = change
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(server, tmp_path / "theirs", batch_size=1)
    finally:
        signal.signal(signal.SIGINT, before)
    server.change = lambda body, reply: reply
    kept = sum(len(path.read_text().splitlines()) for path in (tmp_path / "theirs").glob("*.jsonl"))
    assert kept >= at
    server.answered.clear()
    assert ask(server, tmp_path / "theirs") == answer(tmp_path / "ours")
    assert len(server.answered) == 4 + NUM_PROMPTS - kept
    assert not list((tmp_path / "theirs").glob("part-*"))


def test_a_torn_line_is_asked_for_again(server: Server, tmp_path: Path) -> None:
    """As a crash leaves it: the other answers of the part stay."""
    server.change = lambda body, reply: reply if len(server.answered) < 4 + 7 else 400
    with pytest.raises(ValueError, match="answers 400"):
        ask(server, tmp_path / "theirs", batch_size=1)
    part = tmp_path / "theirs" / "part-00001.jsonl"
    lines = part.read_text().splitlines()
    assert len(lines) == 3
    part.write_text("\n".join([*lines[:2], lines[2][:9]]))
    server.change = lambda body, reply: reply
    server.answered.clear()
    assert ask(server, tmp_path / "theirs") == answer(tmp_path / "ours")
    assert len(server.answered) == 4 + NUM_PROMPTS - 6


# The folder


def test_a_finished_folder_needs_no_server(server: Server, tmp_path: Path) -> None:
    first = ask(server, tmp_path)
    num_asked = len(server.bodies)
    assert ask(server, tmp_path, url="http://127.0.0.1:1/v1") == first
    assert len(server.bodies) == num_asked


def test_engines_and_models_do_not_mix(server: Server, tmp_path: Path) -> None:
    """The address and the number of requests in flight may change."""
    ask(server, tmp_path)
    assert len(ask(server, tmp_path, url=server.url + "/", batch_size=1)) == NUM_PROMPTS
    with pytest.raises(ValueError, match="engine is 'server', now 'target'"):
        answer(tmp_path)
    server.model = "alias"
    with pytest.raises(ValueError, match="served_model is 'tiny', now 'alias'"):
        ask(server, tmp_path, served_model="alias")
    answer(tmp_path / "ours")
    with pytest.raises(ValueError, match="engine is 'target', now 'server'"):
        ask(server, tmp_path / "ours", served_model="alias")


def test_a_folder_of_the_target_is_as_before(tmp_path: Path) -> None:
    """Its manifest has no word of servers: folders made before there were any go on."""
    answer(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    assert not any(name in text for name in ("url", "served", '_s"'))


def test_training_reads_them(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    splits = ("selection", "train", "train")
    path.write_text("".join(f'{{"prompt": "Say {i}.", "split": "{split}"}}\n' for i, split in enumerate(splits)))
    data = replace(DATA, path=str(path))
    options = replace(OPTIONS, engine="server", url=server.url)
    texts = load_texts(make_tiny_target(), data, options, tmp_path / "theirs", 512)
    assert load_texts(make_tiny_target(), data, OPTIONS, tmp_path / "ours", 512) == texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "server"}, r"answers\.url='' is no address; give one such as http://localhost:8000/v1"),
        ({"engine": "server", "url": "localhost:8000"}, r"answers\.url='localhost:8000' is no address"),
        ({"engine": "server", "url": "http://me:pass@host/v1"}, "holds a password, .*set OPENAI_API_KEY"),
        ({"url": "http://host/v1"}, r"are for answers\.engine=server; answers\.engine is 'target'"),
        ({"timeout_s": 0.0}, r"answers\.timeout_s=0\.0 must be positive"),
        ({"patience_s": -1.0}, r"answers\.patience_s=-1\.0 0 or more"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        AnswerOptions(**options)
    assert "pass" not in str(error.value).replace("password", "")


def test_ranks_share_the_prompts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one after the other: each asks for its own shards, and together they make what one would."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    prompts, options = make_prompts(), replace(OPTIONS, engine="server", url=server.url)
    for rank, num_shards in ((1, 1), (0, 3)):
        monkeypatch.setenv("RANK", str(rank))
        answer_prompts(make_tiny_target(), prompts, DATA, options, tmp_path / "theirs")
        assert len(list((tmp_path / "theirs").glob("shard-*"))) == num_shards
    monkeypatch.undo()
    assert read_answers(tmp_path / "theirs") == answer(tmp_path / "ours")
    assert len(set(server.answered)) == NUM_PROMPTS
