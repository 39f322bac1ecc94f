"""The testbed: a target and a weaker draft, trained from scratch within minutes on a CPU, and kept in a folder.

Both are small llama models that learn `train.data.testbed_language`, each its own dialect of it. With them all of
DIVERSED runs without a download: the draft's wording is strange to the target and harmless, its digits are often wrong.

Owns the folder: `target/` and `draft/` as transformers writes them, and the manifest of what they were made from. It
appears whole or not at all. Must not know of verification, rewards or Hydra.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from models.files import whole_folder, write_text
from models.target.model import Target, TargetOptions, load_target
from train.data import testbed_language as language
from train.data.testbed_language import DRAFT_DIALECT, TARGET_DIALECT, Dialect, decisive_places, testbed_prompts
from train.runtime.shards import MANIFEST, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SchoolOptions", "Testbed", "TestbedOptions", "decisive_places", "ensure_testbed", "testbed_prompts"]

FORMAT = 1
BATCH_SIZE = 32
WARMUP_STEPS = 50
NUM_CHECKED = 256  # texts that a trained model is checked on
IGNORED = -100  # label of what is not learned: the prompt, padding
TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class SchoolOptions:
    """One model: its size, its dialect, and how long it goes to school, in steps of BATCH_SIZE texts.

    sighted_share: first part of the texts in which no digit is blind. Looking a digit up is learned from them or, where
    most digits are noise, hardly at all.
    """

    dialect: Dialect
    hidden_size: int
    num_layers: int
    num_heads: int
    max_steps: int
    learning_rate: float
    sighted_share: float = 0.0

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps}: must be at least 1.")
        if not 0.0 <= self.sighted_share <= 1.0:
            raise ValueError(f"sighted_share={self.sighted_share}: must be in [0, 1].")


@dataclass(frozen=True)
class TestbedOptions:
    """The two models. The defaults are what is measured and documented; others are for trying out."""

    target: SchoolOptions = field(
        default_factory=lambda: SchoolOptions(
            TARGET_DIALECT, hidden_size=96, num_layers=2, num_heads=4, max_steps=800, learning_rate=5e-3
        )
    )
    draft: SchoolOptions = field(
        default_factory=lambda: SchoolOptions(
            DRAFT_DIALECT,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            max_steps=800,
            learning_rate=5e-3,
            sighted_share=0.4,
        )
    )


@dataclass(frozen=True)
class Testbed:
    """The two frozen models, of one vocabulary."""

    target: Target
    draft: Target


def ensure_testbed(folder: Path, seed: int = 0, options: TestbedOptions | None = None, device: str = "cpu") -> Testbed:
    """The testbed in `folder`, trained first if it is not there or was made from anything else.

    Training takes a minute or two on two CPU cores, on the CPU whatever the device. The library versions are noted and
    not compared: weights stay good. ValueError for a folder that holds something else than a testbed, or a damaged one.
    """
    options = options or TestbedOptions()
    wanted = make_manifest(seed, options)
    reason = why_train(folder, wanted)
    if reason is not None:
        print(f"testbed: {reason}; training target and draft into {folder}", flush=True)
        with whole_folder(folder) as scratch:
            for number, (name, school) in enumerate(((TARGET, options.target), (DRAFT, options.draft))):
                train_model(school, 2 * seed + number, scratch / name)
            write_text(scratch / MANIFEST, json.dumps(wanted | {"versions": _versions()}, indent=1) + "\n")
    load = {name: TargetOptions(str(folder / name), name, "folder", "float32", device) for name in (TARGET, DRAFT)}
    return Testbed(load_target(load[TARGET]), load_target(load[DRAFT]))


def make_manifest(seed: int, options: TestbedOptions) -> dict[str, Any]:
    """What the two models depend on, as it reads back from JSON."""
    rules = {"tokens": language.TOKENS, "words_before_a_name": (language.MIN_WORDS, language.MAX_WORDS)}
    made_from = {"format": FORMAT, "seed": seed, **rules, "batch_size": BATCH_SIZE, **asdict(options)}
    manifest: dict[str, Any] = json.loads(json.dumps(made_from))
    return manifest


def why_train(folder: Path, wanted: dict[str, Any]) -> str | None:
    """Why the folder's models will not do; None where they do. ValueError where it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another folder for the testbed")
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if not held:
        return "none yet"
    foreign = [name for name in held if name not in (TARGET, DRAFT, MANIFEST)]
    if foreign or (found := read_manifest(folder)) is None:
        what = f"holds {', '.join(foreign[:4])}" if foreign else f"has no {MANIFEST}"
        raise ValueError(f"{folder} is no testbed: it {what}; choose another folder, or delete this one")
    changed = [key for key in wanted if found.get(key) != wanted[key]]
    if changed:
        return "the one there was made with " + ", ".join(_change(key, found.get(key), wanted[key]) for key in changed)
    missing = [name for name in (TARGET, DRAFT) if name not in held]
    return f"the one there lacks its {' and '.join(missing)}" if missing else None


