"""The frozen target: its options, and the one forward that gives hidden states and logits.

Owns the words "hidden state" (the residual stream after the final norm, exactly what the output head reads) and
"logits" (what transformers' own forward returns, in float32). Must not train, sample or touch a checkpoint of ours.

Shape suffixes: B batch, T time, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .placement import AUTO_MAP, DEVICE_MAPS, NO_MAP, parse_limits, stored
from .pretrained import load_pretrained, locate
from .quantization import NONE, check_quantization, plain_tensors
from .template import read_template
from .tokens import num_usable
from .wheel import WheelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

SOURCES = ("auto", "hub", "folder", "wheel", "random")
AUTO = "auto"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Fingerprint: this many evenly spaced weights of every tensor; 8B models hash in seconds and a swapped tensor shows.
FINGERPRINT_SAMPLES = 65536
# Largest gap between our logits and transformers' own on the probe, relative to the largest logit (bf16 has 8 bits).
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass
class TargetOptions:
    """Which causal language model is the target, and how it is held in memory.

    name: hub name, local folder (of a model, or of peft's adapters for one), or a label when the source is a wheel or
    random weights.
    source: auto (a folder if it exists, else the hub), hub, folder, wheel, or random.
    dtype: bfloat16, float16, float32, or auto (bfloat16, but float32 on a CPU without arithmetic for it, where it is
    some ten times slower). device: auto, cpu, cuda, cuda:1, ...
    device_map: none, or auto: layers that do not fit on the device go to the process's other GPUs, to the CPU's memory
    and to the disk, in this order. max_memory: limits for it, such as ['cuda:0=20GiB','cpu=64GiB'].
    quantization: none, int8 (torchao) or nf4 (bitsandbytes), of the linear layers: see `models.target.quantization`.
    draft: hub name or local folder of the usual smaller sibling, for drafters that are separate models. label: short
    name for folders. revision: branch, tag or commit of the hub's repository. seed: of random weights, and of the
    testbed's. chat_template: a Jinja file in place of the tokenizer's own template.
    """

    name: str = ""
    label: str = "target"
    source: str = "auto"
    dtype: str = AUTO
    device: str = "auto"
    quantization: str = NONE
    revision: str = "main"
    draft: str = ""
    seed: int = 0
    chat_template: str = ""
    wheel: WheelOptions = field(default_factory=WheelOptions)
    device_map: str = NO_MAP
    max_memory: list[str] = field(default_factory=list)


class Target:
    """A frozen decoder-only language model with its tokenizer.

    Every parameter has requires_grad False and the model is in eval mode; nothing in this project writes to it.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, quantization: str = NONE
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.quantization = quantization
        self.decoder: nn.Module = model.get_decoder()
        self.config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"target {name!r}: {type(model).__name__} has no output head; a causal language model is needed"
            )
        self.output_head: nn.Linear = head
        self.device = head.weight.device
        self.dtype = head.weight.dtype
        self.vocab_size, self.hidden_size = head.weight.shape
        # Ids from here on are rows of the output head that only pad it: no token has them.
        self.num_tokens: int = min(self.vocab_size, max(tokenizer.get_vocab().values()) + 1)
        # Ids below this have a row in the embeddings and in the output head.
        self.num_usable = num_usable(model)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._fingerprint: str | None = None

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> input embeddings [..., H] in the target's dtype."""
        return self.model.get_input_embeddings()(ids)

    @torch.no_grad()
    def hidden(
        self,
        input_ids_BT: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        reads: Sequence[int] = (),
    ) -> Tensor:
        """Token ids [B, T] -> hidden states [B, T, H] after the final norm.

        attention_mask: None, a padding mask [B, T], a 4D mask, or one 4D mask a layer type. A cache is written in
        place. reads: rising numbers of layers, 0 to all; the residual stream behind the first so many of them (0: the
        embeddings) is put behind the hidden states, [B, T, (1 + R) H], from which `final` takes the latter.
        """
        with self._noted(reads) as streams:
            output = self.decoder(
                input_ids=input_ids_BT,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=cache is not None,
            )
        return torch.cat([output.last_hidden_state, *streams], dim=-1) if reads else output.last_hidden_state

    def final(self, hidden: Tensor) -> Tensor:
        """What `hidden` gives, with or without layers read [..., (1 + R) H] -> the final hidden states [..., H]."""
        return hidden[..., : self.hidden_size]

    @contextmanager
    def _noted(self, reads: Sequence[int]) -> Iterator[list[Tensor]]:
        """Within it, a pass adds to the list what each of the modules behind these numbers of layers receives."""
        streams: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            # Layers may lie on other devices than the heads.
            streams.append((args[0] if args else kwargs["hidden_states"]).to(self.device))

        readers = [*self.layers(), self.decoder.get_submodule("norm")] if reads else []
        handles = [readers[index].register_forward_pre_hook(note, with_kwargs=True) for index in reads]
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V] in float32, equal to transformers' own."""
        return self.finish_logits(self.output_head(hidden)).float()

    def hide_padding(self, logits: Tensor) -> Tensor:
        """Logits [..., V] with -inf, in place, at ids that no token has: they must never be emitted."""
        if self.num_tokens < self.vocab_size:
            logits[..., self.num_tokens :] = -torch.inf
        return logits

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model family does to raw logits: scaling (Granite, Cohere) and soft-capping (Gemma). Elementwise."""
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def changes_logits(self) -> bool:
        """Whether `finish_logits` does anything for this family."""
        names = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return any(getattr(self.config, name, None) is not None for name in names)

    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        return self.decoder.layers  # type: ignore[return-value]

    def rotary(self, hidden: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary (cos, sin) [B, T, head_dim] as the last decoder layer receives them."""
        rotary: Any = self.decoder.rotary_emb
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            return rotary(hidden, position_ids_BT, self.config.layer_types[-1])
        return rotary(hidden, position_ids_BT)

    def max_context(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(self.config.max_position_embeddings)

    def fingerprint(self) -> str:
        """Hash of names, shapes and evenly spaced weights (as bfloat16, so that the dtype in memory does not
        matter).
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            parts = [part for item in self.model.state_dict().items() for part in plain_tensors(*item)]
            for name, tensor in sorted(parts, key=lambda part: part[0]):
                flat = stored(self.model, name).detach().reshape(-1) if tensor.is_meta else tensor.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // FINGERPRINT_SAMPLES)].to("cpu", torch.bfloat16)
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def tokenizer_fingerprint(self) -> str:
        """Hash of the vocabulary, the merges and the chat template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            text = repr(sorted(self.tokenizer.get_vocab().items()))
        else:
            # It writes down how it last padded and cut, which says nothing about what it is.
            backend = copy.deepcopy(backend)
            backend.no_padding()
            backend.no_truncation()
            text = backend.to_str()
        return hashlib.sha256((text + str(self.tokenizer.chat_template)).encode()).hexdigest()[:16]


def load_target(options: TargetOptions) -> Target:
    """Load and freeze the target. Raises ValueError with one line that says what to do."""
    if options.source not in SOURCES:
        raise ValueError(f"model.source={options.source!r} is unknown; choose one of {', '.join(SOURCES)}")
    if options.dtype not in (AUTO, *DTYPES):
        raise ValueError(f"model.dtype={options.dtype!r} is unknown; choose one of {', '.join((AUTO, *DTYPES))}")
    if not options.name:
        raise ValueError("model.name is empty: give a hub name or a local folder, e.g. model.name=Qwen/Qwen3-0.6B")
    check_quantization(options.quantization)
    _check_placement(options)
    device = resolve_device(options.device)
    options = replace(options, dtype=resolve_dtype(options.dtype, device))
    if options.source == "random":
        if options.quantization != NONE:
            raise ValueError(f"model.quantization={options.quantization} with model.source=random: leave it out")
        from .tiny import make_tiny_target

        tiny = make_tiny_target(seed=options.seed, dtype=options.dtype)
        _set_template(tiny.tokenizer, options.chat_template)
        return Target(tiny.model.to(device), tiny.tokenizer, tiny.name)
    if options.chat_template:
        read_template(options.chat_template)  # a name mistyped shows before the weights are fetched
    model, tokenizer = load_pretrained(locate(options), options, DTYPES[options.dtype], device)
    target = Target(model, tokenizer, options.name, options.quantization)
    _set_template(target.tokenizer, options.chat_template)
    _check_logits(target)
    return target


def _check_placement(options: TargetOptions) -> None:
    if options.device_map not in DEVICE_MAPS:
        raise ValueError(f"model.device_map={options.device_map!r} is unknown; choose one of {', '.join(DEVICE_MAPS)}")
    if options.max_memory and options.device_map == NO_MAP:
        raise ValueError("model.max_memory is for model.device_map=auto; set that, too")
    if options.device_map == AUTO_MAP and (options.device != AUTO or options.source == "random"):
        raise ValueError(
            f"model.device_map=auto chooses devices itself: with model.device={options.device} and "
            f"model.source={options.source} leave it at none, or set model.device=auto and give a folder or hub name"
        )
    if options.device_map == AUTO_MAP and options.quantization != NONE:
        raise ValueError(
            f"model.device_map=auto with model.quantization={options.quantization}: a quantised model is made on one "
            "device; leave one of the two out"
        )
    parse_limits(options.max_memory)


def _set_template(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    if file:
        tokenizer.chat_template = read_template(file)


def resolve_device(device: str) -> str:
    """auto -> cuda when there is one, else cpu. ValueError for a device that torch does not know or does not find.

    Of several processes on a machine, each takes the GPU of its own number, which its launcher tells.
    """
    if device == "auto":
        own = f":{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else ""
        return f"cuda{own}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"model.device={device!r} is not there ({reason}); use auto, cpu, or cuda with a GPU"
        ) from error
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    """auto -> bfloat16, or float32 on a CPU that has to emulate it; other names as they are."""
    if dtype != AUTO:
        return dtype
    emulates = device.startswith("cpu") and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "float32" if emulates else "bfloat16"


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's list where there is one, else the tokenizer's."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _check_logits(target: Target) -> None:
    """Refuse a family whose logits are made in a way that `finish_logits` does not know: silence would be wrong."""
    probe = torch.arange(4, device=target.device)[None] % target.vocab_size
    with torch.no_grad():
        expected = target.model(input_ids=probe).logits.float()
    got = target.logits(target.hidden(probe))
    gap = (got - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    if not gap <= PROBE_TOLERANCE[target.dtype]:
        raise ValueError(
            f"target {target.name!r}: {type(target.model).__name__} does something to its logits that Foretoken does "
            f"not know (relative gap {gap:.2g} to its own forward); please report the model family"
        )
