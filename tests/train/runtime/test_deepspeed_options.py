"""deepspeed=: what is asked for is told to transformers, and what cannot be had is told to the user."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from train.mtp import MTPConfig
from train.runtime import deepspeed_options
from train.runtime.config import checked
from train.runtime.deepspeed_options import check_deepspeed, complete, zero_stage
from train.runtime.presets import CONF


def chosen(*words: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose("mtp", ["+model=tiny", *words]), MTPConfig).deepspeed


def test_every_choice() -> None:
    assert chosen() == chosen("deepspeed=none") == {}
    assert complete({}) is None
    assert zero_stage({}) == 0
    for name, stage in (("zero1", 1), ("zero2", 2), ("zero2_offload", 2), ("zero3", 3)):
        engine = complete(chosen(f"deepspeed={name}"))
        assert engine is not None
        assert engine["zero_optimization"]["stage"] == zero_stage(engine) == stage
        assert ("offload_optimizer" in engine["zero_optimization"]) == (name == "zero2_offload")
        assert "bf16" not in engine


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_options, "find_spec", lambda name: None)
    check_deepspeed({})
    with pytest.raises(ValueError, match=r"not installed: pip install 'foretoken\[deepspeed\]'"):
        check_deepspeed(chosen("deepspeed=zero2"))


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeed would look for MPI, and fail in words of its own after the target was loaded."""
    monkeypatch.setattr(deepspeed_options, "find_spec", lambda name: name)
    monkeypatch.delenv("RANK", raising=False)
    check_deepspeed({})
    with pytest.raises(ValueError, match="needs a launcher: start with deepspeed --module"):
        check_deepspeed(chosen("deepspeed=zero1"))
    monkeypatch.setenv("RANK", "0")
    check_deepspeed(chosen("deepspeed=zero1"))
