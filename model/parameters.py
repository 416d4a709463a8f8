"""Which tensors a `glm5_next` text model has: name, shape, kind, role and tensor-parallel cut of every one.

Names are canonical: the text after `model.language_model.`, with `lm_head.weight` for the head. The MTP layer
is `layers.{num_hidden_layers}`; it owns neither embedding nor head nor mHC sites.
`linear` tensors are matrices [out, in] that a checkpoint may store quantised; `float32` tensors stay float32
in memory whatever width the file has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from model.config import Glm5NextConfig

Kind = Literal["linear", "float32"]
Row = tuple[str, tuple[int, ...], int | None]  # name after the layer prefix, shape, split
Group = tuple[str, Iterable[Row]]  # rows of one role

# Two-dimensional, yet never projections of a bf16 activation.
FLOAT32_MATRICES = ("hc_attn_fn", "hc_ffn_fn", "index_kpool_compress_ape")


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of the model; `layer` is None outside the layers, `split` is the axis cut over ranks."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    role: str
    layer: int | None
    split: int | None

    @property
    def stem(self) -> str:
        """The name without `.weight`: what a Linear and its scale tensors share."""
        return self.name.removesuffix(".weight")


def parameter_specs(config: Glm5NextConfig, *, with_mtp: bool = True) -> list[ParameterSpec]:
    """The trunk layers (see `Glm5NextConfig.first_layers`), the MTP layer, embedding, final norm and head."""
    trunk = len(config.layer_types)
    vocab, mtp_layer = (config.vocab_size, config.hidden_size), config.num_hidden_layers
    groups: list[tuple[int | None, Group]] = [(None, ("embedding", [("embed_tokens.weight", vocab, 0)]))]
    groups += [(layer, group) for layer in range(trunk) for group in _trunk_layer(config, layer)]
    groups += [(mtp_layer, group) for group in _mtp_layer(config) if with_mtp]
    groups.append((None, ("norms", _norms(config, "norm"))))
    groups.append((None, ("head", [("lm_head.weight", vocab, 0)])))
    return [_spec(layer, role, row) for layer, (role, rows) in groups for row in rows]


def _spec(layer: int | None, role: str, row: Row) -> ParameterSpec:
    name, shape, split = row
    kind: Kind = "linear" if len(shape) == 2 and not name.endswith(FLOAT32_MATRICES) else "float32"
    return ParameterSpec(name if layer is None else f"layers.{layer}.{name}", shape, kind, role, layer, split)


def _trunk_layer(config: Glm5NextConfig, layer: int) -> Iterator[Group]:
    hidden, streams = config.hidden_size, config.hc_mult
    outputs = 2 * streams + streams * streams
    yield "norms", _norms(config, "input_layernorm", "post_attention_layernorm")
    for site in ("attn", "ffn"):
        fn = (f"hc_{site}_fn", (outputs, streams * hidden), None)
        yield "mhc", (fn, (f"hc_{site}_base", (outputs,), None), (f"hc_{site}_scale", (3,), None))
    if config.layer_types[layer] == "kda":
        yield "kda", _kda(config)
    else:
        yield "mla", _mla(config)
        yield "indexers", _indexer(config)
    if config.mlp_layer_types[layer] == "dense":
        yield "dense mlp", _mlp(hidden, config.intermediate_size, "mlp")
    else:
        yield from _moe(config)


def _mtp_layer(config: Glm5NextConfig) -> Iterator[Group]:
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    projection = ("eh_proj.weight", (config.hidden_size, 2 * config.hidden_size), None)
    yield "mtp eh_proj and norms", (*_norms(config, *norms), projection)
    yield "mtp attention", (*_mla(config), *_indexer(config))
    for role, rows in _moe(config):
        yield "mtp experts" if role == "routed experts" else "mtp shared and router", rows


def _norms(config: Glm5NextConfig, *names: str) -> Iterator[Row]:
    return ((f"{name}.weight", (config.hidden_size,), None) for name in names)


def _kda(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, width, head_dim = config.hidden_size, config.linear_width, config.linear_head_dim
    heads = config.linear_num_heads
    for part in "qkv":
        yield f"self_attn.{part}_proj.weight", (width, hidden), 0
        yield f"self_attn.{part}_conv1d.weight", (width, 1, config.linear_conv_kernel_dim), 0
    yield "self_attn.b_proj.weight", (heads, hidden), 0
    for gate in "fg":
        yield f"self_attn.{gate}_a_proj.weight", (head_dim, hidden), None
        yield f"self_attn.{gate}_b_proj.weight", (width, head_dim), 0
    yield "self_attn.A_log", (heads,), 0
    yield "self_attn.dt_bias", (width,), 0
    yield "self_attn.o_norm.weight", (head_dim,), None
    yield "self_attn.o_proj.weight", (hidden, width), 1


def _mla(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, heads, nope = config.hidden_size, config.num_attention_heads, config.qk_nope_head_dim
    q_rank, kv_rank, value = config.q_lora_rank, config.kv_lora_rank, config.v_head_dim
    yield "self_attn.q_a_proj.weight", (q_rank, hidden), None
    yield "self_attn.q_a_layernorm.weight", (q_rank,), None
    yield "self_attn.q_b_proj.weight", (heads * nope, q_rank), 0
    yield "self_attn.kv_a_proj_with_mqa.weight", (kv_rank, hidden), None
    yield "self_attn.kv_a_layernorm.weight", (kv_rank,), None
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank), 0
    yield "self_attn.o_proj.weight", (hidden, heads * value), 1


def _indexer(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, width, heads = config.hidden_size, config.index_head_dim, config.index_n_heads
    prefix = "self_attn.indexer."
    yield prefix + "wq_b.weight", (heads * width, config.q_lora_rank), None
    yield prefix + "wk.weight", (width, hidden), None
    yield prefix + "k_norm.weight", (width,), None
    yield prefix + "k_norm.bias", (width,), None
    yield prefix + "weights_proj.weight", (heads, hidden), None
    # Bare parameters in the file: no `.weight` suffix.
    yield prefix + "index_kpool_compress_ape", (config.index_kpool, width), None
    yield prefix + "index_kpool_compress_gate", (width, hidden), None


def _moe(config: Glm5NextConfig) -> Iterator[Group]:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    bias = ("mlp.gate.e_score_correction_bias", (experts,), None)
    yield "routers", (("mlp.gate.weight", (experts, hidden), None), bias)
    routed = (_mlp(hidden, inner, f"mlp.experts.{expert}") for expert in range(experts))
    yield "routed experts", chain.from_iterable(routed)
    yield "shared experts", _mlp(hidden, inner * config.n_shared_experts, "mlp.shared_experts")


def _mlp(hidden: int, inner: int, prefix: str) -> Iterator[Row]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden), 0
    yield f"{prefix}.up_proj.weight", (inner, hidden), 0
    yield f"{prefix}.down_proj.weight", (hidden, inner), 1
