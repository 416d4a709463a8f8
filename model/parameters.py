"""Which tensors a `glm5_next` text model has: name, shape, kind, role and tensor-parallel cut of every one.

Names are canonical: the text after `model.language_model.`, with `lm_head.weight` for the head. The MTP layer
is `layers.{num_hidden_layers}`; it owns neither embedding nor head nor mHC sites.
`linear` tensors are matrices [out, in] that a checkpoint may store quantised; `float32` tensors stay float32
in memory whatever width the file has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from model.config import Glm5NextConfig

Kind = Literal["linear", "float32"]
# name after the layer prefix, shape, role, axis cut by tensor parallelism (None: copied to every rank)
Row = tuple[str, tuple[int, ...], str, int | None]

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


def parameter_specs(
    config: Glm5NextConfig, *, num_layers: int | None = None, with_mtp: bool = True
) -> list[ParameterSpec]:
    """The first `num_layers` trunk layers (default all), the MTP layer, embedding, final norm and head."""
    trunk = config.num_hidden_layers if num_layers is None else num_layers
    layers = [(layer, list(_trunk_layer(config, layer))) for layer in range(trunk)]
    if with_mtp:
        layers.append((config.num_hidden_layers, list(_mtp_layer(config))))
    vocab = (config.vocab_size, config.hidden_size)
    specs = [_spec("", ("embed_tokens.weight", vocab, "embedding", 0), None)]
    for layer, rows in layers:
        specs += [_spec(f"layers.{layer}.", row, layer) for row in rows]
    specs.append(_spec("", ("norm.weight", (config.hidden_size,), "norms", None), None))
    specs.append(_spec("", ("lm_head.weight", vocab, "head", 0), None))
    return specs


def _spec(prefix: str, row: Row, layer: int | None) -> ParameterSpec:
    name, shape, role, split = row
    linear = len(shape) == 2 and name not in FLOAT32_MATRICES and not name.endswith(FLOAT32_MATRICES)
    return ParameterSpec(prefix + name, shape, "linear" if linear else "float32", role, layer, split)


def _trunk_layer(config: Glm5NextConfig, layer: int) -> Iterator[Row]:
    hidden, streams = config.hidden_size, config.hc_mult
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", (hidden,), "norms", None
    outputs = 2 * streams + streams * streams
    for site in ("attn", "ffn"):
        yield f"hc_{site}_fn", (outputs, streams * hidden), "mhc", None
        yield f"hc_{site}_base", (outputs,), "mhc", None
        yield f"hc_{site}_scale", (3,), "mhc", None
    if config.layer_types[layer] == "kda":
        yield from _kda(config)
    else:
        yield from _mla(config)
        yield from _indexer(config)
    if config.mlp_layer_types[layer] == "dense":
        yield from _mlp(hidden, config.intermediate_size, "mlp", "dense mlp")
    else:
        yield from _moe(config)


def _mtp_layer(config: Glm5NextConfig) -> Iterator[Row]:
    hidden = config.hidden_size
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    for norm in norms:
        yield f"{norm}.weight", (hidden,), "mtp eh_proj and norms", None
    yield "eh_proj.weight", (hidden, 2 * hidden), "mtp eh_proj and norms", None
    for name, shape, _, split in (*_mla(config), *_indexer(config)):
        yield name, shape, "mtp attention", split
    for name, shape, role, split in _moe(config):
        yield name, shape, "mtp experts" if role == "routed experts" else "mtp shared and router", split


def _kda(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, width, head_dim = config.hidden_size, config.linear_width, config.linear_head_dim
    heads = config.linear_num_heads
    for part in "qkv":
        yield f"self_attn.{part}_proj.weight", (width, hidden), "kda", 0
        yield f"self_attn.{part}_conv1d.weight", (width, 1, config.linear_conv_kernel_dim), "kda", 0
    yield "self_attn.b_proj.weight", (heads, hidden), "kda", 0
    for gate in "fg":
        yield f"self_attn.{gate}_a_proj.weight", (head_dim, hidden), "kda", None
        yield f"self_attn.{gate}_b_proj.weight", (width, head_dim), "kda", 0
    yield "self_attn.A_log", (heads,), "kda", 0
    yield "self_attn.dt_bias", (width,), "kda", 0
    yield "self_attn.o_norm.weight", (head_dim,), "kda", None
    yield "self_attn.o_proj.weight", (hidden, width), "kda", 1


def _mla(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank, nope, value = (
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.v_head_dim,
    )
    yield "self_attn.q_a_proj.weight", (q_rank, hidden), "mla", None
    yield "self_attn.q_a_layernorm.weight", (q_rank,), "mla", None
    yield "self_attn.q_b_proj.weight", (heads * nope, q_rank), "mla", 0
    yield "self_attn.kv_a_proj_with_mqa.weight", (kv_rank, hidden), "mla", None
    yield "self_attn.kv_a_layernorm.weight", (kv_rank,), "mla", None
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank), "mla", 0
    yield "self_attn.o_proj.weight", (hidden, heads * value), "mla", 1


def _indexer(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, width, heads = config.hidden_size, config.index_head_dim, config.index_n_heads
    prefix = "self_attn.indexer."
    yield prefix + "wq_b.weight", (heads * width, config.q_lora_rank), "indexers", None
    yield prefix + "wk.weight", (width, hidden), "indexers", None
    yield prefix + "k_norm.weight", (width,), "indexers", None
    yield prefix + "k_norm.bias", (width,), "indexers", None
    yield prefix + "weights_proj.weight", (heads, hidden), "indexers", None
    # Bare parameters in the file: no `.weight` suffix.
    yield prefix + "index_kpool_compress_ape", (config.index_kpool, width), "indexers", None
    yield prefix + "index_kpool_compress_gate", (width, hidden), "indexers", None


def _moe(config: Glm5NextConfig) -> Iterator[Row]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield "mlp.gate.weight", (config.n_routed_experts, hidden), "routers", None
    yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,), "routers", None
    for expert in range(config.n_routed_experts):
        yield from _mlp(hidden, inner, f"mlp.experts.{expert}", "routed experts")
    yield from _mlp(hidden, inner * config.n_shared_experts, "mlp.shared_experts", "shared experts")


def _mlp(hidden: int, inner: int, prefix: str, role: str) -> Iterator[Row]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden), role, 0
    yield f"{prefix}.up_proj.weight", (inner, hidden), role, 0
    yield f"{prefix}.down_proj.weight", (hidden, inner), role, 1
