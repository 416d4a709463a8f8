"""mini-glm53's engine: `LLM` runs a GLM-5.3 checkpoint, `SamplingParams` says how tokens are chosen.

Names are imported on first use, so that importing a part of the package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.output import Delta, Result
    from engine.sampling import SamplingParams

__all__ = ["LLM", "Delta", "Result", "SamplingParams"]

_HOMES = {"LLM": "llm", "Delta": "output", "Result": "output", "SamplingParams": "sampling"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"engine.{_HOMES[name]}"), name)
