"""Targets: hidden states and logits equal transformers' own, fingerprints, freezing, and every way to fail to load."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from models.target import model as target_module
from models.target import pretrained as pretrained_module
from models.target.model import Target, TargetOptions, load_target, resolve_device, resolve_dtype
from models.target.tiny import FAMILIES, make_tiny_target, make_tiny_tokenizer
from models.target.wheel import WheelOptions

# The same float32 products in the same order: nothing but the last bit may differ.
TOLERANCE = 1e-5
IDS_BT = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(0))


def options(name: str | Path, **changes: Any) -> TargetOptions:
    return TargetOptions(**{"name": str(name), "dtype": "float32", "device": "cpu", **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained wrote."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    target = make_tiny_target(seed=3)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


# The forward


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    """And the hidden states are what the output head reads, final norm included."""
    target = make_tiny_target(family=family)
    with torch.no_grad():
        output = target.model(input_ids=IDS_BT, output_hidden_states=True)
    hidden_BTH = target.hidden(IDS_BT)
    assert hidden_BTH.shape == (2, 24, target.hidden_size)
    torch.testing.assert_close(hidden_BTH, output.hidden_states[-1], atol=TOLERANCE, rtol=0)
    logits_BTV = target.logits(hidden_BTH)
    assert logits_BTV.dtype == torch.float32
    assert logits_BTV.shape == (2, 24, target.vocab_size)
    torch.testing.assert_close(logits_BTV, output.logits.float(), atol=TOLERANCE, rtol=0)
    target_module._check_logits(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_read_are_the_residual_stream(family: str) -> None:
    """Behind so many layers, as transformers gives it; behind all of them, what the final norm receives."""
    target = make_tiny_target(family=family)
    with torch.no_grad():
        output = target.model(input_ids=IDS_BT, output_hidden_states=True)
    wide_BTX = target.hidden(IDS_BT, reads=(0, 1, 2, 3))
    assert torch.equal(target.final(wide_BTX), target.hidden(IDS_BT))
    final, *streams, last = wide_BTX.chunk(5, dim=-1)
    for stream, expected in zip(streams, output.hidden_states[:3], strict=True):
        torch.testing.assert_close(stream, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(target.decoder.norm(last), final, atol=TOLERANCE, rtol=0)
    assert target.hidden(IDS_BT, reads=(1,)).shape == (2, 24, 2 * target.hidden_size)
    assert not any(layer._forward_pre_hooks for layer in [*target.layers(), target.decoder.norm])


@pytest.mark.parametrize("family", FAMILIES)
def test_families_differ_where_it_matters(family: str) -> None:
    target = make_tiny_target(family=family)
    tied = target.output_head.weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert tied == (family in ("llama", "gemma2", "gemma3_text"))
    assert target.changes_logits == (family == "gemma2")
    assert len(target.layers()) == 3
    assert target.max_context() == 512


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_logits_of_scaling_families(family: str) -> None:
    """Families that scale their logits, beside those of the tiny targets."""
    config = AutoConfig.for_model(
        family,
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        **({"logits_scaling": 7.0} if family == "granite" else {"logit_scale": 0.3}),
    )
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), make_tiny_tokenizer(), family)
    assert target.changes_logits
    with torch.no_grad():
        expected = target.model(input_ids=IDS_BT).logits
    torch.testing.assert_close(target.logits(target.hidden(IDS_BT)), expected, atol=TOLERANCE, rtol=0)
    target_module._check_logits(target)


def test_soft_capping_binds() -> None:
    """Without the cap the tiny gemma's logits would be far outside it, so that the comparison above has teeth."""
    target = make_tiny_target(family="gemma2", final_logit_softcapping=2.0)
    hidden = target.hidden(IDS_BT) * 30
    assert target.output_head(hidden).abs().max() > 20
    assert target.logits(hidden).abs().max() <= 2.0


@pytest.mark.parametrize("plant", ["head", "cap forgotten", "norm"])
def test_unknown_changes_to_logits_are_refused(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_target(family="gemma2")
    if plant == "head":
        original = target.model.forward

        def forward(**kwargs: Any) -> Any:
            output = original(**kwargs)
            output.logits = output.logits * 0.9
            return output

        monkeypatch.setattr(target.model, "forward", forward)
    elif plant == "cap forgotten":
        monkeypatch.setattr(Target, "finish_logits", lambda self, logits: logits)
    else:
        monkeypatch.setattr(Target, "hidden", lambda self, ids: target.embed(ids))
    with pytest.raises(
        ValueError, match=r"Gemma2ForCausalLM does something to its logits that Foretoken does not know"
    ):
        target_module._check_logits(target)


def test_padding_and_positions_are_passed_on() -> None:
    """A left-padded row with mask and positions gives the states of the row alone."""
    target = make_tiny_target()
    alone = target.hidden(IDS_BT[:1])
    padded_ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), IDS_BT[:1]], dim=1)
    mask = (torch.arange(29) >= 5).long()[None]
    positions = (torch.arange(29) - 5).clamp(min=0)[None]
    got = target.hidden(padded_ids, attention_mask=mask, position_ids=positions)[:, 5:]
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=0)


