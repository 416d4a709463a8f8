"""Players and cells of the equality tests: one policy, filing, budget and scenario, over caches where every free
place is NaN.

A player is a scheduler and a runner. With answers in place of a model it only plans, which tells in advance whether
two cells do the same work: a plan is all that a runner sees.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_trunk
from engine.llm import EMBEDDED_MODEL
from engine.runner import Runner
from engine.sampling import SamplingParams
from model.glm5_next import Glm5Next, TrunkCache
from model.kda import EXPORT_GRID_TOKENS
from model.parameters import parameter_specs
from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Capability, Policy, make_policy
from scheduler.plan import StepPlan, StepResult
from scheduler.pool import Pool
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests import driver, tiny

BLOCK_TOKENS = {
    "ours": 16,
    "none": 16,
}  # public presets: 32, so that short prompts hold several boundaries, too
WHOLE = 4096
FORK = 40  # inside a block of either size; 32 is a boundary of both
NEW_TOKENS = (5, 2, 4)  # per prompt: the second finishes early
AXES: Mapping[str, tuple[Any, ...]] = {  # cheap values first: `pairwise` takes them when it may choose
    "subject": ("tiny", "embedded"),
    "budget": (WHOLE, 64, 16, 3, 1),
    "policy": ("generic", "seed", "vllm-0.33", "ours", "none"),
    "filing": ("token", "drop", "key", "tag", "off"),
    "scenario": ("cold", "resend", "extend", "branch", "resumed", "mates"),
}


class Cell(NamedTuple):
    """One combination of AXES, in their order."""

    subject: str
    budget: int
    policy: str
    filing: str
    scenario: str

    def __str__(self) -> str:
        return "-".join(str(value) for value in self).replace(str(WHOLE), "whole")


def pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few combinations in which every pair of values of two axes occurs: the best next one, ties to the first."""
    everything = list(product(*axes))
    missing = {pair for cell in everything for pair in pairs(cell)}
    chosen = []
    while missing:
        chosen.append(max(everything, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def pairs(cell: Sequence[Any]) -> set[Any]:
    """Every two (axis, value) of a combination."""
    return set(combinations(enumerate(cell), 2))


class Subject:
    """A model, three prompts past its `index_topk` or shorter, and what it says alone, whole and uncached."""

    def __init__(self, model: Glm5Next, lengths: Sequence[int]) -> None:
        self.model = model
        self.prompts = [tiny.token_ids(n, seed=n, vocab_size=model.config.vocab_size) for n in lengths]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The greedy continuation, max(NEW_TOKENS) tokens."""
        if tuple(prompt) not in self._known:
            self._known[tuple(prompt)] = driver.greedy(self.model, prompt, max(NEW_TOKENS))
        return self._known[tuple(prompt)]


@lru_cache
def subject(name: str, dtype: torch.dtype = torch.float32) -> Subject:
    """`tiny`: five random layers, selection from row 12 on; `embedded`: the model in the repository, from row 260."""
    if name == "embedded":
        return Subject(driver.load_model(EMBEDDED_MODEL, dtype)[0], (269, 83, 45))
    config = replace(tiny.TINY, num_hidden_layers=5, layer_types=("kda", "mla", "kda", "kda", "mla"),
                     mlp_layer_types=("dense", *["sparse"] * 4))  # fmt: skip
    # A slow decay: the state of a boundary matters to the end of the prompt.
    decay = {
        spec.name: tiny.normal(*spec.shape, seed=i) - 3
        for i, spec in enumerate(parameter_specs(config))
        if spec.name.endswith("dt_bias")
    }
    return Subject(Glm5Next(tiny.tree(decay, config), config, dtype, driver.CPU), (81, 49, 37))


class Ask(NamedTuple):
    """A prompt, how many tokens to generate, and whether every policy with a cache owes it a hit."""

    prompt: list[int]
    new_tokens: int
    hit: bool = False


def rounds(scenario: str, of: Subject) -> list[list[Ask]]:
    """The asks of a scenario; those of a round arrive together."""
    a, b, c = (Ask(prompt, n) for prompt, n in zip(of.prompts, NEW_TOKENS, strict=True))
    if scenario in ("resumed", "mates"):
        again = [ask._replace(hit=True) for ask in (a, b, c)]
        return [[a, b, c]] if scenario == "resumed" else [[a, b, c], again]
    branch = Ask([*a.prompt[:FORK], *b.prompt], b.new_tokens)
    turn = [*a.prompt, *of.answer(a.prompt)[: a.new_tokens], *c.prompt]
    later = {
        "cold": [b, c],
        "resend": [a._replace(hit=True)],
        "extend": [Ask(turn, 2, hit=True), Ask([*a.prompt, *b.prompt], 2, hit=True)],
        "branch": [branch, branch._replace(hit=True), Ask([*a.prompt[:32], *c.prompt], 2)],
    }
    return [[ask] for ask in (a, *later[scenario])]


class Oracle:
    """A runner without a model, for requests whose answers are known."""

    def __init__(self, answer: Callable[[Sequence[int]], list[int]]) -> None:
        self.answer, self.prompts = answer, dict[int, Sequence[int]]()

    def execute(self, plan: StepPlan) -> StepResult:
        prompts = {chunk.request_id: self.prompts[chunk.request_id] for chunk in plan.chunks if chunk.samples}
        ends = {chunk.request_id: chunk.end for chunk in plan.chunks}
        return StepResult({i: self.answer(prompt)[ends[i] - len(prompt)] for i, prompt in prompts.items()})


def policy_of(name: str, filing: str, drafter: str | None = None) -> Policy:
    """A preset with small blocks."""
    return make_policy(name, Capability(export_grid=EXPORT_GRID_TOKENS), draft_architecture=drafter,
                       block_size=BLOCK_TOKENS.get(name, 32), filing=filing)  # fmt: skip


class Player:
    """Requests on one scheduler, by `model` or (an Oracle) by known answers. `requests` and `plans` are in order."""

    def __init__(
        self,
        policy: Policy,
        budget: int,
        executor: Glm5Next | Oracle,
        *,
        num_blocks: int = 128,
        num_slots: int = 40,
        max_running: int = 4,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        blocks = BlockManager(policy, num_blocks, num_slots)
        self.scheduler = Scheduler(blocks, max_batched_tokens=budget, context_limit=1024,
                                   max_running_requests=max_running, debug=True)  # fmt: skip
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.runner: Runner | Oracle
        if isinstance(executor, Oracle):
            self.runner = executor
        else:
            config = executor.config
            shape = CacheShape(num_blocks, policy.block_size, num_slots, config.index_kpool)
            cache = allocate_trunk(config, shape, executor.dtype, executor.device, state_dtype)
            self.runner = Runner(executor, cache)
            clear_freed(blocks.slots, slot_tensors(cache), self.before_slot_reuse)
            clear_freed(blocks.groups[0], page_tensors(cache), self.before_page_reuse)

    def add(self, prompt: Sequence[int], new_tokens: int) -> Request:
        """Queue a greedy request."""
        request = Request(len(self.requests), prompt, new_tokens)
        self.requests.append(request)
        self.scheduler.add(request)
        if isinstance(self.runner, Runner):
            self.runner.add(request.request_id, SamplingParams(), seed=0)
        else:
            self.runner.prompts[request.request_id] = prompt
        return request

    def before_slot_reuse(self, slot: int) -> None:
        """Called when a recurrent slot is handed out, before its content goes."""

    def before_page_reuse(self, page: int) -> None:
        """The same for a page."""

    def step(self) -> None:
        """One forward."""
        self.plans.append(self.scheduler.schedule())
        self.scheduler.commit(self.plans[-1], self.execute(self.plans[-1]))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan."""
        return self.runner.execute(plan)

    def play(self, rounds: Sequence[Sequence[Ask]], interrupted: bool = False) -> None:
        """Run rounds one after the other; `interrupted`: preempt each request twice, in prefill and in decode."""
        for asks in rounds:
            done = dict.fromkeys((self.add(ask.prompt, ask.new_tokens).request_id for ask in asks), 0)
            while self.scheduler.has_work:
                self.step()
                for request in list(self.scheduler.running) if interrupted else ():
                    stage = (request.num_computed_tokens > FORK) + (len(request.output) > 1)
                    if stage > done[request.request_id]:
                        done[request.request_id] = stage
                        self.scheduler.preempt(request)


def slot_tensors(cache: TrunkCache) -> list[Tensor]:
    """Everything that a recurrent slot numbers, [num_slots, ...] each."""
    states = [part for state in cache.kda.values() for part in (state.matrix, state.conv)]
    return states + [layer.index.ring for layer in cache.mla.values()]


def page_tensors(cache: TrunkCache) -> list[Tensor]:
    """Everything that a page numbers, [num_blocks, ...] each."""
    return [part for layer in cache.mla.values() for part in (layer.latent, layer.index.pooled)]


def clear_freed(pool: Pool, tensors: Sequence[Tensor], before_reuse: Callable[[int], None]) -> None:
    """Fill a pool's places with NaN: all of them now, then each that is freed, and each evicted one when it is
    handed out again."""
    allocate, release = pool.allocate, pool.release

    def clear(place: int | slice) -> None:
        for tensor in tensors:
            tensor[place] = torch.nan

    def clearing_allocate() -> int | None:
        place = allocate()
        if place is not None:
            before_reuse(place)
            clear(place)
        return place

    def clearing_release(place: int) -> None:
        available = pool.num_available
        release(place)
        if pool.num_available > available and not pool.is_keyed(place):
            clear(place)

    clear(slice(None))
    pool.allocate, pool.release = clearing_allocate, clearing_release  # type: ignore[method-assign]


def play(cell: Cell, executor: Glm5Next | Oracle | None = None) -> Player:
    """A cell on its model, or on `executor`."""
    of = subject(cell.subject)
    player = Player(policy_of(cell.policy, cell.filing), cell.budget, executor or of.model)
    player.play(rounds(cell.scenario, of), interrupted=cell.scenario == "resumed")
    return player


def plans_of(cell: Cell) -> list[StepPlan]:
    """The plans of a cell if its answers are right, without running the model."""
    return play(cell, Oracle(subject(cell.subject).answer)).plans
