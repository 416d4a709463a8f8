"""The policy's chunk, fitted to the slots that are there.

A request needs its running slot; every other state is a wish. If a chunk leaves more states than there are slots, the
deepest boundaries are struck and the chunk is derived again without them, so that it never stops for a state that
nobody can keep. The reason names what was struck. Nothing here takes a slot.
"""

from collections.abc import Container
from dataclasses import replace

from scheduler.checkpoint_policy import Chunk, Policy, Prefill


def fitted_chunk(
    policy: Policy, prefill: Prefill, start: int, room: int, largest: int, num_states: int, num_slots: int
) -> Chunk:
    """The chunk from `start` that leaves at most `num_states` states; `room` and `largest` as for Policy.chunk, but a
    decode takes all of `room`: its row and its drafts. `num_slots`: how many there are in all, for the reason."""
    denied: set[int] = set()
    while True:
        if start < prefill.finish:
            chunk = policy.chunk(start, room, prefill, largest, denied)
        else:
            chunk = _decode(policy, start, start + room, denied)
        wanted = states_of(chunk)
        if len(wanted) <= num_states:
            break
        denied.update(wanted[num_states:])
    if not denied:
        return chunk
    struck, in_use = ", ".join(f"{m:,}" for m in sorted(denied)), num_slots - num_states
    return replace(chunk, reason=f"{chunk.reason}; no slot for {struck}: {in_use} of {num_slots} in use")


def states_of(chunk: Chunk) -> list[int]:
    """Boundaries whose state a chunk leaves in a slot of its own, ascending."""
    rolling = () if chunk.rolling is None else (chunk.rolling,)
    return sorted({*chunk.exports, *chunk.publishes, *rolling})


def _decode(policy: Policy, start: int, end: int, denied: Container[int]) -> Chunk:
    """A decode step, and the boundary that it crosses if its drafts are accepted, if the policy keeps one."""
    boundary, at_once = policy.decode_boundary(start, end)
    if boundary is None or boundary in denied:
        return Chunk(end, reason="decode")
    if at_once:
        return Chunk(end, publishes=(boundary,), reason="decode")
    return Chunk(end, rolling=boundary, reason="decode")
