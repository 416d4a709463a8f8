"""TINY: a small random model without files, any tensor of which a test may set; and requests on one cache.

Layers K K K M K K K M and the MTP layer; `index_kpool` 4 and `index_topk` 8, so the twelfth row is the first
that cannot see everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.cache import allocate_trunk
from engine.memory_plan import CacheShape
from model import nvfp4
from model.batch import Batch, Segment
from model.checkpoint import StoredParameter, part_shapes
from model.config import Glm5NextConfig, load_config
from model.glm5_next import Glm5Next
from model.mtp import Mtp
from model.parameters import parameter_specs
from model.quantization import Format
from model.random_weights import random_reader, stored_as
from model.shards import StoredTensor
from model.weights import WeightTree
from tests.driver import CPU, DATA, poison

TINY = replace(
    load_config(DATA / "bf16"),
    index_topk=8,
    swiglu_limit=10.0,
    mlp_layer_types=("dense", *["sparse"] * 7),
)
MTP_LAYER = TINY.num_hidden_layers
Overrides = Mapping[str, Tensor]


class SettableReader:
    """Random values, except where `overrides` names a parameter (values) or a stored tensor (as it is)."""

    def __init__(self, parameters: Mapping[str, StoredParameter], overrides: Overrides, seed: int) -> None:
        self.random, self.overrides = random_reader(parameters, seed), overrides
        self.owners = {part.name: (p, i) for p in parameters.values() for i, part in enumerate(p.parts)}

    def __call__(self, tensor: StoredTensor) -> Tensor:
        owner, part = self.owners[tensor.name]
        if owner.spec.name in self.overrides:
            return encode(self.overrides[owner.spec.name], owner.format)[part]
        if tensor.name in self.overrides:
            return self.overrides[tensor.name]
        return self.random(tensor)


def encode(values: Tensor, format: Format) -> tuple[Tensor, ...]:
    """The parts of a weight of these values; FP8 rounds them at scale 1."""
    if format == "plain":
        return (values,)
    if format == "nvfp4":
        return nvfp4.quantize(values)
    scale = torch.ones(part_shapes(format, tuple(values.shape))[1])
    return values.to(torch.float8_e4m3fn), scale if format == "fp8_block" else scale.to(torch.float8_e8m0fnu)


def tree(
    overrides: Overrides | None = None, config: Glm5NextConfig = TINY, format: Format = "plain"
) -> WeightTree:
    """Seeded weights of the trunk and the MTP layer; `format` is that of dense, routed and shared MLPs."""
    parameters = {}
    for spec in parameter_specs(config):
        is_mlp = ".mlp." in spec.name and spec.name.endswith("_proj.weight")
        parameters[spec.name] = stored_as(spec, format if is_mlp else "plain")
    reader = SettableReader(parameters, overrides or {}, seed=5)
    return WeightTree(parameters, reader, torch.float32, CPU)


def model(overrides: Overrides | None = None, config: Glm5NextConfig = TINY) -> tuple[Glm5Next, Mtp]:
    """Trunk and MTP layer in float32."""
    weights = tree(overrides, config)
    trunk = Glm5Next(weights, config, torch.float32, CPU)
    return trunk, Mtp(weights, trunk)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def token_ids(count: int, seed: int = 0, vocab_size: int = TINY.vocab_size) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def shuffled_tables(requests: int, max_tokens: int, block_size: int) -> Tensor:
    """Block tables [requests, blocks] for `max_tokens` each: all blocks of a cache, dealt out at random."""
    blocks = -(-max_tokens // block_size)
    return torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(3)).view(requests, -1)


class Requests:
    """Several requests on one cache; request i has slot i. Nothing is cleared between requests."""

    def __init__(self, trunk: Glm5Next, requests: int, max_tokens: int, fill: float = float("nan")) -> None:
        self.trunk, self.lengths = trunk, [0] * requests
        self.tables = shuffled_tables(requests, max_tokens, block_size=16)
        shape = CacheShape(self.tables.numel(), 16, requests, dtype=trunk.dtype)
        self.cache = allocate_trunk(trunk.config, shape, CPU)
        poison(self.cache.kda, fill)
        poison(self.cache.mla, fill)

    def feed(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """One forward of the given tokens by request; logits [num_tokens, vocab] by request."""
        segments, row = [], 0
        for request, tokens in chunks.items():
            segments.append(Segment(row, len(tokens), self.lengths[request], request, self.tables[request]))
            self.lengths[request] += len(tokens)
            row += len(tokens)
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        logits = self.trunk.logits(self.trunk.forward(Batch(ids, tuple(segments)), self.cache))
        return {segment.slot: logits[segment.rows] for segment in segments}
