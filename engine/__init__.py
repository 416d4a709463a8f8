"""mini-glm53's engine: `LLM` runs a GLM-5.3 checkpoint, `SamplingParams` says how tokens are chosen."""

from engine.llm import LLM
from engine.output import Delta, Result
from engine.sampling import SamplingParams

__all__ = ["LLM", "Delta", "Result", "SamplingParams"]
