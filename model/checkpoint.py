"""What a checkpoint directory holds, read from its headers alone: which bytes of which file are which weight.

Invariants of a `Checkpoint`: every parameter of the trunk has exactly one source of the right shape; the
format of a Linear follows the tensors found and agrees with `quantization_config`; every other tensor of the
files is on the skip list below. Anything else is a `WeightError` before a single value is read. Problems of
the MTP layer are kept apart (`mtp_problems`): the trunk can run without it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from model.config import parse_config, read_json
from model.formats import FP8_BLOCK, MXFP8_GROUP
from model.nvfp4 import BLOCK
from model.parameters import ParameterSpec, parameter_specs
from model.quantization import PREFIXES, Format, parse_quantization
from model.shards import StoredTensor, WeightError, read_headers

VISION = re.compile(r"^(model\.)?visual\.")
# Activation and KV scales: the engine computes with 16-bit activations and its own KV dtype.
UNUSED_SCALES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
RESAVED = re.compile(r"(attn|ffn)_hc\.|forget_gate\.|experts\.(gate_up|down)_proj|self_attn\.conv1d")
RESAVED_HINT = "it was re-saved under transformers' module names; use the repository in its released layout"
CONTRADICTION_HINT = "config.json and the shards are of different versions; download both again"
EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
MIXED_HINT = "the experts of a layer, and gate and up, must share a format; use a checkpoint where they do"

FLOAT, FP8, BYTE = ("BF16", "F32"), ("F8_E4M3",), ("U8",)
# Ways to store a Linear: suffix -> accepted file dtypes, in the order of the format's parts.
LAYOUTS: tuple[tuple[Format, Mapping[str, tuple[str, ...]]], ...] = (
    ("plain", {"weight": FLOAT}),
    ("nvfp4", {"weight": BYTE, "weight_scale": FP8, "weight_scale_2": ("F32",)}),
    ("nvfp4", {"weight_packed": BYTE, "weight_scale": FP8, "weight_global_scale": ("F32",)}),
    ("fp8_block", {"weight": FP8, "weight_scale_inv": FLOAT}),
    ("fp8_block", {"weight": FP8, "weight_scale": FLOAT}),
    ("mxfp8", {"weight": FP8, "weight_scale": ("U8", "F8_E8M0")}),
)
SUFFIXES = tuple(dict.fromkeys(suffix for _, layout in LAYOUTS for suffix in layout))


@dataclass(frozen=True)
class StoredParameter:
    """One parameter in the files: its format and the tensors that carry it, in the format's order."""

    spec: ParameterSpec
    format: Format
    parts: tuple[StoredTensor, ...]
    divides: bool = False  # compressed-tensors: the tensor scale is a divisor

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Checkpoint:
    """All parameters by canonical name; the MTP layer is usable if it is there and has no problems."""

    parameters: dict[str, StoredParameter]
    skipped: tuple[StoredTensor, ...]
    has_mtp: bool
    mtp_problems: tuple[str, ...]


