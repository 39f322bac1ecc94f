"""What can be exported where: the one place that sends a checkpoint to its format, or says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import load_heads, read_config
from models.export.eagle3 import export_sglang, export_speculators
from models.export.hf import export_hf
from models.export.vllm import export_medusa
from models.heads.eagle3 import Eagle3Head
from models.heads.medusa import MedusaHeads
from models.target import Target

VLLM, SGLANG, HF = "vllm", "sglang", "hf"
SERVERS = (VLLM, SGLANG, HF)
INSTEAD = "use --to hf, or this project's own decoder"
_READS_DRAFTS = "drafts in parallel from heads that read the drafted tokens"
_OWN_LAYER = "the recursive mtp head is a copy of the target's own last layer between norms and a projection of ours"
# (server, kind of head) -> why not, after reading both servers' sources (vLLM 0.32, SGLang's main of 2026).
REFUSALS = {
    (
        VLLM,
        "hydra",
    ): f"nothing in vLLM {_READS_DRAFTS}; train heads=eagle3 or heads=medusa, which it serves, or {INSTEAD}",
    (VLLM, "mtp"): (
        f"{_OWN_LAYER}, and vLLM loads such a layer only in the layout of a family that ships one (DeepSeek, MiMo, "
        f"Qwen3-Next and others), none of which is written here; train heads=eagle3 or heads=medusa, or {INSTEAD}"
    ),
    (SGLANG, "medusa"): (
        "SGLang has no Medusa drafter (it has EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM and DFLASH); train heads=eagle3, "
        f"which it serves, serve them with --to vllm, or {INSTEAD}"
    ),
    (SGLANG, "hydra"): f"nothing in SGLang {_READS_DRAFTS}; train heads=eagle3, which it serves, or {INSTEAD}",
    (SGLANG, "mtp"): (
        f"{_OWN_LAYER}: SGLang's EAGLE drafter lacks these norms, and NEXTN loads such a layer only in the layout of a "
        f"family that ships one, none of which is written here; train heads=eagle3, which it serves, or {INSTEAD}"
    ),
}


def check_exportable(checkpoint: Path, server: str) -> dict[str, Any]:
    """The checkpoint's config. ValueError, before any model loads, for heads that the server has no place for."""
    if server not in SERVERS:
        raise ValueError(f"--to {server!r} is unknown; choose one of {', '.join(SERVERS)}")
    config = read_config(checkpoint)
    head = config.get("head")
    kind = head.get("kind") if isinstance(head, dict) else None
    if (reason := REFUSALS.get((server, str(kind)))) is not None:
        raise ValueError(f"{kind} heads cannot go to {server}: {reason}")
    return config


def export(checkpoint: Path, folder: Path, server: str, target: Target) -> str:
    """Write `folder` for the server; returns a line that says how it is used.

    The folder must be new or empty: a checkpoint or a model there would lose its files. Heads go to a server in the
    target's dtype, as this project's decoder runs them, and to the hub as they were trained. ValueError as
    `check_exportable` and `load_heads`.
    """
    check_exportable(checkpoint, server)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already, and not empty; give a new folder, or remove it first")
    if server == HF:
        export_hf(checkpoint, load_heads(checkpoint, target, torch.float32), folder)
        return f"{folder} holds the heads and their card; see its README.md for `generate(custom_generate=...)`"
    head = load_heads(checkpoint, target)
    if isinstance(head, Eagle3Head):
        return _export_eagle3(head, folder, server)
    assert isinstance(head, MedusaHeads)
    export_medusa(head, folder)
    # All heads draft in vLLM, whatever is asked for.
    options = {"method": "medusa", "model": str(folder), "num_speculative_tokens": head.num_draft_tokens}
    return f"vllm serve {target.name} --speculative-config '{json.dumps(options)}'"


def _export_eagle3(head: Eagle3Head, folder: Path, server: str) -> str:
    name, count = head.target.get.name, head.num_draft_tokens
    if server == SGLANG:
        export_sglang(head, folder)
        return (
            f"python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {count} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {count + 1}"
        )
    export_speculators(head, folder)
    options = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": count}
    return f"vllm serve {name} --speculative-config '{json.dumps(options)}'"
