"""Prompts have the same ids in every command; what a template refuses, or is told in vain, is one line in each.

Every command is run as far as its first decoding, or its first training examples; templates differ in what matters.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from eval import bench, pareto
from models.decoding.decoder import Decoder
from models.target.tiny import make_tiny_target
from rl import diversed
from scripts import generate
from train import draft, mtp, regenerate, sft
from train.answers import answers
from train.data import texts
from train.data.prompts import Example
from train.runtime.config import checked
from train.runtime.presets import CONF

# What differs between families: a system turn, a switch for thinking, a date, and who writes the BOS.
TURNS = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
# As Qwen3 does it: an answer without a thought is preceded by an empty one.
EMPTY_THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}" + EMPTY_THOUGHT + "{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
    + EMPTY_THOUGHT
    + "{% endif %}"
)
MASKED = THINKING.replace(
    "{{ m['content'] }}<|end|>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}",
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TURNS + ASK, {}),
    "thinking": (THINKING, {}),
    "thinking off": (THINKING, {"enable_thinking": False}),
    "bos of its own": ("{{ bos_token }}" + TURNS + ASK, {}),
    "date": ("{{ bos_token }}{{ date_string }}" + TURNS + ASK, {"date_string": "26 Jul 2024"}),
    "pad": ("{{ pad_token }}" + THINKING, {"enable_thinking": False}),
    "marked answers": (MASKED, {"enable_thinking": False}),
}
NUM_PROMPTS = 4
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Say {n}, 안녕."}]
    for n in range(NUM_PROMPTS)
]


class Stop(Exception):
    """The command has come as far as is wanted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts a BOS before whatever it is given."""
    folder = tmp_path_factory.mktemp("rendering")
    target = make_tiny_target()
    tokenizer = target.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<|start|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    target.model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model")("a")["input_ids"][0] == 1
    for split in ("train", "test"):
        rows = [{"messages": turns, "answer": "Well.", "split": split} for turns in CONVERSATIONS]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def _reward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("reward_of_rendering")
    vars(module)["nothing"] = lambda completions, **kwargs: [0.0] * len(completions)
    monkeypatch.setitem(sys.modules, "reward_of_rendering", module)


def words_for(folder: Path, work: Path, split: str, kwargs: dict[str, Any]) -> list[str]:
    said = [f"data.chat_template_kwargs.{name}={json.dumps(value)}" for name, value in kwargs.items()]
    return [
        *("+model=tiny", "model.source=folder", f"model.name={folder / 'model'}", "model.dtype=float32"),
        *(f"model.chat_template={work / 'template.jinja'}", f"work_dir={work}"),
        *("data=jsonl", f"data.path={folder / f'{split}.jsonl'}", *said),
    ]


def configure(name: str, schema: type[Any], words: list[str]) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose(name, words), schema)


def first_decoded(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts of the first call of the decoder."""
    seen: list[list[int]] = []

    def stop(self: Decoder, prompts: Any, *args: Any, **kwargs: Any) -> None:
        seen.extend(list(prompt) for prompt in prompts)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "generate", stop)
        with pytest.raises(Stop):
            run()
    return seen


def prompts_of(examples: list[Example]) -> list[list[int]]:
    return [example.input_ids[: example.loss_mask.index(True)] for example in examples]


def of_texts(
    words: list[str], engine: str, monkeypatch: pytest.MonkeyPatch, name: str, schema: type[Any]
) -> list[list[int]]:
    """Of train.mtp and train.draft: what they train on, from the target's answers or the data's."""
    config = configure(name, schema, [*words, f"answers.engine={engine}"])
    module = {"mtp": mtp, "draft": draft}[name]
    seen: list[list[int]] = []

    def trim(examples: list[Example], max_length: int) -> None:
        seen.extend(prompts_of(examples))
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(texts, "trim", trim)
        with pytest.raises(Stop):
            module.train_heads(config) if name == "mtp" else module.train_draft(config)
    return seen


