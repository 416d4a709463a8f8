"""Runs a model over token ids in chosen chunks, over a paged cache with a shuffled block table."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_mla, allocate_trunk
from model.batch import Batch, Segment
from model.config import Glm5NextConfig, load_config
from model.glm5_next import Glm5Next
from model.indexer import Selection
from model.mtp import Mtp
from model.weights import load_weights

DATA = Path(__file__).parent / "data"
CPU = torch.device("cpu")


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Glm5Next, Mtp]:
    """Trunk and MTP layer of a checkpoint directory."""
    config = load_config(directory)
    tree = load_weights(directory, config, linear_dtype=torch.float32, device=CPU)
    trunk = Glm5Next(tree, config, dtype, CPU)
    mtp = Mtp(tree, trunk)
    tree.finish()
    return trunk, mtp


class Sequencer:
    """One sequence on a model: feed tokens in chunks of any size and collect hidden states."""

    def __init__(
        self, model: Glm5Next, max_tokens: int, block_size: int = 16, fill: float = float("nan")
    ) -> None:
        self.model, self.length = model, 0
        num_blocks = -(-(max_tokens + 8) // block_size) + 2
        shape = CacheShape(num_blocks, block_size, 3, dtype=model.dtype)
        self.cache = allocate_trunk(model.config, shape, CPU)
        self.draft_cache = allocate_mla(model.config, shape, CPU, 8)
        self.slot, self.table = 2, torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        poison(self.cache.kda, fill)
        poison(self.cache.mla, fill)
        poison({0: self.draft_cache}, fill)

    def batch(self, tokens: Sequence[int], start: int) -> Batch:
        return Batch(torch.tensor(tokens), (Segment(0, len(tokens), start, self.slot, self.table),))

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states of the next tokens, [num_tokens, hidden]."""
        hidden = self.model.forward(self.batch(tokens, self.length), self.cache)
        self.length += len(tokens)
        return hidden


def poison(layers: dict, value: float) -> None:  # type: ignore[type-arg]
    """Fill every tensor of some cache objects, so that reading what was never written shows."""
    for layer in layers.values():
        for name in layer.__dataclass_fields__:
            field = getattr(layer, name)
            if isinstance(field, Tensor):
                field.fill_(value)
            else:
                poison({0: field}, value)


def chunked(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def hidden_states(model: Glm5Next, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
    """Hidden states of a whole prompt, `chunk` tokens per forward (None: all at once)."""
    sequencer = Sequencer(model, len(tokens))
    return torch.cat([sequencer.feed(part) for part in chunked(tokens, chunk or len(tokens))])


def logits(model: Glm5Next, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
    """Logits [num_tokens, vocab] of a whole prompt, `chunk` tokens per forward."""
    return model.logits(hidden_states(model, tokens, chunk))


def greedy(model: Glm5Next, tokens: Sequence[int], count: int) -> list[int]:
    """Greedy continuation, one token per forward after the prompt."""
    sequencer = Sequencer(model, len(tokens) + count)
    hidden, out = sequencer.feed(tokens), []
    for _ in range(count):
        out.append(int(model.logits(hidden[-1:]).argmax()))
        hidden = sequencer.feed(out[-1:])
    return out


class Drafter:
    """The MTP layer over one sequence: rows of known tokens in chunks, then drafts."""

    def __init__(self, mtp: Mtp, sequencer: Sequencer) -> None:
        self.mtp, self.sequencer, self.length = mtp, sequencer, 0
        self.previous = torch.zeros(1, mtp.trunk.config.hidden_size, dtype=mtp.trunk.dtype)

    def feed(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, list[Selection]]:
        """MTP rows of the next known tokens; `hidden` are the trunk's states at these tokens."""
        previous = torch.cat([self.previous, hidden[:-1]])
        batch = self.sequencer.batch(tokens, self.length)
        x = self.mtp.enter(batch.token_ids, previous)
        self.mtp.write(x, batch, self.sequencer.draft_cache)
        y, selections = self.mtp.read(x, batch, self.sequencer.draft_cache)
        self.previous, self.length = hidden[-1:], self.length + len(tokens)
        return y, selections

    def draft(
        self, first_token: int, count: int, share: bool, fed: Sequence[int] = ()
    ) -> tuple[list[int], Tensor]:
        """`count` drafts after the sampled `first_token`, feeding `fed` in their place, if given; also the logits of
        each pass."""
        y, selections = self.feed([first_token], self.previous)
        drafts, all_logits, shared = [], [], selections[0].last_row(self.length - 2)
        for step in range(count):
            all_logits.append(self.mtp.logits(y[-1:])[0])
            drafts.append(fed[step] if fed else int(all_logits[-1].argmax()))
            if step + 1 < count:
                batch = self.sequencer.batch(drafts[-1:], self.length + step)
                x = self.mtp.enter(batch.token_ids, y[-1:])
                if not share:
                    self.mtp.write(x, batch, self.sequencer.draft_cache)
                given = [shared] if share else None
                y, _ = self.mtp.read(x, batch, self.sequencer.draft_cache, given)
        return drafts, torch.stack(all_logits)


def config_of(directory: Path) -> Glm5NextConfig:
    return load_config(directory)
