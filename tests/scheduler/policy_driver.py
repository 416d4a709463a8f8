"""The smallest engine around a checkpoint policy: one request alone, whose forwards always succeed."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.checkpoint_policy import (
    DECLARED_DRAFT_ARCHITECTURE,
    Capability,
    Policy,
    Prefill,
    Reuse,
    make_policy,
)

PRESETS = ("generic", "seed", "vllm-0.33", "ours")


def build(
    preset: str,
    *,
    capability: Capability | None = None,
    draft: str | None = DECLARED_DRAFT_ARCHITECTURE,
    block: int | None = None,
    retain: Iterable[str] | None = None,
    filing: str | None = None,
) -> Policy:
    """A preset on a backend that can do everything, with the drafter of the checkpoint."""
    return make_policy(
        preset,
        capability or Capability(),
        draft_architecture=draft,
        block_size=block,
        retain=retain,
        filing=filing,
    )


@dataclass(frozen=True)
class Trace:
    """What one prefill did; positions in tokens."""

    policy: Policy
    request: Prefill
    computed: int
    chunks: tuple[int, ...]
    exports: tuple[int, ...]
    published: tuple[int, ...]
    rolling: int | None
    reasons: tuple[str, ...]

    @property
    def forwards(self) -> int:
        return len(self.chunks)

    def hit(self, num_tokens: int, shared: int | None = None, more: Iterable[int] = ()) -> Reuse:
        """The lookup of a request of `num_tokens`, of which `shared` are this request's (default: all it ran)."""
        pages = self.policy.publishable(self.computed, max(self.request.known, self.computed))
        matched = pages if shared is None else min(shared, pages)
        return self.policy.reuse(num_tokens, matched, sorted((*self.published, *more), reverse=True))

    @property
    def resend(self) -> int:
        return self.hit(self.request.prompt).state_at

    @property
    def extend(self) -> int:
        return self.hit(self.request.prompt + self.policy.block_size + 1).state_at


def prefill(
    policy: Policy,
    prompt: int,
    *,
    known: int | None = None,
    start: int = 0,
    budget: int = 4096,
    junctions: tuple[int, ...] = (),
    forwards: int | None = None,
) -> Trace:
    """Runs a request from `start` to the end of its prefill, or for a number of forwards."""
    request = Prefill(prompt, known or prompt, junctions)
    chunks: list[int] = []
    exports: list[int] = []
    published: list[int] = []
    reasons: list[str] = []
    rolling = None
    while start < request.finish and len(chunks) != forwards:
        chunk = policy.chunk(start, budget, request, budget)
        assert start < chunk.end <= start + budget, chunk
        chunks.append(chunk.end - start)
        exports += chunk.exports
        published += chunk.publishes
        reasons.append(chunk.reason)
        rolling = chunk.rolling or rolling
        start = chunk.end
    if start >= request.finish:
        rolling = chunk.rolling if chunks else None
    return Trace(
        policy, request, start, tuple(chunks), tuple(exports), tuple(published), rolling, tuple(reasons)
    )


def decode(trace: Trace, num_tokens: int, step: int = 1) -> tuple[tuple[int, ...], int | None, int]:
    """Boundaries published while `num_tokens` are generated, the rolling one at the end, and the verified tokens.

    The last generated token is never run. `step`: tokens verified per step.
    """
    start, published, rolling = trace.computed, [], trace.rolling
    verified = start + num_tokens - 1
    for end in (*range(start + step, verified, step), verified):
        boundary, at_once = trace.policy.decode_boundary(start, end)
        if boundary is not None and at_once:
            published.append(boundary)
        elif boundary is not None:
            rolling = boundary
        start = end
    return tuple(published), rolling, verified
