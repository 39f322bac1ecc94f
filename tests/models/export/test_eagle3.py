"""What is written for vLLM and SGLang is read back by names of its own, gives our head's logits, or is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.export import eagle3 as module
from models.export.eagle3 import check_eagle3, export_sglang, export_speculators
from models.export.eagle3_served import read_sglang, read_speculators
from models.heads import HeadOptions, build_head
from models.heads.eagle3 import Eagle3Head
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target

DRAFT_VOCAB = torch.arange(3, 120, 2)
LAYOUTS = {"speculators": (export_speculators, read_speculators), "sglang": (export_sglang, read_sglang)}
# Families that scale their embeddings, which SGLang's heads share as they are stored.
SCALED = ("gemma2", "gemma3_text")


def make_head(target: Target, draft_vocab: Tensor | None = None, **options: Any) -> Eagle3Head:
    torch.manual_seed(0)
    head = build_head(
        target, HeadOptions("eagle3", **{"num_draft_tokens": 3, "own_output_head": True, **options}), draft_vocab
    )
    assert isinstance(head, Eagle3Head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head.to(target.dtype).eval().requires_grad_(False)


@pytest.fixture
def target() -> Target:
    return make_tiny_target()


# The tiny llama: hidden 32, inner 64, 4 heads of 8 over 2 key-value heads, 264 tokens.
LAYER = {
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB, torch.arange(264)], ids=["whole", "reduced", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_shapes_and_config(layout: str, draft_vocab: Tensor | None, target: Target, tmp_path: Path) -> None:
    """Written out here once more, from the formats alone."""
    LAYOUTS[layout][0](make_head(target, draft_vocab), tmp_path / "out")
    is_reduced = draft_vocab is DRAFT_VOCAB
    rows = len(DRAFT_VOCAB) if is_reduced else 264
    prefix = "midlayer" if layout == "sglang" else "layers.0"
    expected = {f"{prefix}.{name}": shape for name, shape in LAYER.items()}
    expected |= {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (rows, 32)}
    if layout == "speculators":
        expected["embed_tokens.weight"] = (264, 32)
    if is_reduced:
        expected |= {"d2t": (rows,), "t2d": (264,)}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    if is_reduced:
        assert (found["d2t"] + torch.arange(rows)).tolist() == DRAFT_VOCAB.tolist()
        assert found["t2d"].nonzero()[:, 0].tolist() == DRAFT_VOCAB.tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if layout == "sglang":
        assert config == {
            **LLAMA,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": rows,
            "target_hidden_size": 32,
            "num_aux_hidden_states": 3,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
        }
    else:
        method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        assert config == {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [method],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": LLAMA,
            "draft_vocab_size": rows,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": "float32",
        }


# What the servers' own classes make room for, and how their loaders rename: `Eagle3LlamaForCausalLM` of vLLM 0.32 and
# `LlamaForCausalLMEagle3` of SGLang 0.5.23, both in llama_eagle3.py.
STACKED = {
    ".q_proj": ".qkv_proj",
    ".k_proj": ".qkv_proj",
    ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj",
    ".up_proj": ".gate_up_proj",
}
ROOM = {
    "model.fc.weight": (32, 96),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.hidden_norm.weight": (32,),
    "model.layers.0.self_attn.qkv_proj.weight": (64, 64),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.mlp.gate_up_proj.weight": (128, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.norm.weight": (32,),
    "lm_head.weight": (len(DRAFT_VOCAB), 32),
}
BY_SERVER = {
    "speculators": {"model.embed_tokens.weight": (264, 32), "draft_id_to_target_id": (len(DRAFT_VOCAB),)},
    "sglang": {"hot_token_id": (len(DRAFT_VOCAB),)},
}


def place_of(layout: str, name: str) -> str | None:
    """The parameter that the server loads this tensor into; None: passed over."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return "draft_id_to_target_id" if layout == "speculators" else "hot_token_id"
    name = name.replace("midlayer", "layers.0")
    for part, stack in STACKED.items():
        name = name.replace(part, stack)
    return name if "lm_head" in name else f"model.{name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_of_the_servers_is_filled(layout: str, target: Target, tmp_path: Path) -> None:
    """To the last row; only the map that both pass over is left."""
    LAYOUTS[layout][0](make_head(target, DRAFT_VOCAB), tmp_path / "out")
    filled: dict[str, tuple[int, ...]] = {}
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        if (place := place_of(layout, name)) is not None:
            rows, *others = tensor.shape
            assert filled.get(place, (0, *others))[1:] == (*others,)
            filled[place] = (filled.get(place, (0,))[0] + rows, *others)
    assert filled == {**ROOM, **BY_SERVER[layout]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "family"),
    [(layout, family) for layout in LAYOUTS for family in FAMILIES if layout != "sglang" or family not in SCALED],
)
def test_drafts_are_ours(layout: str, family: str, dtype: str, tmp_path: Path) -> None:
    """The export's own check compares logits with the reader's forward; soft caps are left to nobody."""
    export, read = LAYOUTS[layout]
    for name, options in {"own": {}, "frozen": {"own_output_head": False}, "read": {"reads": [0, 1, 2]}}.items():
        head = make_head(make_tiny_target(family=family, dtype=dtype), DRAFT_VOCAB, **options)
        export(head, tmp_path / name)
        served = read(tmp_path / name)
        assert served.reads == head.reads
        assert {tensor.dtype for name, tensor in served.tensors.items() if "2" not in name} == {head.target.get.dtype}


