"""Write a checkpoint with its routed experts in NVFP4 (ModelOpt form, weight only, round to nearest).

The MTP layer's experts are quantised too; other quantised matrices become BF16, everything else keeps its
bits. The result appears under its name only when it is complete: a failed run leaves nothing behind.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model import nvfp4
from model.checkpoint import UNUSED_SCALES, Checkpoint, raise_if_any, read_checkpoint
from model.config import parse_config, read_json
from model.shards import INDEX, WeightError, shard_reader
from model.weights import WeightTree

MAX_SHARD_BYTES = 5_000_000_000
QUANTISED_ROLES = ("routed experts", "mtp experts")
COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json", "LICENSE*")
EXAMPLES = """examples:
  python cli.py quantize GLM-5.3-Flash-BF16 GLM-5.3-Flash-NVFP4
  python cli.py quantize tests/data/bf16 tiny-nvfp4"""
PRODUCER = {"name": "mini-glm53", "version": "0.1.0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quantize`."""
    parser.add_argument("source", type=Path, metavar="SRC", help="directory with a BF16 or FP8 checkpoint")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to create; must not exist")


def run(args: argparse.Namespace) -> int:
    """Quantise SRC into DST. Raises ValueError or OSError on bad input."""
    quantize(args.source, args.target)
    print(f"wrote {args.target}", file=sys.stderr)
    return 0


def quantize(source: Path, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `target` from `source`; it is built beside its final place and renamed when complete."""
    if target.exists():
        raise FileExistsError(f"{target} exists; name a new directory")
    checkpoint = read_checkpoint(source)
    raise_if_any(source, checkpoint.mtp_problems, "the MTP layer is damaged")
    building = target.with_name(f".{target.name}.{os.getpid()}")
    building.mkdir()
    try:
        write_shards(building, converted(checkpoint, QUANTISED_ROLES), max_shard_bytes)
        write_configs(building, read_json(source / "config.json"))
        for file in (file for pattern in COPIED for file in source.glob(pattern)):
            shutil.copyfile(file, building / file.name)
        building.rename(target)
    except BaseException:  # an interrupt, too, must leave nothing behind
        shutil.rmtree(building)
        raise


def converted(checkpoint: Checkpoint, quantised_roles: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under their file names, a parameter at a time: these roles in NVFP4, other quantised ones in BF16."""
    read = shard_reader()
    tree = WeightTree(checkpoint.parameters, read, torch.float32, torch.device("cpu"))
    for parameter in checkpoint.parameters.values():
        name, stem = parameter.parts[0].name.removesuffix("_packed"), parameter.spec.stem
        if parameter.format == "plain" and parameter.spec.role not in quantised_roles:
            yield name, read(parameter.parts[0])
        elif parameter.spec.role not in quantised_roles:
            yield name, tree.linear(stem).expand(torch.bfloat16)
        elif parameter.format == "nvfp4":
            raise WeightError(f"{name} is NVFP4 already; quantise the BF16 or FP8 checkpoint it came from")
        else:
            try:
                parts = nvfp4.quantize(tree.linear(stem).expand(torch.float32))
            except ValueError as error:
                raise WeightError(f"{name}: {error}") from None
            yield from zip((name, f"{name}_scale", f"{name}_scale_2"), parts, strict=True)
    for tensor in checkpoint.skipped:
        if not tensor.name.endswith(UNUSED_SCALES):
            yield tensor.name, read(tensor)


def write_shards(directory: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write shards of at most `max_shard_bytes` (unless one tensor is larger) and their index."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total_bytes = pending_bytes = 0

    def flush() -> None:
        save_file(pending, directory / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        (directory / file).chmod(0o644)  # safetensors keeps its files private
        weight_map |= dict.fromkeys(names, file)
    _write_json(directory / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_configs(directory: Path, raw_config: dict[str, Any]) -> None:
    """config.json with its quantization_config, and ModelOpt's own hf_quant_config.json."""
    dense = [i for i, kind in enumerate(parse_config(raw_config).mlp_layer_types) if kind == "dense"]
    ignore = ["lm_head", "*.embed_tokens", "model.visual*", "*.self_attn*", "*.mlp.shared_experts*"]
    ignore += ["*.mlp.gate", "*.eh_proj", "*.shared_head*"]
    ignore += [f"*.layers.{i}.mlp.{part}_proj" for i in dense for part in ("gate", "up", "down")]
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    method = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": PRODUCER}
    declared = {"quantization_config": method | {"config_groups": groups, "ignore": ignore}}
    _write_json(directory / "config.json", raw_config | declared)
    sizes = {"quant_algo": "NVFP4", "group_size": nvfp4.BLOCK, "kv_cache_quant_algo": None}
    quantization = {"producer": PRODUCER, "quantization": sizes | {"exclude_modules": ignore}}
    _write_json(directory / "hf_quant_config.json", quantization)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
