"""The recursive head as a stock MTP layer: names and shapes, our own drafts, refusals, and a check that bites."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.export import mtp_layer as module
from models.export.mtp_layer import check_mtp, export_mtp, read_mtp
from models.heads import HeadOptions, build_head
from models.heads.mtp import MTPHead
from models.target import tiny
from models.target.model import Target
from models.target.tiny import make_tiny_target

T = 7


def make_head(target: Target, draft_vocab: torch.Tensor | None = None, **options: Any) -> MTPHead:
    torch.manual_seed(0)
    head = build_head(target, HeadOptions("mtp", **{"num_draft_tokens": 4, **options}), draft_vocab)
    assert isinstance(head, MTPHead)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return head.eval()


@pytest.fixture
def target() -> Target:
    return make_tiny_target()


def test_names_shapes_and_config(target: Target, tmp_path: Path) -> None:
    """Written out here once more, from the names that vLLM's MiMoMTP.load_weights maps (0.32)."""
    export_mtp(make_head(target), tmp_path / "out", torch.float32)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected_config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 264,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {name: config[name] for name in expected_config} == expected_config
    assert config["rope_parameters"] == target.config.rope_parameters
    layer = "model.mtp_layers.0."
    expected = {
        "model.embed_tokens.weight": (264, 32),
        "lm_head.weight": (264, 32),
        f"{layer}token_layernorm.weight": (32,),
        f"{layer}hidden_layernorm.weight": (32,),
        f"{layer}final_layernorm.weight": (32,),
        f"{layer}input_proj.weight": (32, 64),
        f"{layer}input_layernorm.weight": (32,),
        f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (32, 32),
        f"{layer}self_attn.q_proj.bias": (32,),
        f"{layer}self_attn.k_proj.weight": (16, 32),
        f"{layer}self_attn.k_proj.bias": (16,),
        f"{layer}self_attn.v_proj.weight": (16, 32),
        f"{layer}self_attn.v_proj.bias": (16,),
        f"{layer}self_attn.o_proj.weight": (32, 32),
        f"{layer}mlp.gate_proj.weight": (64, 32),
        f"{layer}mlp.up_proj.weight": (64, 32),
        f"{layer}mlp.down_proj.weight": (32, 64),
    }
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected


def test_names_are_those_of_sglangs_loader(target: Target, tmp_path: Path) -> None:
    """SGLang 0.5.23, models/mimo_mtp.py: what its load_weights makes of each name is a parameter, and none is left."""
    export_mtp(make_head(target), tmp_path, torch.float32)
    outside = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    stacked = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    stacked |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    found = set()
    for name in load_file(tmp_path / "model.safetensors"):
        if name.startswith("model.mtp_layers.0."):
            inside = "" if any(part in name for part in outside) else "mtp_block."
            name = name.replace("model.mtp_layers.0.", f"model.{inside}")
            name = ".".join(stacked.get(part, part) for part in name.split("."))
        found.add(name)
    block = "model.mtp_block."
    assert found == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        *(f"model.{name}.weight" for name in outside),
        *(f"{block}self_attn.qkv_proj.{part}" for part in ("weight", "bias")),
        f"{block}self_attn.o_proj.weight",
        f"{block}mlp.gate_up_proj.weight",
        f"{block}mlp.down_proj.weight",
        f"{block}input_layernorm.weight",
        f"{block}post_attention_layernorm.weight",
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "llama with scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_ours(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy blocks of the head in float32, from the target's hidden states, as the file's reader drafts them."""
    monkeypatch.setitem(tiny.FAMILIES, "qwen2", {"tie_word_embeddings": False})
    target = make_tiny_target(dtype=dtype, family=family.partition(" ")[0], **FAMILIES[family])
    # As from_pretrained leaves it: its frequencies are not rounded.
    target.decoder.rotary_emb = type(target.decoder.rotary_emb)(target.config)
    if family == "qwen2":
        with torch.no_grad():
            for name, parameter in target.model.named_parameters():
                if name.endswith("proj.bias"):
                    parameter.normal_()
    head = make_head(target)
    export_mtp(head, tmp_path / "out", torch.float32)
    served = read_mtp(tmp_path / "out")
    ids = torch.randint(3, 259, (1, T + 1), generator=torch.Generator().manual_seed(1))
    hidden = target.hidden(ids)[:, :T].float()
    state = head.start(1)
    head.absorb(state, hidden, ids[:, 1:], [T])
    drafted: list[int] = []
    for _ in range(4):
        ours = head.draft_hidden(state, torch.tensor(drafted[-1:]) if drafted else None)
        ours = torch.nn.functional.linear(ours, target.output_head.weight.float())[0]
        theirs = served.draft_logits(hidden[0], ids[0, 1:], drafted, blank_first=False)[-1]
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
        drafted.append(int(theirs.argmax()))
        assert drafted[-1] == int(ours.argmax())


def test_blanking_the_first_pair_changes_its_entry_alone(target: Target, tmp_path: Path) -> None:
    export_mtp(make_head(target), tmp_path, torch.float32)
    served = read_mtp(tmp_path)
    hidden, ids = torch.randn(T, 32), torch.arange(3, 3 + T)
    blank, whole = (served.draft_logits(hidden, ids, [5], blank_first=first) for first in (True, False))
    assert not torch.equal(blank, whole)
    with torch.no_grad():
        served.tensors["model.embed_tokens.weight"][3] = 0  # the first token, which stands nowhere else
    assert torch.equal(served.draft_logits(hidden, ids, [5], blank_first=False), blank)