def of_sft(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []

    def trim(examples: list[Example], max_length: int) -> None:
        seen.extend(prompts_of(examples))
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(sft, "trim", trim)
        with pytest.raises(Stop):
            sft.tune(configure("sft", sft.SFTRunConfig, words))
    return seen


def of_generate(
    folder: Path, work: Path, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, turns: list[dict[str, str]]
) -> list[int]:
    said = [f"{name}={json.dumps(value)}" for name, value in kwargs.items()]
    system = ["--system", turns[0]["content"]] if turns[0]["role"] == "system" else []
    words = [
        *("--target", str(folder / "model"), "--dtype", "float32", "--drafter", "ngram"),
        *("--chat-template", str(work / "template.jinja"), "--prompt", turns[-1]["content"], *system),
        *(["--chat-template-kwargs", *said] if said else []),
    ]
    arguments = generate.parse_arguments(words)
    run = lambda: generate.generate(arguments, arguments.prompt, sys.stdout, sys.stderr)  # noqa: E731
    return first_decoded(run, monkeypatch)[0]


REWARD = ("reward=function", "reward.spec=reward_of_rendering:nothing")


def for_diversed(words: list[str], folder: Path, work: Path) -> diversed.DiversedConfig:
    small = (
        "trainer.per_device_train_batch_size=8",
        "trainer.num_generations=2",
        "heldout_prompts=0",
        "floor.prompts=4",
    )
    pair = ("drafter=model", f"model.draft={folder / 'model'}", f"output_dir={work / 'rl'}")
    return configure("diversed", diversed.DiversedConfig, [*words, *REWARD, *small, *pair])


def for_bench(words: list[str]) -> bench.BenchConfig:
    small = (f"prompts_per_task={NUM_PROMPTS}", "short_tokens=4", "long_tokens=0")
    return configure("bench", bench.BenchConfig, [*words, "tasks=[]", "drafter=ngram", *small])


def for_pareto(words: list[str]) -> pareto.ParetoConfig:
    return configure("pareto", pareto.ParetoConfig, [*words, *REWARD, "drafter=ngram", f"num_prompts={NUM_PROMPTS}"])


def regenerate_with(words: list[str]) -> list[list[int]]:
    config = configure("regenerate", regenerate.RegenerateConfig, [*words, "answers.max_new_tokens=3"])
    target, folder = regenerate.load_target(config.model), Path(config.paths.answers)
    answers.answer_prompts(target, regenerate.load_prompts(config.data), config.data, config.answers, folder)
    return [answer.prompt_ids for answer in answers.read_answers(folder)]


def of_every_command(
    folder: Path, work: Path, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[list[int]]]:
    train, heldout = (words_for(folder, work, split, kwargs) for split in ("train", "test"))
    few = [*train, "answers.max_new_tokens=3"]
    rl = for_diversed(train, folder, work)
    measured = for_pareto(heldout)
    return {
        "regenerate": regenerate_with(train),
        "mtp, answered": of_texts(few, "target", monkeypatch, "mtp", mtp.MTPConfig),
        "mtp, given": of_texts(train, "data", monkeypatch, "mtp", mtp.MTPConfig),
        "draft": of_texts([*train, "cut.layers=1"], "data", monkeypatch, "draft", draft.DraftConfig),
        "sft": of_sft(train, monkeypatch),
        "diversed": first_decoded(lambda: diversed.train_verifier(rl), monkeypatch),
        "bench": bench_prompts(for_bench(heldout), monkeypatch),
        "pareto": [one.ids for one in pareto.questions_for(regenerate.load_target(measured.model), measured)],
        "generate": [of_generate(folder, work, kwargs, monkeypatch, turns) for turns in CONVERSATIONS],
    }


def bench_prompts(config: bench.BenchConfig, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []

    def stop(target: Any, groups: Any, *args: Any) -> None:
        seen.extend(prompt for group in groups for prompt in group.prompts)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(bench, "run_session", stop)
        with pytest.raises(Stop):
            bench.run_bench(config)
    return seen


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_command_gives_a_prompt_the_same_ids(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, kwargs = TEMPLATES[name]
    (tmp_path / "template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = template
    expected = {
        tuple(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **kwargs))
        for turns in CONVERSATIONS
    }
    assert len(expected) == NUM_PROMPTS
    for command, ids in of_every_command(folder, tmp_path, kwargs, monkeypatch).items():
        assert set(map(tuple, ids)) == expected, command
    if name == "thinking off":
        assert "<think>\n\n</think>" in tokenizer.decode(next(iter(expected)))


COMMANDS = ("regenerate", "mtp", "draft", "sft", "diversed", "bench", "pareto", "generate")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        (NO_SYSTEM + TURNS + ASK, {}, "turns system, user.*System role not supported"),
        ("{{ 1 + messages[0]['content'] }}", {}, "refuses a conversation.*TypeError"),
        (
            THINKING,
            {"enable_thinkin": False},
            "names 'enable_thinkin', which .* does not know; it knows enable_thinking$",
        ),
        (TURNS + ASK, {"enable_thinking": False}, "names 'enable_thinking', .*; it knows none at all$"),
        (TURNS + ASK, {"add_generation_prompt": False}, "names 'add_generation_prompt', which is set for"),
        ("{{ '\\ud83d' }}" + TURNS + ASK, {}, "lone surrogate"),
    ],
    ids=["system turn", "error in it", "misspelt", "unknown", "not its own", "surrogate"],
)
def test_what_a_template_refuses_is_one_line(
    command: str,
    template: str,
    kwargs: dict[str, Any],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "template.jinja").write_text(template)
    train, heldout = (words_for(folder, tmp_path, split, kwargs) for split in ("train", "test"))
    runs: dict[str, Callable[[], object]] = {
        "regenerate": lambda: regenerate_with(train),
        "mtp": lambda: mtp.train_heads(configure("mtp", mtp.MTPConfig, train)),
        "draft": lambda: draft.train_draft(configure("draft", draft.DraftConfig, [*train, "cut.layers=1"])),
        "sft": lambda: sft.tune(configure("sft", sft.SFTRunConfig, train)),
        "diversed": lambda: diversed.train_verifier(for_diversed(train, folder, tmp_path)),
        "bench": lambda: bench.run_bench(for_bench(heldout)),
        "pareto": lambda: pareto.run_pareto(for_pareto(heldout)),
        "generate": lambda: of_generate(folder, tmp_path, kwargs, monkeypatch, CONVERSATIONS[0]),
    }
    with pytest.raises(ValueError, match=message) as caught:
        runs[command]()
    assert "\n" not in str(caught.value)
    if command not in ("diversed", "generate"):
        assert ".jsonl:" in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        ["data.chat_template_kwargs={enable_thinking: false}"],
        ["data.chat_template_kwargs.enable_thinking=false"],
        ["+data.chat_template_kwargs.enable_thinking=false"],
        ["data.chat_template_kwargs={}", "++data.chat_template_kwargs.enable_thinking=false"],
    ],
)
@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("regenerate", regenerate.RegenerateConfig),
        ("mtp", mtp.MTPConfig),
        ("draft", draft.DraftConfig),
        ("sft", sft.SFTRunConfig),
        ("diversed", diversed.DiversedConfig),
        ("bench", bench.BenchConfig),
        ("pareto", pareto.ParetoConfig),
    ],
)
def test_kwargs_need_no_plus(name: str, schema: type[Any], said: list[str]) -> None:
    assert configure(name, schema, ["+model=tiny", *said]).data.chat_template_kwargs == {"enable_thinking": False}


def test_generate_takes_no_template_options_with_raw_text(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", "tiny", "--drafter", "ngram", "--prompt", "x"]
    for words in (["--system", "x"], ["--chat-template-kwargs", "a=1"]):
        assert generate.main([*given, "--raw", *words]) == 2
        assert f"{words[0]} with --raw" in capsys.readouterr().err
    assert generate.main([*given, "--chat-template-kwargs", "a"]) == 2
    assert "--chat-template-kwargs a: write NAME=VALUE" in capsys.readouterr().err


def test_raw_text_takes_no_kwargs() -> None:
    words = ["+model=tiny", "data=stdlib", "data.chat_template_kwargs.enable_thinking=false"]
    config = configure("regenerate", regenerate.RegenerateConfig, words)
    with pytest.raises(ValueError, match=r"data\.source=stdlib is raw text"):
        regenerate.load_prompts(config.data)
