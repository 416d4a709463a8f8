"""The engine's public face: requests in, tokens and text out.

    plan = scheduler.schedule()
    result = runner.execute(plan)
    finished = scheduler.commit(plan, result)

`step` is these three lines and the text that comes of them; `generate` and `stream` are loops around it.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.cache import CacheShape, allocate_draft, allocate_trunk
from engine.commands.policy_options import DEFAULT_DRAFT_TOKENS, policy_from
from engine.memory_plan import cache_parts, default_kv_tokens, keep_freed_memory, require_memory
from engine.options import DTYPES, EngineOptions
from engine.output import Delta, Output, Result, SpeculationStatistics
from engine.runner import Runner
from engine.sampling import NUM_SEEDS, SamplingParams, default_sampling
from engine.speculation import Drafter
from engine.text import Tokenizer, stop_token_ids
from model.config import load_config, read_json
from model.glm5_next import Glm5Next
from model.kda import EXPORT_GRID_TOKENS
from model.linear import matmul_dtype
from model.mtp import DRAFT_ARCHITECTURE, Mtp
from model.random_weights import random_weights
from model.weights import WeightTree, load_weights
from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Capability
from scheduler.plan import StepResult
from scheduler.request import Advance, FinishReason, Request
from scheduler.scheduler import Scheduler

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "model" / "embedded"
Prompt = str | Sequence[int]
Progress = Callable[[int, int], None]


class LLM:
    """One model with its cache and scheduler. Options are those of EngineOptions, by name.

    `model`: a Hugging Face directory; the default is the small model that comes with the project.
    `progress(bytes_done, bytes_total)` is called while weights load. Raises ValueError (or a subclass) on any
    input that can't be served.
    """

    def __init__(
        self, model: str | Path = EMBEDDED_MODEL, *, progress: Progress | None = None, **options: Any
    ) -> None:
        self.options, directory = EngineOptions(**options), Path(model)
        if not directory.is_dir():
            found = "a file" if directory.exists() else "missing"
            raise ValueError(f"{model} is {found}; expected a directory with config.json and *.safetensors")
        self.seed = secrets.randbelow(NUM_SEEDS) if self.options.seed is None else self.options.seed
        self.device, self.dtype = torch.device(self.options.device), DTYPES[self.options.dtype]
        self.config = load_config(directory)
        generation_path = directory / "generation_config.json"
        self.generation_config = read_json(generation_path) if generation_path.exists() else {}
        self.tokenizer = Tokenizer.load(directory)
        self.stop_ids = stop_token_ids(self.config.eos_token_ids, self.generation_config, self.tokenizer)
        self._load(directory, progress)
        self.statistics = SpeculationStatistics(self.draft_tokens)  # of all requests so far
        self._outputs: dict[int, Output] = {}
        self._next_id = 0

    def _load(self, directory: Path, progress: Progress | None) -> None:
        options, device, dtype = self.options, self.device, self.dtype
        tree = self._weight_tree(directory, progress)
        if device.type == "cpu":
            keep_freed_memory()
        config, remedy = self.config, "use a smaller model or another device"
        require_memory("the weights need", tree.resident_bytes, device, remedy)
        depth = options.draft_tokens
        if depth is None:
            depth = DEFAULT_DRAFT_TOKENS if tree.has_mtp and config.num_nextn_predict_layers else 0
        self.draft_tokens = depth
        architecture = DRAFT_ARCHITECTURE if self.draft_tokens else None
        if not options.index_share and self.draft_tokens < 2:
            found = f"--no-index-share acts from the second draft on, draft_tokens is {self.draft_tokens}"
            raise ValueError(f"{found}; leave it out or draft more")
        self.index_share = options.index_share and config.index_share_for_mtp_iteration
        policy = policy_from(options, Capability(export_grid=EXPORT_GRID_TOKENS), architecture)
        # After the options are checked: loading may take minutes.
        self.model = Glm5Next(tree, config, dtype, device)
        first_slot = int(policy.filing == "token")
        self.mtp = Mtp(tree, self.model, first_slot) if self.draft_tokens else None
        tree.finish()
        self.has_mtp = tree.has_mtp  # whether the checkpoint has a draft layer
        kv_tokens = options.kv_tokens or default_kv_tokens(config, dtype, device, self.draft_tokens)
        shape = CacheShape(
            max(kv_tokens // policy.block_size, 1), policy.block_size,
            options.max_running_requests + options.checkpoint_slots,
            options.max_running_requests, self.draft_tokens, not self.index_share,
            dtype, DTYPES[options.state_dtype], matmul_dtype(dtype, device),
        )  # fmt: skip
        self._allocate(shape)
        self.scheduler = Scheduler(
            BlockManager(policy, shape.num_blocks, shape.num_slots),
            max_batched_tokens=options.max_batched_tokens,
            mixed_prefill_tokens=options.mixed_prefill_tokens,
            max_running_requests=options.max_running_requests,
            context_limit=config.max_position_embeddings,
            draft_tokens=self.draft_tokens,
            scratch_tokens=min(self.draft_tokens, 1) if self.index_share else self.draft_tokens,
            debug=options.debug,
        )

    def _allocate(self, shape: CacheShape) -> None:
        config, device, drafter = self.config, self.device, None
        what = f"the cache ({shape.num_blocks} blocks, {shape.num_slots} slots) needs"
        self.cache_parts = cache_parts(config, shape)
        remedy = "lower kv_tokens, checkpoint_slots or max_running_requests"
        require_memory(what, sum(self.cache_parts.values()), device, remedy)
        if self.mtp is not None:
            cache = allocate_draft(config, shape, device)
            drafter = Drafter(self.mtp, cache, self.draft_tokens, self.index_share)
        self.runner = Runner(self.model, allocate_trunk(config, shape, device), drafter)

    def _weight_tree(self, directory: Path, progress: Progress | None) -> WeightTree:
        wanted, resident = self.options.draft_tokens, matmul_dtype(self.dtype, self.device)
        shared: dict[str, Any] = {"linear_dtype": resident, "device": self.device}
        declared = self.config.num_nextn_predict_layers > 0
        if not self.options.random_weights:
            with_mtp = (None if declared else False) if wanted is None else wanted > 0
            return load_weights(directory, self.config, **shared, with_mtp=with_mtp, progress=progress)
        self.config = self.config.first_layers(self.options.num_layers or self.config.num_hidden_layers)
        if wanted and not declared:
            raise ValueError(f"draft_tokens is {wanted} and the config declares no MTP layer; leave it out")
        with_mtp = declared and wanted != 0
        return random_weights(directory, self.config, **shared, with_mtp=with_mtp, seed=self.seed)

    def default_params(self, **changes: Any) -> SamplingParams:
        """Sampling as the checkpoint's generation_config.json says (else greedy), with `changes` applied."""
        return SamplingParams(**default_sampling(self.generation_config) | changes)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, split_reasoning: bool = False
    ) -> int:
        """Queue text or token ids; the request id. `split_reasoning`: the output begins in `<think>`."""
        params, ids = params or self.default_params(), self.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model directory has no tokenizer.json")
        stop_ids = frozenset(() if params.ignore_eos else self.stop_ids)
        request = Request(self._next_id, ids, params.max_tokens, stop_ids)
        return self._enqueue(request, params, split_reasoning)

    def _enqueue(self, request: Request, params: SamplingParams, split_reasoning: bool = False) -> int:
        self.scheduler.add(request)
        request_id = request.request_id
        self._next_id += 1
        # Each request of one engine seed gets a stream of its own.
        seed = (self.seed + request_id) % NUM_SEEDS if params.seed is None else params.seed
        self.runner.add(request_id, params, seed)
        self._outputs[request_id] = Output(request, self.tokenizer, params, split_reasoning)
        return request_id

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; nothing is added. ValueError on an id outside the vocabulary."""
        if not isinstance(prompt, str):
            ids = list(prompt)
            if wrong := [token for token in ids if type(token) is not int]:
                raise ValueError(f"a prompt holds {wrong[0]!r}; expected text, or integer token ids")
        elif self.tokenizer is not None:
            ids = self.tokenizer.encode(prompt)
        else:
            raise ValueError("the model directory has no tokenizer.json; give token ids instead of text")
        limit = self.config.vocab_size
        if bad := [token for token in ids if not 0 <= token < limit]:
            raise ValueError(f"token id {bad[0]} is outside the vocabulary; expected 0 to {limit - 1}")
        return ids

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return self.scheduler.has_work

    def step(self) -> list[Delta]:
        """One forward; the news of every request that it moved. Nothing happens when none is left."""
        if not self.has_work:
            return []
        plan = self.scheduler.schedule()
        result = self.runner.execute(plan)
        for chunk in plan.chunks:
            if chunk.num_drafts and chunk.request_id in result.tokens:
                self.statistics.add_step(chunk.num_drafts, len(result.tokens[chunk.request_id]) - 1)
            if chunk.targets:  # a preempted prompt is scored again from its start
                scores = self._outputs[chunk.request_id].result.prompt_log_probs
                scores[chunk.start :] = result.log_probs[chunk.request_id]
        advances = self.scheduler.commit(plan, result)
        return [delta for advance in advances for delta in self._deliver(advance, result)]

    def _deliver(self, advance: Advance, result: StepResult) -> Iterator[Delta]:
        """A delta per token; what follows a stop string is dropped."""
        request_id, reason = advance.request.request_id, advance.finish_reason
        output = self._outputs[request_id]
        output.result.cached_tokens = advance.request.num_cached_tokens
        listed = result.token_log_probs.get(request_id) or (None,) * len(advance.tokens)
        for token, own in zip(advance.tokens, listed, strict=False):  # none is delivered of a stop id
            delta, stopped = output.push(token, own)
            yield delta
            if stopped:  # at the last allowed token, too, a stop string is a stop
                reason = "stop"
                self.scheduler.finish(advance.request)
                break
        if reason is not None:
            yield output.finish(reason, advance.message)

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> Delta | None:
        """End a request between two steps; None if it had ended. What it generated stays in its result."""
        output = self._outputs[request_id]
        if output.request.status == "finished":
            return None
        self.scheduler.finish(output.request)
        return output.finish(reason)

    def result(self, request_id: int) -> Result:
        """A request's result so far."""
        return self._outputs[request_id].result

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop the results of ended requests."""
        for request_id in request_ids:
            del self._outputs[request_id]

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Deltas of all prompts as they come, ids counting from the first prompt's; leaving early cancels."""
        return self._run((self.add_request(prompt, params) for prompt in listed(prompts)), [])

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Result]:
        """Results in prompt order."""
        return self._results(self.add_request(prompt, params) for prompt in listed(prompts))

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Teacher-forced log-probability of every token but the first, per prompt."""
        queued = (
            self._enqueue(Request(self._next_id, self.encode(prompt), 0, score_prompt=True), SamplingParams())
            for prompt in listed(prompts)
        )
        return [result.prompt_log_probs for result in self._results(queued)]

    def _results(self, queueing: Iterable[int]) -> list[Result]:
        outputs: list[Output] = []
        for _ in self._run(queueing, outputs):
            pass
        return [output.result for output in outputs]

    def _run(self, queueing: Iterable[int], outputs: list[Output]) -> Iterator[Delta]:
        """Deltas of the requests that `queueing` queues one by one, and their outputs in `outputs`.

        None of the requests stays behind, however this is left.
        """
        try:
            for request_id in queueing:
                outputs.append(self._outputs[request_id])
            while any(output.request.status != "finished" for output in outputs):
                yield from self.step()
        finally:
            ids = [output.request.request_id for output in outputs]
            for request_id in ids:
                self.cancel(request_id)
            self.forget(ids)


def listed(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts; ValueError for a lone string, whose letters would else be prompts."""
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; expected a list of prompts")
    return prompts
