"""Too few slots and pages cost recomputation and time, never a token."""

import pytest

from tests.engine.equality import WHOLE, Player, policy_of, rounds, subject

MAX_RUNNING = 3
POLICIES = ("generic", "seed", "vllm-0.33", "ours", "none")


def play(player: Player, *scenarios: str) -> None:
    """Play scenarios and compare every token with those of the prompt alone."""
    of = subject("tiny")
    for scenario in scenarios:
        player.play(rounds(scenario, of))
    answers = [of.answer(request.prompt)[: request.max_tokens] for request in player.requests]
    assert [request.output for request in player.requests] == answers


@pytest.mark.parametrize(("budget", "checkpoint_slots"), [(16, 0), (WHOLE, 0), (24, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_hardly_a_slot_beyond_the_running_ones(policy: str, budget: int, checkpoint_slots: int) -> None:
    player = Player(policy_of(policy, "token"), budget, subject("tiny").model,
                    num_slots=MAX_RUNNING + checkpoint_slots, max_running=MAX_RUNNING)  # fmt: skip
    play(player, "mates", "branch", "extend")
    denied = any("no slot for" in chunk.reason for plan in player.plans for chunk in plan.chunks)
    assert denied or player.scheduler.blocks.slots.num_evictions or policy == "none"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_slot_runs_without_checkpoints(policy: str) -> None:
    player = Player(policy_of(policy, "token"), 16, subject("tiny").model, num_slots=1, max_running=1)
    play(player, "mates", "resend")
    assert not player.scheduler.blocks.slots.num_keyed


@pytest.mark.parametrize("budget", [24, WHOLE])
@pytest.mark.parametrize("policy", POLICIES)
def test_pages_for_little_more_than_the_longest_request(policy: str, budget: int) -> None:
    # 144 tokens; the branch, 89 tokens and its answer, and the next turn, 128 and its answer, fit alone.
    chosen = policy_of(policy, "token")
    player = Player(chosen, budget, subject("tiny").model, num_blocks=-(-144 // chosen.block_size),
                    max_running=MAX_RUNNING)  # fmt: skip
    play(player, "mates", "branch", "extend", "mates")
    if budget < WHOLE:
        assert player.scheduler.num_preemptions
    assert player.scheduler.blocks.groups[0].num_evictions or policy == "none"
