"""Sources, options and rendering: every row checked, every error with its place and its remedy."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from train.data.prompts import SOURCES, DataOptions, Prompt, dedupe, load_prompts, render_example, render_prompt
from train.data.sources import hub
from train.data.sources.record import hash_split, mix

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "conf" / "data").glob("*.yaml"))


def _write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def _jsonl(path: Path, **options: Any) -> list[Prompt]:
    return load_prompts(DataOptions(source="jsonl", path=str(path), **options))


def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte; raw text gets a BOS, as many tokenizers do."""
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ m.role[0] + ':' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' + ('' if thinking is not defined or thinking else '()') }}{% endif %}"
)


# --- JSONL


def test_rows_of_each_form(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    path = _write(
        tmp_path / "own.jsonl",
        {"prompt": "One", "id": 7, "task": "maths", "answer": "1", "split": "selection"},
        "   ",
        {"messages": turns},
        "",
        {"messages": [*turns, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Two"}]},
        {"messages": [{"role": "user", "content": "Three"}, {"role": "assistant", "content": "3"}]},
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = {prompt.messages[-1]["content"]: prompt for prompt in _jsonl(path, default_task="rewrite")}
    assert set(found) == {"One", "Hello", "Two", "Three"}
    assert found["One"] == Prompt("7", "maths", ({"role": "user", "content": "One"},), None, "selection", "1")
    assert found["Hello"].messages == tuple(turns)
    assert found["Hello"].task == "rewrite"
    assert len(found["Two"].messages) == 4
    assert (found["Two"].answer, found["Three"].answer) == (None, "3")
    assert found["Three"].messages == ({"role": "user", "content": "Three"},)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{oops", "not JSON"),
        ('"text"', "found a str, not an object"),
        ({"question": "?"}, r"found \{'question': '\?'\}; expected"),
        ({"prompt": ""}, "expected"),
        ({"prompt": 3}, "expected"),
        ({"messages": "Hello"}, "`messages` is 'Hello'"),
        ({"messages": []}, "not a list of turns"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "turn 0 is .* a turn needs a `role` of system, user, assistant",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "turn 0 is"),
        ({"messages": [{"role": "user"}]}, "turn 0 is"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "c"},
            "twice",
        ),
        ({"prompt": "x", "id": ["y"]}, "`id` is"),
        ({"prompt": "x", "task": True}, "`task` is True"),
        ({"prompt": "x", "split": "eval"}, "`split` is 'eval'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = _write(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", row)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
        _jsonl(path)


def test_a_repeated_id(tmp_path: Path) -> None:
    path = _write(tmp_path / "own.jsonl", {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    with pytest.raises(ValueError, match=r"own.jsonl:2: id 'x' was used at .*own.jsonl:1"):
        _jsonl(path)


def test_files_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the file has no rows"):
        _jsonl(_write(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(ValueError, match="no such file"):
        _jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"data\.source=jsonl needs data\.path=FILE"):
        load_prompts(DataOptions(source="jsonl"))


def test_a_folder_of_files_and_copies(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", {"prompt": "one"}, {"prompt": "two"})
    _write(tmp_path / "b.jsonl", {"prompt": "two"}, {"prompt": "three"})
    assert sorted(prompt.content() for prompt in _jsonl(tmp_path)) == ["one", "three", "two"]


def test_the_split_depends_on_content_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}"} for i in range(400)]
    whole = {p.content(): p.split for p in _jsonl(_write(tmp_path / "a.jsonl", *rows), heldout_fraction=0.2)}
    part = _jsonl(_write(tmp_path / "b.jsonl", *rows[::-3]), heldout_fraction=0.2, seed=5, max_prompts=60)
    assert all(whole[prompt.content()] == prompt.split for prompt in part)
    # 400 draws at 0.2: 80 expected, standard deviation 8; four of them are missed by 1 set of rows in 15,000.
    assert abs(sum(split != "train" for split in whole.values()) - 80) < 32
    assert {hash_split(str(i), 0.0) for i in range(50)} == {"train"}
    assert {hash_split(str(i), 1.0) for i in range(50)} == {"selection", "test"}


# --- known sets and the hub


def test_known_sets_from_local_files(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", {"question": "2 + 2?", "answer": "It is 4\n#### 4"})
    _write(tmp_path / "test.jsonl", {"question": "3 + 3?", "answer": "#### 6"})
    prompt, test = sorted(load_prompts(DataOptions(source="gsm8k", path=str(tmp_path))), key=Prompt.content)
    assert (prompt.task, prompt.content(), prompt.answer) == ("maths", "2 + 2?", "It is 4\n#### 4")
    assert (prompt.split, test.split, test.content()) == ("train", "test", "3 + 3?")
    (prompt,) = load_prompts(DataOptions(source="gsm8k", path=str(tmp_path / "test.jsonl")))
    assert prompt.content() == "3 + 3?"
    (prompt,) = load_prompts(DataOptions(source="gsm8k", path=str(tmp_path), dataset_split="test"))
    assert prompt.content() == "3 + 3?"
    code = _write(tmp_path / "mbpp.jsonl", {"text": "Write a function.", "code": "def f(): ...", "test_list": []})
    (prompt,) = load_prompts(DataOptions(source="mbpp", path=str(code)))
    assert (prompt.task, prompt.content(), prompt.answer) == ("code", "Write a function.", "def f(): ...")
    news = _write(tmp_path / "xsum.jsonl", {"document": "Braces {} stay.", "summary": "They do."})
    (prompt,) = load_prompts(DataOptions(source="xsum", path=str(news)))
    assert prompt.content() == "Summarise the following article in one sentence.\n\nBraces {} stay."


def test_any_columns_of_a_local_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    path = _write(tmp_path / "own.jsonl", {"ask": "Why?", "say": "So.", "chat": chat, "n": 3})
    options = DataOptions(source="hub", path=str(path), prompt_column="ask", answer_column="say", default_task="code")
    (prompt,) = load_prompts(options)
    assert (prompt.content(), prompt.answer, prompt.task) == ("Why?", "So.", "code")
    (prompt,) = load_prompts(DataOptions(source="hub", path=str(path), prompt_column="chat"))
    assert (prompt.content(), prompt.answer) == ("Hi", "Ho")
    with pytest.raises(ValueError, match=r"own.jsonl:1: column 'nope' holds None.* columns are ask, chat, n, say"):
        load_prompts(DataOptions(source="hub", path=str(path), prompt_column="nope"))
    with pytest.raises(ValueError, match="column 'n' holds 3"):
        load_prompts(DataOptions(source="hub", path=str(path), prompt_column="ask", answer_column="n"))


def test_a_folder_with_several_files_is_ambiguous(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", {"question": "?"})
    _write(tmp_path / "b.jsonl", {"question": "?"})
    with pytest.raises(
        ValueError, match=r"found a.jsonl, b.jsonl; give the file itself, or a folder that holds train.jsonl"
    ):
        load_prompts(DataOptions(source="gsm8k", path=str(tmp_path)))


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    datasets = pytest.importorskip("datasets")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {name: None for row in rows for name in row}
    datasets.Dataset.from_list([{**names, **row} for row in rows]).to_parquet(str(path))
    return path


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    """The same prompts, whatever the source; columns that a row leaves empty are none of its own."""
    rows = [
        {"prompt": "Why?", "answer": "So.", "split": "train", "note": 1},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "split": "selection"},
    ]
    own = DataOptions(source="jsonl")
    lines, table = _write(tmp_path / "rows.jsonl", *rows), write_parquet(tmp_path / "rows.parquet", *rows)
    assert load_prompts(replace(own, path=str(lines))) == load_prompts(replace(own, path=str(table)))
    columns = DataOptions(source="hub", prompt_column="prompt")
    with pytest.raises(ValueError, match=r"rows\.parquet:2: column 'prompt' holds None"):
        load_prompts(replace(columns, path=str(table)))
    lines, table = _write(tmp_path / "one.jsonl", rows[0]), write_parquet(tmp_path / "one.parquet", rows[0])
    assert load_prompts(replace(columns, path=str(lines))) == load_prompts(replace(columns, path=str(table)))


def test_a_folder_of_the_hubs_parts(tmp_path: Path) -> None:
    """As a snapshot of a set has them: all parts of the split, in order, and nothing of the others."""
    for part in range(2):
        write_parquet(tmp_path / f"train-0000{part}-of-00002.parquet", {"question": f"{part}?", "answer": "1"})
    write_parquet(tmp_path / "test-00000-of-00001.parquet", {"question": "test?", "answer": "1"})
    prompts = load_prompts(DataOptions(source="gsm8k", path=str(tmp_path)))
    assert sorted((prompt.content(), prompt.split == "test") for prompt in prompts) == [
        ("0?", False),
        ("1?", False),
        ("test?", True),
    ]
    (prompt,) = load_prompts(DataOptions(source="gsm8k", path=str(tmp_path), dataset_split="test"))
    assert prompt.content() == "test?"
    with pytest.raises(ValueError, match=r"give the file itself, or a folder that holds dev\.jsonl"):
        load_prompts(DataOptions(source="gsm8k", path=str(tmp_path), dataset_split="dev"))
    write_parquet(tmp_path / "own" / "b.parquet", {"prompt": "b"})
    _write(tmp_path / "own" / "a.jsonl", {"prompt": "a"})
    assert {prompt.content() for prompt in _jsonl(tmp_path / "own")} == {"a", "b"}


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", *({"prompt": f"Say {i}."} for i in range(50)))
    content = path.read_bytes()
    for damaged in (content[:-9], content[: len(content) // 2], b"", b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x\.parquet: not a whole Parquet file \(.*\); fetch or write") as error:
            _jsonl(path)
        assert "\n" not in str(error.value)


def test_an_unreachable_hub_says_what_to_do_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"data=gsm8k: cannot read 'openai/gsm8k' from the hub") as caught:
        load_prompts(DataOptions(source="gsm8k"))
    text = str(caught.value)
    assert "\n" not in text
    for remedy in ("data.path=FILE", "HF_HUB_OFFLINE", "data=instructions"):
        assert remedy in text


def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([{"question": f"q{i}", "answer": f"a{i}"} for i in range(30)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = load_prompts(DataOptions(source="gsm8k", max_prompts=10, dataset_split="test"))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert len({prompt.id for prompt in prompts}) == 10
    assert all(prompt.answer == prompt.content().replace("q", "a") for prompt in prompts)
    assert {prompt.content() for prompt in prompts} != {f"q{i}" for i in range(10)}  # drawn, not the first ones


def test_a_stream_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read as they come, as many as are asked for and the window holds, and no more."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hub, "SHUFFLED_ROWS", 20)
    read: list[int] = []
    asked = []

    def rows() -> Iterator[dict[str, str]]:
        for i in range(10_000):
            read.append(i)
            yield {"question": f"q{i}", "answer": f"a{i}"}

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = DataOptions(source="gsm8k", max_prompts=10, streaming=True)
    prompts = load_prompts(options)
    ours = ("openai/gsm8k", "main")
    assert asked == [(ours, {"split": split, "streaming": True}) for split in ("train", "test")]
    assert len({prompt.id for prompt in prompts}) == 10
    assert len(read) <= 20 + 10 + 2 + 20 + 1 + 2
    assert all(prompt.answer == prompt.content().replace("q", "a") for prompt in prompts)
    assert {prompt.content() for prompt in prompts} != {f"q{i}" for i in range(10)}
    assert load_prompts(options) == prompts
    assert load_prompts(replace(options, seed=1)) != prompts

    def breaking() -> Iterator[dict[str, str]]:
        yield {"question": "q", "answer": "a"}
        raise OSError("the connection was lost")

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.IterableDataset.from_generator(breaking))
    with pytest.raises(ValueError, match=r"cannot read 'openai/gsm8k' from the hub.*the connection was lost"):
        load_prompts(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "gsm8k"}, r"reads data\.max_prompts rows and no more: set data\.max_prompts"),
        (
            {"source": "instructions", "max_prompts": 5},
            r"sets of the hub; data\.source=instructions is read as it is",
        ),
        ({"source": "gsm8k", "path": "x", "max_prompts": 5}, "is for sets of the hub"),
    ],
)
def test_what_cannot_be_streamed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(DataOptions(streaming=True, **options))


def test_the_hub_client_is_not_imported_without_need() -> None:
    code = "import sys, train.data.prompts as d; d.load_prompts(d.DataOptions(max_prompts=1))"
    code += "; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- options and mixtures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "nope"}, "data.source='nope' is unknown; choose one of instructions, stories, stdlib, gsm8k"),
        ({"heldout_fraction": 1.5}, r"data.heldout_fraction=1.5 must lie in \[0, 1\]"),
        ({"max_prompts": -1}, "data.max_prompts=-1"),
        ({"languages": ["de"]}, "data.languages"),
        ({"languages": []}, "data.languages"),
        ({"tasks": ["nope"]}, "no prompt left; the tasks of data.source=instructions are chat, chat_ko, code"),
        ({"source": "mixed"}, "data=mixed needs one"),
        ({"sources": ["stdlib"]}, "belongs to data=mixed"),
        ({"source": "mixed", "sources": ["stdlib", "nope"]}, "data.sources names nope"),
        ({"source": "mixed", "sources": ["mixed"]}, "data.sources names mixed"),
        ({"source": "mixed", "sources": ["jsonl"], "path": "x"}, "say which source it is for"),
        ({"source": "hub"}, "needs data.dataset=NAME"),
        ({"source": "hub", "dataset": "x/y"}, "data.prompt_column=''"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(DataOptions(**options))


def test_mixed_sources_keep_their_proportions(tmp_path: Path) -> None:
    path = _write(tmp_path / "own.jsonl", *({"prompt": f"mine {i}", "task": "mine"} for i in range(1000)))
    options = DataOptions(source="mixed", sources=["instructions", f"jsonl={path}"], max_prompts=800)
    prompts = load_prompts(options)
    assert len(prompts) == 800
    num_generated = len(load_prompts(DataOptions()))
    assert abs(sum(p.task == "mine" for p in prompts) - 800 * 1000 / (1000 + num_generated)) <= 4
    assert load_prompts(options) == prompts


def test_mix_takes_groups_in_proportion_and_shuffles_each() -> None:
    groups = [[Prompt(f"{name}{i:03}", name) for i in range(size)] for name, size in (("a", 300), ("b", 100), ("c", 0))]
    mixed = mix(groups, seed=0)
    assert sorted(mixed, key=lambda p: p.id) == groups[0] + groups[1]
    for length in range(0, 401, 20):
        assert abs(sum(p.task == "b" for p in mixed[:length]) - length / 4) <= 2
    assert [p for p in mixed if p.task == "a"] != groups[0]
    assert mix(groups, seed=1) != mixed


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_data_config_fits_the_schema(path: Path) -> None:
    schema = OmegaConf.structured(DataOptions)
    options = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(path)))
    assert isinstance(options, DataOptions)
    assert options.source == path.stem
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(schema, {"nope": 1})
    OmegaConf.merge(schema, {"chat_template_kwargs": {"enable_thinking": False}})


def test_there_is_a_config_for_each_source() -> None:
    assert {path.stem for path in CONFIGS} == set(SOURCES)
    assert set(hub.KNOWN) < set(SOURCES)


# --- rendering


def test_a_chat_prompt_is_the_templates_own_rendering() -> None:
    tokenizer = _tokenizer(TEMPLATE)
    prompt = Prompt("x", "chat", ({"role": "user", "content": "hé"},))
    ids = render_prompt(tokenizer, prompt)
    assert tokenizer.decode(ids) == "<s>u:hé</s>a:"  # one BOS, from the template
    expected = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
    assert ids == expected
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(render_prompt(tokenizer, prompt, {"thinking": False})) == "<s>u:hé</s>a:()"


def test_raw_text_needs_no_template_and_chat_does() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.decode(render_prompt(tokenizer, Prompt("x", "code", text="def f():"))) == "<s>def f():"
    with pytest.raises(ValueError, match="has no chat template, so it takes raw text alone: use data=stdlib"):
        render_prompt(tokenizer, Prompt("x", "chat", ({"role": "user", "content": "Hello"},)))


def test_a_prompt_without_tokens() -> None:
    tokenizer = _tokenizer("{{ '' }}")
    with pytest.raises(ValueError, match="prompt 'x': it renders to no token"):
        render_prompt(tokenizer, Prompt("x", "chat", ({"role": "user", "content": "Hello"},)))


def test_an_example_begins_with_its_rendered_prompt() -> None:
    tokenizer = _tokenizer(TEMPLATE)
    prompt = Prompt("x", "maths", ({"role": "user", "content": "1+1"},), split="selection", answer="2")
    example = render_example(tokenizer, prompt)
    assert (example.id, example.task, example.split) == ("x", "maths", "selection")
    prompt_ids = render_prompt(tokenizer, prompt)
    assert example.input_ids[: len(prompt_ids)] == prompt_ids
    assert tokenizer.decode(example.input_ids[len(prompt_ids) :]) == "2</s>"
    assert example.loss_mask == [False] * len(prompt_ids) + [True, True]


def test_an_example_of_raw_text() -> None:
    tokenizer = _tokenizer()
    example = render_example(tokenizer, Prompt("x", "code", text="def f():", answer="\n  1"))
    assert tokenizer.decode(example.input_ids) == "<s>def f():\n  1"
    assert tokenizer.decode([i for i, on in zip(example.input_ids, example.loss_mask, strict=True) if on]) == "\n  1"


def test_an_example_without_an_answer() -> None:
    for prompt in (Prompt("x", "code", text="a"), Prompt("x", "chat", ({"role": "user", "content": "a"},))):
        with pytest.raises(ValueError, match=r"prompt 'x' has no answer; .*train\.regenerate"):
            render_example(_tokenizer(TEMPLATE), prompt)
    with pytest.raises(ValueError, match="prompt 'x' has an answer without a token"):
        render_example(_tokenizer(), Prompt("x", "code", text="a", answer=""))


def test_copies_by_rendered_ids_are_dropped() -> None:
    tokenizer = _tokenizer(TEMPLATE.replace("m.content", "m.content | trim"))
    prompts = [
        Prompt(f"{i}", "chat", ({"role": "user", "content": text},)) for i, text in enumerate(("a", "b", " a ", "b"))
    ]
    kept = dedupe((prompt, render_prompt(tokenizer, prompt)) for prompt in prompts)
    assert [prompt.id for prompt, _ in kept] == ["0", "1"]
    assert [tokenizer.decode(ids) for _, ids in kept] == ["<s>u:a</s>a:", "<s>u:b</s>a:"]
