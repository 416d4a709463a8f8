"""Whatever arrives, runs, fails and leaves in whatever order: accounts hold, contents are right, everybody ends.

After each operation the content model compares every findable page, state and companion with what its key promises,
wipes what is free, and checks each reference; each forward reads only its own prefix and writes only private places;
outputs equal those of an uninterrupted run. Draft rows are exact under `token`, `key` and `tag`.

What waits for the MTP capability, since it needs drafts: outputs at every depth and for every drafter; no key over
rejected tokens; drafts after a hit; depth switched between two requests; a companion that is ignored without drafts;
states, windows and index rings after a verification that accepts 0 to K, also across a boundary; verification run
twice; draft pages whose pass never ran. What needs the model's arithmetic (states against the recurrence, rows that
do not depend on company) is tested with the model.
"""

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
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
    )
    def add(self, text: int, length: int, tail: int, tokens: int, salt: bytes) -> None:
        prompt = self.texts[text][:length] + [9] * tail
        try:
            self.run.add(prompt, tokens, salt=salt)
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

    @rule()
    def collect(self) -> None:
        """Commit the step under way."""
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

    @rule(steps=st.integers(1, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.launch()
            self.collect()

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
        copyable = self.run.blocks.slots.size > 1
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

    @invariant()
    def a_running_request_holds_one_rolling_checkpoint_and_what_is_being_written(self) -> None:
        for request in self.run.scheduler.running if hasattr(self, "run") else ():
            assert self.in_flight is not None or not request.reserved
            assert request.rolling is None or request.rolling.position <= request.num_computed_tokens

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
