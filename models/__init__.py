"""What inference needs: the frozen target, draft heads, the checkpoint format and the decoder. Usable alone.

Installed, this package is `foretoken`; in a checkout it is `models`. What is imported here is the public interface; the
rest may change between versions.
"""

from .checkpoint import heads_record, load_ensemble, load_heads, model_record, read_config, save_ensemble, save_heads
from .decoding.decoder import Decoder
from .decoding.length_options import LengthOptions, make_length
from .decoding.reference import decode_plainly
from .decoding.rows import DecodeResult, GenerationParams
from .drafters.build import make_drafter
from .drafters.heads import HeadsDrafter
from .drafters.hybrid import HybridDrafter
from .drafters.model import ModelDrafter
from .drafters.options import DrafterOptions
from .drafters.text.lookahead import LookaheadDrafter
from .drafters.text.ngram import NgramDrafter
from .drafters.text.suffix import SuffixDrafter
from .drafters.tree import DynamicTreeDrafter, StaticTreeDrafter
from .drafters.universal import make_universal
from .ensemble import EnsembleHead, EnsembleOptions
from .export.custom_generate import SpeculativeGenerate, load_speculative
from .heads import DraftHead, HeadOptions, build_head
from .processors.prefix import ProcessorParams
from .sampling import SamplingParams
from .target.model import Target, TargetOptions, load_target
from .verification.blockwise import BlockVerification
from .verification.cascades import SpeculativeCascade
from .verification.ensemble import DynamicEnsemble, StaticEnsemble
from .verification.fly import FLy
from .verification.lenience import Lenience
from .verification.mentored import MentoredDecoding
from .verification.options import VerifierOptions, make_rule
from .verification.thresholds import ProbabilityGap, ThresholdSampling, TypicalAcceptance
from .verification.token import TokenVerification

__all__ = [
    "BlockVerification",
    "DecodeResult",
    "Decoder",
    "DraftHead",
    "DrafterOptions",
    "DynamicEnsemble",
    "DynamicTreeDrafter",
    "EnsembleHead",
    "EnsembleOptions",
    "FLy",
    "GenerationParams",
    "HeadOptions",
    "HeadsDrafter",
    "HybridDrafter",
    "LengthOptions",
    "Lenience",
    "LookaheadDrafter",
    "MentoredDecoding",
    "ModelDrafter",
    "NgramDrafter",
    "ProbabilityGap",
    "ProcessorParams",
    "SamplingParams",
    "SpeculativeCascade",
    "SpeculativeGenerate",
    "StaticEnsemble",
    "StaticTreeDrafter",
    "SuffixDrafter",
    "Target",
    "TargetOptions",
    "ThresholdSampling",
    "TokenVerification",
    "TypicalAcceptance",
    "VerifierOptions",
    "build_head",
    "decode_plainly",
    "heads_record",
    "load_ensemble",
    "load_heads",
    "load_speculative",
    "load_target",
    "make_drafter",
    "make_length",
    "make_rule",
    "make_universal",
    "model_record",
    "read_config",
    "save_ensemble",
    "save_heads",
]
