"""Where two runs part: the first step, layer and tensor that differs from the same tokens in one uncached forward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model.glm5_next import Glm5Next
from model.kda import Kda
from scheduler.plan import ScheduledChunk
from tests import driver
from tests.engine.equality import Player

# Of the largest magnitude in the tensor. Float32 rounding moves the models of these tests by less than 1e-4.
TOLERANCE = 1e-3
Streams = dict[tuple[int, str], Tensor]  # (layer, what), in order of computation: rows of one forward


@dataclass(frozen=True)
class Divergence:
    """`tensor` is what a layer's kda, mla or ffn returned, or the streams behind it; `size` of its largest entry."""

    step: int
    layer: int
    tensor: str
    request: int
    position: int
    size: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, layer {self.layer}, {self.tensor}, request {self.request}, position"
            f" {self.position}, off by {self.size:.2g} of the largest entry"
        )


@contextmanager
def recording(model: Glm5Next) -> Iterator[list[Streams]]:
    """Collect what every layer computes, one Streams per forward."""
    forwards: list[Streams] = []

    def watch(owner: Any, layer: int, name: str) -> None:
        original = owner.forward

        def forward(*args: Any) -> Any:
            result = original(*args)
            value = result[0] if isinstance(result, tuple) else result
            forwards[-1][layer, name] = value.float().flatten(1).clone()
            return result

        owner.forward = forward

    def begin(*args: Any) -> Tensor:
        forwards.append({})
        return Glm5Next.forward(model, *args)

    before = [(owner, vars(owner).get("forward")) for owner in watched(model)]
    for index, layer in enumerate(model.layers):
        watch(layer.mixer, index, "kda" if isinstance(layer.mixer, Kda) else "mla")
        watch(layer.ffn, index, "ffn")
        watch(layer, index, "streams")
    model.forward = begin  # type: ignore[method-assign]
    try:
        yield forwards
    finally:
        for owner, forward in before:
            if forward is None:
                del owner.forward
            else:
                owner.forward = forward


def watched(model: Glm5Next) -> list[Any]:
    """The objects whose `forward` a recording replaces."""
    return [model, *(part for layer in model.layers for part in (layer.mixer, layer.ffn, layer))]


def first_divergence(
    model: Glm5Next, player: Player, forwards: Sequence[Streams], tolerance: float = TOLERANCE
) -> Divergence | None:
    """Compare a player's recorded forwards with its tokens in one forward each."""
    known: dict[int, Streams] = {}
    said = [[*request.prompt, *request.output] for request in player.requests]
    for request in player.requests:
        with recording(model) as whole:
            driver.hidden_states(model, said[request.request_id])
        known[request.request_id] = whole[0]
    for step, (plan, streams) in enumerate(zip(player.plans, forwards, strict=True)):
        for (layer, name), rows in streams.items():
            for chunk, own in zip(
                plan.chunks, rows.split([len(c.token_ids) for c in plan.chunks]), strict=True
            ):
                expected = known[chunk.request_id][layer, name]
                size = off_by(own, expected, chunk)[: num_standing(chunk, said[chunk.request_id])]
                if size.isnan().any() or size.max() > tolerance:
                    row = int((~(size <= tolerance)).nonzero()[0])
                    where = (chunk.request_id, chunk.start + row)
                    return Divergence(step, layer, name, *where, float(size[row]))
    return None


def off_by(own: Tensor, expected: Tensor, chunk: ScheduledChunk) -> Tensor:
    """Largest difference of each of a chunk's rows that can be compared, relative to the largest entry."""
    rows = expected[chunk.start : chunk.end]
    return (own[: len(rows)] - rows).abs().amax(1) / expected.abs().max()


def num_standing(chunk: ScheduledChunk, tokens: Sequence[int]) -> int:
    """How many of a chunk's tokens are the request's, before the first draft that was wrong."""
    different = first_difference(chunk.token_ids, tokens[chunk.start : chunk.end])
    return len(chunk.token_ids) if different is None else different


def margin(model: Glm5Next, tokens: Sequence[int]) -> float:
    """Top-2 gap of the logits after `tokens`."""
    best = driver.logits(model, tokens)[-1].topk(2).values
    return float(best[0] - best[1])


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one list ends."""
    same = (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
    return next(same, None if len(found) == len(expected) else min(len(found), len(expected)))


def wrong_tokens(model: Glm5Next, player: Player, expected: Mapping[int, Sequence[int]]) -> list[str]:
    """One line per request whose tokens differ from `expected`: the token, both values, the argmax margin there."""
    lines = []
    for request in player.requests:
        answer = expected[request.request_id]
        at = first_difference(request.output, answer)
        if at is not None:
            gap = margin(model, [*request.prompt, *answer[:at]])
            lines.append(
                f"request {request.request_id}, token {at}: {request.output[at : at + 1]}, expected"
                f" {answer[at : at + 1]}, argmax margin {gap:.3g}"
            )
    return lines
