"""The fields of a `glm5_next` config.json that the engine uses, read once and validated in one place.

Every value the engine depends on comes from the file. A value it does not implement is refused by name
(`ConfigError`: found, expected, what to do); nothing is guessed. Re-exported configs may spell the layer
types and the KDA sizes differently; `LINEAR_FIELDS` and `LAYER_TYPES` are the only places that know.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

LayerType = Literal["kda", "mla"]
MlpType = Literal["dense", "sparse"]

LAYER_TYPES: Mapping[str, LayerType] = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "mla",
    "indexed_attention": "mla",
    "full_attention": "mla",
}
# Our field: its name in `linear_attn_config`, and in a config re-saved by transformers.
LINEAR_FIELDS = {
    "linear_num_heads": ("num_heads", "linear_num_heads"),
    "linear_head_dim": ("head_dim", "linear_head_dim"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    "linear_gate_lower_bound": ("gate_lower_bound", "linear_lower_bound"),
}
# Values with one implemented meaning. Absent is accepted: the released classes default to the same value.
FIXED_FIELDS: Mapping[str, Any] = {
    "model_type": "glm5_next_text",
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "topk_group": 1,
    "mhc": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "tie_word_embeddings": False,
}


class ConfigError(ValueError):
    """A config.json that cannot be served; the message says found, expected and what to do."""


@dataclass(frozen=True)
class Glm5NextConfig:
    """`text_config` of config.json under its own field names; KDA sizes flattened. Counts are per model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    index_share_for_mtp_iteration: bool
    max_position_embeddings: int
    num_nextn_predict_layers: Literal[0, 1]  # may be absent, unlike the plain numbers
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    linear_gate_lower_bound: float
    layer_types: tuple[LayerType, ...]
    mlp_layer_types: tuple[MlpType, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers of the trunk."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the MLA layers of the trunk; the MTP layer is not among them."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "mla")

    def first_layers(self, num_layers: int) -> "Glm5NextConfig":
        """The same model cut to its first trunk layers; the MTP layer keeps its index, `num_hidden_layers`."""
        if num_layers > len(self.layer_types):
            raise ConfigError(f"{num_layers} layers asked for, the model has {len(self.layer_types)}")
        kept = slice(num_layers)
        return replace(self, layer_types=self.layer_types[kept], mlp_layer_types=self.mlp_layer_types[kept])

    @property
    def linear_width(self) -> int:
        """Width of each of q, k, v in a KDA layer: heads x head_dim."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def index_topk_pools(self) -> int:
        """Pools an indexer selects per query; the tail comes on top."""
        return self.index_topk // self.index_kpool


def load_config(directory: Path) -> Glm5NextConfig:
    """Read `directory/config.json`. Raises ConfigError on a value that is not implemented."""
    return parse_config(read_json(directory / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object, with the path in every error."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected a Hugging Face model directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


@contextmanager
def refusing_wrong_types(place: str) -> Iterator[None]:
    """ConfigError in place of what Python raises where a value has a wrong JSON type."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        message = f"{place} holds a value of a wrong JSON type ({error}); download it again"
        raise ConfigError(message) from None


