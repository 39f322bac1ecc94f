"""The testbed's folder and its training, with two tiny models; slow: that the real ones are what they should be."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.base import Draft
from models.drafters.model import ModelDrafter, ModelState
from models.sampling import SamplingParams
from models.verification.base import Block, Rule
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble
from train.data import testbed
from train.data import testbed_language as language

NAME_IDS = torch.tensor(sorted(language.NAME_IDS))


def tiny_options(max_steps: int = 5, **draft: Any) -> testbed.TestbedOptions:
    """Both models at a few thousand weights and `max_steps` of training."""
    default = testbed.TestbedOptions()
    size = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "max_steps": max_steps}
    return testbed.TestbedOptions(replace(default.target, **size), replace(default.draft, **size, **draft))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny testbed of seed 0; not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "testbed"
    testbed.ensure_testbed(folder, 0, tiny_options())
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of `made`."""
    copy = tmp_path / "testbed"
    for path in made.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(made)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(made)).write_bytes(path.read_bytes())
    return copy


def fingerprints(bed: testbed.Testbed) -> tuple[str, str]:
    return bed.target.fingerprint(), bed.draft.fingerprint()


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- the folder ----


def test_models_are_ordinary_folders(made: Path) -> None:
    assert sorted(path.name for path in made.iterdir()) == ["draft", "manifest.json", "target"]
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(made / name)
        tokenizer = AutoTokenizer.from_pretrained(made / name)
        assert model.config.vocab_size == len(tokenizer) == len(language.TOKENS)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == language.IDS[language.END]
        assert tokenizer.get_vocab() == language.IDS
        assert tokenizer(language.prompt_text("0951"))["input_ids"] == language.prompt_ids("0951")


def test_is_loaded_again_without_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = held(folder)
    first, second = (testbed.ensure_testbed(folder, 0, tiny_options()) for _ in range(2))

    assert "training" not in capsys.readouterr().out
    assert fingerprints(first) == fingerprints(second)
    assert held(folder) == before
    assert not any(parameter.requires_grad for parameter in first.target.model.parameters())
    assert first.target.eos_token_ids == first.draft.eos_token_ids == (language.IDS[language.END],)


