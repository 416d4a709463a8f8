"""Numbers of cache pages and recurrent slots: who has which. The tensors behind them are the engine's.

Pages (blocks of `block_size` tokens) and slots have sizes of their own and are counted apart. An allocation is
all or nothing. After every operation each page and slot is either free or owned by exactly one request.
"""

from collections.abc import Iterable

from scheduler.request import Request


class BlockManager:
    """Pages 0 .. num_blocks - 1 of `block_size` tokens and slots 0 .. num_slots - 1, lowest numbers first."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.num_blocks, self.block_size, self.num_slots = num_blocks, block_size, num_slots
        self._free_blocks = list(reversed(range(num_blocks)))
        self._free_slots = list(reversed(range(num_slots)))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, request: Request) -> bool:
        """Give the request a slot and the pages of its longest possible course, or nothing."""
        num_blocks = self.blocks_for(request.max_known_tokens)
        if not self._free_slots or num_blocks > len(self._free_blocks):
            return False
        request.recurrent_slot = self._free_slots.pop()
        request.block_table = [self._free_blocks.pop() for _ in range(num_blocks)]
        return True

    def release(self, request: Request) -> None:
        """Take back what the request owns; legal at any time, also twice."""
        self._free_blocks.extend(reversed(request.block_table))
        request.block_table = []
        if request.recurrent_slot is not None:
            self._free_slots.append(request.recurrent_slot)
            request.recurrent_slot = None

    def check(self, running: Iterable[Request]) -> None:
        """Assert that every page and slot is free or owned once."""
        owners = list(running)
        blocks = self._free_blocks + [block for request in owners for block in request.block_table]
        slots = self._free_slots + [
            request.recurrent_slot for request in owners if request.recurrent_slot is not None
        ]
        assert sorted(blocks) == list(range(self.num_blocks)), "a page is lost or owned twice"
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or owned twice"
