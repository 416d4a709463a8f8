"""Loads a synthetic checkpoint of 1 GB; prints its bytes, the resident bytes, the largest tensor, the peak.

The peak is anonymous memory above that at the start, sampled while a second thread loads; mapped file pages,
which the system can drop, do not count.
"""

import re
import sys
import threading
from pathlib import Path

import torch

from model.config import load_config
from model.formats import Weight
from model.weights import WeightTree, load_weights
from tests.synthetic import real_config, write_sparse


def main(directory: Path) -> None:
    raw = real_config()
    raw["text_config"] |= {
        "num_hidden_layers": 4,
        "n_routed_experts": 12,
        "vocab_size": 16384,
        "hidden_size": 1024,
    }
    for field in ("layer_types", "mlp_layer_types"):
        raw["text_config"][field] = raw["text_config"][field][:4]
    write_sparse(directory, raw, lambda spec: "plain")
    config = load_config(directory)
    start = peak = anonymous_bytes()
    tree = load_weights(directory, config, linear_dtype=torch.bfloat16, device=torch.device("cpu"))
    loading = threading.Thread(target=take_all, args=(tree, config.num_hidden_layers, []))
    loading.start()
    while loading.is_alive():
        peak = max(peak, anonymous_bytes())
    tree.finish()
    stored = tree.parameters.values()
    largest = max(part.nbytes for parameter in stored for part in parameter.parts)
    print(sum(parameter.nbytes for parameter in stored), tree.resident_bytes, largest, peak - start)


def take_all(tree: WeightTree, layers: int, kept: list[Weight | torch.Tensor]) -> None:
    """Take experts as stacks, the query, key and value projections fused, and the rest one by one."""
    for layer in range(3, layers + 1):
        kept += [tree.at(f"layers.{layer}.mlp").experts(f"{name}_proj") for name in ("gate", "up", "down")]
    for layer in range(3):
        kept.append(tree.at(f"layers.{layer}.self_attn").fused(["q_proj", "k_proj", "v_proj"]))
    taken = re.compile(r"\.experts\.|layers\.[012]\.self_attn\.[qkv]_proj")
    for name, parameter in tree.parameters.items():
        if not taken.search(name):
            linear = parameter.spec.kind == "linear"
            kept.append(tree.linear(parameter.spec.stem) if linear else tree.tensor(name))


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
