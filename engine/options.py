"""Every setting of an engine, with its default; the command line reads the defaults from here."""

from dataclasses import dataclass

import torch

from engine.commands.policy_options import MAX_DRAFT_TOKENS
from engine.sampling import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class EngineOptions:
    """`kv_tokens` None: a share of the free memory. `num_layers`: only the first layers of the trunk.

    `draft_tokens`: drafts per step; None: 3 if the checkpoint declares and has a draft layer, else 0. `index_share`
    False: every draft pass selects its own keys.
    """

    dtype: str = "bfloat16"
    device: str = "cpu"
    max_batched_tokens: int = 4096
    mixed_prefill_tokens: int = 1024  # of prefill in a step that also decodes; 0: no cap
    max_running_requests: int = 16
    checkpoint_slots: int = 32  # recurrent slots beyond those of running requests
    kv_tokens: int | None = None  # per attention group
    state_dtype: str = "float32"  # of the recurrent matrices
    draft_tokens: int | None = None
    index_share: bool = True
    debug: bool = False  # account for every page, slot and reference after every step
    # The checkpoint policy: see engine/commands/policy_options.py.
    policy: str = "ours"
    retain: str | None = None
    exports: str | None = None
    chunk_ends: str | None = None
    draft_filing: str | None = None
    block_size: int | None = None
    no_prefix_cache: bool = False
    random_weights: bool = False
    num_layers: int | None = None
    seed: int | None = None  # of random weights, and of requests that name none; None: fresh

    def __post_init__(self) -> None:
        for name in ("dtype", "state_dtype"):
            if (value := getattr(self, name)) not in DTYPES:
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(DTYPES)}")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}, expected cpu or cuda")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but this torch sees no CUDA device; use cpu")
        for name in ("max_batched_tokens", "max_running_requests", "kv_tokens", "num_layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        for name in ("mixed_prefill_tokens", "checkpoint_slots"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}, expected at least 0")
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens is {self.draft_tokens}, expected 0 to {MAX_DRAFT_TOKENS}")
        if self.num_layers is not None and not self.random_weights:
            raise ValueError("num_layers acts with random weights only; a real model needs all its layers")
        SamplingParams(seed=self.seed)  # the range of seeds is a request's
