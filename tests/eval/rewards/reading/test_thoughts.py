"""What a completion answers, without its thoughts, from text and from token ids; and that all rewards go by it."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.rewards.loading import answer_texts, load_reward
from eval.rewards.reading.thoughts import behind_thoughts, opens_thought, read_answers

PAIRS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("begin", "end"), PAIRS)
def test_marks_in_text(begin: str, end: str) -> None:
    thought = f"{begin}So #### 5, I think."
    assert behind_thoughts(f"{thought}{end}\n\n#### 73") == "\n\n#### 73"
    assert behind_thoughts(f"Well. {thought}{end}#### 73") == "#### 73"
    assert behind_thoughts(thought) == ""
    assert behind_thoughts(f"#### 5 {thought}") == ""
    assert behind_thoughts(f"{thought}{end}#### 5 {thought}{end}#### 73") == "#### 73"
    assert behind_thoughts(f"So #### 5{end}#### 73", opened=True) == "#### 73"
    assert behind_thoughts("So #### 5", opened=True) == ""
    # A prompt that is not at hand may have opened it.
    assert behind_thoughts(f"So #### 5{end}#### 73") == "#### 73"
    assert opens_thought(f"<|im_start|>assistant\n{begin}\n\n")
    assert not opens_thought(f"Think in {begin}{end} please.")
    assert not opens_thought(f"<|im_start|>assistant\n{begin}\n\n{end}\n\n")


@pytest.mark.parametrize(
    "text", ["", "#### 73", "I think so: 73", 'text.split("</think>")', "the tag `<think>` begins one", "'<thinking>'"]
)
def test_text_without_marks(text: str) -> None:
    assert behind_thoughts(text) == text


def test_argument_goes_before_text() -> None:
    assert answer_texts(["<think>a</think>b", [{"role": "assistant", "content": "c"}]]) == ["b", "c"]
    assert answer_texts(["x"], ["y"]) == ["y"]


# ---- from token ids ----


def make_tokenizer(special: list[str], plain: list[str]) -> PreTrainedTokenizerFast:
    """Of bytes, with these tokens beside."""
    bytes_ = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(plain)
    return tokenizer


QWEN = make_tokenizer(["<|im_start|>"], ["<think>", "</think>"])
MISTRAL = make_tokenizer(["[THINK]", "[/THINK]", "[INST]", "[/INST]"], [])
HARMONY = make_tokenizer(["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"], [])
ASKED = "<|im_start|>user\nThink in <think></think>.<|im_end|>\n<|im_start|>assistant\n"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "completion", "answer"),
    [
        (QWEN, ASKED, "<think>\n#### 5\n</think>\n\n#### 73<|im_end|>", "\n\n#### 73"),
        (QWEN, ASKED + "<think>\n", "#### 5\n</think>\n\n#### 73<|im_end|>", "\n\n#### 73"),
        (QWEN, ASKED + "<think>\n", "#### 5", ""),
        (QWEN, ASKED + "<think>\n\n</think>\n\n", "#### 73<|im_end|>", "#### 73"),
        (QWEN, ASKED, "#### 73<|im_end|>", "#### 73"),
        (QWEN, ASKED, "<think>\n#### 5<|im_end|>", ""),
        (QWEN, "A base model's", " answer", " answer"),
        # Marks that a decoded text is without.
        (MISTRAL, "[INST]?[/INST]", "[THINK]#### 5[/THINK]#### 73<|im_end|>", "#### 73"),
        (MISTRAL, "[INST]?[/INST]", "[THINK]#### 5", ""),
        (MISTRAL, "[INST]?[/INST][THINK]", "#### 5[/THINK]#### 73", "#### 73"),
        (HARMONY, "<|start|>assistant", f"<|channel|>analysis<|message|>#### 5{FINAL}#### 73<|return|>", "#### 73"),
        (HARMONY, "<|start|>assistant", "<|channel|>analysis<|message|>#### 5<|end|>", ""),
        (HARMONY, "<|start|>assistant", "<|channel|>final<|message|>#### 73<|return|>", "#### 73"),
    ],
)
def test_marks_in_ids(tokenizer: Any, prompt: str, completion: str, answer: str) -> None:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion)]
    assert read_answers(tokenizer, [ids[0]] * 2, [ids[1]] * 2) == [answer] * 2


TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<ponder>", "close_pattern": r"</ponder>\s*", "content": "text"},
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


@pytest.mark.parametrize(
    ("opening", "completion", "answer"),
    [
        ("", "<ponder>\n#### 5\n</ponder>\n\n#### 73<|im_end|>", "#### 73"),
        ("<ponder>", "#### 5</ponder>#### 73<|im_end|>", "#### 73"),
        ("<ponder>", "#### 5", ""),
        ("", "<ponder>#### 5", ""),
        ("", "#### 73<|im_end|>", "#### 73"),
        ("", "<think>#### 5</think>#### 73", "#### 73"),
    ],
)
def test_the_tokenizers_own_template(opening: str, completion: str, answer: str) -> None:
    tokenizer = make_tokenizer(["<|im_start|>"], [])
    tokenizer.response_template = TEMPLATE
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (ASKED + opening, completion)]
    assert [text.strip() for text in read_answers(tokenizer, ids[:1], ids[1:])] == [answer]


# ---- all rewards ----

RIGHT = {
    "gsm8k": ("#### 73", {"answer": "73"}, "#### 5"),
    "rouge": ("the cat sat", {"summary": "the cat sat"}, "no dog"),
    "stories": ("1 and 2", {"answer": "1 or 2"}, "3 and 4"),
    "testbed": (
        "we walk red 7 all sing blue 2 they green 5 and run gold 1",
        {"answer": "7251"},
        "we walk red 0 all sing blue 0 they green 0 and run gold 0",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_every_reward_pays_the_answer_alone(name: str) -> None:
    right, row, wrong = RIGHT[name]
    reward, _ = load_reward(name)
    completions = [
        f"<think>{wrong}</think>{right}",
        f"<think>{right}</think>{wrong}",
        f"<think>{right}",
        [{"role": "assistant", "content": f"{wrong}</think>{right}"}],
    ]
    columns = {column: [value] * len(completions) for column, value in row.items()}
    assert reward(completions=completions, **columns) == [1.0, 0.0, 0.0, 1.0]
    assert reward(completions=completions, completion_answers=["", right, right, wrong], **columns) == [0, 1, 1, 0]
