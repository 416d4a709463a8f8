"""When a recurrent state is kept, exported, published and reused, under chunked prefill with speculation.

**The problem.** A prefix cache for attention is easy: if tokens 0..m-1 are cached, so is every shorter prefix.
A KDA layer instead carries one matrix, overwritten token by token. `state@m`, the state after exactly m tokens,
says nothing about any other position, so a prefix of m tokens can be reused only if somebody kept `state@m`: a
*checkpoint*. States are large (about 5,500 tokens of an FP8 attention cache), so they are kept at few
positions, all multiples of the block size B: *boundaries*.

**Words.** A forward runs a *chunk*, tokens start .. end - 1, and leaves the state at its end. A kernel that can
*export* also hands out states at boundaries inside. A state that is kept is a *checkpoint*; it is *published*
when a lookup of another request may find it, in the commit after the forward that wrote it. P is the prompt's
length, N the number of known tokens (more than P when a preempted request replays its output), and prefill ends
at `finish` = max(P, N - 1). floor(x) is the largest boundary not above x.

**A policy is three values**; `PRESETS` names combinations.

1. *Retention*: which boundaries deserve a slot.

   | value | boundary |
   |---|---|
   | `resend` | floor(P - 1) - dropped: where the same prompt, sent again, looks (its last token is always run) |
   | `extend` | floor(P - ahead) - dropped: where a longer prompt that begins with this one looks |
   | `junction` | the end of the attention match of this request's own lookup, if no state was there |
   | `progress` | floor(end) of a chunk that does not finish prefill; rolling, dropped when prefill completes |
   | `decode` | the newest boundary above the prompt that verified tokens reached; rolling |
   | `chunk-ends` | every chunk end on a boundary; if the kernel cannot export also the stop floor(N) - dropped |
   | `crossed` | floor(end) of every chunk, by export unless the chunk ends there |
   | `all` | every boundary |

   A *rolling* checkpoint is private and replaced by the next one; it is published when its request leaves (finished,
   preempted or cancelled).

2. *Capability*, what the kernel can do and the preset uses, the smaller of the two: how many states a forward exports
   (0, 1, many; each a multiple of 16 from the chunk's start), and whether a chunk that does not finish prefill may end
   inside a block.

3. *Filing* of draft rows. The draft layer pairs the hidden state of token p-1 with token p. Filed under the token
   (`token`), a row depends only on tokens up to its own slot: *what is cached under a key is a function of the
   tokens the key covers*. That is the law, and why the draft layer's cache does not stand in the way of any hit.
   Filed under the hidden state's position, a block's last row depends on a token outside of the block, and a
   guard is needed: `drop` (a lookup gives up its last matching block: `dropped` = B), `key` (keys cover one more
   token: `ahead` = 1), `tag` (draft pages record that token: `ahead` = 1), or `off` (measure what it costs).

**The chunk end is derived, not chosen**: as far as the budget allows (rounded down to a multiple of 16, or of B if a
chunk may not end inside a block, unless it finishes prefill), such that every retained boundary inside the chunk is
exported, or is its end. A boundary that is wanted and cannot be exported costs a forward.

**A hit, a chunk boundary and a resume are one operation**: restore `state@m`, continue as after a chunk that ended
at m. Example, P = 32,320, budget 4,096, cold: seven chunks of 4,096 reach 28,672. `generic` (no export, B 512) stops
at 31,744 = floor(P) - 512 and needs a ninth forward for the tail; a resend hits 31,744. (If B divides P, that stop
lies a block above where a resend looks, which then misses it.) `ours` (any export, B 64)
takes the 3,648 tokens at once, exports 32,256 = floor(P - 1) on the way and ends on 32,320 = floor(P).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Retention = Literal["resend", "extend", "junction", "progress", "decode", "chunk-ends", "crossed", "all"]
Filing = Literal["token", "drop", "key", "tag", "off"]

MANY = 1 << 30  # exports of a kernel without a limit
# The architecture whose draft layer keeps attention-only state of its own, pointwise in (hidden, token).
DECLARED_DRAFT_ARCHITECTURE = "Glm5NextMTPModel"


@dataclass(frozen=True)
class Capability:
    """What a forward can do, as the model's ops report it."""

    exports: int = MANY
    export_grid: int = 16  # exports lie a multiple of this many tokens from the chunk's start
    free_chunk_ends: bool = True


@dataclass(frozen=True)
class Prefill:
    """The numbers of one request that the policy reads, in tokens. `junctions` come from its own lookup."""

    prompt: int
    known: int
    junctions: tuple[int, ...] = ()

    @property
    def finish(self) -> int:
        """Where prefill ends; from here on every forward samples."""
        return max(self.prompt, self.known - 1)


@dataclass(frozen=True)
class Chunk:
    """The policy's answer for one forward: where it ends, what it exports on the way, and what becomes of the
    states at `exports` and at `end`: `publishes` others may find, `rolling` is kept privately. `reason` is why
    it ends there."""

    end: int
    exports: tuple[int, ...] = ()
    publishes: tuple[int, ...] = ()
    rolling: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reuse:
    """What a lookup may skip: computing restarts at `state_at`; cached attention is valid to `attention_to`, so the
    tokens between are run against shared pages and write none of them."""

    state_at: int
    attention_to: int


