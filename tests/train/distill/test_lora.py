"""Low-rank adapters: options out of range are refused; what they do is tested where they are trained."""

from typing import Any

import pytest

from train.distill.lora import LoraOptions


@pytest.mark.parametrize("options", [{"rank": -1}, {"alpha": 0.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lora\.rank=.* must be at least 0, and lora\.alpha=.* above 0"):
        LoraOptions(**options)
