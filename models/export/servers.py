"""What can be exported where: the one place that sends a checkpoint to its format, or says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load_heads, read_config
from ..heads.base import DraftHead
from ..heads.eagle3 import Eagle3Head
from ..heads.medusa import MedusaHeads
from ..heads.mtp import MTPHead
from ..target.model import Target
from .eagle3 import export_sglang, export_speculators
from .hf import export_hf
from .mtp_layer import VLLM_OVERRIDES, export_mtp
from .vllm import export_medusa

VLLM, SGLANG, HF = "vllm", "sglang", "hf"
SERVERS = (VLLM, SGLANG, HF)
INSTEAD = "use --to hf, or this project's own decoder"
_READS_DRAFTS = "drafts in parallel from heads that read the drafted tokens"
NOT_BLANK = (
    "# note: servers do without the first pair's embedding, and these heads were trained with it: drafts differ a "
    "little there, texts do not; heads.blank_first=true trains them as they are served"
)
# (server, kind of head) -> why not, after reading both servers' sources (vLLM 0.32, SGLang's main of 2026).
REFUSALS = {
    (VLLM, "hydra"): (
        f"nothing in vLLM {_READS_DRAFTS}; train heads=eagle3, mtp or medusa, which it serves, or {INSTEAD}"
    ),
    (SGLANG, "medusa"): (
        "SGLang has no Medusa drafter (it has EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM and DFLASH); train heads=eagle3, "
        f"which it serves, serve them with --to vllm, or {INSTEAD}"
    ),
    (SGLANG, "hydra"): f"nothing in SGLang {_READS_DRAFTS}; train heads=eagle3 or mtp, which it serves, or {INSTEAD}",
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


def export(checkpoint: Path, folder: Path, server: str, target: Target, token_map: bool = False) -> str:
    """Write `folder` for the server; returns a line that says how it is used. token_map: see `export_medusa`.

    The folder must be new or empty: a checkpoint or a model there would lose its files. Heads go to a server in the
    target's dtype, as this project's decoder runs them, and to the hub as they were trained. ValueError as
    `check_exportable` and `load_heads`.
    """
    kind = check_exportable(checkpoint, server).get("head", {}).get("kind")
    if token_map and kind != "medusa":
        raise ValueError(f"--token-map: only Medusa heads have one in vLLM, and these are {kind} heads; leave it out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already, and not empty; give a new folder, or remove it first")
    if server == HF:
        export_hf(checkpoint, load_heads(checkpoint, target, torch.float32), folder)
        return f"{folder} holds the heads and their card; see its README.md for `generate(custom_generate=...)`"
    head = load_heads(checkpoint, target, torch.float32)
    if isinstance(head, MTPHead):
        export_mtp(head, folder, target.dtype)
        line = _vllm(target, folder, "mtp", head) if server == VLLM else _sglang(target, folder, "NEXTN", head)
        return line if head.options.blank_first else f"{NOT_BLANK}\n{line}"
    head.to(target.dtype)
    if isinstance(head, Eagle3Head) and server == SGLANG:
        export_sglang(head, folder)
        return _sglang(target, folder, "EAGLE3", head)
    if isinstance(head, Eagle3Head):
        export_speculators(head, folder)
        return _vllm(target, folder, "eagle3", head)
    assert isinstance(head, MedusaHeads)
    export_medusa(head, folder, token_map)
    return _vllm(target, folder, "medusa", head)  # all of its heads draft there, whatever is asked for


def _vllm(target: Target, folder: Path, method: str, head: DraftHead) -> str:
    options = {"method": method, "model": str(folder), "num_speculative_tokens": head.num_draft_tokens}
    overrides = f"--hf-overrides '{json.dumps(VLLM_OVERRIDES)}' " if method == "mtp" else ""
    return f"vllm serve {target.name} {overrides}--speculative-config '{json.dumps(options)}'"


def _sglang(target: Target, folder: Path, algorithm: str, head: DraftHead) -> str:
    """A chain of K drafts, and the root's own token behind the last verified one counts there, too."""
    count = head.num_draft_tokens
    return (
        f"python -m sglang.launch_server --model-path {target.name} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {count} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {count + 1}"
    )