@dataclass(frozen=True)
class Policy:
    """Retention, capability and filing for blocks of `block_size` tokens; `drafting`: a draft layer is in use."""

    name: str
    block_size: int
    retain: frozenset[Retention]
    capability: Capability
    filing: Filing
    drafting: bool = True
    # Where release 0.33 of vLLM differs: it exports one state, its stop, and only in the chunk that finishes.
    export_at_finish_only: bool = False
    # Public schedulers take the stop from the known tokens, which a replay makes more than the prompt.
    stop_from_known: bool = False

    @property
    def dropped(self) -> int:
        """Tokens that a lookup gives up behind its attention match."""
        return self.block_size if self.drafting and self.filing == "drop" else 0

    @property
    def ahead(self) -> int:
        """Tokens beyond a block that its key or tag needs to know."""
        return int(self.drafting and self.filing in ("key", "tag"))

    def floor(self, position: int) -> int:
        """The last boundary at or below a position; 0 below the first."""
        return max(position, 0) // self.block_size * self.block_size

    def chunk(
        self, start: int, room: int, request: Prefill, largest: int, denied: Collection[int] = ()
    ) -> Chunk:
        """The next forward of a request that has computed `start` tokens.

        `room`: tokens left for it in this step. `largest`: the most any step could give it, so that waiting
        helps if and only if `room` < `largest`. `denied`: boundaries for which no slot is free. `end` == `start`
        means: wait for a step with more room.
        """
        end, finish, reason = start + min(room, request.known - start), request.finish, "budget"
        if start >= finish:
            # States of a sampling step come from its verification: see decode_boundary.
            return Chunk(end, reason="decode")
        if end >= finish:
            reason = "end of prompt" if end == request.prompt else "end of known tokens"
        else:
            grid = self.capability.export_grid if self.retain else 1  # nothing to keep, nothing to align
            unit = grid if self.capability.free_chunk_ends else self.block_size
            aligned = end // unit * unit
            # A unit wider than any chunk is crossed in pieces.
            if aligned > start or unit <= largest:
                reason = reason if aligned == end else f"aligned to {unit}"
                end = aligned
        if not self.capability.free_chunk_ends and start % self.block_size:
            realigned = self.floor(start) + self.block_size
            if realigned < end:
                end, reason = realigned, "re-aligned to the block"
        if end <= start:
            return Chunk(start, reason=f"waits: {room} tokens are less than one step of {unit}")
        wanted = [m for m in self.retained(start, end, request) if m not in denied]
        for m in wanted:
            if m < end and not self._exportable(m, start, end, request, wanted):
                end, reason = m, f"stopped at {m:,}: retained, kernel exports {self._exports_text()}"
        return self._settled(start, end, request, denied, reason)

    def retained(self, start: int, end: int, request: Prefill) -> list[int]:
        """Boundaries in (start, end] that deserve a slot, ascending."""
        points = set(self.fixed_points(request, stop=True))
        if "all" in self.retain:
            points.update(range(self.floor(start) + self.block_size, end + 1, self.block_size))
        points.add(self._newest(end, request) or 0)
        return sorted(m for m in points if start < m <= end)

    def fixed_points(self, request: Prefill, *, stop: bool = False) -> set[int]:
        """The boundaries that depend on the request alone: those to publish, or (`stop`) those to end or export at."""
        points = set(request.junctions) if "junction" in self.retain else set()
        if "resend" in self.retain:
            last = request.known if stop and self.stop_from_known else request.prompt
            points.add(self.floor(last - 1) - self.dropped)
        if "extend" in self.retain:
            points.add(self.floor(request.prompt - self.ahead) - self.dropped)
        if stop and "chunk-ends" in self.retain and not self.capability.exports:
            points.add(self.floor(request.known) - self.dropped)
        return {m for m in points if m > 0}

    def reuse(self, num_tokens: int, matched: int, states: Iterable[int]) -> Reuse:
        """What a request of `num_tokens` known tokens may skip, when the index matched pages of its first
        `matched` tokens in every attention group in use and holds complete checkpoints at `states`, deepest first."""
        attention_to = max(self.floor(min(num_tokens - 1, matched)) - self.dropped, 0)
        return Reuse(next((m for m in states if m <= attention_to), 0), attention_to)

    def publishable(self, verified: int, known: int) -> int:
        """How many tokens' worth of full blocks may be published: verified, and the token their key or tag needs
        is known."""
        return self.floor(min(verified, known - self.ahead))

    def _newest(self, end: int, request: Prefill) -> int | None:
        """The boundary that moves with the end of the chunk, if a retention asks for one."""
        kind: Retention | None = (
            "progress" if end < request.finish else "decode" if end > request.prompt else None
        )
        aligned_end = "chunk-ends" in self.retain and end % self.block_size == 0
        return self.floor(end) if aligned_end or {"crossed", kind} & self.retain else None

    def _exportable(self, m: int, start: int, end: int, request: Prefill, wanted: list[int]) -> bool:
        if self.export_at_finish_only and (end < request.finish or m in request.junctions):
            return False
        # Exports are handed out from the chunk's start.
        on_grid = (m - start) % self.capability.export_grid == 0
        return on_grid and wanted.index(m) < self.capability.exports

    def _settled(self, start: int, end: int, request: Prefill, denied: Collection[int], reason: str) -> Chunk:
        """The chunk with its end decided: everything wanted below the end is exported."""
        wanted = [m for m in self.retained(start, end, request) if m not in denied]
        exports = tuple(m for m in wanted if m < end)
        if exports and end >= request.finish:
            reason = "tail joined"
        written = {*exports, end}.difference(denied)
        publishes = tuple(sorted(m for m in written if self._published(m, end, request)))
        newest = self._newest(end, request)
        rolling = newest if newest in wanted and newest not in publishes else None
        return Chunk(end, exports, publishes, rolling, reason)

    def _published(self, m: int, end: int, request: Prefill) -> bool:
        """Whether others may find the state that a chunk up to `end` left at m."""
        crossed = "crossed" in self.retain and m == self.floor(end)
        ended = "chunk-ends" in self.retain and m == end
        kept = crossed or ended or "all" in self.retain or m in self.fixed_points(request)
        return kept and m % self.block_size == 0

    def decode_boundary(self, start: int, verified: int) -> tuple[int | None, bool]:
        """The newest boundary that verified tokens crossed in a decode step, if it is kept, and whether it is
        published at once (else it is rolling)."""
        boundary = self.floor(verified)
        at_once = bool({"chunk-ends", "all"} & self.retain)
        kept = boundary > start and (at_once or "decode" in self.retain)
        return (boundary if kept else None), at_once

    def outlasts_prefill(self, boundary: int, prompt: int) -> bool:
        """Whether a rolling checkpoint stays when prefill completes: the newest decode boundary of a replay does."""
        return "decode" in self.retain and boundary > prompt

    def _exports_text(self) -> str:
        return "many" if self.capability.exports >= MANY else str(self.capability.exports)


