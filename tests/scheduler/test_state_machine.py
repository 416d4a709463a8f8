"""Whatever arrives, runs, fails and leaves in whatever order: accounts hold, contents are right, everybody ends.

After each operation the content model compares every findable page, state and companion with what its key promises,
wipes what is free, and checks each reference; each forward reads only its own prefix and writes only private places;
outputs equal those of an uninterrupted run. Draft rows are exact under `token`, `key` and `tag`.

Any number of drafts is proposed and accepted, stops and limits fall inside an accepted run, and in a request's last
step the draft layer may not run: no key covers a rejected token, and none a draft row or companion that was not made.
What needs the model's arithmetic (states, windows and rings after a rejection, drafts after a hit, rows that do not
depend on company) is tested with the model and with speculation.
"""

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.plan import StepPlan
from scheduler.request import Request
from scheduler.scheduler import RequestRefused
from tests.scheduler.simulation import DRAFTER, PRESETS, Simulation, engine, published, reference

BLOCK = 16
RETENTIONS = st.lists(
    st.sampled_from(["resend", "extend", "junction", "progress", "decode", "chunk-ends", "crossed", "all"]),
    unique=True,
)


class Machine(RuleBasedStateMachine):
    """Prompts are cut from few texts, so that prefixes are shared and branch on and off boundaries."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        draw = data.draw
        self.pages = draw(st.integers(5, 14), "pages")
        scheduler = engine(
            draw(st.sampled_from(PRESETS), "preset"),
            BLOCK,
            draw(st.sampled_from([3, 16, 23, 40, 64, 200]), "budget"),
            pages=self.pages,
            slots=draw(st.integers(1, 7), "slots"),
            running=draw(st.integers(1, 4), "running"),
            mixed=draw(st.sampled_from([0, 1, 10, 16, 48]), "mixed"),
            drafter=draw(st.sampled_from([DRAFTER, None]), "drafter"),
            filing=draw(st.sampled_from([None, "token", "drop", "key", "tag", "off"]), "filing"),
            retain=draw(st.none() | RETENTIONS, "retain"),
            exports=draw(st.sampled_from([0, 1, 2, 1 << 30]), "exports"),
            free_chunk_ends=draw(st.booleans(), "free chunk ends"),
            drafts=(drafts := draw(st.sampled_from([0, 1, 3, 7]), "drafts")),
            scratch=draw(st.sampled_from([1, drafts]), "scratch") if drafts else 0,
        )
        self.run = Simulation(scheduler)
        self.texts = [list(range(seed, seed + 200)) for seed in (1000, 2000)]
        self.in_flight: StepPlan | None = None
        self.failed: set[int] = set()

    @rule(
        text=st.integers(0, 1),
        length=st.integers(1, 140),
        tail=st.integers(0, 2),
        tokens=st.integers(1, 40),
        stop=st.none() | st.integers(1, 40),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
    )
    def add(self, text: int, length: int, tail: int, tokens: int, stop: int | None, salt: bytes) -> None:
        """`stop`: the answer's token of this number is a stop id."""
        prompt = self.texts[text][:length] + [9] * tail
        stop_ids = frozenset(reference(prompt, stop, salt)[-1:] if stop else [])
        try:
            self.run.add(prompt, tokens, salt=salt, stop_ids=stop_ids)
        except RequestRefused:
            assert len(prompt) + tokens > self.pages * BLOCK

    @precondition(lambda self: self.run.requests)
    @rule(which=st.integers(0, 99), extra=st.integers(0, 40), tokens=st.integers(1, 20))
    def continue_an_answer(self, which: int, extra: int, tokens: int) -> None:
        """The next turn of a conversation, or the same prompt again."""
        earlier = self.run.requests[which % len(self.run.requests)]
        prompt = [*earlier.prompt, *(earlier.output + [8] * extra if extra else [])]
        if len(prompt) + tokens <= self.pages * BLOCK:
            self.run.add(prompt, tokens, salt=earlier.salt)

    @rule()
    def launch(self) -> None:
        """Plan a step, if none is under way."""
        if self.in_flight is not None or not self.run.scheduler.has_work:
            return
        plan = self.in_flight = self.run.schedule()
        assert plan.chunks, f"an empty step: {dict(plan.waits)}"

    @rule(right=st.lists(st.integers(0, 7), min_size=1, max_size=3), lagging=st.booleans())
    def collect(self, right: Sequence[int] = (7, 2, 0), lagging: bool = False) -> None:
        """Commit the step under way. `right`: how many of the drafts that are proposed now will be accepted, for every
        request in turn."""
        self.run.num_right = lambda request: right[request.request_id % len(right)]
        self.run.lagging = lagging
        if self.in_flight is not None:
            self.failed |= self.run.errors.keys() & {chunk.request_id for chunk in self.in_flight.chunks}
            self.run.commit(self.in_flight)
            self.in_flight = None

    @precondition(lambda self: self.in_flight is not None)
    @rule(ran=st.integers(0, 4))
    def crash(self, ran: int) -> None:
        """The step under way is never committed, whatever part of its forward ran; another is planned."""
        assert self.in_flight is not None
        for chunk in self.in_flight.chunks[:ran]:
            request = self.run.requests[chunk.request_id]
            if request in self.run.scheduler.running:
                self.run.forward(request, chunk)
        self.in_flight = None
        self.launch()
        self.run.account(self.run.scheduler.running)

    @rule(
        steps=st.integers(1, 12),
        right=st.lists(st.integers(0, 7), min_size=1, max_size=3),
        lagging=st.booleans(),
    )
    def steps(self, steps: int, right: Sequence[int], lagging: bool) -> None:
        for _ in range(steps):
            self.launch()
            self.collect(right, lagging)

    @precondition(lambda self: self.run.scheduler.running)
    @rule(which=st.integers(0, 9))
    def preempt(self, which: int) -> None:
        running = self.run.scheduler.running
        self.leaves_its_newest(running[which % len(running)], "preempt")

    @precondition(lambda self: self.run.requests)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        request = self.run.requests[which % len(self.run.requests)]
        self.leaves_its_newest(request, "finish")
        self.run.finish(request)

    def leaves_its_newest(self, request: Request, how: str) -> None:
        """A rolling checkpoint is findable afterwards, and so is the running state if retention promises its boundary;
        a forward under way publishes nothing of its own."""
        rolling, computed, policy = request.rolling, request.num_computed_tokens, self.run.policy
        kind = "progress" if computed < max(len(request.prompt), request.num_known_tokens - 1) else "decode"
        written = self.in_flight is None or request.request_id not in {
            c.request_id for c in self.in_flight.chunks
        }
        copyable = self.run.blocks.slots.size > 1  # a hit reads one slot and writes another
        newest = computed and computed % BLOCK == 0 and kind in policy.retain and written and copyable
        promised = ({rolling.position} if rolling else set()) | ({computed} if newest else set())
        before = set(published(self.run, request))
        getattr(self.run, how)(request)
        after = set(published(self.run, request))
        assert after - before <= promised <= after

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def fail(self) -> None:
        """The first forward of the step under way fails."""
        assert self.in_flight is not None
        self.run.errors = {self.in_flight.chunks[0].request_id: "broken"}

    @rule()
    def reset(self) -> None:
        self.run.blocks.reset_cache(self.run.scheduler.running)

    @rule(kind=st.integers(0, 3), count=st.integers(1, 5))
    def evict(self, kind: int, count: int) -> None:
        """Somebody takes idle places of one kind and gives them back: hits become shorter, and nothing else."""
        blocks = self.run.blocks
        pools = [pool for pool in (*blocks.groups, blocks.slots, blocks.companions) if pool is not None]
        pool = pools[kind % len(pools)]
        taken = [place for _ in range(count) if (place := pool.allocate()) is not None]
        for place in taken:
            pool.release(place)
        self.run.account(self.run.scheduler.running)

    @invariant()
    def outputs_are_those_of_uninterrupted_runs(self) -> None:
        for request in self.run.requests.values() if hasattr(self, "run") else ():
            full = reference(request.prompt, len(request.output), request.salt)
            assert request.output == full
            assert not request.stop_ids & {*full}

    @invariant()
    def a_running_request_holds_one_rolling_checkpoint_and_what_is_being_written(self) -> None:
        for request in self.run.scheduler.running if hasattr(self, "run") else ():
            assert self.in_flight is not None or not request.reserved
            assert request.rolling is None or request.rolling.position <= request.num_computed_tokens
            assert request.num_computed_tokens < request.num_known_tokens

    @invariant()
    def only_running_requests_hold_drafts(self) -> None:
        """Never more than may be verified, and rows in draft pages beside them."""
        for request in self.run.requests.values() if hasattr(self, "run") else ():
            room = request.max_tokens - len(request.output) - 1
            assert len(request.drafts) <= (room if request.status == "running" else 0)
            assert request.status == "running" or request.num_drafted_tokens == 0

    def teardown(self) -> None:
        """Everybody who is still there ends, with all tokens."""
        if not hasattr(self, "run"):
            return
        self.collect()
        self.run.drain(5_000)
        blocks = self.run.blocks
        pools = (*blocks.groups, blocks.slots, blocks.companions)
        assert all(pool is None or pool.num_available == pool.size for pool in pools)
        self.outputs_are_those_of_uninterrupted_runs()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
