"""The generated prompts and the standard library's: counts, balance, honest splits, right answers."""

import re
from collections import Counter
from pathlib import Path

import pytest

from train.data.prompts import DataOptions, load_prompts
from train.data.sources import arithmetic, english, instructions, korean, stdlib
from train.data.sources.instructions import ENTITIES, FAMILIES, heldout_entities, split_pool
from train.data.sources.korean import KoreanWord
from train.data.sources.record import TASKS, Prompt, hash_split, old_split


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_prompts(DataOptions())


def _words(prompt: Prompt) -> list[str]:
    return re.findall(r"\w+", prompt.content().lower())


def test_word_lists_are_rich_and_without_repeats() -> None:
    assert len(english.TOPICS) >= 150
    assert len(korean.TOPICS_KO) >= 60
    for pools in ENTITIES.values():
        for slot, pool in pools.items():
            assert len(set(pool)) == len(pool), slot


def test_counts_of_tasks_and_splits(prompts: list[Prompt]) -> None:
    counts = Counter((prompt.task, old_split(prompt.split)) for prompt in prompts)
    wanted: Counter[tuple[str, str]] = Counter()
    for family in FAMILIES:
        wanted[family.task, "heldout"] += round(family.num_prompts * 0.1)
        wanted[family.task, "train"] += family.num_prompts - round(family.num_prompts * 0.1)
    assert counts == wanted
    assert {task for task, _ in counts} == set(TASKS)
    halves = Counter(prompt.split for prompt in prompts)
    # 805 draws: 402 expected, standard deviation 14.
    assert abs(halves["selection"] - halves["test"]) < 4 * 28


