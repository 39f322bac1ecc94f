"""The drafters that a command can have without trained heads."""

from models.drafters.options import KINDS, DrafterOptions, needs_checkpoint
from train.runtime.presets import read_preset

WITHOUT_CHECKPOINT = [
    kind for kind in KINDS if not needs_checkpoint(read_preset(DrafterOptions, "drafter", kind, {}, "tests"))
]
