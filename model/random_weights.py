"""Seeded random weights in the formats a directory declares, for a model that only `config.json` describes.

Each stored tensor is a function of (seed, its name): the first layers have the same values however many
layers are built. Every matrix has its own tensor scale, so gate and up differ as in real checkpoints.
"""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import LAYOUTS, StoredParameter, part_shapes, read_checkpoint
from model.config import Glm5NextConfig, read_json
from model.parameters import ParameterSpec, parameter_specs
from model.quantization import Format, parse_quantization
from model.shards import DTYPES, INDEX, SINGLE, Reader, StoredTensor
from model.weights import WeightTree

E2M1_RMS = 2.926  # root mean square of the sixteen codes
FLOAT32_VALUES = {  # name endings, of which the first that fits counts: mean, standard deviation
    ("norm.weight",): (1.0, 0.1),
    ("_scale",): (1.0, 0.2),
    ("A_log",): (0.5, 0.5),
    ("_base", "conv1d.weight", "dt_bias", "_ape"): (0.0, 0.5),
    ("bias",): (0.0, 0.1),
}


def random_weights(
    directory: Path,
    config: Glm5NextConfig,
    *,
    linear_dtype: torch.dtype,
    device: torch.device,
    seed: int,
    with_mtp: bool = True,
) -> WeightTree:
    """A tree of random weights. Formats follow the shards' headers in `directory`, else the declaration."""
    has_shards = any((directory / file).exists() for file in (INDEX, SINGLE))
    stored = read_checkpoint(directory).parameters if has_shards else {}
    declaration = parse_quantization(directory, read_json(directory / "config.json"))

    def format_of(spec: ParameterSpec) -> Format:
        if spec.name in stored:
            return stored[spec.name].format
        # Every known checkpoint keeps the MTP layer's input projection in BF16, whatever its lists say.
        if spec.kind == "float32" or spec.name.endswith("eh_proj.weight"):
            return "plain"
        return declaration.format_of(spec.stem) or "plain"

    specs = parameter_specs(config, with_mtp=with_mtp)
    parameters = {spec.name: stored_as(spec, format_of(spec)) for spec in specs}
    return WeightTree(parameters, random_reader(parameters, seed), linear_dtype, device, has_mtp=with_mtp)


def stored_as(spec: ParameterSpec, format: Format) -> StoredParameter:
    """A parameter as a file would hold it in `format` (NVFP4 in ModelOpt form), scales in float32."""
    layout = next(layout for known, layout in LAYOUTS if known == format)
    parts = []
    for (suffix, dtypes), shape in zip(layout.items(), part_shapes(format, spec.shape), strict=True):
        name = spec.name if suffix == "weight" else f"{spec.stem}.{suffix}"
        dtype = dtypes[0] if suffix == "weight" and spec.kind == "linear" else dtypes[-1]
        size = math.prod(shape) * DTYPES[dtype].itemsize
        parts.append(StoredTensor(name, Path("random"), dtype, shape, size))
    return StoredParameter(spec, format, tuple(parts))


def random_reader(parameters: Mapping[str, StoredParameter], seed: int) -> Reader:
    """Values that are a function of (seed, name); matrices have variance 1 / in."""
    owners = {part.name: (owner, i) for owner in parameters.values() for i, part in enumerate(owner.parts)}

    def read(tensor: StoredTensor) -> Tensor:
        # A CPU generator uses the low 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {tensor.name}".encode()))
        owner, part = owners[tensor.name]
        if owner.format == "nvfp4" and part == 0:
            return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator)
        normal = torch.randn(tensor.shape, generator=generator)
        return _scaled(owner, part, normal).to(DTYPES[tensor.dtype])

    return read


def _scaled(owner: StoredParameter, part: int, normal: Tensor) -> Tensor:
    """Standard normal values moved to where part number `part` of the parameter lives."""
    spec, format = owner.spec, owner.format
    std = 1.0 if spec.role == "embedding" else spec.shape[-1] ** -0.5
    if spec.kind == "float32":
        known = (values for endings, values in FLOAT32_VALUES.items() if spec.name.endswith(endings))
        mean, std = next(known, (0.0, std))
        return mean + std * normal
    if part == 0:
        return std * normal if format == "plain" else normal
    if format == "mxfp8":
        return torch.full_like(normal, std)
    size = {("nvfp4", 1): 1.0, ("nvfp4", 2): std / E2M1_RMS}.get((format, part), std)
    return size * (0.2 * normal).exp()