def test_embed() -> None:
    target = make_tiny_target(dtype="bfloat16")
    embedded = target.embed(IDS_BT)
    assert embedded.dtype == torch.bfloat16
    assert torch.equal(embedded, target.model.get_input_embeddings().weight[IDS_BT])


def test_target_is_frozen() -> None:
    target = make_tiny_target()
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.hidden(IDS_BT).requires_grad
    assert not target.logits(target.hidden(IDS_BT)).requires_grad


def test_model_without_an_output_head_is_refused() -> None:
    model = make_tiny_target().model

    class Headless(type(model)):  # type: ignore[misc]
        def get_output_embeddings(self) -> None:
            return None

    model.__class__ = Headless
    with pytest.raises(ValueError, match="Headless has no output head; a causal language model is needed"):
        Target(model, make_tiny_tokenizer(), "x")


# Ends of text


@pytest.mark.parametrize(
    ("in_generation_config", "in_tokenizer", "expected"),
    [
        ([2, 7], "<|end|>", (2, 7)),
        (5, "<|end|>", (5,)),
        (None, "<|end|>", (2,)),
        (None, None, ()),
    ],
)
def test_eos_token_ids(in_generation_config: Any, in_tokenizer: str | None, expected: tuple[int, ...]) -> None:
    """The generation config's list, else the tokenizer's token."""
    target = make_tiny_target()
    target.model.generation_config.eos_token_id = in_generation_config
    target.tokenizer.eos_token = in_tokenizer
    assert Target(target.model, target.tokenizer, "x").eos_token_ids == expected


# Fingerprints


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_is_that_of_the_weights(family: str) -> None:
    """The same for the same weights in another dtype; another for another seed."""
    first = make_tiny_target(family=family).fingerprint()
    assert make_tiny_target(family=family).fingerprint() == first
    assert make_tiny_target(family=family, dtype="bfloat16").fingerprint() == first
    assert make_tiny_target(family=family, seed=1).fingerprint() != first


def test_fingerprint_hears_of_every_tensor() -> None:
    """One weight of any tensor changed, or two tensors of one shape swapped."""
    first = make_tiny_target().fingerprint()
    names = [name for name, _ in make_tiny_target().model.named_parameters()]
    found = {first}
    for name in names:
        target = make_tiny_target()
        with torch.no_grad():
            dict(target.model.named_parameters())[name].view(-1)[0] += 1.0
        found.add(target.fingerprint())
    assert len(found) == len(names) + 1
    target = make_tiny_target()
    layers = target.layers()
    state = {key: value.clone() for key, value in layers[0].state_dict().items()}
    layers[0].load_state_dict(layers[1].state_dict())
    layers[1].load_state_dict(state)
    assert target.fingerprint() not in found


