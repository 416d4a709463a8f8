"""In bfloat16 a request's logits do not depend, in one bit, on who shares a batch of the same shape; across shapes,
and with states kept in bfloat16, its tokens only differ where the best two logits lie closer than a stated gap.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from model.glm5_next import Glm5Next
from tests import tiny
from tests.engine.divergence import first_difference, margin
from tests.engine.equality import NEW_TOKENS, WHOLE, Ask, Player, policy_of, rounds, subject

BF16 = torch.bfloat16
Logits = dict[tuple[int, int], Tensor]  # of a request's token, [vocab], by request and index


@contextmanager
def sampled(model: Glm5Next) -> Iterator[list[Tensor]]:
    """Collect the logits [rows, vocab] that each step samples from."""
    seen: list[Tensor] = []

    def logits(hidden: Tensor) -> Tensor:
        seen.append(Glm5Next.logits(model, hidden))
        return seen[-1]

    vars(model)["logits"] = logits
    try:
        yield seen
    finally:
        del vars(model)["logits"]


def logits_of(player: Player, model: Glm5Next, asks: list[list[Ask]]) -> Logits:
    """Play rounds; the logits of every token of every request."""
    with sampled(model) as seen:
        player.play(asks)
    found: Logits = {}
    samplings = [[c for c in plan.chunks if c.samples] for plan in player.plans]
    for chunks, logits in zip((chunks for chunks in samplings if chunks), seen, strict=True):
        for chunk, row in zip(chunks, logits, strict=True):
            found[chunk.request_id, chunk.end - len(player.requests[chunk.request_id].prompt)] = row
    return found
