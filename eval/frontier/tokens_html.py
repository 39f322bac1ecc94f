"""Completions as an HTML page that shows how each token came to be: which the drafter wrote, which only a relaxed rule
let pass, which the target put in their place; with p, q, nu and w to hover over. One file, nothing loaded from outside.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.rows import DecodeResult, GenerationParams, TokenVerdict
from models.decoding.stops import Detokenizer
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble

UNFINISHED = "\ufffd"  # what a tokenizer decodes half a character to
NO_TEXT = "◦"  # a token whose text comes with a later one, or which has none
MEANING: dict[TokenVerdict, str] = {
    "prefill": "from the target, after the prompt",
    "accepted": "drafted, and lossless verification would have kept it",
    "relaxed": "drafted, and only the relaxed rule kept it",
    "recovered": "from the target, in place of a rejected one",
    "bonus": "from the target, after a block kept whole",
}
STYLE = """
body { font: 16px/1.7 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #111; background: #fff; }
pre, .tokens { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: #f2f2f2; padding: .5rem 1rem; font-size: .85rem; line-height: 1.4; }
pre { max-height: 20rem; overflow: auto; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; } h3 small { font-weight: normal; color: #444; }
.tokens span, .key span { border-radius: .2em; padding: .1em 0; cursor: help; border-right: 1px solid #fff; }
.prefill { background: #e4e4e4; } .accepted { background: #d5ecd9; } .bonus { background: #cfe3f5; }
.recovered { background: #f7dfae; font-style: italic; } .relaxed { background: #f2b6a8; font-weight: 600; }
.tokens span[style] { box-shadow: inset 0 -.22em 0 rgb(0 0 0 / calc(var(--w) * 55%)); }
""".strip()


@dataclass(frozen=True)
class TracedToken:
    """One emitted token. p, nu: its probability under the target and under what the rule emits; q: under the proposal.

    None: there is none (q and w of tokens that were not verified, w of rules without one), or the rule does not know.
    """

    text: str
    verdict: TokenVerdict
    p: float
    q: float | None
    nu: float | None
    weight: float | None


@dataclass(frozen=True)
class TracedText:
    """One completion of one prompt under one point."""

    point: str
    tokens: list[TracedToken]
    result: DecodeResult
    reward: float


def trace(
    decoder: Decoder, prompts: Sequence[Sequence[int]], params: GenerationParams, batch_size: int
) -> list[tuple[DecodeResult, list[TracedToken]]]:
    """Decode, and tell what is known of every token."""
    proposals: list[list[tuple[float | None, float | None]]] = [[] for _ in prompts]  # (q, w) of tokens after the first

    def note(record: BlockRecord) -> None:
        weights_BK = _weights(decoder, record)
        for b, index in enumerate(record.indices):
            proposals[index] += _proposals(record, b, weights_BK)

    results = decoder.generate(prompts, replace(params, logprobs=True), batch_size, on_block=note)
    tokenizer = decoder.target.tokenizer
    return [(result, _tokens(result, known, tokenizer)) for result, known in zip(results, proposals, strict=True)]


def _proposals(record: BlockRecord, b: int, weights_BK: Tensor | None) -> list[tuple[float | None, float | None]]:
    """(q, w) of the tokens that row b took from a block; None for a bonus."""
    block, verdict = record.block, record.verdict
    num_accepted = int(verdict.num_accepted_B[b])
    found: list[tuple[float | None, float | None]] = []
    for place in range(record.num_emitted[b]):
        if place == num_accepted and bool(verdict.is_bonus_B[b]):
            found.append((None, None))
            continue
        token = int(block.draft_tokens_BK[b, place] if place < num_accepted else verdict.next_token_B[b])
        if block.draft_probs_BKV is None:
            q = float(token == int(block.draft_tokens_BK[b, place]))
        else:
            q = float(block.draft_probs_BKV[b, place, token])
        found.append((q, None if weights_BK is None else float(weights_BK[b, place])))
    return found


def _weights(decoder: Decoder, record: BlockRecord) -> Tensor | None:
    """w of the block's places; None for a rule without one, or where a budget may have raised it."""
    rule = decoder.judge.rule
    if record.block.num_draft_tokens == 0 or record.block.budget_B is not None:
        return None
    return rule.weights(record.block) if isinstance(rule, StaticEnsemble | DynamicEnsemble) else None


def _tokens(
    result: DecodeResult, proposals: Sequence[tuple[float | None, float | None]], tokenizer: Detokenizer
) -> list[TracedToken]:
    assert result.logprobs is not None
    first = [(None, None)] if result.tokens else []  # the first token comes from the prompt's own pass
    rows = zip(pieces(tokenizer, result.tokens), result.verdicts, result.logprobs, [*first, *proposals], strict=True)
    return [
        TracedToken(
            text, verdict, math.exp(logs.target), q, None if logs.verify is None else math.exp(logs.verify), weight
        )
        for text, verdict, logs, (q, weight) in rows
    ]


def pieces(tokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds, special tokens included; "" where a character is still unfinished."""
    shown, found = "", []
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:end]))
        if text.endswith(UNFINISHED) and end < len(tokens):
            found.append("")
            continue
        # A tokenizer that changes what it has said before gives no piece: the token's own text then.
        found.append(text[len(shown) :] if text.startswith(shown) else tokenizer.decode([tokens[end - 1]]))
        shown = text
    return found


def render_page(title: str, prompts: Sequence[str], texts: Sequence[Sequence[TracedText]]) -> str:
    """The page. texts[i]: completions of prompt i, one a point."""
    key = " ".join(f'<span class="{name}">{name}</span> {_text(what)};' for name, what in MEANING.items())
    sections = [
        f"<section><h2>Prompt {number}</h2>\n<pre>{_text(prompt)}</pre>\n{''.join(map(_render, of_prompt))}</section>"
        for number, (prompt, of_prompt) in enumerate(zip(prompts, texts, strict=True), start=1)
    ]
    head = f'<meta charset="utf-8"/>\n<title>{_text(title)}</title>\n<style>\n{STYLE}\n</style>'
    body = "\n".join(
        [
            f"<h1>{_text(title)}</h1>",
            f'<p class="key">{key} a darker line under a token: more weight w on the target. Hover over a token '
            "for its probabilities.</p>",
            *sections,
        ]
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _render(text: TracedText) -> str:
    counters = text.result.counters
    figures = f"acceptance {counters.acceptance_rate:.2f}, {counters.relaxed} relaxed, reward {text.reward:.3g}"
    if text.result.certificate:
        figures += f", distance {text.result.certificate:.2f}"
    spans = "".join(map(_render_token, text.tokens))
    return f'<h3>{_text(text.point)} <small>{figures}</small></h3>\n<p class="tokens">{spans}</p>\n'


def _render_token(token: TracedToken) -> str:
    lines = [f"{token.verdict}: {MEANING[token.verdict]}", f"p = {token.p:.4g}"]
    for name, value in (("q", token.q), ("nu", token.nu), ("w", token.weight)):
        if value is not None:
            lines.append(f"{name} = {value:.4g}")
    style = "" if token.weight is None else f' style="--w:{token.weight:.3f}"'
    shown = _text(token.text).replace("\n", "↵\n") or NO_TEXT
    return f'<span class="{token.verdict}"{style} title="{_text(chr(10).join(lines))}">{shown}</span>'


def _text(text: str) -> str:
    """Escaped for content and attributes; what cannot be seen (control characters, direction marks) as its code."""
    seen = "".join(char if char.isprintable() or char in "\n\t" else f"\\u{ord(char):04x}" for char in text)
    return html.escape(seen, quote=True)
