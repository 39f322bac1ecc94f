"""Draft heads as a folder for the hub: our checkpoint and a model card, written, fetched and pushed.

The folder is loaded by `models.export.custom_generate.load_speculative`, which makes transformers' `generate` draft
with it, and by everything else that takes a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ..checkpoint import CONFIG_NAME, WEIGHTS_NAME, read_config, write_files
from ..heads import DraftHead

CARD_NAME = "README.md"
CARD = """\
---
base_model: {target}
library_name: foretoken
pipeline_tag: text-generation
tags: [speculative-decoding, multi-token-prediction, draft-heads]
---

# {kind} draft heads for {target}

They draft {num_draft_tokens} tokens a pass from the hidden states of {target}, which is not changed; with lossless
verification neither is the law of its output.

- kind: {kind}, layers: {num_layers}
- output heads: {output_heads}
- draft vocabulary: {draft_vocab}
- target: weights {fingerprint}, tokenizer {tokenizer_fingerprint}

## Measured

{measured}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken import load_speculative  # pip install foretoken

model = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
speculative = load_speculative("FOLDER OR OWNER/NAME", model, tokenizer)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, custom_generate=speculative, max_new_tokens=100)[0]))
```

## Training

{provenance}
"""


def export_hf(checkpoint: Path, head: DraftHead, folder: Path) -> None:
    """Write the checkpoint of this head, loaded in float32, and a card that carries what was measured."""
    config = read_config(checkpoint)
    write_files(folder, head.state_dict(), config, {CARD_NAME: model_card(config)})


def model_card(config: dict[str, Any]) -> str:
    """The card's text, for the config of draft heads that was found to be whole."""
    head, target, draft_vocab = config["head"], config["target"], config["draft_vocab"]
    provenance = config.get("provenance") or {}
    return CARD.format(
        target=target["name"],
        kind=head["kind"],
        num_draft_tokens=head["num_draft_tokens"],
        num_layers=head["num_layers"],
        output_heads="of their own" if head["own_output_head"] else "the target's, frozen",
        draft_vocab=f"{len(draft_vocab)} tokens" if draft_vocab else "the target's",
        fingerprint=target["fingerprint"],
        tokenizer_fingerprint=target["tokenizer_fingerprint"],
        measured="\n".join(_measured(config.get("acceptance") or {})),
        provenance="\n".join(f"- {key}: {value}" for key, value in provenance.items()) or "Nothing was noted.",
    )


def _measured(acceptance: dict[str, Any]) -> list[str]:
    """The table of acceptance by place in the block."""
    if not acceptance.get("acceptance_at"):
        return ["Nothing was measured."]
    rates = acceptance["acceptance_at"]
    places = range(1, len(rates) + 1)
    return [
        f"Mean block length {acceptance['mean_block_length']:.2f} tokens a target pass ({acceptance['on']}).",
        "",
        f"| place in the block | {' | '.join(map(str, places))} |",
        f"| --- |{' --- |' * len(rates)}",
        f"| kept, with all before it | {' | '.join(f'{rate:.3f}' for rate in rates)} |",
    ]


def fetch_folder(name: str | Path, revision: str = "main") -> Path:
    """A local folder as it is, else a repository of the hub, out of the local cache where there is no network."""
    if Path(name).expanduser().is_dir() or str(name).startswith((".", "/", "~")):
        return Path(name).expanduser()
    try:
        found = snapshot_download(str(name), revision=revision, allow_patterns=[CONFIG_NAME, WEIGHTS_NAME, CARD_NAME])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"heads {str(name)!r} are neither a folder here nor in the local cache, and the hub did not give them "
            f"({_first_line(error)}); give a folder, or go online and, if they are private, run `hf auth login`"
        ) from error
    return Path(found)


def push_folder(folder: Path, repository: str, private: bool = True) -> str:
    """Upload an exported folder as OWNER/NAME, made where it does not exist; returns its address.

    ValueError where the hub is out of reach or refuses.
    """
    read_config(folder)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Draft heads, exported by Foretoken")
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"{folder} could not be pushed to {repository!r} ({_first_line(error)}); it lies there whole: check the "
            "network, HF_HUB_OFFLINE, and `hf auth login`"
        ) from error
    return f"{api.endpoint}/{repository}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
