"""The EAGLE-3 head's own: the layers it reads, what its layer is, and its first weights."""

import pytest
import torch
from torch import Tensor

from models.heads import HeadOptions, build_head
from models.heads.eagle3 import Eagle3Head, default_reads
from models.heads.eagle3_start import MIN_TOKENS_PER_FEATURE, RIDGE, guess_linearly
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target


def make_head(target: Target, **options: object) -> Eagle3Head:
    head = build_head(target, HeadOptions("eagle3", 3, own_output_head=True, **options))
    assert isinstance(head, Eagle3Head)
    return head


def make_texts(rows: int, length: int = 48) -> list[Tensor]:
    return list(torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (2, (0, 1, 2)),
        (3, (0, 1, 2)),
        (4, (0, 2, 3)),
        (6, (0, 3, 5)),
        (7, (2, 3, 4)),
        (30, (2, 15, 27)),
        (32, (2, 16, 29)),
    ],
)
def test_layers_read_by_default(num_layers: int, expected: tuple[int, ...]) -> None:
    """vLLM's own choice (`get_eagle3_default_aux_hidden_state_layers`) wherever it gives three rising numbers."""
    assert default_reads(num_layers) == expected


def test_the_options_say_what_is_read() -> None:
    """So that a checkpoint does, whatever a later default is."""
    target = make_tiny_target()
    assert make_head(target).options.reads == [0, 1, 2]
    assert make_head(target, reads=[1, 2, 3]).reads == (1, 2, 3)
    with pytest.raises(ValueError, match=r"heads\.reads=\[0, 1, 2\].*at most 1"):
        make_head(make_tiny_target(num_hidden_layers=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_starts_from_the_targets_output(family: str) -> None:
    """Its norm's gain is what the target's norm does to a state of ones, its output head the target's rows."""
    target = make_tiny_target(family=family)
    head = make_head(target)
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) * 3.0
    torch.testing.assert_close(head.norm(states), target.decoder.norm(states), atol=1e-5, rtol=1e-4)
    assert torch.equal(head.output_heads[0], target.output_head.weight)


@pytest.mark.parametrize("reads", [(0, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_guess_is_the_least_squares_one(family: str, reads: tuple[int, ...]) -> None:
    """Against torch's own solver over all positions at once, from transformers' own hidden states."""
    target = make_tiny_target(family=family)
    texts = make_texts(12)
    head = make_head(target, reads=list(reads))
    norm = head.layers[0].input_layernorm
    guess = guess_linearly(target, reads, norm, texts)
    features, wanted = [], []
    with torch.no_grad():
        for ids_T in texts:
            output = target.model(input_ids=ids_T[None], output_hidden_states=True)
            streams = [stream[0] for stream in output.hidden_states[:3]]
            streams.append(target.hidden(ids_T[None], reads=(3,))[0, :, 32:])  # before the final norm
            features.append(torch.cat([*(streams[i][:-1] for i in reads), norm(target.embed(ids_T[1:]))], dim=1))
            wanted.append(streams[3][1:])
    x, y = torch.cat(features).double(), torch.cat(wanted).double()
    weight = y.pow(2).mean(dim=1, keepdim=True).rsqrt()
    x, y = x * weight, y * weight
    ridge = torch.diag((RIDGE * x.pow(2).sum(dim=0)).sqrt())
    expected = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, torch.zeros(128, 32).double()])).solution.T
    torch.testing.assert_close(torch.cat([guess.fuse, guess.embed], dim=1), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_computes_the_guess(family: str) -> None:
    """Fused streams exactly; the embedding's part as well as the values' width allows, by attention to oneself."""
    target = make_tiny_target(family=family)
    texts = make_texts(16)
    head = make_head(target)
    layer = head.layers[0]
    guess = guess_linearly(target, head.reads, layer.input_layernorm, texts)
    head.fit_start(texts)
    assert torch.equal(head.fc.weight, guess.fuse.float())
    config = head.config
    groups = config.num_attention_heads // config.num_key_value_heads
    values = layer.self_attn.v_proj.weight.double().unflatten(0, (config.num_key_value_heads, config.head_dim))
    values = values.repeat_interleave(groups, dim=0).flatten(0, 1)
    through = layer.self_attn.o_proj.weight.double() @ values  # where each position attends to itself alone
    assert through[:, 32:].abs().max() == 0
    # What is lost of the text is the sum of the smallest eigenvalues (Eckart and Young): no map of this rank is closer.
    rank = min(config.num_key_value_heads * config.head_dim, 32)
    lost = torch.trace((through[:, :32] - guess.embed) @ guess.moment @ (through[:, :32] - guess.embed).T)
    smallest = torch.linalg.eigvalsh(guess.embed @ guess.moment @ guess.embed.T)[: 32 - rank].sum()
    total = torch.trace(guess.embed @ guess.moment @ guess.embed.T)
    torch.testing.assert_close(lost / total, smallest / total, atol=1e-5, rtol=0)


def test_each_position_finds_itself() -> None:
    """Heads of a usual width: what attention brings is the guess's part of the position's own token, where tokens
    differ, and also where the same token stood before.
    """
    target = make_tiny_target(head_dim=64)
    head = make_head(target)
    head.fit_start(make_texts(16))
    layer = head.layers[0]
    guess = guess_linearly(target, head.reads, layer.input_layernorm, make_texts(16))
    ids_T = torch.randperm(250, generator=torch.Generator().manual_seed(4))[:20] + 3
    ids_1T = torch.cat([ids_T, ids_T])[None]
    carried_1TH = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(5))
    brought: list[Tensor] = []
    layer.self_attn.register_forward_hook(lambda module, args, output: brought.append(output[0]))
    with torch.no_grad():
        mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
        head._run(carried_1TH, ids_1T, torch.arange(40)[None], mask, None)
        expected = layer.input_layernorm(target.embed(ids_1T)) @ guess.embed.T.float()
    error = (brought[0] - expected).norm() / expected.norm()
    assert error < 0.1, error


def test_too_little_text_leaves_the_start_as_it_was() -> None:
    target = make_tiny_target()
    head = make_head(target)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    few = MIN_TOKENS_PER_FEATURE * 128 // 47
    with pytest.warns(UserWarning, match=r"first weights stay random: 470 tokens .* more than 512 are needed"):
        head.fit_start(make_texts(few))
    head.fit_start([])
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())
    head.fit_start(make_texts(few + 1))
    changed = {name for name, tensor in head.state_dict().items() if not torch.equal(before[name], tensor)}
    assert changed == {"fc.weight", *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo")}
