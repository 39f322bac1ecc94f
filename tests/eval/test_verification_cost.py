"""The benchmark of verdicts, on a tiny target: every shipped rule at every batch size, from consistent blocks."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from eval.verification_cost import Blocks, Cost, CostConfig, measure_costs, render, run_costs
from models.target.tiny import make_tiny_target
from models.verification.options import RULES
from train.runtime.config import checked
from train.runtime.presets import CONF


def configure(*overrides: str) -> CostConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose("verification_cost", ["+model=tiny", *overrides]), CostConfig)


def test_blocks_are_what_a_decoder_would_judge() -> None:
    """p has K + 1 places, each a distribution; drafted tokens have q > 0; the pass gives the same logits again."""
    target = make_tiny_target()
    blocks = Blocks(target, 3, CostConfig(num_draft_tokens=4))
    block = blocks.block
    assert block.target_probs_BTV.shape == (3, 5, target.vocab_size)
    assert block.draft_probs_BKV is not None
    assert torch.allclose(block.target_probs_BTV.sum(dim=-1), torch.ones(3, 5))
    assert (block.draft_probs_BKV.gather(2, block.draft_tokens_BK[..., None]) > 0).all()
    assert torch.equal(blocks.run_target(), blocks.logits_BTV)


def test_every_rule_is_measured() -> None:
    costs = measure_costs(make_tiny_target(), CostConfig(num_draft_tokens=2, batch_sizes=[1, 2], rounds=1))
    assert [(cost.rule, cost.batch_size) for cost in costs] == [(rule, size) for size in (1, 2) for rule in RULES]
    assert all(min(cost.verdict_ms, cost.judge_ms, cost.pass_ms) > 0 for cost in costs)


def test_table_gives_shares_of_the_pass() -> None:
    line = render([Cost("static", 8, 1.0, 2.5, 50.0)]).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "static",
        "8",
        "1.00",
        "2.50",
        "50.0",
        "2.0%",
        "5.0%",
    ]


def test_command_writes_table_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_costs(configure("num_draft_tokens=2", "batch_sizes=[1]", "rounds=2", f"output_dir={tmp_path}"))
    record = json.loads((tmp_path / "verification_cost.json").read_text())
    assert [cost["rule"] for cost in record["costs"]] == list(RULES)
    assert (tmp_path / "verification_cost.md").read_text().splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["rounds=0", "batch_sizes=[]", "batch_sizes=[0]", "temperature=0.0", "num_draft_tokens=0"]
)
def test_options_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=option.split("=")[0]):
        run_costs(configure(option))
