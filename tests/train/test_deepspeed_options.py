"""deepspeed=: what is asked for is told to transformers, and what cannot be had is told to the user."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from train import deepspeed_options
from train.config import checked
from train.deepspeed_options import check_deepspeed, complete
from train.mtp import MTPConfig
from train.presets import CONF


def chosen(*words: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose("mtp", ["+model=tiny", *words]), MTPConfig).deepspeed


def test_every_choice() -> None:
    assert chosen() == chosen("deepspeed=none") == {}
    assert complete({}) is None
    for stage in (1, 2):
        engine = complete(chosen(f"deepspeed=zero{stage}"))
        assert engine is not None
        assert engine["zero_optimization"]["stage"] == stage
        assert "bf16" not in engine


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_options, "find_spec", lambda name: None)
    check_deepspeed({})
    with pytest.raises(ValueError, match=r"not installed: pip install 'foretoken\[deepspeed\]'"):
        check_deepspeed(chosen("deepspeed=zero2"))


def test_stage_3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_options, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"zero_optimization\.stage=3: draft heads train under stages 0 to 2"):
        check_deepspeed(chosen("deepspeed=zero2", "deepspeed.zero_optimization.stage=3"))