def test_same_seed_gives_the_same_models(made: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again = testbed.ensure_testbed(tmp_path / "again", 0, tiny_options())

    assert fingerprints(again) == fingerprints(testbed.ensure_testbed(made, 0, tiny_options()))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len({again.target.fingerprint(), again.draft.fingerprint()}) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (1, tiny_options()), "the one there was made with seed 0, now 1"),
        (lambda folder: (0, tiny_options(sighted_share=0.0)), "the one there was made with another draft"),
        (lambda folder: (0, tiny_options(max_steps=4)), "made with another target, another draft"),
        (lambda folder: ((folder / "draft").rename(folder.parent / "x"), (0, tiny_options()))[1], "lacks its draft"),
    ],
)
def test_is_trained_again_when_it_does_not_fit(
    change: Callable[[Path], tuple[int, testbed.TestbedOptions]],
    reason: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed, options = change(folder)
    bed = testbed.ensure_testbed(folder, seed, options)

    told = [line for line in capsys.readouterr().out.splitlines() if "; training target and draft into" in line]
    assert len(told) == 1
    assert reason in told[0]
    assert testbed.why_train(folder, testbed.make_manifest(seed, options)) is None
    assert fingerprints(bed) == fingerprints(testbed.ensure_testbed(folder, seed, options))
    assert [path.name for path in folder.parent.iterdir() if path.name not in ("testbed", "x")] == []


def test_other_versions_do_not_matter(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__
    (folder / "manifest.json").write_text(json.dumps(manifest | {"versions": {}}))
    assert testbed.why_train(folder, testbed.make_manifest(0, tiny_options())) is None


def test_what_is_no_testbed_is_left_alone(folder: Path) -> None:
    (folder / "thesis.tex").write_text("years of work")
    before = held(folder)
    with pytest.raises(ValueError, match=r"is no testbed: it holds thesis.tex; choose another folder"):
        testbed.ensure_testbed(folder, 1, tiny_options())
    assert held(folder) == before
    with pytest.raises(ValueError, match=r"thesis.tex is a file"):
        testbed.ensure_testbed(folder / "thesis.tex", 1, tiny_options())
    assert held(folder) == before

    (folder / "thesis.tex").unlink()
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"is no testbed: it has no manifest.json"):
        testbed.ensure_testbed(folder, 0, tiny_options())


def test_a_damaged_manifest_is_told(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        testbed.ensure_testbed(folder, 0, tiny_options())


@pytest.mark.parametrize(("option", "value"), [("max_steps", 0), ("sighted_share", 1.5)])
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        replace(testbed.TestbedOptions().draft, **{option: value})


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("model", ["target", "draft"])
@pytest.mark.parametrize("is_first", [True, False])
def test_interrupt_leaves_nothing_half_made(
    model: str, is_first: bool, made: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "other" / "testbed" if is_first else folder
    before = held(place) if place.exists() else None

    def press(bar: testbed._Bar, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if bar.bar.desc.startswith(f"testbed: {model}") and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(testbed._Bar, "on_step_end", press)
    with pytest.raises(KeyboardInterrupt):
        testbed.ensure_testbed(place, 5, tiny_options())

    assert (held(place) if place.exists() else None) == before
    assert list(place.parent.iterdir()) == ([] if is_first else [folder])


# ---- training ----


def test_training_lowers_the_loss_and_learns_the_dialect(tmp_path: Path) -> None:
    """60 steps take a small model from log V = 3.8 to near the entropy of words alone."""
    school = replace(tiny_options(max_steps=60).target, hidden_size=32, learning_rate=1e-2)
    texts = testbed.Texts(school.dialect, 64, 9, "selection")
    testbed.train_model(school, 0, tmp_path / "target")
    with torch.no_grad():
        before, after = (
            float(model(input_ids=texts.ids_NT, labels=texts.labels_NT).loss)
            for model in (testbed.make_model(school), AutoModelForCausalLM.from_pretrained(tmp_path / "target"))
        )
    assert before > 3.7
    assert after < 2.6


def test_texts_are_learned_behind_the_prompt() -> None:
    texts = testbed.Texts(language.DRAFT_DIALECT, 40, 3, "train", num_sighted=15)
    answers = language.draw_answers(40, 3, "train")
    width = len(language.prompt_ids("0000"))
    right = []
    for answer, row in zip(answers, texts, strict=True):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        end = ids.index(language.IDS[language.END]) + 1
        assert ids[:width] == language.prompt_ids(answer)
        assert labels == [-100] * width + ids[width:end] + [-100] * (len(ids) - end)
        assert set(ids[end:]) <= {language.IDS[language.PAD]}
        right.append(language.read_digits(" ".join(language.TOKENS[token] for token in ids[width : end - 1])) == answer)
    assert all(right[:15])
    assert sum(right[15:]) < 5  # 0.46^4 = 0.04 each


def test_texts_come_in_order(tmp_path: Path) -> None:
    school = tiny_options(max_steps=3).draft
    texts = testbed.Texts(school.dialect, 3 * testbed.BATCH_SIZE, 0, "train")
    trainer = testbed._InOrder(testbed.make_model(school), testbed._arguments(school, 0, tmp_path), train_dataset=texts)
    seen = torch.cat([batch["input_ids"] for batch in trainer.get_train_dataloader()])

    assert isinstance(trainer, Trainer)
    assert torch.equal(seen, texts.ids_NT)


def test_digit_probability_looks_at_digits_alone() -> None:
    """A model that knows the digits behind names and nothing else, and one that knows everything else."""
    texts = testbed.Texts(language.TARGET_DIALECT, 20, 0, "selection")
    is_name_NT = torch.isin(texts.ids_NT, NAME_IDS)

    def stub(is_known_NT: Tensor) -> Any:
        next_NT = texts.ids_NT.roll(-1, dims=1)
        known = torch.nn.functional.one_hot(next_NT, len(language.TOKENS)) * 50.0 * is_known_NT[..., None]
        model = torch.nn.Module()
        model.forward = lambda input_ids, use_cache: SimpleNamespace(logits=known)
        return model

    assert testbed.digit_probability(stub(is_name_NT), texts) == pytest.approx(1.0)
    assert testbed.digit_probability(stub(~is_name_NT), texts) == pytest.approx(1 / len(language.TOKENS))


# ---- the real ones ----


class OracleDrafter(ModelDrafter):
    """Keeps each row's root, so that a rule can tell from the text so far which drafted token is decisive."""

    def propose(self, state: ModelState, *args: Any, **kwargs: Any) -> Draft:
        self.roots = [unread[-1] for unread in state.unread]
        return super().propose(state, *args, **kwargs)

    def weigh(self, block: Block) -> Tensor:
        """w = 1 at decisive places, 0 at all others."""
        roots_B1 = torch.tensor(self.roots)[:, None]
        return torch.isin(torch.cat([roots_B1, block.draft_tokens_BK[:, :-1]], dim=1), NAME_IDS).float()


def measure(bed: testbed.Testbed, drafter: ModelDrafter, rule: Rule, count: int = 1024) -> tuple[float, float]:
    """(acceptance rate, share of digits that are right) at temperature 1, K = 4."""
    answers = language.draw_answers(count, 0, "selection")
    params = GenerationParams(language.MAX_TOKENS, SamplingParams(temperature=1.0), seed=1)
    results = Decoder(bed.target, drafter, 4, rule).generate([language.prompt_ids(a) for a in answers], params)
    digits = [language.read_digits(result.text) or "????" for result in results]
    right = sum(a == b for ours, theirs in zip(digits, answers, strict=True) for a, b in zip(ours, theirs, strict=True))
    return add_up(result.counters for result in results).acceptance_rate, right / (4 * count)


@pytest.mark.slow
def test_relaxing_free_wording_alone_keeps_the_reward(tmp_path: Path) -> None:
    """With 1024 texts the standard error of a reward is below 0.01."""
    bed = testbed.ensure_testbed(tmp_path / "testbed")
    drafter = OracleDrafter(bed.draft, bed.target)
    lossless = measure(bed, drafter, StaticEnsemble(1.0))
    static = measure(bed, drafter, StaticEnsemble(0.8))
    oracle = measure(bed, drafter, DynamicEnsemble(drafter.weigh))

    assert lossless[1] > 0.95
    assert static[1] < lossless[1] - 0.05  # so that the static point of equal reward lies between these two
    assert oracle[1] > lossless[1] - 0.025
    assert oracle[0] > static[0] + 0.25