def test_a_head_that_blanks_the_first_pair_is_served_as_it_is(target: Target, tmp_path: Path) -> None:
    """From a text's first token on, with the reader as servers have it."""
    head = make_head(target, blank_first=True)
    export_mtp(head, tmp_path, torch.float32)
    served = read_mtp(tmp_path)
    ids = torch.randint(3, 259, (1, T + 1), generator=torch.Generator().manual_seed(1))
    hidden = target.hidden(ids)[:, :T]
    state = head.start(1)
    head.absorb(state, hidden[:, :3], ids[:, 1:4], [3])
    head.absorb(state, hidden[:, 3:], ids[:, 4:], [T - 3])
    ours = torch.cat([head.draft_logits(state, token) for token in (None, torch.tensor([7]))])
    theirs = served.draft_logits(hidden[0], ids[0, 1:], [7])
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(served.draft_logits(hidden[0], ids[0, 1:], [7], blank_first=False), ours, atol=1e-2)


def test_served_in_the_targets_dtype(target: Target, tmp_path: Path) -> None:
    export_mtp(make_head(target), tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("target_options", "head_options", "message"),
    [
        ({}, {"num_layers": 2}, r"num_layers=2: a server's MTP layer is one"),
        ({}, {"own_output_head": True}, r"heads\.own_output_head=true: servers give MTP layers the target's whole"),
        ({"family": "qwen3"}, {}, r"of family 'qwen3': a server's MTP layer is that of llama, mistral, qwen2"),
        ({"family": "gemma2"}, {}, r"of family 'gemma2'"),
        ({"head_dim": 16}, {}, r"attention heads of 16, and a server's MTP layer divides hidden_size 32 by 4"),
        ({"attention_bias": True}, {}, r"a server's MTP layer has no self_attn\.o_proj\.bias"),
        ({"mlp_bias": True}, {}, r"a server's MTP layer has no mlp\.down_proj\.bias"),
    ],
)
def test_what_has_no_place_is_refused(
    target_options: dict[str, Any], head_options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_mtp(make_head(make_tiny_target(**target_options), **head_options), tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def test_a_reduced_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    head = make_head(target, torch.arange(3, 120, 2), draft_vocab_size=59)
    with pytest.raises(ValueError, match=r"draft_vocab_size=59: .*train with .*draft_vocab_size=0"):
        export_mtp(head, tmp_path / "out", torch.float32)


def test_a_bias_of_the_output_head_is_refused(target: Target, tmp_path: Path) -> None:
    target.output_head.bias = torch.nn.Parameter(torch.zeros(264), requires_grad=False)
    with pytest.raises(ValueError, match="has a bias in its output head"):
        export_mtp(make_head(target), tmp_path / "out", torch.float32)


def test_an_activation_that_is_not_vllms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden_act 'gelu'"):
        export_mtp(make_head(make_tiny_target(hidden_act="gelu")), tmp_path / "out", torch.float32)


LAYER = "model.mtp_layers.0."


def swap_norms(tensors: dict[str, torch.Tensor]) -> None:
    one, other = f"{LAYER}token_layernorm.weight", f"{LAYER}hidden_layernorm.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def swap_halves(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}input_proj.weight"] = tensors[f"{LAYER}input_proj.weight"].roll(32, dims=1).contiguous()


def forget_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}input_proj.weight"] = tensors[f"{LAYER}input_proj.weight"] * 1.01


def swap_gate(tensors: dict[str, torch.Tensor]) -> None:
    one, other = f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


@pytest.mark.parametrize("damage", [swap_norms, swap_halves, forget_scale, swap_gate])
def test_the_check_sees_wrong_numbers(
    damage: Callable[[dict[str, torch.Tensor]], None], target: Target, tmp_path: Path
) -> None:
    head = make_head(target)
    export_mtp(head, tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"step \d gives other logits"):
        check_mtp(read_mtp(tmp_path), head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 0.5}, r"step 1 gives other logits"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, r"step \d gives other logits"),
    ],
)
def test_the_check_sees_a_wrong_config(changes: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    head = make_head(target)
    export_mtp(head, tmp_path, torch.float32)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        check_mtp(read_mtp(tmp_path), head)


def test_the_check_is_part_of_the_export(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = module._tensors

    def wrong(head: MTPHead) -> dict[str, torch.Tensor]:
        found = tensors(head)
        swap_norms(found)
        return found

    monkeypatch.setattr(module, "_tensors", wrong)
    with pytest.raises(ValueError, match="gives other logits"):
        export_mtp(make_head(target), tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, r"no config of an MTP layer"),
        ({"num_nextn_predict_layers": 2}, r"lacks num_nextn_predict_layers=1"),
        ({"hidden_size": "32"}, r"lacks hidden_size"),
        ({"hidden_size": 16}, r"expected \(16"),
        ({"num_key_value_heads": 4}, r"k_proj\.bias is \(16,\), expected \(32,\)"),
    ],
)
def test_config_must_fit(changes: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    export_mtp(make_head(target), tmp_path, torch.float32)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_mtp(tmp_path)


def test_damaged_files(target: Target, tmp_path: Path) -> None:
    export_mtp(make_head(target), tmp_path, torch.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"damaged or cut short"):
        read_mtp(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"no readable JSON"):
        read_mtp(tmp_path)
