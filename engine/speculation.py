"""The round: one step of every request, the draft layer speculating on top of the trunk.

    1. verify     one trunk forward over every chunk: known tokens and drafts of whoever decodes, beside prompts
    2. accept     the longest run of drafts that sampling lets stand, and one token of the trunk's own
    3. roll back  recurrent states to the accepted run, by replay; checkpoints at boundaries inside it
    4. catch up   the draft layer's rows of all tokens that are known now, from the trunk's hidden states
    5. draft      the next tokens, one pass each, from the last row; the next round verifies them

Example: x_40 is known and not computed, d_1 d_2 d_3 are its drafts. The trunk runs (x_40, d_1, d_2, d_3) at positions
40 to 43. Two drafts stand: `num_accepted_drafts` is 2, and the new tokens, `num_new_tokens` = 3 of them, are x_41 =
d_1, x_42 = d_2 and x_43, chosen from d_2's row. The recurrent state becomes that of 43 tokens. The draft layer, whose
rows reached x_40, writes those of x_41, x_42 and x_43 from h_40, h_41 and h_42, and drafts what follows x_43.

Invariants: whatever a request keeps after a round is a function of its known tokens; in pages and rings rejected rows
stay, and are overwritten before anything reads them. Counts belong to the request, never to its row in the batch. A
request's *companion* holds its last hidden state and the draft layer's raw index rows of the pool under way, so that
to the draft layer the end of a chunk, a hit and a resume are one thing: it goes on at `draft_start`.
Without drafts there is nothing to roll back, and without a draft layer a round ends there.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling import Sampler, SamplingError, token_log_probs
from model.batch import Batch, Export, Segment
from model.glm5_next import Glm5Next, TrunkCache
from model.mtp import DraftCache, Mtp
from scheduler.plan import Checkpoint, ScheduledChunk, TokenLogProbs


@dataclass
class RequestTensors:
    """What a request has on the engine's side for all its life: how it samples, and its block tables by group."""

    sampler: Sampler
    num_top: int | None = (
        None  # alternatives to list with each token's log-probability; None: no log-probabilities
    )
    tables: list[Tensor] = field(default_factory=list)  # [num_blocks] int64 each
    proposals: list[Tensor | None] = field(default_factory=list)  # what its drafts were drawn from


@dataclass
class Turn:
    """One request's part of a round; filled in step by step."""

    chunk: ScheduledChunk
    own: RequestTensors
    segment: Segment  # its rows in the trunk's batch
    hidden: Tensor = field(init=False)  # [rows, hidden_size], the trunk's
    tokens: tuple[int, ...] = ()  # new ones: accepted drafts and one more
    log_probs: tuple[TokenLogProbs, ...] = ()
    draft_segment: Segment | None = None  # its rows in the draft layer's batch
    drafts: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def computed(self) -> int:
        """Tokens that the trunk has computed and that stand."""
        return self.chunk.end - self.chunk.num_drafts + max(len(self.tokens) - 1, 0)

    @property
    def reached(self) -> list[Checkpoint]:
        """Checkpoints at boundaries that the accepted run has reached."""
        return [checkpoint for checkpoint in self.chunk.exports if checkpoint.position <= self.computed]

    @property
    def known(self) -> tuple[int, ...]:
        """Tokens known from the chunk's start on: its own without rejected drafts, and the one that follows, sampled or
        given by the prompt, if it is known."""
        verified = self.chunk.token_ids[: len(self.chunk.token_ids) - self.chunk.num_drafts]
        following = self.chunk.next_token
        return verified + (self.tokens if following is None else (following,))


class Speculation:
    """Rounds on one trunk and its cache: steps 1 to 3, and those of the drafter, if there is one."""

    def __init__(self, trunk: Glm5Next, cache: TrunkCache, drafter: "Drafter | None") -> None:
        self.trunk, self.cache, self.drafter = trunk, cache, drafter

    def round(self, batch: Batch, turns: list[Turn]) -> None:
        """Run the chunks; the turns are those of the batch's segments. A turn whose logits can't be sampled gets an
        `error` and leaves the round; the others go on."""
        self.verify(batch, turns)
        self.accept(turns)
        standing = [turn for turn in turns if turn.error is None]
        self.roll_back(standing)
        if self.drafter is not None and standing:
            self.drafter.draft(standing, self.drafter.catch_up(standing))

    def verify(self, batch: Batch, turns: list[Turn]) -> None:
        """Step 1. Rows of drafts are written to pages and rings like any others."""
        hidden = self.trunk.forward(batch, self.cache)
        for turn in turns:
            turn.hidden = hidden[turn.segment.rows]

    def accept(self, turns: list[Turn]) -> None:
        """Step 2. Every new token is chosen from its own row: the first from that of the last known token, each other
        from that of the draft before it."""
        sampling = [turn for turn in turns if turn.chunk.samples]
        if not sampling:
            return
        counts = [1 + turn.chunk.num_drafts for turn in sampling]
        rows = [turn.hidden[-count:] for turn, count in zip(sampling, counts, strict=True)]
        logits = self.trunk.logits(torch.cat(rows)).split(counts)
        for turn, count, own in zip(sampling, counts, logits, strict=True):
            drafts = turn.chunk.token_ids[len(turn.chunk.token_ids) - count + 1 :]
            try:
                turn.tokens = turn.own.sampler.verify(own, drafts, turn.own.proposals[: count - 1])
            except SamplingError as error:
                turn.error = str(error)
                continue
            if turn.own.num_top is not None:
                turn.log_probs = token_log_probs(own[: len(turn.tokens)], turn.tokens, turn.own.num_top)

    def roll_back(self, turns: list[Turn]) -> None:
        """Step 3. A verification left the running slot as it was; replay brings it to the last token that stands."""
        for turn in turns:
            chunk, segment = turn.chunk, turn.segment
            if segment.replay is not None:
                exports = [Export(c.position - chunk.start, c.slot) for c in turn.reached]
                exports.append(Export(len(turn.tokens), segment.slot))
                self.cache.recurrent.roll_back(segment.slot, segment.replay, tuple(exports))


