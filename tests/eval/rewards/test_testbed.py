"""The testbed's reward: known texts, trl's signature, bad columns; and planted faults are caught."""

import inspect
from types import SimpleNamespace

import pytest

from eval.rewards import shares, testbed
from eval.rewards.loading import load_reward
from train.data import testbed_language
from train.data.testbed_language import TARGET_DIALECT, TOKENS, draw_answers, write_completions

RIGHT = "we walk red 7 all sing blue 2 they green 5 and run gold 1"
# Completion, expected digits, share.
CASES = (
    (RIGHT, "7251", 1.0),
    (RIGHT, "7258", 0.75),
    (RIGHT, "0251", 0.75),
    (RIGHT, "1257", 0.5),
    (RIGHT, "1527", 0.0),
    (RIGHT, "9999", 0.0),
    (RIGHT.removesuffix(" gold 1"), "7251", None),
    (RIGHT + " gold 1", "7251", None),
    (RIGHT + " we", "7251", None),
    (RIGHT.replace("red 7", "red"), "7251", None),
    (RIGHT.replace("red 7", "red 7 7"), "7251", None),
    (RIGHT.replace("red", "Red"), "7251", None),
    (RIGHT.replace("we walk ", ""), "7251", None),
    ("7 2 5 1", "7251", None),
    ("", "7251", None),
)


def rewards(code: SimpleNamespace, count: str, logged: dict[str, float] | None = None) -> list[float]:
    texts, answers, _ = zip(*CASES, strict=True)
    log = None if logged is None else logged.__setitem__
    reward = code.make_reward(count)
    return reward(
        prompts=[""] * len(texts),
        completions=list(texts),
        completion_ids=[[]] * len(texts),
        answer=list(answers),
        trainer_state=None,
        log_extra=None,
        log_metric=log,
    )


def check(code: SimpleNamespace) -> None:
    logged: dict[str, float] = {}
    assert rewards(code, "share", logged) == [share or 0.0 for _, _, share in CASES]
    assert rewards(code, "all") == [float(share == 1.0) for _, _, share in CASES]
    formed = [share for _, _, share in CASES if share is not None]
    assert logged == {
        "testbed/well_formed": len(formed) / len(CASES),
        "testbed/digit_accuracy": sum(formed) / len(formed),
    }


def test_known_texts() -> None:
    check(testbed)


def test_is_found_by_name() -> None:
    for options in ({}, {"count": "all"}):
        reward, name = load_reward("testbed", options)
        assert name == "testbed"
        assert reward(completions=[RIGHT], answer=["7258"]) == [0.0 if options else 0.75]


def test_reads_conversations() -> None:
    message = [{"role": "assistant", "content": RIGHT}]
    assert testbed.make_reward()(completions=[message], answer=["7251"]) == [1.0]


def test_the_target_dialect_earns_everything() -> None:
    answers = draw_answers(50, 0, "test")
    texts = [" ".join(TOKENS[token] for token in ids[:-1]) for ids in write_completions(answers, TARGET_DIALECT, 0)]
    assert testbed.make_reward("all")(completions=texts, answer=answers) == [1.0] * 50


def test_nothing_well_formed_and_nothing_at_all_are_logged_as_such() -> None:
    logged: dict[str, float] = {}
    assert testbed.make_reward()(completions=["we"], answer=["7251"], log_metric=logged.__setitem__) == [0.0]
    assert logged == {"testbed/well_formed": 0.0}
    assert testbed.make_reward()(completions=[], answer=[], log_metric=logged.__setitem__) == []


def test_unknown_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count='most' must be one of share, all"):
        testbed.make_reward("most")


@pytest.mark.parametrize("answer", ["725", "72511", "725x", "", 7251, None])
def test_bad_answer_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match=r"column 'answer' holds .*; it must be text of 4 digits"):
        testbed.make_reward()(completions=[RIGHT], answer=[answer])


def test_missing_column_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the dataset column 'answer'"):
        testbed.make_reward()(completions=[RIGHT])


FAULTS = [
    ("fullmatch", "match"),  # goes on after the end
    ("fullmatch", "search"),
    ("|'.join(WORDS)}) )+", "|'.join(WORDS)}) )*"),  # no words needed
    ("{name} ([0-9])", "{name}(?: ([0-9]))?"),  # no digit needed
    ("{name} ([0-9])", "{name} ([0-9])(?: [0-9])*"),  # two digits
    ("for name in NAMES))", "for name in NAMES[::-1]))"),  # another order
    ("for name in NAMES))", "for name in NAMES[:3]))"),
    ("re.compile(", "re.compile('(?i)' + "),  # keys read as names
    ("sum(ours == theirs", "sum(ours != theirs"),
    ("sum(ours == theirs", "any(ours == theirs"),
    ("sum(ours == theirs for ours, theirs in zip(digits, expected, strict=True))", "len(set(digits) & set(expected))"),
    ("strict=True)) / len(NAMES)", "strict=True))"),
    ("share == 1.0", "share != 0.0"),
    ("share or 0.0", "1.0 if share is None else share"),
    ('if count == "all"', 'if count == "share"'),
    ("len(formed) / len(shares)", "len(shares) / len(formed)"),
    ("sum(formed) / len(formed)", "sum(formed) / len(shares)"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    sources = [inspect.getsource(module) for module in (testbed_language, shares, testbed)]
    assert sum(right in source for source in sources) == 1, f"the planted fault no longer matches the code: {right}"
    language, frame, code = {}, {}, {}
    for names, source in zip((language, frame, code), sources, strict=True):
        exec(compile(source.replace(right, wrong, 1), "faulty", "exec"), names)
    code |= {"read_digits": language["read_digits"], "share_reward": frame["share_reward"]}

    with pytest.raises((AssertionError, TypeError, ValueError)):
        check(SimpleNamespace(**code))
