"""The speculators package on an exported EAGLE-3 head; `scripts/peers/check_speculators.sh` is its command.

ours: export the head for vLLM, and write down streams, tokens and our logits. theirs: load the folder by the package's
own `from_pretrained`, and run its forward on the same streams and tokens. compare: the same logits within TOLERANCE.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

EXPORTED, ASKED, OURS, THEIRS = "exported", "asked.safetensors", "ours.safetensors", "theirs.safetensors"
TEXT_TOKENS = 48
# Of float32 logits, relative to the largest: the order of additions differs, nothing else.
TOLERANCE = 1e-5


def give_ours(work: Path, checkpoint: Path, model: str) -> None:
    """Write the exported folder, two texts (the target's own streams, and random ones), and our logits for them."""
    import torch
    from safetensors.torch import save_file

    from models.checkpoint import load_heads
    from models.export.eagle3 import export_speculators
    from models.heads.eagle3 import Eagle3Head
    from models.target.model import load_target
    from scripts.generate import find_target

    target = load_target(replace(find_target(model), dtype="float32"))
    # The package reads the verifier's config and weights from there.
    target.name = str(Path(target.model.config._name_or_path).resolve())
    head = load_heads(checkpoint, target)
    if not isinstance(head, Eagle3Head):
        raise ValueError(f"{checkpoint} holds {head.kind} heads; give the folder of `train.mtp heads=eagle3`")
    shutil.rmtree(work / EXPORTED, ignore_errors=True)
    export_speculators(head, work / EXPORTED)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, target.num_tokens, (2, TEXT_TOKENS), generator=generator)
    hidden_BTX = target.hidden(ids_BT, reads=head.reads)
    hidden_BTX[1] = torch.randn(hidden_BTX[1].shape, generator=generator)
    with torch.no_grad():
        states_KBTH = head(hidden_BTX, ids_BT)
        # Without the family's scale or soft cap, which the package has no place for.
        logits = torch.stack([states @ head.output_weight(k).T for k, states in enumerate(states_KBTH, start=1)])
    streams_BTX = hidden_BTX[..., target.hidden_size :].contiguous()
    next_ids_BT = torch.nn.functional.pad(ids_BT[:, 1:], (0, 1)).contiguous()
    save_file({"streams": streams_BTX, "next_ids": next_ids_BT}, work / ASKED)
    save_file({"logits": logits}, work / OURS)


def give_theirs(work: Path) -> None:
    """Write the package's logits. Runs in an environment that has it."""
    import torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(work / EXPORTED)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(work / EXPORTED, config=config).eval()
    asked = load_file(work / ASKED)
    num_steps = config.speculators_config.proposal_methods[0].speculative_tokens
    texts = []
    for streams_TX, next_ids_T in zip(asked["streams"], asked["next_ids"], strict=True):
        steps: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda module, args, logits, steps=steps: steps.append(logits[0]))
        with torch.no_grad():
            model(
                streams_TX[None],
                next_ids_T[None],
                document_ids=torch.zeros_like(next_ids_T)[None],
                ttt_steps=num_steps,
            )
        hook.remove()
        texts.append(torch.stack(steps))
    facts = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    (work / "theirs.json").write_text(json.dumps({"class": type(model).__name__, "tensors": facts}))
    save_file({"logits": torch.stack(texts, dim=1).contiguous()}, work / THEIRS)


def report(work: Path) -> int:
    """Print the gap at each step; returns the exit code, 1 where one is too large."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(work / name)["logits"] for name in (OURS, THEIRS))
    if ours.shape != theirs.shape:
        print(f"error: logits of ours are {tuple(ours.shape)}, of theirs {tuple(theirs.shape)}", file=sys.stderr)
        return 1
    print(f"loaded as {json.loads((work / 'theirs.json').read_text())['class']}")
    is_wrong = False
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        # Step k at t reads token t + k: behind the text's end nothing is promised.
        own, other = own[:, : TEXT_TOKENS - step], other[:, : TEXT_TOKENS - step]
        gap = float((own - other).abs().max() / own.abs().max())
        is_wrong |= not gap <= TOLERANCE
        same = float((own.argmax(dim=-1) == other.argmax(dim=-1)).float().mean())
        print(f"step {step}: relative gap {gap:.1e} (at most {TOLERANCE:.0e}), same likeliest token {same:.4f}")
    if is_wrong:
        print("error: the package computes something else with the exported head", file=sys.stderr)
    return int(is_wrong)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side", choices=("ours", "theirs", "compare"))
    parser.add_argument("work", type=Path, help="folder for what the sides exchange")
    parser.add_argument("--checkpoint", type=Path, help="the head itself, for ours")
    parser.add_argument("--target", default="smollm2", help="file in conf/model, or a local folder, for ours")
    arguments = parser.parse_args(words)
    if arguments.side == "compare":
        return report(arguments.work)
    if arguments.side == "theirs":
        give_theirs(arguments.work)
    elif arguments.checkpoint is None:
        parser.error("ours needs --checkpoint, the folder that train.mtp wrote")
    else:
        give_ours(arguments.work, arguments.checkpoint, arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
