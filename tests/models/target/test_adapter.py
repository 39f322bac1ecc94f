"""Adapters as a target: merged, they are the adapted model; whatever is wrong with the folder is told in a line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from models.target.adapter import ADAPTER_CONFIG
from models.target.model import TargetOptions, load_target
from models.target.tiny import make_tiny_target

# W x + B A x and (W + B A) x in float32.
TOLERANCE = 1e-4
IDS_BT = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(0))


def options(name: Path) -> TargetOptions:
    return TargetOptions(name=str(name), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    target = make_tiny_target(seed=3)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def adapted(base: Path, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A folder of adapters that say something, and the logits [B, T, V] of the model that wears them unmerged."""
    torch.manual_seed(0)
    model = load_target(options(base)).model
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    wearing = get_peft_model(model, config)
    with torch.no_grad():
        logits_BTV = wearing.eval()(input_ids=IDS_BT).logits
    wearing.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits_BTV


def test_merged_model_is_the_adapted_one(base: Path, adapted: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """Its logits, its fingerprint, which is not the base's, and no trace of peft: saved and loaded it is the same."""
    folder, logits_BTV = adapted
    assert json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(base)
    target, plain = load_target(options(folder)), load_target(options(base))
    torch.testing.assert_close(target.logits(target.hidden(IDS_BT)), logits_BTV, atol=TOLERANCE, rtol=0)
    assert (target.logits(target.hidden(IDS_BT)) - plain.logits(plain.hidden(IDS_BT))).abs().max() > 0.1
    assert target.fingerprint() != plain.fingerprint()
    assert target.name == str(folder)
    assert target.model.state_dict().keys() == plain.model.state_dict().keys()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    target.model.save_pretrained(tmp_path / "merged")
    target.tokenizer.save_pretrained(tmp_path / "merged")
    assert load_target(options(tmp_path / "merged")).fingerprint() == target.fingerprint()


def test_fingerprint_hears_of_the_adapter(adapted: tuple[Path, torch.Tensor]) -> None:
    """One adapted layer otherwise is another target."""
    folder, _ = adapted
    before = load_target(options(folder)).fingerprint()
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "lora_B" in name)
    save_file(weights | {name: weights[name] * 2}, path, {"format": "pt"})
    assert load_target(options(folder)).fingerprint() != before


def test_tokenizer_is_the_adapters_where_there_is_one(adapted: tuple[Path, torch.Tensor]) -> None:
    folder, _ = adapted
    tokenizer = make_tiny_target().tokenizer
    plain = load_target(options(folder)).tokenizer_fingerprint()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert load_target(options(folder)).tokenizer_fingerprint() != plain


def test_missing_tensors_are_not_made_up(adapted: tuple[Path, torch.Tensor]) -> None:
    folder, _ = adapted
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    weights.pop(next(name for name in weights if "lora_B" in name))
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the adapters in .* do not go into .*: Found missing adapter keys"):
        load_target(options(folder))


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_adapters_cut_short(keep: int, adapted: tuple[Path, torch.Tensor]) -> None:
    folder, _ = adapted
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"the adapters in .* do not go into ") as error:
        load_target(options(folder))
    assert "\n" not in str(error.value)


def test_what_is_wrong_is_told(base: Path, adapted: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, _ = adapted
    config = json.loads((folder / ADAPTER_CONFIG).read_text())

    def with_base(name: str | None) -> None:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": name}))

    with_base("./nowhere")
    with pytest.raises(ValueError, match=r"nowhere"):
        load_target(options(folder))
    with_base(None)
    with pytest.raises(ValueError, match="names no base_model_name_or_path"):
        load_target(replace(options(folder), source="folder"))
    other = make_tiny_target(hidden_size=16, head_dim=8)
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    with_base(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"the adapters in .* do not go into '.*other'"):
        load_target(options(folder))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has adapter_config\.json and lacks adapter_model\.safetensors"):
        load_target(options(folder))
    (folder / ADAPTER_CONFIG).write_text("{")
    (folder / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match="is no readable JSON"):
        load_target(options(folder))
