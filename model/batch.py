"""What one forward is handed: token rows of several requests, flattened, and where each request's state lies.

A `Segment` is one request's consecutive rows. Rows of a batch lie in segment order. `start` is a position
(tokens before it are already in the caches); a segment that starts at 0 begins from zero state, whatever its
slot holds. Block tables are in blocks, positions and offsets in tokens, pooled index keys in entries:
`physical_index` is the only conversion between them.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Export:
    """Keep the recurrent state after the segment's first `num_tokens` tokens in `slot`."""

    num_tokens: int
    slot: int


@dataclass(frozen=True)
class Segment:
    """One request's rows of a batch: tokens `start` .. `start + num_tokens` - 1 at rows `row` ..."""

    row: int
    num_tokens: int
    start: int
    slot: int
    block_table: Tensor  # [num_blocks] int64 on the model's device
    exports: tuple[Export, ...] = ()
    write_from: int = 0  # positions below lie in shared pages: their rows run, but are not written
    replay: int | None = None  # verification: the slot keeps its state, the recurrence inputs go to this row

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def rows(self) -> slice:
        """The segment's rows in the batch."""
        return slice(self.row, self.row + self.num_tokens)

    def part(self, begin: int, size: int, row: int) -> "Segment":
        """Tokens `begin` .. `begin + size` - 1 of the segment as one of its own, at `row` of another batch."""
        inside = [export for export in self.exports if begin < export.num_tokens <= begin + size]
        exports = tuple(Export(export.num_tokens - begin, export.slot) for export in inside)
        return replace(self, row=row, num_tokens=size, start=self.start + begin, exports=exports)


@dataclass(frozen=True)
class Batch:
    """token_ids [num_tokens] int64 and the segments that share them out."""

    token_ids: Tensor
    segments: tuple[Segment, ...]

    @cached_property
    def single_rows(self) -> "SingleRows | None":
        """The one-token segments without exports, gathered so that their states advance together."""
        singles = [s for s in self.segments if s.num_tokens == 1 and not s.exports and s.replay is None]
        if not singles:
            return None
        fresh, device = [s.start == 0 for s in singles], self.token_ids.device
        return SingleRows(
            rows=row_index([s.row for s in singles], device),
            slots=row_index([s.slot for s in singles], device),
            fresh=torch.tensor(fresh, device=device) if any(fresh) else None,
        )

    def cut(self, max_rows: int, grid: int) -> tuple["Batch", ...]:
        """The same rows as consecutive batches of at most `max_rows`; a segment is cut at multiples of `grid` of its
        tokens. For layers that carry a state in its slot, to which a cut is a chunk boundary."""
        batches: list[Batch] = []
        pieces: list[Segment] = []
        first = row = 0
        for segment in self.segments:
            done = 0
            while done < segment.num_tokens:
                left = segment.num_tokens - done
                size = left if left <= max_rows - row else (max_rows - row) // grid * grid
                if size:
                    pieces.append(segment.part(done, size, row))
                    done, row = done + size, row + size
                if done < segment.num_tokens:
                    batches.append(Batch(self.token_ids[first : first + row], tuple(pieces)))
                    pieces, first, row = [], first + row, 0
        return (*batches, Batch(self.token_ids[first:], tuple(pieces)))

    @cached_property
    def multi_row_segments(self) -> tuple[Segment, ...]:
        """The segments that `single_rows` and `verifications` do not cover."""
        return tuple(s for s in self.segments if (s.num_tokens > 1 or s.exports) and s.replay is None)

    @cached_property
    def verifications(self) -> tuple["VerifiedRows", ...]:
        """The segments under verification, those of one length together."""
        lengths: dict[int, list[Segment]] = {}
        for segment in self.segments:
            if segment.replay is not None:
                lengths.setdefault(segment.num_tokens, []).append(segment)
        return tuple(VerifiedRows(tuple(found), self.token_ids.device) for found in lengths.values())


@dataclass(frozen=True)
class SingleRows:
    """n one-token segments: their rows and slots, and which of them ([n] bool; None = no one) start from zero."""

    rows: Tensor | slice
    slots: Tensor | slice
    fresh: Tensor | None

    def carried(self, state: Tensor) -> Tensor:
        """The rows' slots of `state` [num_slots, ...] as [n, ...]; zeros for a fresh row, whatever its slot holds."""
        carried = state[self.slots]
        if self.fresh is None:
            return carried
        return carried.masked_fill(self.fresh.view(-1, *[1] * (state.dim() - 1)), 0)


class VerifiedRows:
    """n segments of one length under verification: their rows, slots and replay rows."""

    def __init__(self, segments: tuple[Segment, ...], device: torch.device) -> None:
        self.num_tokens = segments[0].num_tokens
        self.rows = row_index([row for s in segments for row in range(s.row, s.row + s.num_tokens)], device)
        self.slots = row_index([s.slot for s in segments], device)
        self.replay = row_index([s.replay for s in segments if s.replay is not None], device)

    def split(self, rows: Tensor) -> Tensor:
        """The group's rows [n * num_tokens, ..] as [n, num_tokens, ..]."""
        return rows.view(-1, self.num_tokens, *rows.shape[1:])


def row_index(numbers: list[int], device: torch.device) -> Tensor | slice:
    """An index that picks `numbers`: a slice, which copies nothing, if they are consecutive."""
    first = numbers[0]
    if numbers == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers, device=device)


def physical_index(block_table: Tensor, logical: Tensor, per_block: int) -> Tensor:
    """Address of logical entries in a cache of [num_blocks * per_block, ...].

    block_table [num_blocks] int64, logical [n] int64 (slots or pooled entries, `per_block` of them a block).
    An entry beyond the table raises IndexError (on a CPU; CUDA asserts in the kernel).
    """
    return block_table[logical // per_block] * per_block + logical % per_block


def read_prefix(cache: Tensor, block_table: Tensor, count: int) -> Tensor:
    """The first `count` logical entries of a request: cache [num_blocks, per_block, width] -> [count, width]."""
    per_block = cache.shape[1]
    num_blocks = -(-count // per_block)
    if num_blocks > len(block_table):
        raise IndexError(f"{count} entries need {num_blocks} blocks, the block table has {len(block_table)}")
    return cache.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:count]
