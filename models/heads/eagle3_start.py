"""First weights of an EAGLE-3 head from a little text: a least-squares guess, written into its one layer.

At position t the head should end with z_{t+1}, the residual stream behind all of the target's layers at the next
position, from which norm and output head make the right prediction. The linear map from the streams that it reads at t
and from the embedding of x_{t+1}, [F, G], that comes closest to it is written down as follows. F is `fc`, and the
residual carries it through. G goes through the attention: queries and keys are one random map of the embedding, so that
a position finds itself (and the same token earlier, whose value is the same), and values times output projection are
the best approximation of G of their rank. Positions count by 1 / rms(z)^2, since the norm leaves relative errors alone.
Our own method; later steps are not looked at, and left to training.

Shape suffixes: T positions, H hidden, X = 3H streams, F = 4H features, R rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig

from ..target.model import Target

# Ridge of each feature, relative to its mean square: a few features of a residual stream are huge.
RIDGE = 1e-3
# Tokens for each weight of a row, at least.
MIN_TOKENS_PER_FEATURE = 4
# What a position's own token adds to its attention logit.
SELF_LOGIT = 16.0
# Size of what queries and keys read of the state, relative to the embedding's part.
STATE_SHARE = 0.02


@dataclass(frozen=True)
class LinearGuess:
    """fuse [H, 3H] and embed [H, H], float64: the map; moment [H, H]: the weighted sum of e e^T over the text."""

    fuse: Tensor
    embed: Tensor
    moment: Tensor


@torch.no_grad()
def guess_linearly(
    target: Target, reads: Sequence[int], embedding_norm: nn.Module, texts: Sequence[Tensor]
) -> LinearGuess | None:
    """The least-squares map of the module's description; None where the text is too short to say anything.

    embedding_norm: what the layer does to embeddings. texts: ids [T] each.
    """
    size = target.hidden_size
    num_layers = len(target.layers())
    with_last = reads if reads[-1] == num_layers else (*reads, num_layers)
    gram = torch.zeros(4 * size, 4 * size, dtype=torch.float64, device=target.device)
    cross = torch.zeros(4 * size, size, dtype=torch.float64, device=target.device)
    num_tokens = 0
    for ids_T in tqdm(texts, desc="first weights", unit="text", leave=False):
        ids_1T = ids_T[None].to(target.device)
        wide_TX = target.hidden(ids_1T, reads=with_last)[0].double()
        embedding_TH = embedding_norm(target.embed(ids_1T)[0, 1:].float()).double()
        features_TF = torch.cat([wide_TX[:-1, size : 4 * size], embedding_TH], dim=1)
        last_TH = wide_TX[1:, -size:]
        weight_T1 = last_TH.pow(2).mean(dim=1, keepdim=True).rsqrt()
        gram += (features_TF * weight_T1).T @ (features_TF * weight_T1)
        cross += (features_TF * weight_T1).T @ (last_TH * weight_T1)
        num_tokens += len(features_TF)
    needed = MIN_TOKENS_PER_FEATURE * 4 * size
    if num_tokens <= needed:
        if texts:
            warnings.warn(
                f"first weights stay random: {num_tokens} tokens of text are too few to fit them to, more than "
                f"{needed} are needed; raise trainer.start_tokens, or give more text",
                stacklevel=3,
            )
        return None
    squares_F = gram.diagonal()
    ridge = RIDGE * squares_F.clamp(min=1e-12 * float(squares_F.max()))
    solution = torch.linalg.solve(gram + torch.diag(ridge), cross).T
    return LinearGuess(solution[:, : 3 * size], solution[:, 3 * size :], gram[3 * size :, 3 * size :])


@torch.no_grad()
def write_attention(attention: nn.Module, config: LlamaConfig, guess: LinearGuess) -> None:
    """Let the attention add `guess.embed` times the embedding, as well as its values' width allows."""
    size, width, num_entries = config.hidden_size, config.head_dim, config.num_key_value_heads
    groups = config.num_attention_heads // num_entries
    rank = min(num_entries * width, size)
    # Of all maps of this rank, the one that loses least of what the text's embeddings give.
    directions_HR = torch.linalg.eigh(guess.embed @ guess.moment @ guess.embed.T)[1][:, -rank:]
    values = guess.embed.new_zeros(num_entries * width, 2 * size)
    values[:rank, :size] = directions_HR.T @ guess.embed
    back = guess.embed.new_zeros(size, num_entries * width)
    back[:, :rank] = directions_HR
    # The queries that share a key-value head share what it brings.
    back = (back / groups).unflatten(1, (num_entries, 1, width)).expand(-1, -1, groups, -1).flatten(1)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(num_entries, width, 2 * size, generator=generator) * (SELF_LOGIT / width**0.5 / size) ** 0.5
    keys[..., size:] *= STATE_SHARE
    queries = keys[:, None].expand(-1, groups, -1, -1)
    for name, weight in (("q", queries), ("k", keys), ("v", values), ("o", back)):
        parameter = attention.get_parameter(f"{name}_proj.weight")
        parameter.copy_(weight.reshape(parameter.shape))
