"""What is told of each token, against the models themselves; and the page: escaped, well-formed, on its own."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

import eval.frontier.tokens_html
from eval.frontier.tokens_html import NO_TEXT, TracedText, TracedToken, pieces, trace
from models.decoding.counters import Counters
from models.decoding.decoder import Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.drafters.model import ModelDrafter
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target, make_tiny_tokenizer
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble
from models.verification.fly import FLy
from models.verification.token import TokenVerification
from tests.eval.planting import planted

PROMPTS = [[7, 8, 9], [20, 21, 22, 23, 24]]
SAMPLING = SamplingParams(0.8)
PARAMS = GenerationParams(24, SAMPLING, seed=5)
TOLERANCE = 2e-5  # float32 probabilities, from passes of other shapes


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Target]:
    return make_tiny_target(), make_tiny_target(1)


def probability(model: Target, context: list[int], token: int) -> float:
    logits_V = model.logits(model.hidden(torch.tensor([context]))[0, -1])
    return float((model.hide_padding(logits_V) / SAMPLING.temperature).softmax(dim=-1)[token])


def check_trace(code: Any, pair: tuple[Target, Target], rule: Any, weight: float | None) -> None:
    """p and q are the models' own at that prefix; nu = w p + (1 - w) q where it was verified, else p."""
    target, draft = pair
    decoder = Decoder(target, ModelDrafter(draft, target), 3, rule)
    seen = set()
    for prompt, (result, tokens) in zip(PROMPTS, code.trace(decoder, PROMPTS, PARAMS, 2), strict=True):
        assert len(tokens) == len(result.tokens) > 8
        for i, (token, traced) in enumerate(zip(result.tokens, tokens, strict=True)):
            context = [*prompt, *result.tokens[:i]]
            seen.add(traced.verdict)
            assert traced.verdict == result.verdicts[i]
            assert traced.p == pytest.approx(probability(target, context, token), abs=TOLERANCE)
            if traced.verdict in ("prefill", "bonus"):
                assert (traced.q, traced.weight) == (None, None)
                assert traced.nu == pytest.approx(traced.p)
                continue
            assert traced.weight == weight
            assert traced.q == pytest.approx(probability(draft, context, token), abs=TOLERANCE)
            mixed = (1.0 if weight is None else weight) * traced.p + (0.0 if weight is None else 1 - weight) * traced.q
            assert traced.nu == pytest.approx(mixed, abs=TOLERANCE)
    assert {"prefill", "accepted", "recovered"} <= seen
    assert ("relaxed" in seen) == (weight is not None)


def test_static_and_dynamic(pair: tuple[Target, Target]) -> None:
    check_trace(eval.frontier.tokens_html, pair, StaticEnsemble(0.25), 0.25)
    half = DynamicEnsemble(lambda block: torch.full(block.draft_tokens_BK.shape, 0.5))
    check_trace(eval.frontier.tokens_html, pair, half, 0.5)


def test_lossless(pair: tuple[Target, Target]) -> None:
    check_trace(eval.frontier.tokens_html, pair, TokenVerification(), None)


def test_what_is_not_known_is_left_out(pair: tuple[Target, Target]) -> None:
    """A rule without a law has no nu; under a budget w may be any from the rule's up; greedy drafts are one-hot."""
    target, draft = pair
    drafter = ModelDrafter(draft, target)
    ((_, tokens), _) = trace(Decoder(target, drafter, 3, FLy(0.1, 1)), PROMPTS, PARAMS, 2)
    assert all(token.nu is None for token in tokens)
    ((_, tokens), _) = trace(Decoder(target, drafter, 3, StaticEnsemble(0.1), 1.0), PROMPTS, PARAMS, 2)
    assert all(token.weight is None for token in tokens)
    assert any(token.q is not None for token in tokens)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("place < num_accepted else verdict.next_token_B[b]", "place <= num_accepted else verdict.next_token_B[b]"),
        ("block.draft_probs_BKV[b, place, token]", "block.draft_probs_BKV[b, 0, token]"),
        ("block.draft_probs_BKV[b, place, token]", "block.target_probs_BTV[b, place, token]"),
        ("float(weights_BK[b, place])", "1 - float(weights_BK[b, place])"),
        ("math.exp(logs.target)", "math.exp(logs.model)"),
        ("place == num_accepted and bool(verdict.is_bonus_B[b])", "place == num_accepted"),
        ("[*first, *proposals]", "[*proposals, *first]"),
        ("proposals[index] +=", "proposals[0] +="),
    ],
)
def test_planted_fault_is_caught(pair: tuple[Target, Target], right: str, wrong: str) -> None:
    code = planted(eval.frontier.tokens_html, right, wrong)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_trace(code, pair, StaticEnsemble(0.25), 0.25)


