"""Every setting of an engine, with its default; the command line reads the defaults from here."""

from dataclasses import dataclass

import torch

from engine.sampling import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BLOCK_GRID_TOKENS = 16  # block sizes are multiples of this: of the state export grid and of any index pool


@dataclass(frozen=True)
class EngineOptions:
    """`kv_tokens` None: a share of the free memory. `num_layers`: only the first layers of the trunk."""

    dtype: str = "bfloat16"
    device: str = "cpu"
    max_batched_tokens: int = 4096
    block_size: int = 64
    max_running_requests: int = 16
    kv_tokens: int | None = None
    random_weights: bool = False
    num_layers: int | None = None
    seed: int | None = None  # of random weights, and of requests that name none; None: fresh

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}, expected cpu or cuda")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but this torch sees no CUDA device; use cpu")
        if self.block_size <= 0 or self.block_size % BLOCK_GRID_TOKENS:
            raise ValueError(f"block size is {self.block_size}, expected a multiple of {BLOCK_GRID_TOKENS}")
        for name in ("max_batched_tokens", "max_running_requests", "kv_tokens", "num_layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if self.num_layers is not None and not self.random_weights:
            raise ValueError("num_layers acts with random weights only; a real model needs all its layers")
        SamplingParams(seed=self.seed)  # the range of seeds is a request's
