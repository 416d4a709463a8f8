"""In bfloat16 a request's logits do not depend, in one bit, on who shares batches of one shape; across shapes, and
with states kept in bfloat16, every token is the best of an uncached forward, or within a stated gap of it.

Products run in bfloat16 here on every machine: harder than the float32 ones of a CPU without such instructions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from model import glm5_next
from model.glm5_next import Glm5Next
from scheduler.checkpoint_policy import DECLARED_DRAFT_ARCHITECTURE
from tests import driver, tiny
from tests.engine.drafts import Drafts, Script
from tests.engine.equality import NEW_TOKENS, WHOLE, Ask, Player, Subject, policy_of, rounds, subject

# Twice the largest difference of any logit from an uncached forward over the same tokens, as two logits may move
# apart: 0.0625 measured with products in bfloat16, 0.0194 with states in bfloat16.
GAP, STATE_GAP = 0.125, 0.04
Logits = dict[tuple[int, int], Tensor]  # [vocab] by request and index of the token


@lru_cache
def subject_in_bfloat16(name: str) -> Subject:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm5_next, "matmul_dtype", lambda dtype, device: dtype)
        return subject(name, torch.bfloat16)


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
    """Play rounds; the logits that every token was chosen from."""
    with sampled(model) as seen:
        player.play(asks)
    sampling = [[chunk for chunk in plan.chunks if chunk.samples] for plan in player.plans]
    found: Logits = {}
    for chunks, logits in zip(filter(None, sampling), seen, strict=True):
        for chunk, row in zip(chunks, logits, strict=True):
            found[chunk.request_id, chunk.end - len(player.requests[chunk.request_id].prompt)] = row
    return found


def largest_gap(player: Player, model: Glm5Next) -> float:
    """How far the chosen tokens lie below the best ones of an uncached forward over the same tokens."""
    gaps = [0.0]
    for request in player.requests:
        rows = driver.logits(model, [*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :]
        chosen = rows.gather(1, torch.tensor(request.output).unsqueeze(1)).squeeze(1)
        gaps.append(float((rows.amax(1) - chosen).max()))
    return max(gaps)


@pytest.mark.parametrize("budget", [24, WHOLE])
@pytest.mark.parametrize(("name", "policy"), [("tiny", "generic"), ("tiny", "ours"), ("embedded", "ours")])
def test_a_row_has_the_same_bits_whoever_its_batch_mates_are(name: str, policy: str, budget: int) -> None:
    of, players, logits = subject_in_bfloat16(name), [], []
    for seed in (1, 2):
        first, *others = rounds("mates", of)[0]
        strangers = [
            Ask(tiny.token_ids(len(ask.prompt), seed + i * 10, of.model.config.vocab_size), ask.new_tokens)
            for i, ask in enumerate(others)
        ]
        players.append(Player(policy_of(policy, "token"), budget, of.model))
        logits.append(logits_of(players[-1], of.model, [[first, *strangers]] * 2))
    shapes = [[[(c.start, c.end) for c in plan.chunks] for plan in player.plans] for player in players]
    assert shapes[0] == shapes[1]
    assert players[0].requests[3].num_cached_tokens > 0
    own = [key for key in logits[0] if key[0] in (0, 3)]  # the shared prompt, cold and as a hit
    assert len(own) == 2 * max(NEW_TOKENS) and all(torch.equal(logits[0][key], logits[1][key]) for key in own)
    assert not torch.equal(logits[0][1, 0], logits[1][1, 0])


@pytest.mark.parametrize(("budget", "scenario"), [(16, "mates"), (64, "extend"), (WHOLE, "branch")])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("tiny", "generic"), ("tiny", "seed"), ("tiny", "vllm-0.33"), ("tiny", "ours"), ("embedded", "ours")],
)
def test_other_shapes_choose_tokens_within_the_gap(
    name: str, policy: str, budget: int, scenario: str
) -> None:
    of = subject_in_bfloat16(name)
    player = Player(policy_of(policy, "token"), budget, of.model)
    player.play(rounds(scenario, of))
    assert any(request.num_cached_tokens for request in player.requests)
    assert largest_gap(player, of.model) <= GAP


@pytest.mark.parametrize("drafter", ["perfect", "adversarial", None])
@pytest.mark.parametrize(
    ("name", "budget", "scenario"), [("tiny", 16, "mates"), ("embedded", WHOLE, "extend")]
)
def test_verified_tokens_lie_within_the_gap(
    name: str, budget: int, scenario: str, drafter: str | None
) -> None:
    of = subject_in_bfloat16(name)
    drafts = Drafts(3, of.mtp, Script(drafter, 3, of.answer) if drafter else None)
    policy = policy_of("ours", "token", DECLARED_DRAFT_ARCHITECTURE)
    player = Player(policy, budget, of.model, drafts=drafts)
    player.play(rounds(scenario, of))
    assert any(request.num_cached_tokens for request in player.requests)
    assert drafter is None or any(accepted for _, accepted in player.verified)
    assert largest_gap(player, of.model) <= GAP


@pytest.mark.parametrize("budget", [16, WHOLE])
@pytest.mark.parametrize("name", ["tiny", "embedded"])
def test_states_in_bfloat16_hit_within_the_gap(name: str, budget: int) -> None:
    of = subject(name)
    player = Player(policy_of("ours", "token"), budget, of.model, state_dtype=torch.bfloat16)
    logits = logits_of(player, of.model, rounds("resend", of))
    cold, warm = player.requests
    assert warm.num_cached_tokens == (len(warm.prompt) - 1) // 16 * 16
    assert (logits[cold.request_id, 0] - logits[warm.request_id, 0]).abs().max() <= STATE_GAP / 2
    assert largest_gap(player, of.model) <= STATE_GAP


def test_decodes_in_scattered_slots_keep_states_in_bfloat16() -> None:
    of = subject("tiny")
    player = Player(policy_of("none", "off"), WHOLE, of.model, state_dtype=torch.bfloat16)
    player.play(rounds("mates", of)[:1])  # the second finishes early: the first and the third slot go on
    slots = [[chunk.recurrent_slot for chunk in plan.chunks] for plan in player.plans]
    assert [0, 2] in slots and largest_gap(player, of.model) <= STATE_GAP