def test_pieces_never_cut_a_character() -> None:
    tokenizer = make_tiny_tokenizer()
    text = "a한 é\n"
    tokens = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, tokens)
    assert found == ["a", "", "", "한", " ", "", "é", "\n"]
    assert pieces(tokenizer, [tokenizer.eos_token_id]) == ["<|end|>"]
    assert "".join(pieces(tokenizer, tokens[:2])) == "a\ufffd"  # an end in mid-character is shown
    assert pieces(tokenizer, []) == []


def test_pieces_of_a_tokenizer_that_changes_its_mind() -> None:
    class Moody:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return {1: "a", 2: "B c"}.get(len(token_ids), "?")

    assert pieces(Moody(), [1, 2]) == ["a", "a"]


# ---- the page ----

NASTY = "<script>alert(1)</script> & \"q\" 'r' \x00\x1b\u202e"


def make_page(code: Any = eval.frontier.tokens_html) -> str:
    result = DecodeResult([1, 2, 3], [], "", "length", Counters(drafted=4, accepted=2, relaxed=1), certificate=1.25)
    tokens = [
        TracedToken(NASTY, "accepted", 0.5, 0.25, 0.4, 0.75),
        TracedToken("\n", "bonus", 0.125, None, 0.125, None),
        TracedToken("", "relaxed", 0.0, 1.0, None, None),
    ]
    return code.render_page(NASTY, [NASTY], [[TracedText(NASTY, tokens, result, 0.5)]])


def parse(page: str) -> ET.Element:
    """As XML: the page closes all that it opens."""
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def check_page(page: str) -> None:
    root = parse(page)
    tags = {element.tag for element in root.iter()}
    assert tags == {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "small",
        "p",
        "pre",
        "section",
        "span",
    }
    seen = NASTY.replace("\x00", "\\u0000").replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")
    assert root.find("head/title").text == seen
    assert root.find("body/section/pre").text == seen
    assert root.find("body/section/h3").text.strip() == seen
    first, second, third = root.findall("body/section/p/span")
    assert first.text == seen
    assert (second.text, third.text) == ("↵\n", NO_TEXT)
    assert [span.get("class") for span in (first, second, third)] == ["accepted", "bonus", "relaxed"]
    assert [span.get("style") for span in (first, second, third)] == ["--w:0.750", None, None]
    assert re.findall(r"(\w+) = ([\d.]+)", first.get("title")) == [
        ("p", "0.5"),
        ("q", "0.25"),
        ("nu", "0.4"),
        ("w", "0.75"),
    ]
    assert re.findall(r"(\w+) = ([\d.]+)", second.get("title")) == [("p", "0.125"), ("nu", "0.125")]
    assert root.find("body/section/h3/small").text == "acceptance 0.50, 1 relaxed, reward 0.5, distance 1.25"
    key = root.find("body/p[@class='key']")
    assert [span.text for span in key.findall("span")] == ["prefill", "accepted", "relaxed", "recovered", "bonus"]


def check_escaping_and_page(code: Any) -> None:
    check_page(make_page(code))
    # No meaning of a verdict has quotes today; one that had would end the attribute that it stands in.
    assert '"' not in code._text('a "quoted" word')


def test_page() -> None:
    page = make_page()
    check_escaping_and_page(eval.frontier.tokens_html)
    assert "<script" not in page
    assert not re.search(r"(?:src|href|url|@import|https?:)", page)
    assert page.isprintable() or set(re.findall(r"[^\x20-\x7e]", page)) <= {"\n", "↵", NO_TEXT}
    for name in eval.frontier.tokens_html.MEANING:
        assert f".{name} {{" in page  # each has a colour


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("return html.escape(seen, quote=True)", "return seen"),
        ("return html.escape(seen, quote=True)", "return html.escape(seen, quote=False)"),
        ('char if char.isprintable() or char in "\\n\\t" else', "char if True else"),
        ("<pre>{_text(prompt)}</pre>", "<pre>{prompt}</pre>"),
        ("<h3>{_text(text.point)} ", "<h3>{text.point} "),
        ("or NO_TEXT", 'or ""'),
    ],
)
def test_planted_fault_on_the_page_is_caught(right: str, wrong: str) -> None:
    code = planted(eval.frontier.tokens_html, right, wrong)
    with pytest.raises((AssertionError, ET.ParseError)):
        check_escaping_and_page(code)
