"""When a recurrent state is kept, exported, published and reused, under chunked prefill with speculation.

**The problem.** A prefix cache for attention is easy: if tokens 0..m-1 are cached, so is every shorter prefix. A KDA
layer instead carries one matrix, overwritten token by token: m tokens can be reused only if somebody kept `state@m`,
the state after exactly m tokens, as a *checkpoint*. One weighs as much as about 5,500 tokens of FP8 attention cache, so
few are kept, all at *boundaries*, multiples of the block size B. floor(x) is the largest boundary not above x.

**Words.** P is the prompt's length, N the number of known tokens (more than P when a preempted request replays its
output); prefill ends at `finish` = max(P, N - 1). A forward runs a *chunk*, tokens start .. end - 1, and leaves the
state at its end; a kernel that can *export* also hands out states inside. A checkpoint is *published* when other
requests may find it, from its forward's commit on; *rolling* when it is private, replaced by the next one, and
published only if its request leaves (finished, preempted or cancelled).

**A policy is three values.** *Retention*: which boundaries above 0 deserve a slot.

| value | boundary | becomes |
|---|---|---|
| `resend` | floor(P - 1) - dropped: where the same prompt, sent again, looks (its last token always runs) | published |
| `extend` | floor(P - ahead) - dropped: where a longer prompt that begins with this one looks | published |
| `junction` | `attention_to` of the request's own lookup, if above its `state_at` (both defined below) | published |
| `progress` | floor(end) of a chunk that does not finish prefill | rolling, dropped when prefill is complete |
| `decode` | floor(verified tokens) above P; also floor(end) of the chunk that ends a replay | rolling |
| `chunk-ends` | ends on a boundary, in decode every boundary; without export also floor(N) - dropped | published |
| `crossed`, `all` | floor(end) of every prefill chunk; every boundary | published |

*Capability*: how many states a forward exports (0, 1, many; each a multiple of 16 from the chunk's start), and whether
a chunk that does not finish prefill may end inside a block (*free* ends, else *floored*). A preset may use less.

*Filing* of draft rows. The draft layer pairs the hidden state of token p-1 with token p. Filed under the token
(`token`), a row depends on no token above its own slot: *what is cached under a key is a function of the tokens the key
covers*. That is the law, and why draft rows stand in the way of no hit. Filed under the hidden state's position, a
block's last row depends on a token outside: a lookup gives up its last matching block (`drop`: dropped = B), keys cover
one token more (`key`: ahead = 1), draft pages record that token (`tag`: ahead = 1), or nothing is done (`off`, to
measure the cost). Else, and always without a drafter, dropped = ahead = 0.

**Where does a chunk end?** As far as the budget reaches, N at most; then, in this order:
1. Short of `finish`, the end (not the length) is rounded down to a multiple of the unit: B for floored ends, 16 for
   free ones (1 if nothing is retained). If no token remains, the request waits for a step with more room, unless the
   unit is wider than any step's room: then the end stays as it was, and the block is crossed in pieces.
2. If ends are floored and the chunk starts inside a block, it ends at the next boundary at the latest.
3. The lowest retained boundary inside that cannot be exported becomes the end. It costs a forward.

**What becomes of the states?** All retained boundaries strictly inside are exported; the end's state is there anyway.
At commit each becomes what the table says; published, if both. In a replay public presets export or end at the `resend`
of N but publish that of P: an export may become neither, and is freed.

**What may a lookup skip?** If A of a request's n tokens match pages, `attention_to` = floor(min(n - 1, A)) - dropped,
and `state_at` is the deepest checkpoint not above it, else 0. The request continues as after a chunk that ended at
`state_at`; up to `attention_to` it reads the shared pages and writes none.

**The presets**, for a cold prompt with a drafter; F = floor(P), R = floor(P - 1):

| preset | B | ends | stops inside | exports, if inside | publishes | a resend hits |
|---|---|---|---|---|---|---|
| `generic` | 512 | floored | F - B | nothing | all ends on boundaries | the deepest of these not above R - B |
| `seed` | 512 | floored | none | F | all ends on boundaries, F | the deepest of these not above R - B |
| `vllm-0.33` | 512 | floored | none | R | R | R |
| `ours` | 64 | free | none | R, F, floor(end) | R, F; floor(end) is rolling | R |
| `none` | 64 | free | none | nothing | nothing | 0 |

`vllm-0.33` exports only in the chunk that finishes, and no junction: it ends a chunk. `seed` is `generic` on a kernel
without export or with a drafter other than `Glm5NextMTPModel`. P = 32,320, budget 4,096: seven chunks of 4,096 reach
28,672. `generic` stops at 31,744 = F - 512, where a resend looks, and needs a ninth forward. `seed` runs to the end and
exports 32,256, which a resend may not use: it hits 28,672. `ours` exports 32,256 on the way to 32,320, and a resend
hits it.
P = 5,000, B 2,304, budget 1,024: floored chunks end at 1,024, 2,048, 2,304, 3,328, 4,352, 4,608 and 5,000.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Retention = Literal["resend", "extend", "junction", "progress", "decode", "chunk-ends", "crossed", "all"]
Filing = Literal["token", "drop", "key", "tag", "off"]

MANY = 1 << 30  # exports of a kernel without a limit
DECLARED_DRAFT_ARCHITECTURE = "Glm5NextMTPModel"  # its rows are made from (hidden, token) alone


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
    """One forward: its end and why it ends there, what it exports, and which states become published or rolling."""

    end: int
    exports: tuple[int, ...] = ()
    publishes: tuple[int, ...] = ()
    rolling: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reuse:
    """What a lookup found: computing restarts at `state_at`, cached attention is valid to `attention_to` tokens."""

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
    export_at_finish_only: bool = False  # vLLM 0.33: in the chunk that finishes prefill, and no junction
    stop_from_known: bool = False  # public schedulers stop for N, which a replay makes more than P

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
        """The next forward of a request that has computed `start` tokens; it has to wait if `end` == `start`.
        `room`: tokens left for it in this step. `largest`: the most any step could give it; waiting helps if and only
        if `room` is less. `denied`: boundaries for which no slot is free."""
        if start >= request.finish:
            # States of a sampling step come from its verification: see decode_boundary.
            return Chunk(start + min(room, request.known - start), reason="decode")
        end, reason = self._farthest(start, room, request, largest)
        if end == start:
            return Chunk(start, reason=reason)
        wanted = sorted(self._retained(start, end, request).difference(denied))
        for rank, m in enumerate(wanted):
            if m < end and (obstacle := self._obstacle(m, rank, start, end, request)):
                end, reason = m, f"stopped at {m:,}: retained, {obstacle}"
        exports = tuple(m for m in wanted if m < end)
        reason = "tail joined" if exports and end >= request.finish else reason
        written = {*exports, end}.difference(denied)
        publishes = written & self._retained(start, end, request, published=True)
        rolling = (written - publishes) & {self._rolling(end, request)}
        return Chunk(end, exports, tuple(sorted(publishes)), max(rolling, default=None), reason)

    def _farthest(self, start: int, room: int, request: Prefill, largest: int) -> tuple[int, str]:
        """How far the budget and the alignment of ends allow, and which of them decided."""
        end, reason = start + min(room, request.known - start), "budget"
        unit = self.capability.export_grid if self.retain else 1  # nothing to keep, nothing to align
        unit = unit if self.capability.free_chunk_ends else self.block_size
        aligned = end // unit * unit
        if end >= request.finish:
            reason = "end of prompt" if end == request.prompt else "end of known tokens"
        elif aligned < end and (aligned > start or unit <= largest):
            end, reason = aligned, f"aligned to {unit}"
        following = self.floor(start) + self.block_size
        if not self.capability.free_chunk_ends and start % self.block_size and following < end:
            end, reason = following, "re-aligned to the block"
        wait = f"waits: {room} tokens are less than one step of {unit}"
        return (end, reason) if end > start else (start, wait)

    def _retained(self, start: int, end: int, request: Prefill, *, published: bool = False) -> set[int]:
        """Boundaries in (start, end] that the chunk must export or end at, or those that others may find after it."""
        points = set(request.junctions) if "junction" in self.retain else set()
        if "resend" in self.retain:
            last = request.known if self.stop_from_known and not published else request.prompt
            points.add(self.floor(last - 1) - self.dropped)
        if "extend" in self.retain:
            points.add(self.floor(request.prompt - self.ahead) - self.dropped)
        if "chunk-ends" in self.retain and not self.capability.exports:
            points.add(self.floor(request.known) - self.dropped)
        if "crossed" in self.retain or ("chunk-ends" in self.retain and end == self.floor(end)):
            points.add(self.floor(end))
        if "all" in self.retain:
            points.update(range(self.floor(start), end + 1, self.block_size))
        if not published:
            points.add(self._rolling(end, request))
        return {m for m in points if start < m <= end}

    def _rolling(self, end: int, request: Prefill) -> int:
        """The boundary to keep privately after a chunk up to `end`, 0 if there is none."""
        progress, decode = "progress" in self.retain, "decode" in self.retain and end > request.prompt
        return self.floor(end) if (progress if end < request.finish else decode) else 0

    def _obstacle(self, m: int, rank: int, start: int, end: int, request: Prefill) -> str:
        """Why the state at m, with `rank` retained boundaries before it, cannot be exported; empty if it can."""
        if rank >= self.capability.exports:
            return f"kernel exports {self.capability.exports}"
        if (m - start) % self.capability.export_grid:
            return f"no multiple of {self.capability.export_grid} from the chunk's start"
        if self.export_at_finish_only and end < request.finish:
            return "exports only in the chunk that finishes"
        return "exports no junction" if self.export_at_finish_only and m in request.junctions else ""

    def reuse(self, num_tokens: int, matched: int, states: Iterable[int]) -> Reuse:
        """What a request of `num_tokens` known tokens may skip, when the index matched pages of its first
        `matched` tokens in every attention group in use and holds complete checkpoints at `states`, deepest first."""
        attention_to = max(self.floor(min(num_tokens - 1, matched)) - self.dropped, 0)
        return Reuse(next((m for m in states if m <= attention_to), 0), attention_to)

    def publishable(self, verified: int, known: int) -> int:
        """Tokens whose full blocks may be published: verified, and the token that their key or tag needs is known."""
        return self.floor(min(verified, known - self.ahead))

    def decode_boundary(self, start: int, verified: int) -> tuple[int | None, bool]:
        """The newest boundary crossed by a decode step, if it is kept, and whether it is published at once."""
        boundary, at_once = self.floor(verified), bool({"chunk-ends", "all"} & self.retain)
        kept = boundary > start and (at_once or "decode" in self.retain)
        return (boundary if kept else None), at_once

    def outlasts_prefill(self, boundary: int, prompt: int) -> bool:
        """Whether a rolling checkpoint stays when prefill completes: the newest decode boundary of a replay does."""
        return "decode" in self.retain and boundary > prompt

    def hands_over(self, computed: int, request: Prefill) -> bool:
        """Whether the running state itself, of a request that leaves after `computed` tokens, is to be published."""
        kind = "progress" if computed < request.finish else "decode"
        return kind in self.retain and 0 < computed == self.publishable(computed, request.known)


def _public(name: str, exports: int, filing: Filing, *retain: Retention) -> Policy:
    """A public scheduler's rules, for blocks of the size they were measured with."""
    floored = Capability(exports, free_chunk_ends=False)
    return Policy(name, 512, frozenset(retain), floored, filing, stop_from_known=True)