SPARSE_EXPORT, NO_EXPORT = (
    Capability(exports=1, free_chunk_ends=False),
    Capability(exports=0, free_chunk_ends=False),
)
OURS: frozenset[Retention] = frozenset({"resend", "extend", "junction", "progress", "decode"})

# Block sizes are those the public schedulers were measured with; `ours` can afford smaller ones.
PRESETS: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("generic", 512, frozenset({"chunk-ends"}), NO_EXPORT, "drop", stop_from_known=True),
        Policy(
            "seed", 512, frozenset({"chunk-ends", "crossed"}), SPARSE_EXPORT, "drop", stop_from_known=True
        ),
        Policy(
            "vllm-0.33",
            512,
            frozenset({"resend", "junction"}),
            SPARSE_EXPORT,
            "key",
            export_at_finish_only=True,
            stop_from_known=True,
        ),
        Policy("ours", 64, OURS, Capability(), "token"),
        Policy("none", 64, frozenset(), Capability(), "off"),
    )
}


def make_policy(
    preset: str,
    capability: Capability,
    *,
    draft_architecture: str | None,
    block_size: int | None = None,
    retain: Iterable[str] | None = None,
    filing: str | None = None,
) -> Policy:
    """A preset under a kernel's capability (which masks the preset's wishes, never the reverse) and a drafter.

    `draft_architecture` None: no drafter; filing then has no effect. A drafter that does not declare independent,
    attention-only draft state turns `seed` into `generic` and may not use `token` filing. ValueError on unknown names.
    """
    declared = draft_architecture in (None, DECLARED_DRAFT_ARCHITECTURE)
    base = PRESETS[_known(preset, PRESETS, "policy")]
    if preset == "seed" and not (declared and capability.exports):
        base = PRESETS["generic"]
    chosen = base.filing if filing is None else _known(filing, get_args(Filing), "draft filing")
    if chosen == "token" and not declared:
        raise ValueError(
            f"draft filing 'token' needs a drafter whose rows are pointwise in (hidden, token); {draft_architecture}"
            " does not declare that: use drop, key or tag"
        )
    size = base.block_size if block_size is None else block_size
    if size <= 0 or size % capability.export_grid:
        raise ValueError(f"block size is {size}, expected a multiple of {capability.export_grid}")
    names = (
        base.retain if retain is None else [_known(name, get_args(Retention), "retention") for name in retain]
    )
    return replace(
        base,
        name=preset,
        block_size=size,
        retain=frozenset(names),
        capability=Capability(
            min(capability.exports, base.capability.exports),
            capability.export_grid,
            capability.free_chunk_ends and base.capability.free_chunk_ends,
        ),
        filing=chosen,
        drafting=draft_architecture is not None,
    )


def _known(name: str, names: Iterable[str], what: str) -> Any:
    if name not in names:
        raise ValueError(f"{what} is {name!r}, expected one of {', '.join(names)}")
    return name