@pytest.mark.parametrize(
    ("rope", "written"),
    [
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            None,
        ),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, None),
        ({"rope_type": "dynamic", "rope_theta": 2e4, "factor": 4.0}, {"rope_type": "default", "rope_theta": 2e4}),
    ],
    ids=lambda value: value and value["rope_type"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_positions(layout: str, rope: dict[str, Any], written: dict[str, Any] | None, tmp_path: Path) -> None:
    """The target's own where a server's Llama layer has them, else its base alone: in the head as in the folder."""
    export, read = LAYOUTS[layout]
    export(make_head(make_tiny_target(rope_parameters=rope)), tmp_path / "out")
    assert read(tmp_path / "out").config.rope_parameters == (written or rope)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_of_the_output_head_is_refused(layout: str, target: Target, tmp_path: Path) -> None:
    target.output_head.bias = torch.nn.Parameter(torch.zeros(264), requires_grad=False)
    with pytest.raises(ValueError, match=r"target 'tiny' has a bias in its output head.*use --to hf"):
        LAYOUTS[layout][0](make_head(target), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", SCALED)
def test_sglang_has_no_place_for_scaled_embeddings(family: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scales its embeddings.*use --to vllm"):
        export_sglang(make_head(make_tiny_target(family=family)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sglang_cannot_read_behind_the_last_layer(target: Target, tmp_path: Path) -> None:
    head = make_head(target, reads=[0, 1, 3])
    with pytest.raises(ValueError, match=r"heads\.reads=\[0, 1, 3\]: SGLang reads in front of a layer.*all 3"):
        export_sglang(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_speculators(head, tmp_path / "out")


# The check


def swap(one: str, other: str) -> Callable[[dict[str, Tensor], str], None]:
    def damage(tensors: dict[str, Tensor], prefix: str) -> None:
        a, b = one.format(prefix), other.format(prefix)
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return damage


def swap_streams(tensors: dict[str, Tensor], prefix: str) -> None:
    low, middle, high = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([middle, low, high], dim=1)


def state_first(tensors: dict[str, Tensor], prefix: str) -> None:
    """[state; embedding] in the place of [embedding; state], for the values alone."""
    name = f"{prefix}self_attn.v_proj.weight"
    tensors[name] = tensors[name].roll(32, dims=1)


def another_row(tensors: dict[str, Tensor], prefix: str) -> None:
    """The map of a head whose first token is another."""
    tensors["d2t"][0] -= 1
    tensors["t2d"][2:4] = torch.tensor([True, False])


DAMAGES = {
    "norms": swap("{}input_layernorm.weight", "{}hidden_norm.weight"),
    "keys": swap("{}self_attn.k_proj.weight", "{}self_attn.v_proj.weight"),
    "gate": swap("{}mlp.gate_proj.weight", "{}mlp.up_proj.weight"),
    "final norm": swap("norm.weight", "{}post_attention_layernorm.weight"),
    "streams": swap_streams,
    "halves": state_first,
    "map": another_row,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_sees_wrong_numbers(layout: str, damage: str, target: Target, tmp_path: Path) -> None:
    """Under right names and shapes."""
    export, read = LAYOUTS[layout]
    head = make_head(target, DRAFT_VOCAB)
    export(head, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    DAMAGES[damage](tensors, "midlayer." if layout == "sglang" else "layers.0.")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"gives other logits when it is read as the server reads it"):
        check_eagle3(read(tmp_path), head, tmp_path)


def edit(folder: Path, layout: str, changes: dict[str, Any]) -> None:
    """A change of the layer's config goes where the layout has it; None removes."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        place = config["transformer_layer_config"] if layout == "speculators" and key in LLAMA else config
        place[key] = value
        if value is None:
            del place[key]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rms_norm_eps": 0.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_sees_another_network(layout: str, changes: dict[str, Any], target: Target, tmp_path: Path) -> None:
    """Whose tensors have the same shapes."""
    export, read = LAYOUTS[layout]
    head = make_head(target)
    export(head, tmp_path)
    edit(tmp_path, layout, changes)
    with pytest.raises(ValueError, match="gives other logits"):
        check_eagle3(read(tmp_path), head, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_sees_other_layers_read(layout: str, target: Target, tmp_path: Path) -> None:
    export, read = LAYOUTS[layout]
    head = make_head(target)
    export(head, tmp_path)
    if layout == "sglang":
        changes: dict[str, Any] = {
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        }
    else:
        changes = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    edit(tmp_path, layout, changes)
    assert read(tmp_path).reads == (1, 2, 3)
    with pytest.raises(ValueError, match="gives other logits"):
        check_eagle3(read(tmp_path), head, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_is_part_of_the_export(
    layout: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = module._tensors

    def wrong(head: Eagle3Head) -> dict[str, Tensor]:
        found = tensors(head)
        swap_streams(found, "")
        return found

    monkeypatch.setattr(module, "_tensors", wrong)
    with pytest.raises(ValueError, match="gives other logits"):
        LAYOUTS[layout][0](make_head(target), tmp_path / "out")


# Damaged folders


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("speculators", {"speculators_model_type": "eagle"}, r"speculators_model_type is 'eagle', expected 'eagle3'"),
        ("speculators", {"norm_before_residual": None}, r"norm_before_residual is None, expected False"),
        ("speculators", {"fc_norm": True}, r"fc_norm is True, expected False"),
        ("speculators", {"transformer_layer_config": None}, r"lacks proposal_methods or transformer_layer_config"),
        ("speculators", {"speculators_config": {"proposal_methods": []}}, r"lacks proposal_methods"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, r"must be 3 rising numbers"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": None}, r"must be 3 rising numbers"),
        ("sglang", {"architectures": ["LlamaForCausalLM"]}, r"architectures is .*LlamaForCausalLMEagle3"),
        ("sglang", {"eagle_config": None}, r"use_aux_hidden_state is None, expected True"),
        ("sglang", {"eagle_config": {"use_aux_hidden_state": True}}, r"must be 3 rising numbers"),
        ("sglang", {"target_hidden_size": 64}, r"target_hidden_size must be hidden_size"),
        *(
            (layout, changes, message)
            for layout in LAYOUTS
            for changes, message in (
                ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
                ({"num_hidden_layers": 2}, r"num_hidden_layers is 2, expected 1"),
                ({"head_dim": None}, r"lacks head_dim"),
                ({"draft_vocab_size": "59"}, r"lacks draft_vocab_size"),
                ({"draft_vocab_size": 264}, r"lm_head\.weight is \(59, 32\), expected \(264, 32\)"),
                ({"intermediate_size": 32}, r"mlp\.gate_proj\.weight is \(64, 32\), expected \(32, 32\)"),
            )
        ),
    ],
)
def test_config_must_fit(layout: str, changes: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    export, read = LAYOUTS[layout]
    export(make_head(target, DRAFT_VOCAB), tmp_path)
    edit(tmp_path, layout, changes)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_must_fit(layout: str, target: Target, tmp_path: Path) -> None:
    """One too many, one too few, and maps that disagree or are no maps."""
    export, read = LAYOUTS[layout]
    export(make_head(target, DRAFT_VOCAB), tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    for changed, message in (
        ({**good, "fc.bias": torch.zeros(32)}, r"unknown fc\.bias \(32,\)"),
        ({name: tensor for name, tensor in good.items() if name != "norm.weight"}, r"missing norm\.weight \(32,\)"),
        ({**good, "d2t": good["d2t"] + 1}, r"d2t and t2d must name the same tokens"),
        ({**good, "d2t": good["d2t"].flip(0)}, r"d2t and t2d must name the same tokens"),
        ({**good, "d2t": good["d2t"].float()}, r"d2t and t2d must name the same tokens"),
    ):
        save_file(changed, path)
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_cut_short_or_missing(layout: str, target: Target, tmp_path: Path) -> None:
    export, read = LAYOUTS[layout]
    export(make_head(target), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"damaged or cut short"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        read(tmp_path)
    for text in ("", "{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is no "):
            read(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is no readable JSON"):
        read(tmp_path)