_OURS: frozenset[Retention] = frozenset({"resend", "extend", "junction", "progress", "decode"})
_POLICIES = (
    _public("generic", 0, "drop", "chunk-ends"),
    _public("seed", 1, "drop", "chunk-ends", "crossed"),
    replace(_public("vllm-0.33", 1, "key", "resend", "junction"), export_at_finish_only=True),
    Policy("ours", 64, _OURS, Capability(), "token"),
    Policy("none", 64, frozenset(), Capability(), "off"),
)
PRESETS: Mapping[str, Policy] = {policy.name: policy for policy in _POLICIES}


def make_policy(
    preset: str,
    capability: Capability,
    *,
    draft_architecture: str | None,
    block_size: int | None = None,
    retain: Iterable[str] | None = None,
    filing: str | None = None,
) -> Policy:
    """A preset under a kernel's capability, which masks the preset's wishes, and a drafter (None: there is none). A
    drafter that does not declare independent, attention-only draft state, or a kernel without export, turns `seed` into
    `generic`; that drafter may not use `token` filing. `retain` may be `none` alone. ValueError on unknown names."""
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
    names = list(base.retain if retain is None else retain)
    kept = frozenset(_known(name, get_args(Retention), "retention") for name in names if names != ["none"])
    free = capability.free_chunk_ends and base.capability.free_chunk_ends
    able = Capability(min(capability.exports, base.capability.exports), capability.export_grid, free)
    named = replace(base, name=preset, drafting=draft_architecture is not None)
    return replace(named, block_size=size, retain=kept, capability=able, filing=chosen)


def _known(name: str, names: Iterable[str], what: str) -> Any:
    if name not in names:
        raise ValueError(f"{what} is {name!r}, expected one of {', '.join(names)}")
    return name