def test_prompts_and_ids_are_distinct(prompts: list[Prompt]) -> None:
    assert len({prompt.content() for prompt in prompts}) == len(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_prompts_are_well_formed(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        roles = [message["role"] for message in prompt.messages]
        assert roles in (["user"], ["user", "assistant", "user"])
        for message in prompt.messages:
            assert message["content"] == message["content"].strip() != ""
            assert "  " not in message["content"]
            assert not set("{}") & set(message["content"])
        assert (prompt.task == "chat_ko") == bool(re.search("[가-힣]", prompt.content()))


def test_the_same_arguments_give_the_same_prompts_and_another_seed_others(prompts: list[Prompt]) -> None:
    assert load_prompts(DataOptions()) == prompts
    other = load_prompts(DataOptions(seed=1))
    assert len(other) == len(prompts)
    shared = {prompt.content() for prompt in other} & {prompt.content() for prompt in prompts}
    assert len(shared) < 0.7 * len(prompts)


@pytest.mark.parametrize("language", ["en", "ko"])
def test_held_out_entities_occur_in_no_training_prompt(prompts: list[Prompt], language: str) -> None:
    entities = heldout_entities(language, 0.1)
    assert len(entities) >= 0.09 * sum(len(pool) for pool in ENTITIES[language].values())
    train = [p.content().lower() for p in prompts if p.split == "train" and (p.task == "chat_ko") == (language == "ko")]
    heldout = [p.content().lower() for p in prompts if p.split != "train"]
    for entity in entities:
        pattern = rf"\b{re.escape(entity.lower())}\b" if language == "en" else re.escape(entity.lower())
        assert not [text for text in train if re.search(pattern, text)], entity
    mentioned = sum(any(entity.lower() in text for text in heldout) for entity in entities)
    assert mentioned > 0.9 * len(entities)  # and they are in use


def test_held_out_material_does_not_depend_on_the_seed(prompts: list[Prompt]) -> None:
    """A head trained with one seed is measured with another: what one holds out, the other must not have trained on."""
    other = load_prompts(DataOptions(seed=1))
    train = {prompt.content() for prompt in other if prompt.split == "train"}
    assert not train & {prompt.content() for prompt in prompts if prompt.split != "train"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_holds_out_a_template(prompts: list[Prompt], family: instructions.Family) -> None:
    train, heldout = split_pool(family.templates, 0.1)
    assert heldout
    assert not set(heldout) & set(train)
    # The template's longest literal part must be absent from training prompts and present in held-out ones.
    literals = [max(re.split(r"\{[^}]*\}", turn), key=len).strip() for template in heldout for turn in template[-1:]]
    literals = [literal for literal in literals if len(literal) > 12 and literal not in str(train)]
    for split in ("train", "heldout"):
        ours = [p for p in prompts if old_split(p.split) == split and p.id.rsplit("-", 1)[0] == family.name]
        texts = [p.messages[-1]["content"] for p in ours]
        assert texts
        used = [literal for literal in literals if any(literal in text for text in texts)]
        assert used == (literals if split == "heldout" else [])


@pytest.mark.parametrize("task", ["summarise", "rewrite", "maths"])
def test_held_out_texts_are_no_near_copies(prompts: list[Prompt], task: str) -> None:
    """Runs of six words that training prompts have too are the exception, instructions included."""

    def runs(prompt: Prompt) -> set[tuple[str, ...]]:
        found = _words(prompt)
        return {tuple(found[i : i + 6]) for i in range(len(found) - 5)}

    known = {run for prompt in prompts if prompt.split == "train" for run in runs(prompt)}
    shares = [len(runs(p) & known) / len(runs(p)) for p in prompts if p.split != "train" and p.task == task]
    assert len(shares) >= 50
    assert sum(shares) / len(shares) < 0.15


def test_any_prefix_is_balanced(prompts: list[Prompt]) -> None:
    total = Counter((prompt.task, old_split(prompt.split)) for prompt in prompts)
    for length in (100, 500, 2000):
        part = Counter((prompt.task, old_split(prompt.split)) for prompt in prompts[:length])
        for key, count in total.items():
            # The places of a group are one apart, each off by less than one.
            assert abs(part[key] - count * length / len(prompts)) <= 2, (key, length)


def test_a_topic_is_not_favoured(prompts: list[Prompt]) -> None:
    topics = [topic for topic in split_pool(english.TOPICS, 0.1, 2)[0] if topic != "mind maps"]  # "maps" is held out
    texts = [prompt.content() for prompt in prompts if prompt.id.startswith("explain-") and prompt.task == "chat"]
    counts = [sum(f" {topic}" in text for text in texts) for topic in topics]
    assert min(counts) >= 2
    assert sorted(counts)[len(counts) // 2] <= 12


def test_answers_of_sums(prompts: list[Prompt]) -> None:
    sums = [prompt for prompt in prompts if prompt.id.startswith("sums-")]
    assert all(int(prompt.answer or "") > 0 for prompt in sums)
    # Parsed from the text, independently of the generator.
    checks = {
        r"What is (\d+) times (\d+), minus (\d+)\?": lambda a, b, c: a * b - c,
        r"(\d+) boxes with (\d+) .* in each, and (\d+) loose": lambda a, b, c: a * b + c,
        r"had (\d+) .* among (\d+) friends": lambda total, a: total // a if total % a == 0 else None,
        r"with (\d+) people. At the first stop (\d+) get off and (\d+) get on": lambda a, b, c: a - b + c,
        r"holds (\d+) litres. A pump empties (\d+) litres": lambda total, a: total // a if total % a == 0 else None,
        r"counts (\d+) tricycles and (\d+) bicycles .* (\d+) of": lambda a, b, c: 3 * a + 2 * b - 2 * c,
        r"(\d+) metres long and (\d+) metres wide. A fence costs (\d+)": lambda a, b, c: (a + b + a + b) * c,
        r"rope of (\d+) metres into pieces of (\d+) metres": lambda total, a: len(range(a, total, a)),
    }
    checked: Counter[str] = Counter()
    for prompt in sums:
        for pattern, solve in checks.items():
            if match := re.search(pattern, prompt.content()):
                assert prompt.answer == str(solve(*map(int, match.groups()))), prompt.content()
                checked[pattern] += 1
    assert len(checked) == len(checks)
    assert len(arithmetic.PROBLEMS) >= 20


def test_languages_and_tasks() -> None:
    english_only = load_prompts(DataOptions(languages=["en"]))
    assert {prompt.task for prompt in english_only} == set(TASKS) - {"chat_ko"}
    code = load_prompts(DataOptions(tasks=["code"], max_prompts=50))
    assert len(code) == 50
    assert {prompt.task for prompt in code} == {"code"}


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.5])
def test_other_fractions(fraction: float) -> None:
    prompts = load_prompts(DataOptions(heldout_fraction=fraction))
    share = sum(prompt.split != "train" for prompt in prompts) / len(prompts)
    assert share == pytest.approx(fraction, abs=0.01)
    assert len(prompts) > 6000


def test_a_larger_fraction_holds_out_a_superset() -> None:
    small, large = (set(heldout_entities("en", fraction)) for fraction in (0.1, 0.2))
    assert small < large


@pytest.mark.parametrize(
    ("word", "particle", "expected"),
    [
        ("지진", "을", "지진을"),
        ("화산재", "을", "화산재를"),
        ("진화", "은", "진화는"),
        ("민서", "이", "민서가"),
        ("수면", "과", "수면과"),
        ("달빛골", "으로", "달빛골로"),
        ("큰나루", "으로", "큰나루로"),
        ("은모래 마을", "으로", "은모래 마을로"),
        ("해변", "으로", "해변으로"),
        ("자석", "이라", "자석이라"),
        ("7", "을", "7을"),
        ("7", "으로", "7로"),
        ("12", "을", "12를"),
        ("지진", "", "지진"),
    ],
)
def test_korean_particles(word: str, particle: str, expected: str) -> None:
    assert f"{KoreanWord(word):{particle}}" == expected


def _library(folder: Path, num_modules: int = 40) -> Path:
    body = "".join(f"        total += value * {i}\n        values.append(total)\n" for i in range(4))
    for number in range(num_modules):
        head = f'def run_{number}(values):\n    """Add up."""\n    total = {number}\n    for value in list(values):\n'
        code = f"{head}{body}    return total\n"
        (folder / f"module{number}.py").write_text(code, encoding="utf-8")
    code = code.replace("run_", "skip_")  # what follows is to be skipped
    (folder / "test").mkdir()
    (folder / "test" / "test_it.py").write_text(code, encoding="utf-8")
    (folder / "table.py").write_text(code + "X = 0\n" * 50_000, encoding="utf-8")
    return folder


def test_library_functions_are_cut_where_the_rest_goes_on(tmp_path: Path) -> None:
    prompts = stdlib.load(0, 0.3, _library(tmp_path))
    assert len(prompts) == 40  # none of the tests, none of the huge table
    for prompt in prompts:
        number = re.search(r"run_(\d+)", prompt.text or "").group(1)  # type: ignore[union-attr]
        source = (tmp_path / f"module{number}.py").read_text(encoding="utf-8")
        assert (prompt.text or "") + (prompt.answer or "") + "\n" == source
        assert '"""Add up."""' in (prompt.text or "")
        assert (prompt.answer or "").count("\n") >= 2
        assert prompt.messages == ()
        assert prompt.split == hash_split(f"module{number}", 0.3)
    assert {prompt.split for prompt in prompts} == {"train", "selection", "test"}
    assert stdlib.load(0, 0.3, tmp_path) == prompts
    assert stdlib.load(1, 0.3, tmp_path) != prompts


def test_a_pure_python_twin_is_held_out_with_its_module() -> None:
    assert stdlib.module_of("_pydecimal.py") == stdlib.module_of("decimal.py") == "decimal"
    assert stdlib.module_of("json/decoder.py") == stdlib.module_of("json/__init__.py") == "json"


def test_this_interpreters_own_library() -> None:
    prompts = load_prompts(DataOptions(source="stdlib"))
    counts = Counter(prompt.split for prompt in prompts)
    assert counts["train"] > 2000
    assert min(counts["selection"], counts["test"]) > 50
    assert not {p.text for p in prompts if p.split == "train"} & {p.text for p in prompts if p.split != "train"}


def test_a_folder_without_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source files"):
        stdlib.load(0, 0.1, tmp_path)
    (tmp_path / "old.py").write_text("print 'hello'\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"old.py:1: not Python"):
        stdlib.load(0, 0.1, tmp_path)