@refusing_wrong_types("config.json")
def parse_config(raw: Mapping[str, Any]) -> Glm5NextConfig:
    """Turn a parsed config.json (top level or bare text_config) into a Glm5NextConfig."""
    if raw.get("model_type") not in ("glm5_next", "glm5_next_text"):
        raise ConfigError(f"config.json: model_type is {raw.get('model_type')!r}, expected 'glm5_next'")
    text = raw.get("text_config", raw)
    # What matters to the text model at the top level: both places count.
    outer = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id") if key in raw}
    for field, expected in FIXED_FIELDS.items():
        for found in (text.get(field, expected), outer.get(field, expected)):
            if found != expected:
                raise ConfigError(f"config.json: {field} is {found!r}; only {expected!r} is implemented")
    linear = text.get("linear_attn_config") or {name: text.get(flat) for name, flat in LINEAR_FIELDS.values()}
    flat = {**text, **{field: linear.get(name) for field, (name, _) in LINEAR_FIELDS.items()}}
    numeric = [field for field in fields(Glm5NextConfig) if field.type in (int, float)]
    numbers = {field.name: _number(flat, field.name, field.type) for field in numeric}
    eos_token_ids = token_ids(text.get("eos_token_id")) + token_ids(outer.get("eos_token_id"))
    config = Glm5NextConfig(
        **numbers,
        num_nextn_predict_layers=text.get("num_nextn_predict_layers", 0),
        index_share_for_mtp_iteration=bool(text.get("index_share_for_mtp_iteration", True)),
        layer_types=_layer_types(text, numbers["num_hidden_layers"]),
        mlp_layer_types=_mlp_layer_types(text, numbers["num_hidden_layers"]),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
    )
    _check_relations(text, config)
    return config


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` entry (one id, a list, or null) as a tuple."""
    ids = (value,) if isinstance(value, int) else tuple(value or ())
    if any(type(token) is not int for token in ids):
        raise ConfigError(f"eos_token_id is {value!r}, expected a token id or a list of them")
    return ids


def _number(source: Mapping[str, Any], field: str, kind: Any) -> Any:
    """A positive integer, or any number as a float, as `kind` says."""
    value: Any = source.get(field)
    if type(value) not in (int, kind) or (kind is int and value <= 0):
        expected = "a positive integer" if kind is int else "a number"
        raise ConfigError(f"config.json: {field} is {value!r}, expected {expected}")
    return kind(value)


def _layer_types(text: Mapping[str, Any], num_layers: int) -> tuple[LayerType, ...]:
    names = text.get("layer_types") or []
    unknown = sorted({str(name) for name in names} - set(LAYER_TYPES))
    if unknown:
        raise ConfigError(f"config.json: layer_types holds {unknown}; known are {sorted(LAYER_TYPES)}")
    if len(names) != num_layers:
        raise ConfigError(f"config.json: layer_types has {len(names)} entries for {num_layers} layers")
    return tuple(LAYER_TYPES[name] for name in names)


def _mlp_layer_types(text: Mapping[str, Any], num_layers: int) -> tuple[MlpType, ...]:
    dense = int(text.get("first_k_dense_replace", 0))
    types = text.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (num_layers - dense)
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise ConfigError(f"config.json: mlp_layer_types is {types}, expected {num_layers} x dense|sparse")
    return tuple(types)


def _check_relations(text: Mapping[str, Any], config: Glm5NextConfig) -> None:
    linear = text.get("linear_attn_config") or {}
    for name, derived in (("kda_layers", config.kda_layers), ("full_attn_layers", config.mla_layers)):
        if linear.get(name) is not None and sorted(linear[name]) != list(derived):
            found = f"linear_attn_config.{name} is {linear[name]}"
            raise ConfigError(f"config.json: {found}, layer_types says {list(derived)}")
    heads, topk, experts = config.num_attention_heads, config.index_topk, config.n_routed_experts
    kv_heads = text.get("num_key_value_heads", heads)
    indexers = sorted(set(text.get("indexer_types") or ["full"]))
    head_dim = text.get("qk_head_dim", config.qk_nope_head_dim)
    frequency, pattern = text.get("index_topk_freq"), text.get("index_topk_pattern")
    mtp_layers, bound = config.num_nextn_predict_layers, config.linear_gate_lower_bound
    for good, message in (
        (kv_heads == heads, f"num_key_value_heads is {kv_heads}; expected num_attention_heads, {heads}"),
        (topk % config.index_kpool == 0, f"index_topk is {topk}; must be a multiple of index_kpool"),
        (config.num_experts_per_tok <= experts, f"num_experts_per_tok exceeds n_routed_experts, {experts}"),
        (mtp_layers in (0, 1), f"num_nextn_predict_layers is {mtp_layers!r}; must be 0 or 1"),
        (head_dim == config.qk_nope_head_dim, f"qk_head_dim is {head_dim}; expected qk_nope_head_dim"),
        (frequency in (None, 1), f"index_topk_freq is {frequency}; only 1 is implemented"),
        (pattern is None, f"index_topk_pattern is {pattern!r}; only indexers in every layer are implemented"),
        (indexers == ["full"], f"indexer_types holds {indexers}; only 'full' is implemented"),
        # Recurrences inside a chunk are rebased every 16 tokens; 16 x 5 keeps every exponent inside float32.
        (-5.0 <= bound < 0, f"gate_lower_bound is {bound}; must lie in [-5, 0)"),
    ):
        if not good:
            raise ConfigError(f"config.json: {message}")