def part_shapes(format: Format, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of a format's parts for a Linear [out, in]; () is one number."""
    if format == "plain":
        return [shape]
    rows, columns = shape
    if format == "fp8_block":
        return [shape, (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))]
    group = BLOCK if format == "nvfp4" else MXFP8_GROUP
    if columns % group:
        groups = f"groups of {group} input columns"
        raise WeightError(f"shape {list(shape)} cannot be stored as {format}: {groups}")
    scales = (rows, columns // group)
    return [(rows, columns // 2), scales, ()] if format == "nvfp4" else [shape, scales]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Resolve every parameter of the config against the shards' headers. Raises WeightError on any mismatch."""
    raw_config = read_json(directory / "config.json")
    config = parse_config(raw_config)
    headers = read_headers(directory)
    skipped = [headers.pop(name) for name in list(headers) if VISION.match(name)]
    found = _canonical(headers)
    mtp_prefix = f"layers.{config.num_hidden_layers}."
    # The draft head is the trunk's; a copy or placeholder in the file is never read.
    draft_head = f"{mtp_prefix}shared_head.head."
    skipped += [found.pop(name) for name in list(found) if name.startswith(draft_head)]
    has_mtp = any(name.startswith(mtp_prefix) for name in found)
    parameters, problems = {}, []
    for spec in parameter_specs(config, with_mtp=has_mtp):
        try:
            parameters[spec.name] = _take(spec, found)
        except WeightError as error:
            problems.append(f"{spec.name}: {error}")
    skipped += [found.pop(name) for name in list(found) if name.endswith(UNUSED_SCALES)]
    problems += [f"{name}: unknown tensor {tensor.describe()}" for name, tensor in found.items()]
    hint = RESAVED_HINT if any(RESAVED.search(name) for name in found) else "download the directory again"
    raise_if_any(directory, (p for p in problems if not p.startswith(mtp_prefix)), hint)
    declaration = parse_quantization(directory, raw_config)
    # The MTP layer's precision follows its tensors.
    contradictions = (
        f"{name}: tensors say {stored.format}, quantization_config says {declared}"
        for name, stored in parameters.items()
        if stored.spec.kind == "linear"
        and not name.startswith(mtp_prefix)
        and (declared := declaration.format_of(stored.spec.stem)) not in (None, stored.format)
    )
    raise_if_any(directory, contradictions, CONTRADICTION_HINT)
    mixed = list(_mixed_stacks(parameters))
    raise_if_any(directory, (p for p in mixed if not p.startswith(mtp_prefix)), MIXED_HINT)
    # The problems that did not stop it here are the MTP layer's.
    return Checkpoint(parameters, tuple(skipped), has_mtp, (*problems, *mixed))


def _mixed_stacks(parameters: Mapping[str, StoredParameter]) -> Iterator[str]:
    """Matrices that are used as one stack (gate with up, expert with expert) and differ in format."""
    firsts: dict[str, StoredParameter] = {}
    for name, stored in parameters.items():
        if ".mlp." in name and name.endswith("_proj.weight"):
            stack = EXPERT_NUMBER.sub(".experts.", name).replace("gate_proj", "up_proj")
            first = firsts.setdefault(stack, stored)
            if first.format != stored.format:
                yield f"{name} is stored as {stored.format}, {first.spec.name} as {first.format}"


def raise_if_any(place: Path | str, problems: Iterable[str], hint: str) -> None:
    """WeightError with the first problems, their number and what to do; nothing when there are none."""
    listed = list(problems)
    if listed:
        more = f"\n  ... and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise WeightError(f"{place}: {hint}\n  " + "\n  ".join(listed[:5]) + more)


def _canonical(headers: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, tensor in headers.items():
        prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
        first = found.setdefault(name[len(prefix) :], tensor)
        if first is not tensor:
            raise WeightError(f"{name} and {first.name} are the same parameter; remove one")
    return found


def _take(spec: ParameterSpec, found: dict[str, StoredTensor]) -> StoredParameter:
    """The parameter's tensors, removed from `found`. Raises WeightError unless they make one format."""
    stem = spec.stem
    bare = stem == spec.name or spec.kind == "float32"
    names = {"weight": spec.name} if bare else {suffix: f"{stem}.{suffix}" for suffix in SUFFIXES}
    parts = {suffix: found.pop(name) for suffix, name in names.items() if name in found}
    if not parts:
        raise WeightError(f"missing, expected shape {list(spec.shape)}")
    for format, layout in LAYOUTS:
        if parts.keys() == layout.keys() and all(part.dtype in layout[s] for s, part in parts.items()):
            ordered = tuple(parts[suffix] for suffix in layout)
            for suffix, part, shape in zip(layout, ordered, part_shapes(format, spec.shape), strict=True):
                if part.shape != shape and not (shape == () and part.shape == (1,)):
                    raise WeightError(f"{suffix} has shape {list(part.shape)}, expected {list(shape)}")
            return StoredParameter(spec, format, ordered, divides="weight_global_scale" in parts)
    described = ", ".join(f"{suffix} {part.describe()}" for suffix, part in parts.items())
    raise WeightError(f"found {described}; these make no known format")
