"""Numbered places of one kind (pages of a group, recurrent slots), their keys, references and age.

A place is in exactly one of four conditions:

* free: no key, no reference; content undefined;
* held: referenced, no key; its content is private to the holder;
* shared: keyed and referenced; content immutable;
* idle: keyed, no reference; findable, and evictable oldest first.

`publish` keeps the first place under a key and counts the duplicate; the newcomer stays held. Allocation takes
free places first, then evicts idle ones, key first. Nothing here knows what a place holds.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile

Key = bytes


class Pool:
    """Places 0 .. size - 1. Allocation prefers the place that was freed last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_evictions = self.num_duplicate_publications = 0
        self._free = list(reversed(range(size)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references: Counter[int] = Counter()
        self._key_of: dict[int, Key] = {}
        self._place_of: dict[Key, int] = {}

    @property
    def num_available(self) -> int:
        """Places that `allocate` could hand out: free and idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_keyed(self) -> int:
        """Places that a lookup can find."""
        return len(self._key_of)

    def find(self, key: Key) -> int | None:
        """The place under a key; looking does not change its age."""
        return self._place_of.get(key)

    def num_found(self, keys: Iterable[Key]) -> int:
        """How many of the first keys have a place, up to the first that has none."""
        return len(list(takewhile(self._place_of.__contains__, keys)))

    def which(self, keys: Iterable[Key]) -> Iterator[bool]:
        """For each key whether there is a place under it."""
        return map(self._place_of.__contains__, keys)

    def num_idle(self, places: Iterable[int]) -> int:
        """How many of these places `allocate` could hand out, were they not needed."""
        return sum(map(self._idle.__contains__, places))

    def allocate(self) -> int | None:
        """A place held once, or None if every place is referenced."""
        if self._free:
            place = self._free.pop()
        elif self._idle:
            place, _ = self._idle.popitem(last=False)
            del self._place_of[self._key_of.pop(place)]
            self.num_evictions += 1
        else:
            return None
        self._references[place] = 1
        return place

    def acquire(self, place: int) -> None:
        """One more reference to a keyed place; it becomes the youngest."""
        assert place in self._key_of, f"place {place} has no key and may not be shared"
        self._idle.pop(place, None)
        self._references[place] += 1

    def release(self, place: int) -> None:
        """One reference less; the last one makes a keyed place idle and frees any other."""
        assert self._references[place] > 0, f"place {place} is not referenced"
        self._references[place] -= 1
        if not self._references[place]:
            del self._references[place]
            if place in self._key_of:
                self._idle[place] = None
            else:
                self._free.append(place)

    def publish(self, place: int, key: Key) -> bool:
        """Make a held place findable; False, and counted, if the key is taken. Republishing itself is neither."""
        assert self._references[place] > 0, f"place {place} is not held by anybody"
        first = self._place_of.setdefault(key, place)
        if first != place:
            self.num_duplicate_publications += 1
            return False
        assert self._key_of.setdefault(place, key) == key, f"place {place} already has another key"
        return True

    def is_keyed(self, place: int) -> bool:
        """Whether the place may be found by others, so that nobody may write it."""
        return place in self._key_of

    def evict_all(self) -> None:
        """Forget every idle place and every key; referenced places stay with their holders, unfindable."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._place_of.clear()

    def check(self, holders: Iterable[int]) -> None:
        """Assert that `holders`, one entry per reference, are all references there are, and that no place is lost."""
        assert Counter(holders) == self._references, "references and holders differ"
        places = [*self._free, *self._idle, *self._references]
        assert sorted(places) == list(range(self.size)), "a place is lost or in two conditions"
        assert {key: place for place, key in self._key_of.items()} == self._place_of, "keys and places differ"
        assert self._idle.keys() <= self._key_of.keys() and not self._key_of.keys() & set(self._free)
