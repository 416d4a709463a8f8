"""Show what a checkpoint holds: roles, layers, formats, parameters, and bytes per GPU.

Reads headers only, so a directory of 200 GB takes seconds; everything that loading would refuse is refused
here too. Bytes per GPU are what one of `--tp` ranks keeps resident: plain matrices in BF16, small tensors in
F32, quantised ones packed.
"""

import argparse
import gc
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import VISION, StoredParameter, read_checkpoint
from model.shards import StoredTensor
from model.weights import resident_bytes

EXAMPLES = """examples:
  python cli.py inspect model/embedded
  python cli.py inspect GLM-5.3-Flash-NVFP4 --tp 4 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `inspect`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="a Hugging Face checkpoint directory")
    add("--tp", type=int, default=1, metavar="N", help="GPUs to split over (default %(default)s)")
    add("--json", action="store_true", help="one JSON document instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises ValueError or OSError on bad input."""
    if args.tp < 1:
        raise ValueError(f"--tp is {args.tp}, expected at least 1")
    gc.set_threshold(100_000)  # a million small objects, none of them garbage
    report = inspect(args.directory, args.tp)
    print(json.dumps(report, indent=1) if args.json else _table(report))
    return 0


def inspect(directory: Path, ranks: int) -> dict[str, Any]:
    """The report as plain data; see `_role` for the entries of `roles`."""
    checkpoint = read_checkpoint(directory)
    by_role: dict[str, list[StoredParameter]] = {}
    for parameter in checkpoint.parameters.values():
        by_role.setdefault(parameter.spec.role, []).append(parameter)
    present, problems = checkpoint.has_mtp, list(checkpoint.mtp_problems)
    return {
        "directory": str(directory),
        "tp": ranks,
        "roles": [_role(role, parameters, ranks) for role, parameters in by_role.items()],
        "vision": _skipped([tensor for tensor in checkpoint.skipped if VISION.match(tensor.name)]),
        "unused": _skipped([tensor for tensor in checkpoint.skipped if not VISION.match(tensor.name)]),
        "mtp": {"present": present, "usable": present and not problems, "problems": problems},
    }


def _role(role: str, group: Sequence[StoredParameter], ranks: int) -> dict[str, Any]:
    """Sums over the parameters of one role; `formats` counts parameters, `gpu_bytes` is one rank's share."""
    return {
        "role": role,
        "layers": sorted({p.spec.layer for p in group if p.spec.layer is not None}),
        "formats": dict(Counter(p.format if p.format != "plain" else p.parts[0].dtype for p in group)),
        "tensors": sum(len(p.parts) for p in group),
        "parameters": sum(math.prod(p.spec.shape) for p in group),
        "file_bytes": sum(p.nbytes for p in group),
        "gpu_bytes": sum(resident_bytes(p, torch.bfloat16, ranks) for p in group),
    }


def _skipped(group: Sequence[StoredTensor]) -> dict[str, int]:
    return {
        "tensors": len(group),
        "parameters": sum(math.prod(tensor.shape) for tensor in group),
        "file_bytes": sum(tensor.nbytes for tensor in group),
    }


def _table(report: dict[str, Any]) -> str:
    roles, mtp = report["roles"], report["mtp"]
    total = {c: sum(row[c] for row in roles) for c in ("tensors", "parameters", "file_bytes", "gpu_bytes")}
    scale, unit = (2**30, "GiB") if total["file_bytes"] >= 2**30 else (2**20, "MiB")
    rows = [*roles, {"role": "total"} | total]
    skipped = [name for name in ("vision", "unused") if report[name]["tensors"]]
    rows += [{"role": name, "formats": ["not loaded"]} | report[name] for name in skipped]
    sizes = f"{'file ' + unit:>12}{'per GPU ' + unit:>14}"
    head = f"{'role':<24}{'layers':<14}{'format':<12}{'tensors':>9}{'parameters':>17}{sizes}"
    lines = [f"{report['directory']}, per GPU of {report['tp']}", "", head, *(_line(r, scale) for r in rows)]
    state = "usable" if mtp["usable"] else "damaged:" if mtp["present"] else "absent"
    return "\n".join([*lines, "", f"MTP layer: {state}", *mtp["problems"]])


def _line(row: dict[str, Any], scale: int) -> str:
    layers, formats = _ranges(row.get("layers", [])), "+".join(row.get("formats", []))
    numbers = f"{row['tensors']:>9,}{row['parameters']:>17,}{row['file_bytes'] / scale:>12.3f}"
    per_gpu = f"{row['gpu_bytes'] / scale:>14.3f}" if "gpu_bytes" in row else ""
    return f"{row['role']:<24}{layers:<14}{formats:<12}{numbers}{per_gpu}"


def _ranges(layers: list[int]) -> str:
    """Layer numbers as runs, "0-2,4"; many runs as their number and span."""
    # Within a run, number and place grow alike.
    grouped = groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
    runs = [[layer for _, layer in run] for _, run in grouped]
    if len(runs) > 4:
        return f"{len(layers)} of {layers[0]}-{layers[-1]}"
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
