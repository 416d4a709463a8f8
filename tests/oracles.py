"""Random tiny Glm5Next checkpoints in the released file layout, and transformers' answers for any checkpoint.

Names and shapes are written out here a second time, on purpose: a loader that only reads what our own
quantiser wrote could agree with itself and still be wrong. The three variants differ in every shape and in
each number of the config that enters the arithmetic.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KDA, MLA = "linear_attention", "deepseek_sparse_attention"
Shapes = Iterator[tuple[str, tuple[int, ...]]]

# Released widths: these roles are stored as F32, everything else as BF16.
FLOAT32_SUFFIXES = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")

_COMMON: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "dtype": "bfloat16",
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "head_dim": 0,
    "attention_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "topk_group": 1,
    "mhc": True,
    "hc_eps": 1e-6,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "index_share_for_mtp_iteration": True,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": [0, 1],
}
# One column per variant.
_VARIANTS: dict[str, tuple[Any, ...]] = {
    "layer_types": ("KMKKM", "MKKM", "KKMMKK"),
    "first_k_dense_replace": (1, 2, 1),
    "vocab_size": (160, 200, 136),
    "hidden_size": (48, 64, 96),
    "intermediate_size": (80, 96, 64),
    "moe_intermediate_size": (32, 48, 16),
    "n_routed_experts": (6, 8, 6),
    "num_experts_per_tok": (2, 3, 3),
    "n_shared_experts": (1, 2, 1),
    "routed_scaling_factor": (2.5, 1.5, 2.5),
    "swiglu_limit": (1.0, 10.0, 1.0),
    "rms_norm_eps": (1e-5, 1e-6, 1e-5),
    "num_attention_heads": (3, 4, 2),
    "q_lora_rank": (32, 48, 64),
    "kv_lora_rank": (48, 32, 32),
    "qk_nope_head_dim": (16, 32, 48),
    "v_head_dim": (32, 16, 64),
    # Few indexer heads can all be off at once, and pools then tie at exactly zero: at least 16.
    "index_n_heads": (16, 24, 32),
    "index_head_dim": (16, 8, 32),
    "index_topk": (8, 16, 32),
    "index_kpool": (2, 4, 8),
    "hc_mult": (4, 2, 4),
    "hc_sinkhorn_iters": (20, 12, 20),
}
_LINEAR_VARIANTS: dict[str, tuple[Any, ...]] = {
    "num_heads": (2, 4, 4),
    "head_dim": (32, 16, 32),
    "short_conv_kernel_size": (4, 4, 4),
    "gate_lower_bound": (-5.0, -3.0, -5.0),
}
NUM_VARIANTS = len(_VARIANTS["layer_types"])


def tiny_config(variant: int) -> dict[str, Any]:
    """The config.json of one of NUM_VARIANTS tiny models."""
    text = _COMMON | {name: column[variant] for name, column in _VARIANTS.items()}
    types = [KDA if letter == "K" else MLA for letter in text["layer_types"]]
    dense = text["first_k_dense_replace"]
    text |= {
        "num_hidden_layers": len(types),
        "num_key_value_heads": text["num_attention_heads"],
        "qk_head_dim": text["qk_nope_head_dim"],
        "layer_types": types,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(types) - dense),
        "indexer_types": ["full"] * len(types),
        "linear_attn_config": {name: column[variant] for name, column in _LINEAR_VARIANTS.items()},
    }
    # The smallest vision tower that transformers builds; its weights are never stored.
    vision = dict.fromkeys(("hidden_size", "intermediate_size", "projection_intermediate_size"), 32)
    return {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision | {"depth": 1, "num_heads": 2, "out_hidden_size": text["hidden_size"]},
    }


def checkpoint_shapes(text: dict[str, Any], mtp: bool = True) -> Shapes:
    """(file name, shape) of every tensor that a checkpoint with this `text_config` holds."""
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    trunk = "model.language_model."
    yield "lm_head.weight", (text["vocab_size"], hidden)
    yield trunk + "embed_tokens.weight", (text["vocab_size"], hidden)
    yield trunk + "norm.weight", (hidden,)
    for layer in range(layers + mtp):
        for name, shape in _layer_shapes(text, layer):
            yield f"{trunk}layers.{layer}.{name}", shape


def _layer_shapes(text: dict[str, Any], layer: int) -> Shapes:
    hidden, streams, is_mtp = text["hidden_size"], text["hc_mult"], layer == text["num_hidden_layers"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if is_mtp:
        yield "eh_proj.weight", (hidden, 2 * hidden)
        yield from ((f"{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head.norm"))
    else:
        rows = streams * (streams + 2)
        for site in ("attn", "ffn"):
            yield f"hc_{site}_fn", (rows, streams * hidden)
            yield f"hc_{site}_base", (rows,)
            yield f"hc_{site}_scale", (3,)
    kda = not is_mtp and text["layer_types"][layer] == KDA
    yield from _kda_shapes(text) if kda else _mla_shapes(text)
    dense = not is_mtp and text["mlp_layer_types"][layer] == "dense"
    yield from _swiglu_shapes("mlp", hidden, text["intermediate_size"]) if dense else _moe_shapes(text)


def _kda_shapes(text: dict[str, Any]) -> Shapes:
    hidden, linear = text["hidden_size"], text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    for letter in "qkv":
        yield f"self_attn.{letter}_proj.weight", (heads * dim, hidden)
        yield f"self_attn.{letter}_conv1d.weight", (heads * dim, 1, linear["short_conv_kernel_size"])
    for letter in "fg":
        yield f"self_attn.{letter}_a_proj.weight", (dim, hidden)
        yield f"self_attn.{letter}_b_proj.weight", (heads * dim, dim)
    yield "self_attn.b_proj.weight", (heads, hidden)
    yield "self_attn.A_log", (heads,)
    yield "self_attn.dt_bias", (heads * dim,)
    yield "self_attn.o_norm.weight", (dim,)
    yield "self_attn.o_proj.weight", (hidden, heads * dim)


def _mla_shapes(text: dict[str, Any]) -> Shapes:
    hidden, heads, rank, latent = (
        text[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    yield "self_attn.q_a_proj.weight", (rank, hidden)
    yield "self_attn.q_a_layernorm.weight", (rank,)
    yield "self_attn.q_b_proj.weight", (heads * text["qk_nope_head_dim"], rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (text["qk_nope_head_dim"] + text["v_head_dim"]), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * text["v_head_dim"])
    index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
    yield "self_attn.indexer.wq_b.weight", (index_heads * index_dim, rank)
    yield "self_attn.indexer.wk.weight", (index_dim, hidden)
    yield "self_attn.indexer.k_norm.weight", (index_dim,)
    yield "self_attn.indexer.k_norm.bias", (index_dim,)
    yield "self_attn.indexer.weights_proj.weight", (index_heads, hidden)
    yield "self_attn.indexer.index_kpool_compress_ape", (text["index_kpool"], index_dim)
    yield "self_attn.indexer.index_kpool_compress_gate", (index_dim, hidden)


def _moe_shapes(text: dict[str, Any]) -> Shapes:
    hidden, width, experts = (text[k] for k in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _swiglu_shapes(f"mlp.experts.{expert}", hidden, width)
    yield from _swiglu_shapes("mlp.shared_experts", hidden, width * text["n_shared_experts"])


def _swiglu_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Seeded values in the released width, of a scale that keeps every gate, mix and clamp in play."""
    mean, std = 0.0, 1.3 * shape[-1] ** -0.5
    if name.endswith(("norm.weight", "layernorm.weight")):
        mean, std = 1.0, 0.15
    elif name.endswith("_scale"):
        mean, std = 0.9, 0.3
    elif name.endswith(("e_score_correction_bias", "k_norm.bias")):
        std = 0.1
    elif name.endswith(("conv1d.weight", "A_log")):
        std = 0.5
    elif name.endswith(("embed_tokens.weight", "_ape", "_base", "dt_bias")):
        std = 1.0
    dtype = torch.float32 if name.endswith(FLOAT32_SUFFIXES) else torch.bfloat16
    return (mean + std * torch.randn(shape, generator=generator)).to(dtype)


