"""Keys of blocks: what a cached page or state is found by.

key(k) = H(key(k - 1), the block's tokens, the `ahead` tokens after it), key(0) = H(salt). One chain serves every
group. 128-bit BLAKE2b; requests of different salts (tenant, adapter, image content) never share a key.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 16


class KeyChain:
    """The keys of one request's known tokens, extended as tokens become known."""

    def __init__(self, block_size: int, ahead: int, salt: bytes = b"") -> None:
        self._block_size, self._ahead = block_size, ahead
        self._root = blake2b(salt, digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        """Blocks whose key is known."""
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def extend(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Compute the keys that the known tokens, prompt then output, determine; earlier ones are kept."""
        size, split, start = self._block_size, len(prompt), len(self._keys) * self._block_size
        covered = (split + len(output) - self._ahead) // size * size
        if covered <= start:
            return
        end = covered + self._ahead
        tokens = array("Q", prompt[start:end])
        tokens.extend(output[max(start - split, 0) : max(end - split, 0)])
        view, last = memoryview(tokens), self._keys[-1] if self._keys else self._root
        for offset in range(0, covered - start, size):
            block = view[offset : offset + size + self._ahead]
            last = blake2b(block, key=last, digest_size=KEY_BYTES).digest()
            self._keys.append(last)

    def at(self, position: int) -> bytes:
        """The key that covers tokens 0 .. position - 1; position is a boundary above 0."""
        return self._keys[position // self._block_size - 1]

    def between(self, start: int, end: int) -> list[bytes]:
        """The keys of all boundaries above `start` and at or below `end`, ascending; both are boundaries."""
        return self._keys[start // self._block_size : end // self._block_size]
