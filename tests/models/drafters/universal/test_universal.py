"""Drafting with another vocabulary: lossless, and q is what the method says, by fresh forwards of the draft model."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters import universal as real_code
from models.drafters.build import make_drafter
from models.drafters.options import DrafterOptions
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import Target, TargetOptions
from models.target.tiny import make_tiny_target
from tests.models.decoding.test_decoder_sampled import (
    FALSE_ALARM,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAMPLING,
    chi_square_p_value,
    exact_law,
)
from tests.models.drafters.universal.toy import PROMPTS, SAMPLED, Witness
from tests.models.drafters.universal.vocabularies import make_model, make_toy_draft, make_toy_target

METHODS = ("slem", "slrs", "tli")


@pytest.mark.parametrize("method", METHODS)
def test_law_is_the_targets(method: str) -> None:
    """N = 2000 texts of 3 tokens a prompt, ragged neighbours; refused below p = 1e-6, the false-alarm rate of each."""
    target, draft = make_toy_target(), make_toy_draft(num_hidden_layers=1)
    prompts = [[5, 7, 4], [9]] if method != "slrs" else [[5, 7, 4]]  # a tree a block takes its time
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    results = Decoder(target, real_code.make_universal(method, draft, target), 2).generate(
        prompts * NUM_SAMPLES, params, 333
    )
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    assert 0.05 < add_up(result.counters for result in results).acceptance_rate < 0.8


@pytest.mark.parametrize("method", METHODS)
def test_rows_do_not_depend_on_the_batch(method: str) -> None:
    """Counters too: a row's drafts are the same whatever stands beside it, and after rows left and joined."""
    target, draft = make_toy_target(), make_toy_draft()
    params = GenerationParams(8, SamplingParams(1.0), seed=3)
    decoder = Decoder(target, real_code.make_universal(method, draft, target), 3)
    alone = decoder.generate(PROMPTS, params, max_batch_size=1)
    assert decoder.generate(PROMPTS, params, max_batch_size=3) == alone


@pytest.mark.parametrize("method", METHODS)
def test_processors_are_asked(method: str) -> None:
    """The output is that of plain decoding; TLI, whose law has other tokens left, drafts none that is forbidden."""
    target, draft = make_toy_target(), make_toy_draft()
    processors = ProcessorParams(bad_words_ids=((1,), (2,), (3,)), no_repeat_ngram_size=2)
    drafter = real_code.make_universal(method, draft, target)
    drafted: list[int] = []
    propose = drafter.propose

    def watched(*args):
        proposal = propose(*args)
        drafted.extend(proposal.tokens_BK.flatten().tolist())
        return proposal

    drafter.propose = watched
    params = GenerationParams(10, eos_token_ids=(), processors=processors)
    results = Decoder(target, drafter, 2).generate(PROMPTS[3:], params)
    expected = [decode_plainly(target, prompt, 10, eos_token_ids=(), processors=processors) for prompt in PROMPTS[3:]]
    assert [result.tokens for result in results] == expected
    assert drafted
    assert method != "tli" or not {1, 2, 3} & set(drafted)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_other_attention(family: str) -> None:
    """Sliding windows and soft-capping in the draft model: a tree's drafts are those of a listing."""
    target, draft = make_toy_target(), make_toy_draft(family=family)
    witness = Witness("slrs", draft, target, SAMPLED)
    drafter = real_code.StringRejectionSampling(draft, target, 10**6, 0.0)
    witness.run(drafter, [[5, 4, 9, 1, 2, 3] * 4, [7]], num_draft_tokens=2, max_batch_size=2)
    assert sum(witness.num_accepted) > 0


def test_what_does_not_fit_is_refused() -> None:
    target, draft = make_toy_target(), make_toy_draft()
    with pytest.raises(ValueError, match=r"'toy draft' has 8 tokens, and max_sequences=7: psi is summed over all"):
        real_code.make_universal("slrs", draft, target, 7)
    with pytest.raises(ValueError, match=r"drafter.method='tlx' is unknown; choose one of slem, slrs, tli"):
        real_code.make_universal("tlx", draft, target)
    with pytest.raises(ValueError, match="max_sequences=0: must be at least 1"):
        real_code.StringRejectionSampling(draft, target, 0)
    with pytest.raises(ValueError, match="min_mass=1"):
        real_code.StringRejectionSampling(draft, target, 10, 1.0)
    draft.device = torch.device("meta")
    with pytest.raises(ValueError, match="is on meta and target 'toy target' on cpu"):
        real_code.make_universal("tli", draft, target)
    draft = make_toy_draft()
    draft.config.layer_types = ["linear_attention"] * 2
    with pytest.raises(ValueError, match=r"draft model 'toy draft' cannot draft: .*linear_attention"):
        real_code.make_universal("slem", draft, target)


def test_no_common_token_is_refused() -> None:
    """Other letters altogether, and no EOS on one side."""
    backend = Tokenizer(models.BPE(vocab={"x": 0, "y": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    draft = Target(
        make_tiny_target(vocab_size=2, eos_token_id=None, pad_token_id=None).model,
        PreTrainedTokenizerFast(tokenizer_object=backend),
        "xy",
    )
    with pytest.raises(ValueError, match=r"draft model 'xy' and target 'toy target' share no token.*method=slem"):
        real_code.make_universal("tli", draft, make_toy_target())
    (result,) = Decoder(make_toy_target(), real_code.make_universal("slem", draft, make_toy_target()), 2).generate(
        [PROMPTS[0]], GenerationParams(5, eos_token_ids=())
    )
    assert result.tokens == decode_plainly(make_toy_target(), PROMPTS[0], 5, eos_token_ids=())


def test_by_options() -> None:
    """From a configuration: a random target gets a random sibling, which shares its vocabulary."""
    options = DrafterOptions("universal", method="slem", max_sequences=8192)
    target = make_model("bytes")
    drafter, record = make_drafter(options, TargetOptions(name="tiny", source="random"), target)
    assert isinstance(drafter, real_code.StringExactMatch)
    assert record["kind"] == "universal"
    assert record["method"] == "slem"
    assert record["fingerprint"] == drafter.draft.fingerprint()
