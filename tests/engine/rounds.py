"""Requests whose drafts are scripted, and what they hold: in the runs of test_roll_back.py, and without drafts.

A drafter proposes a given number of right tokens, then wrong ones; draft passes and acceptance are the engine's own.
Rings and pages are read where something may still be read; everything else is NaN or a rejected token's.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_draft, allocate_trunk
from engine.runner import Runner
from engine.sampling import Sampler, SamplingParams
from engine.speculation import Drafter
from model.batch import read_prefix
from model.glm5_next import Glm5Next
from model.kda import EXPORT_GRID_TOKENS
from model.mtp import DRAFT_ARCHITECTURE, Mtp
from model.parameters import parameter_specs
from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Capability, make_policy
from scheduler.plan import Checkpoint, StepPlan
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests import driver, tiny

BLOCK, POOL, DEPTH = 16, tiny.TINY.index_kpool, 3
NUM_BLOCKS, NUM_SLOTS, MAX_RUNNING = 320, 96, 64
NUM_TEXTS, PLAIN_TOKENS = 8, 150
POLICY = make_policy("ours", Capability(export_grid=EXPORT_GRID_TOKENS), draft_architecture=DRAFT_ARCHITECTURE,
                     block_size=BLOCK, retain=["all"])  # fmt: skip
Contents = dict[str, Tensor]


@lru_cache
def models() -> tuple[Glm5Next, Mtp]:
    """Three layers and the draft layer; a slow decay, so that a state remembers what it should not have seen."""
    config = replace(tiny.TINY, num_hidden_layers=3, layer_types=("kda", "mla", "kda"),
                     mlp_layer_types=("dense", "sparse", "sparse"))  # fmt: skip
    decay = {
        spec.name: tiny.normal(*spec.shape, seed=i) - 3
        for i, spec in enumerate(parameter_specs(config, num_layers=3))
        if spec.name.endswith("dt_bias")
    }
    weights = tiny.tree(decay, config)
    trunk = Glm5Next(weights, config, torch.float32, driver.CPU)
    return trunk, Mtp(weights, config, trunk)


class Scripted(Sampler):
    """Verifies as ever; after its step i it proposes `counts[i]` right drafts of `text`, then wrong ones."""

    def __init__(self, text: Sequence[int], known: int, counts: Sequence[int], wrong: int) -> None:
        super().__init__(SamplingParams(), seed=0)
        self.text, self.known, self.counts, self.wrong = text, known, counts, wrong
        self.steps = self.proposed = 0

    def verify(
        self, logits: Tensor, drafts: Sequence[int] = (), proposals: Sequence[Tensor | None] = ()
    ) -> tuple[int, ...]:
        tokens = super().verify(logits, drafts, proposals)
        self.known, self.steps, self.proposed = self.known + len(tokens), self.steps + 1, 0
        return tokens

    def propose(self, logits: Tensor) -> tuple[int, Tensor | None]:
        right = self.text[self.known + self.proposed]
        is_right = self.proposed < self.counts[(self.steps - 1) % len(self.counts)]
        self.proposed += 1
        return right if is_right else (right + self.wrong) % len(models()[0].embedding), None


class Rounds:
    """Requests on a scheduler and a runner over caches full of NaN; wrong drafts miss by `wrong` ids."""

    def __init__(self, depth: int = DEPTH, wrong: int = 1, index_share: bool = True) -> None:
        trunk, mtp = models()
        shape = CacheShape(NUM_BLOCKS, BLOCK, NUM_SLOTS, MAX_RUNNING, depth, not index_share)
        self.cache = allocate_trunk(trunk.config, shape, trunk.dtype, driver.CPU)
        self.draft = allocate_draft(trunk.config, shape, trunk.dtype, driver.CPU)
        driver.poison({0: self.cache.recurrent, 1: self.draft, **self.cache.mla}, torch.nan)
        self.runner = Runner(trunk, self.cache, Drafter(mtp, self.draft, depth, index_share))
        scratch = (
            1 if index_share else max(depth, 1)
        )  # the row of the new token is written without drafts, too
        self.scheduler = Scheduler(
            BlockManager(POLICY, NUM_BLOCKS, NUM_SLOTS), max_batched_tokens=1024, context_limit=1024,
            max_running_requests=MAX_RUNNING, draft_tokens=depth, scratch_tokens=scratch, debug=True,
        )  # fmt: skip
        self.wrong, self.requests = wrong, list[Request]()
        self.accepted: list[list[int]] = []  # by request, of the steps that verified
        self.before: dict[Checkpoint, Contents] = {}  # what the last step's checkpoints held until then

    def add(self, text: Sequence[int], prompt: int, new_tokens: int, counts: Sequence[int] = (0,)) -> Request:
        """A request for `text`, of which `prompt` tokens are given. Nothing is shared between requests."""
        request_id = len(self.requests)
        request = Request(request_id, text[:prompt], new_tokens, salt=bytes([request_id]))
        self.requests.append(request)
        self.accepted.append([])
        self.scheduler.add(request)
        self.runner.add(request_id, SamplingParams(), seed=0)
        self.runner._requests[request_id].sampler = Scripted(text, prompt, counts, self.wrong)
        return request

    def step(self, leaving: Request | None = None, preempted: bool = False) -> StepPlan:
        """One forward; `leaving` ends, or is preempted, between it and its commit."""
        plan = self.scheduler.schedule()
        self.before = {c: self.carried(c, c.position) for chunk in plan.chunks for c in chunk.exports}
        result = self.runner.execute(plan)
        if leaving is not None:
            (self.scheduler.preempt if preempted else self.scheduler.finish)(leaving)
        self.scheduler.commit(plan, result)
        for chunk in plan.chunks:
            if chunk.num_drafts:
                self.accepted[chunk.request_id].append(len(result.tokens[chunk.request_id]) - 1)
        return plan

    def carried(self, place: Checkpoint, num_drafted: int) -> Contents:
        """What a state and its companion hold at `position`, where draft slots below `num_drafted` have their rows."""
        rings = {
            f"ring {i}": live(mla.index.ring[place.slot], place.position) for i, mla in self.cache.mla.items()
        }
        found = {
            "matrix": self.cache.recurrent.matrix[place.slot],
            "conv": self.cache.recurrent.conv[place.slot],
            "hidden": self.draft.hidden[place.companion],
            "draft ring": live(self.draft.mla.index.ring[place.companion], num_drafted - 1),
        }
        return {name: part.clone() for name, part in (found | rings).items()}

    def running(self, request: Request) -> Contents:
        """What a request carries beside its pages."""
        place = Checkpoint(request.num_computed_tokens, request.recurrent_slot or 0, request.companion_slot)
        return self.carried(place, request.num_drafted_tokens)

    def pages(self, request: Request, computed: int, num_drafted: int) -> Contents:
        """Latents of all tokens and pooled keys of all complete pools; the draft layer's without the empty first."""
        table, draft_table = self.runner._requests[request.request_id].tables
        found = {}
        for i, mla in self.cache.mla.items():
            found[f"latent {i}"] = read_prefix(mla.latent, table, computed)
            found[f"pooled {i}"] = read_prefix(mla.index.pooled, table, computed // POOL)
        pools, own = (num_drafted - 1) // POOL, self.draft.mla
        found["draft latent"] = read_prefix(own.latent, draft_table, num_drafted)[1:]
        found["draft pooled"] = read_prefix(own.index.pooled, draft_table, pools + 1)[1:]
        return found

    def decoding(self) -> list[Request]:
        return [request for request in self.scheduler.running if request.decodes]

    def places(self) -> dict[str, list[Tensor]]:
        """All that is numbered by the places of each pool."""
        layers, own, recurrent = list(self.cache.mla.values()), self.draft.mla, self.cache.recurrent
        return {
            "slots": [recurrent.matrix, recurrent.conv, *(mla.index.ring for mla in layers)],
            "companions": [self.draft.hidden, own.index.ring],
            "pages": [part for mla in layers for part in (mla.latent, mla.index.pooled)],
            "draft pages": [own.latent, own.index.pooled],
        }

    def owned(self, plan: StepPlan) -> dict[str, set[int | None]]:
        """The places of the requests that run, and of the checkpoints that a step leaves."""
        running, exports = self.scheduler.running, [c for chunk in plan.chunks for c in chunk.exports]
        return {
            "slots": {r.recurrent_slot for r in running} | {c.slot for c in exports},
            "companions": {r.companion_slot for r in running} | {c.companion for c in exports},
            "pages": {page for r in running for page in r.tables[0]},
            "draft pages": {page for r in running for page in r.tables[1]},
        }


def live(ring: Tensor, num_rows: int) -> Tensor:
    """The raw rows of the pool that is incomplete after `num_rows` rows."""
    return ring[[row % len(ring) for row in range(num_rows // POOL * POOL, num_rows)]]


class Plain:
    """A text of the model's own, and what its request, without drafts, holds at every count of its tokens."""

    def __init__(self, rounds: Rounds, seed: int) -> None:
        self.rounds, self.request = rounds, rounds.add(tiny.token_ids(5, seed=seed), 5, PLAIN_TOKENS)
        self.states: dict[int, Contents] = {}

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt, *self.request.output]

    def note(self) -> None:
        """Keep what the request carries now."""
        self.states[self.request.num_computed_tokens] = self.rounds.running(self.request)

    def pages(self, computed: int, num_drafted: int) -> Contents:
        return self.rounds.pages(self.request, computed, num_drafted)

    def checkpoint(self, position: int) -> Contents:
        """A run that ends at a boundary knows no token there: its draft rows are those of one token before."""
        return self.states[position] | {"draft ring": self.states[position - 1]["draft ring"]}


@lru_cache
def plain() -> list[Plain]:
    """Texts that run beside each other; none of them ends, so that their pages can be read."""
    rounds = Rounds(depth=0)
    texts = [Plain(rounds, seed) for seed in range(NUM_TEXTS)]
    for _ in range(PLAIN_TOKENS - 1):
        rounds.step()
        for text in texts:
            text.note()
    return texts