def write_checkpoint(directory: Path, raw_config: dict[str, Any], seed: int, mtp: bool = True) -> Path:
    """A random checkpoint: config.json, an index and two shards. Returns the directory."""
    generator = torch.Generator().manual_seed(seed)
    shapes = checkpoint_shapes(raw_config["text_config"], mtp)
    tensors = {name: random_tensor(name, shape, generator) for name, shape in shapes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw_config, indent=1), encoding="utf-8")
    write_shards(directory, tensors)
    return directory


def write_shards(directory: Path, tensors: dict[str, Tensor], num_shards: int = 2) -> None:
    """Write tensors as model-0000X-of-0000N.safetensors, with their index."""
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[shard::num_shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as stored."""
    shards = sorted(directory.glob("model*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def copy_checkpoint(source: Path, target: Path, edit: Edit) -> Path:
    """Copy a checkpoint with its tensors passed through `edit` (rename, drop, add). Returns the target."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            copyfile(file, target / file.name)
    write_shards(target, edit(read_tensors(source)))
    return target


@lru_cache(maxsize=4)
def _transformers_model(directory: Path, device: str) -> Any:
    import transformers  # slow to import, so only by the tests that ask

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.Glm5NextForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval().to(device)


def transformers_logits(directory: Path, token_ids: Sequence[int], device: str = "cpu") -> Tensor:
    """Logits [num_tokens, vocab] float32 of the whole prompt at once; the MTP layer is ignored there."""
    return _transformers_logits(directory, tuple(token_ids), device)


@lru_cache(maxsize=32)
@torch.inference_mode()
def _transformers_logits(directory: Path, token_ids: tuple[int, ...], device: str) -> Tensor:
    ids = torch.tensor([token_ids], device=device)
    logits: Tensor = _transformers_model(directory, device)(input_ids=ids, use_cache=False).logits
    return logits[0].float().cpu()


def transformers_greedy(directory: Path, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation, recomputed from the whole prompt for every token: no cache to be wrong."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(int(transformers_logits(directory, ids)[-1].argmax()))
    return ids[len(token_ids) :]
