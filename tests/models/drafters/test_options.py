"""Every kind by its name: what it takes, what it refuses, and what it is recorded as."""

from pathlib import Path

import pytest

from models.checkpoint import heads_record, save_heads
from models.drafters.build import make_drafter
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter
from models.drafters.options import KINDS, DrafterOptions, check_drafter, default_draft_tokens
from models.drafters.text.ngram import NgramDrafter
from models.drafters.text.suffix import SuffixDrafter
from models.heads import HeadOptions, build_head
from models.target.model import TargetOptions
from models.target.tiny import make_tiny_target

RANDOM = TargetOptions(name="tiny", source="random")


def test_none_and_parameters() -> None:
    target = make_tiny_target()
    assert make_drafter(DrafterOptions(), RANDOM, target) == (None, {"kind": "none"})
    assert default_draft_tokens(None) == 0
    drafter, record = make_drafter(DrafterOptions("ngram", min_match=2, max_match=5), RANDOM, target)
    assert isinstance(drafter, NgramDrafter)
    assert (drafter.min_match, drafter.max_match) == (2, 5)
    assert record == {"kind": "ngram", "name": "ngram", "fingerprint": "min_match=2, max_match=5"}
    options = DrafterOptions("suffix", min_match=3, min_probability=0.25, remembered_tokens=9)
    drafter, record = make_drafter(options, RANDOM, target)
    assert isinstance(drafter, SuffixDrafter)
    assert (drafter.min_match, drafter.min_probability, drafter.remembered_tokens) == (3, 0.25, 9)
    assert record["fingerprint"] == "min_match=3, min_probability=0.25, remembered_tokens=9"
    assert default_draft_tokens(drafter) == 4


def test_models_and_heads(tmp_path: Path) -> None:
    target = make_tiny_target()
    save_heads(tmp_path, build_head(target, HeadOptions("medusa", 3)))
    drafter, record = make_drafter(DrafterOptions("heads"), RANDOM, target, tmp_path)
    assert isinstance(drafter, HeadsDrafter)
    assert record == heads_record(tmp_path)
    assert default_draft_tokens(drafter) == 3
    drafter, record = make_drafter(DrafterOptions("model"), RANDOM, target)
    assert isinstance(drafter, ModelDrafter)
    assert record["fingerprint"] == drafter.draft.fingerprint()
    with pytest.raises(ValueError, match="drafter=heads needs checkpoint=FOLDER"):
        make_drafter(DrafterOptions("heads"), RANDOM, target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DrafterOptions("oracle"), r"drafter\.kind='oracle' is unknown; choose one of none, heads, "),
        (DrafterOptions("ngram"), r"drafter\.min_match is missing: ngram needs min_match, max_match"),
        (DrafterOptions("model", min_match=0), r"drafter\.min_match=0 is no parameter of model, which has: none"),
        (
            DrafterOptions("ngram", min_match=1, max_match=2, min_probability=0.0),
            r"drafter\.min_probability=0\.0 is no parameter of ngram",
        ),
    ],
)
def test_refusals(options: DrafterOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_drafter(options)
    with pytest.raises(ValueError, match=message):
        make_drafter(options, RANDOM, make_tiny_target())


def test_every_parameter_belongs_to_a_kind() -> None:
    names = {name for names in KINDS.values() for name in names}
    assert names == set(DrafterOptions.__dataclass_fields__) - {"kind"}