@dataclass
class Drafter:
    """Steps 4 and 5: the draft layer, its cache, and how it drafts: up to `depth` tokens; `index_share` as in
    model/mtp.py."""

    mtp: Mtp
    cache: DraftCache
    depth: int
    index_share: bool

    def catch_up(self, turns: list[Turn]) -> Tensor:
        """Step 4. Write the rows of tokens that became known; later passes need no more of them. Returns the residual
        rows [rows, hidden_size], of which step 5 reads each request's last."""
        mtp, cache = self.mtp, self.cache
        token_ids: list[int] = []
        previous = []
        for turn in turns:
            chunk, row = turn.chunk, len(token_ids)
            # Where in the chunk the first token without draft row is; 0 if the chunk goes on where drafting stopped.
            first = chunk.draft_start + 1 - mtp.first_slot - chunk.start
            token_ids += turn.known[first:]
            if first == 0:  # its hidden state came with the forward before
                previous.append(cache.hidden[chunk.companion_slot].unsqueeze(0))
            previous.append(turn.hidden[max(first - 1, 0) : first - 1 + len(token_ids) - row])
            exports = tuple(Export(c.position - chunk.draft_start, c.companion or 0) for c in turn.reached)
            turn.draft_segment = Segment(
                row, len(token_ids) - row, chunk.draft_start, chunk.companion_slot or 0, turn.own.tables[1],
                exports, chunk.write_from,
            )  # fmt: skip
        ids = torch.tensor(token_ids, dtype=torch.int64, device=mtp.trunk.device)
        x = mtp.enter(ids, torch.cat(previous))
        mtp.write(x, Batch(ids, tuple(t.draft_segment for t in turns if t.draft_segment)), cache.mla)
        for turn in turns:  # only now: `previous` reads what the forward before left there
            self.leave_companions(turn)
        return x

    def leave_companions(self, turn: Turn) -> None:
        """Keep the hidden states before every boundary that stands, and before the next token."""
        hidden, start = self.cache.hidden, turn.chunk.start
        for checkpoint in turn.reached:
            hidden[checkpoint.companion] = turn.hidden[checkpoint.position - 1 - start]
        hidden[turn.chunk.companion_slot] = turn.hidden[turn.computed - 1 - start]

    def draft(self, turns: list[Turn], x: Tensor) -> None:
        """Step 5. Pass 1 reads the row of each request's last known token, a later pass the row of its draft."""
        mtp, mla, share = self.mtp, self.cache.mla, self.index_share
        active = [turn for turn in turns if self.wants_draft(turn)]
        x = x[[turn.draft_segment.rows.stop - 1 for turn in active if turn.draft_segment]]
        y, shared = x, None
        for step in range(self.depth):
            if not active:
                return
            batch = query_batch(active, step, x.device)
            if step:
                x = mtp.enter(batch.token_ids, y)
                if not share:
                    mtp.write(x, batch, mla)
            y, selections = mtp.read(x, batch, mla, shared)
            if share and shared is None:
                rows = [segment.start - mtp.first_slot for segment in batch.segments]
                shared = [each.last_row(row) for each, row in zip(selections, rows, strict=True)]
            for turn, logits in zip(active, mtp.logits(y), strict=True):
                propose(turn, logits)
            left = [i for i, turn in enumerate(active) if self.wants_draft(turn)]
            if len(left) < len(active):
                active, y = [active[i] for i in left], y[left]
                shared = shared and [shared[i] for i in left]

    def wants_draft(self, turn: Turn) -> bool:
        """Whether one more draft could be verified: it follows the last known token, and the step that verifies it
        brings a token of its own."""
        most = min(self.depth, turn.chunk.limit - 2 - turn.computed)
        return turn.error is None and turn.chunk.samples and len(turn.drafts) < most


def query_batch(turns: list[Turn], step: int, device: torch.device) -> Batch:
    """The rows of the last known tokens, `step` = 0, or of their `step`-th drafts, one of each turn."""
    segments = []
    for row, turn in enumerate(turns):
        assert turn.draft_segment is not None
        slot = turn.draft_segment.end - 1 + step
        segments.append(Segment(row, 1, slot, turn.draft_segment.slot, turn.draft_segment.block_table))
    token_ids = [turn.drafts[-1] if step else turn.tokens[-1] for turn in turns]
    return Batch(torch.tensor(token_ids, device=device), tuple(segments))


def propose(turn: Turn, logits: Tensor) -> None:
    """One more draft, from the draft layer's logits [vocab_size]."""
    if not turn.drafts:
        turn.own.proposals.clear()  # those of the round before
    try:
        token, distribution = turn.own.sampler.propose(logits)
    except SamplingError as error:
        turn.error = f"the draft layer: {error}; draft_tokens 0 runs without it"
        return
    turn.drafts.append(token)
    turn.own.proposals.append(distribution)