def test_fingerprint_samples_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer samples than weights a fine-tuned tensor still shows."""
    monkeypatch.setattr(target_module, "FINGERPRINT_SAMPLES", 16)
    first = make_tiny_target().fingerprint()
    target = make_tiny_target()
    with torch.no_grad():
        target.layers()[1].mlp.up_proj.weight.mul_(1.1)
    assert target.fingerprint() != first


def test_tokenizer_fingerprint() -> None:
    target = make_tiny_target()
    first = target.tokenizer_fingerprint()
    assert make_tiny_target(seed=5, family="mistral").tokenizer_fingerprint() == first
    target.tokenizer.chat_template += " "
    assert target.tokenizer_fingerprint() != first
    target = make_tiny_target()
    target.tokenizer.add_tokens(["<|new|>"])
    assert target.tokenizer_fingerprint() != first


def test_tokenizer_fingerprint_does_not_change_with_use() -> None:
    """A batch that is padded and cut leaves its settings in the tokenizer, and they stay there."""
    target = make_tiny_target()
    first = target.tokenizer_fingerprint()
    target.tokenizer(["abc", "d"], padding=True, truncation=True, max_length=2)
    assert target.tokenizer_fingerprint() == first
    assert target.tokenizer.backend_tokenizer.padding is not None


# Loading


@pytest.mark.parametrize("source", ["auto", "folder"])
def test_folder_round_trip(source: str, saved: Path) -> None:
    target = load_target(options(saved, source=source))
    made = make_tiny_target(seed=3)
    assert target.name == str(saved)
    assert target.fingerprint() == made.fingerprint()
    assert target.tokenizer_fingerprint() == made.tokenizer_fingerprint()
    assert target.eos_token_ids == made.eos_token_ids == (2,)
    assert torch.equal(target.hidden(IDS_BT), made.hidden(IDS_BT))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_family_loads_in_short_floats(family: str, dtype: str, tmp_path: Path) -> None:
    """Tied and untied heads come back as they were, in the dtype asked for."""
    made = make_tiny_target(family=family)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    target = load_target(options(tmp_path, dtype=dtype))
    assert target.dtype == getattr(torch, dtype)
    if dtype == "bfloat16":
        assert target.fingerprint() == made.fingerprint()
    gap = (target.logits(target.hidden(IDS_BT)) - made.logits(made.hidden(IDS_BT))).abs()
    assert gap.median() < 0.1


def test_a_relative_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    assert load_target(options("./model")).fingerprint() == make_tiny_target(seed=3).fingerprint()
    assert load_target(options("model")).fingerprint() == make_tiny_target(seed=3).fingerprint()


@pytest.mark.parametrize(("is_native", "on_cpu"), [(True, "bfloat16"), (False, "float32")])
def test_auto_dtype_is_what_the_machine_does_well(
    is_native: bool, on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    assert resolve_dtype("auto", "cpu") == on_cpu
    assert resolve_dtype("auto", "cuda:1") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"
    assert load_target(options("tiny", source="random", dtype="auto")).dtype == getattr(torch, on_cpu)


def test_random_source() -> None:
    target = load_target(options("tiny", source="random", seed=4, dtype="bfloat16"))
    assert target.dtype == torch.bfloat16
    assert target.fingerprint() == make_tiny_target(seed=4).fingerprint()


def test_wheel_source(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the wheel was unpacked into, under the model's own name."""
    monkeypatch.setattr(pretrained_module, "unpack_wheel", lambda wheel: saved if wheel.gguf == "x" else None)
    target = load_target(options("org/name", source="wheel", wheel=WheelOptions(gguf="x")))
    assert target.name == "org/name"
    assert target.fingerprint() == make_tiny_target(seed=3).fingerprint()


def test_auto_device() -> None:
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == "cpu"


def test_a_chat_template_of_ones_own(saved: Path, tmp_path: Path) -> None:
    """In place of the tokenizer's own, heard of by the fingerprint; what transformers adds to Jinja is taken, too."""
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{% generation %}[{{ message['content'] }}]{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    )
    options = TargetOptions(name=str(saved), dtype="float32", device="cpu", chat_template=str(template))
    target = load_target(options)
    chat = [{"role": "user", "content": "Hi"}]
    assert target.tokenizer.apply_chat_template(chat, tokenize=False) == "[Hi]"
    assert target.tokenizer_fingerprint() != load_target(replace(options, chat_template="")).tokenizer_fingerprint()
    tiny = load_target(replace(options, name="tiny", source="random"))
    assert tiny.tokenizer.apply_chat_template(chat, tokenize=False) == "[Hi]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"model\.chat_template='.*own\.jinja' cannot be read \(.*No such file"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a\n{% for x in %}", r"is no Jinja template \(line 2: "),
        (b"{{ messages", r"is no Jinja template \(line 1: "),
    ],
)
def test_a_chat_template_that_is_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    """Before anything is loaded."""
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_target(TargetOptions(name="no/such-model", chat_template=str(file)))
    assert "\n" not in str(error.value)


# Every way to fail


def assert_one_line(error: pytest.ExceptionInfo[ValueError]) -> None:
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, r"model\.source='web' is unknown; choose one of auto, hub, folder, wheel, random"),
        ({"dtype": "int8"}, r"model\.dtype='int8' is unknown; choose one of auto, bfloat16, float16, float32"),
        ({"name": ""}, r"model\.name is empty: give a hub name or a local folder"),
        ({"device": "gpu"}, r"model\.device='gpu' is not there .*use auto, cpu, or cuda"),
        ({"name": "./nowhere"}, r"model\.name='nowhere' is not a folder; give an existing folder or a hub name"),
        ({"name": "/nowhere"}, r"model\.name='/nowhere' is not a folder"),
        ({"name": "some/thing", "source": "folder"}, r"model\.name='some/thing' is not a folder"),
        ({"source": "wheel"}, r"model\.source=wheel needs model\.wheel\.requirement"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_target(options("tiny", **changes) if "name" not in changes else options(**changes))
    assert_one_line(error)


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"model\.device='cuda' is not there .*use auto, cpu, or cuda with a GPU"):
        load_target(options("tiny", source="random", device="cuda"))


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    """transformers would fill them with random numbers and go on."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 of its weights, such as model\.layers\.1\.self_attn\.q_proj\.weight"
    ):
        load_target(options(folder))