def _change(key: str, found: Any, wanted: Any) -> str:
    if isinstance(found, int | float | str) and isinstance(wanted, int | float | str):
        return f"{key} {found}, now {wanted}"
    return f"another {key}"


def train_model(school: SchoolOptions, seed: int, folder: Path) -> None:
    """Train one model from random weights and save it, with the tokenizer, as transformers does."""
    count = school.max_steps * BATCH_SIZE
    texts = Texts(school.dialect, count, seed, "train", num_sighted=int(school.sighted_share * count))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(school)
        bar = _Bar(folder.name)
        trainer = _InOrder(model, _arguments(school, seed, folder), train_dataset=texts, callbacks=[bar])
        trainer.remove_callback(PrinterCallback)
        with bar:
            seconds = trainer.train().metrics["train_runtime"]
    right = digit_probability(model, Texts(TARGET_DIALECT, NUM_CHECKED, seed, "selection"))
    print(f"testbed: {folder.name} trained in {seconds:.0f} s; probability of the right digit {right:.3f}", flush=True)
    model.save_pretrained(folder)
    language.make_tokenizer().save_pretrained(folder)


@torch.no_grad()
def digit_probability(model: PreTrainedModel, texts: Texts) -> float:
    """Mean probability that the model gives to the digits of these texts, each after what the text says before."""
    probs_NTV = model.eval()(input_ids=texts.ids_NT, use_cache=False).logits.softmax(dim=-1)
    probs_NT = probs_NTV[:, :-1].gather(2, texts.ids_NT[:, 1:, None])[..., 0]
    is_decisive_NT = torch.isin(texts.ids_NT[:, :-1], torch.tensor(sorted(language.NAME_IDS)))
    return float(probs_NT[is_decisive_NT].mean())


def make_model(school: SchoolOptions) -> PreTrainedModel:
    """A llama of that size with random weights, float32."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(language.TOKENS),
        hidden_size=school.hidden_size,
        intermediate_size=3 * school.hidden_size,
        num_hidden_layers=school.num_layers,
        num_attention_heads=school.num_heads,
        num_key_value_heads=school.num_heads,
        max_position_embeddings=2 * language.MAX_TOKENS,
        bos_token_id=language.IDS[language.START],
        eos_token_id=language.IDS[language.END],
        pad_token_id=language.IDS[language.PAD],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Texts(Dataset[dict[str, Tensor]]):
    """Prompts of a split with completions in a dialect; in the first `num_sighted` no digit is blind."""

    def __init__(self, dialect: Dialect, count: int, seed: int, split: str, num_sighted: int = 0) -> None:
        answers = language.draw_answers(count, seed, split)
        completions = language.write_completions(answers, dialect, seed, num_sighted)
        self.ids_NT = torch.full((count, language.MAX_TOKENS), language.IDS[language.PAD])
        self.labels_NT = torch.full((count, language.MAX_TOKENS), IGNORED)
        for row, (answer, completion) in enumerate(zip(answers, completions, strict=True)):
            prompt = language.prompt_ids(answer)
            end = len(prompt) + len(completion)
            self.ids_NT[row, :end] = torch.tensor(prompt + completion)
            self.labels_NT[row, len(prompt) : end] = self.ids_NT[row, len(prompt) : end]

    def __len__(self) -> int:
        return len(self.ids_NT)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids_NT[row], "labels": self.labels_NT[row]}


def _arguments(school: SchoolOptions, seed: int, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=school.max_steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=school.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(WARMUP_STEPS, school.max_steps // 2),
        weight_decay=0.01,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=seed,
    )


class _InOrder(Trainer):
    """Each text is new, and the sighted ones come first: nothing to shuffle."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


class _Bar(TrainerCallback):
    """A progress bar that says which model it is, and is taken away however training ends."""

    def __init__(self, name: str) -> None:
        self.bar = tqdm(desc=f"testbed: {name}", unit="step", leave=False, mininterval=1.0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.reset(total=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}
