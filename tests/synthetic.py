"""Checkpoints of any size without their bytes: real headers over sparse files that read as zeros."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from model.config import parse_config
from model.parameters import ParameterSpec, parameter_specs
from model.quantization import Format
from model.random_weights import stored_as
from model.shards import StoredTensor

FormatOf = Callable[[ParameterSpec], Format]


def real_config() -> dict[str, Any]:
    """config.json of GLM-5.3-Flash, as far as the engine reads it."""
    layers = range(45)
    attention = ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in layers]
    text = {
        "model_type": "glm5_next_text",
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
        "layer_types": attention,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
    }
    return {"model_type": "glm5_next", "tie_word_embeddings": False, "text_config": text}


def write_sparse(
    directory: Path, raw_config: dict[str, Any], format_of: FormatOf, num_shards: int = 4
) -> Path:
    """A checkpoint whose Linears have the formats `format_of` says; F32 where a role is float32."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw_config))
    specs = parameter_specs(parse_config(raw_config))
    stored = [stored_as(spec, format_of(spec) if spec.kind == "linear" else "plain") for spec in specs]
    tensors = [part for parameter in stored for part in parameter.parts]
    per_shard = -(-len(tensors) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = tensors[shard * per_shard : (shard + 1) * per_shard]
        weight_map |= dict.fromkeys(write_sparse_shard(directory / file, part), file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_sparse_shard(path: Path, tensors: Iterable[StoredTensor]) -> list[str]:
    """One shard; canonical names get the released prefix. Returns the file names of the tensors."""
    header, end = {}, 0
    for tensor in tensors:
        name = tensor.name if tensor.name == "lm_head.weight" else f"model.language_model.{tensor.name}"
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return list(header)
