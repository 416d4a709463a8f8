"""A place is free, held, shared or idle; only its last reference and its key decide which."""

import pytest

from scheduler.pool import Pool

A, B, C = (bytes([i]) * 16 for i in range(3))


def taken(pool: Pool) -> int:
    place = pool.allocate()
    assert place is not None
    return place


def cached(pool: Pool, key: bytes) -> int:
    """A place published under a key and given up."""
    place = taken(pool)
    assert pool.publish(place, key)
    pool.release(place)
    return place


def test_every_place_is_handed_out_once_and_then_none() -> None:
    pool = Pool(3)
    assert sorted(taken(pool) for _ in range(3)) == [0, 1, 2]
    assert pool.allocate() is None and pool.num_available == 0
    pool.check([0, 1, 2])


def test_the_place_freed_last_is_taken_first() -> None:
    pool = Pool(4)
    first, second = taken(pool), taken(pool)
    pool.release(first), pool.release(second)
    assert [taken(pool), taken(pool)] == [second, first]


def test_an_unkeyed_place_is_free_again_after_its_last_reference() -> None:
    pool = Pool(1)
    place = taken(pool)
    pool.release(place)
    assert pool.num_available == 1 and pool.num_evictions == 0 and taken(pool) == place


def test_a_keyed_place_stays_findable_without_references() -> None:
    pool = Pool(2)
    place = cached(pool, A)
    assert pool.find(A) == place and pool.is_keyed(place) and pool.num_available == 2
    pool.acquire(place)
    assert pool.num_available == 1
    pool.acquire(place)
    pool.release(place)
    assert pool.num_available == 1
    pool.check([place])


def test_free_places_go_before_cached_ones_and_then_the_oldest() -> None:
    pool = Pool(3)
    oldest, newest = cached(pool, A), cached(pool, B)
    assert oldest != newest
    free = taken(pool)
    assert free not in (oldest, newest) and pool.num_evictions == 0
    assert taken(pool) == oldest and (pool.find(A), pool.find(B)) == (None, newest)
    assert taken(pool) == newest and pool.find(B) is None
    assert pool.num_evictions == 2 and pool.allocate() is None
    pool.check([0, 1, 2])


def test_a_use_makes_a_place_young_and_a_look_does_not() -> None:
    pool = Pool(2)
    first, second = cached(pool, A), cached(pool, B)
    pool.find(A)
    pool.acquire(first)
    pool.release(first)
    assert taken(pool) == second
    assert pool.find(A) == first


def test_a_referenced_place_is_never_evicted() -> None:
    pool = Pool(2)
    kept = cached(pool, A)
    pool.acquire(kept)
    assert taken(pool) != kept and pool.allocate() is None and pool.find(A) == kept


def test_the_first_place_under_a_key_is_kept_and_the_second_counted() -> None:
    pool = Pool(2)
    first, second = taken(pool), taken(pool)
    assert pool.publish(first, A) and not pool.publish(second, A)
    assert pool.find(A) == first and not pool.is_keyed(second)
    assert pool.num_duplicate_publications == 1
    pool.release(second)
    assert pool.num_available == 1
    assert pool.publish(first, A) and pool.num_duplicate_publications == 1  # itself, again
    pool.check([first])


@pytest.mark.parametrize(
    "misuse", ["release free", "publish free", "share unkeyed", "second key", "publish idle"]
)
def test_illegal_transitions_are_refused(misuse: str) -> None:
    pool = Pool(2)
    place = taken(pool)
    with pytest.raises(AssertionError):
        if misuse == "release free":
            pool.release(1 - place)
        elif misuse == "publish free":
            pool.publish(1 - place, A)
        elif misuse == "share unkeyed":
            pool.acquire(place)
        elif misuse == "second key":
            pool.publish(place, A)
            pool.publish(place, B)
        else:
            pool.release(place)
            pool.publish(place, A)


def test_a_reset_frees_what_is_idle_and_leaves_holders_alone() -> None:
    pool = Pool(3)
    idle, shared = cached(pool, A), taken(pool)
    pool.publish(shared, B)
    pool.evict_all()
    assert pool.find(A) is None and pool.find(B) is None
    assert not pool.is_keyed(idle) and not pool.is_keyed(shared)
    assert pool.num_available == 2
    pool.check([shared])
    pool.release(shared)
    assert pool.num_available == 3
    pool.check([])


class TestCheck:
    """`check` sees each way of losing count."""

    def test_a_missing_and_a_superfluous_reference(self) -> None:
        pool = Pool(2)
        place = taken(pool)
        for holders in ([], [place, place], [1 - place]):
            with pytest.raises(AssertionError, match="references"):
                pool.check(holders)
        pool.check([place])

    def test_a_lost_place(self) -> None:
        pool = Pool(2)
        pool._free.pop()
        with pytest.raises(AssertionError, match="lost"):
            pool.check([])

    def test_a_place_in_two_conditions(self) -> None:
        pool = Pool(2)
        place = taken(pool)
        pool._free.append(place)
        with pytest.raises(AssertionError, match="two conditions"):
            pool.check([place])

    def test_a_key_without_its_place_and_a_free_place_with_a_key(self) -> None:
        pool = Pool(2)
        place = cached(pool, A)
        pool._place_of[C] = place
        with pytest.raises(AssertionError, match="keys"):
            pool.check([])
        del pool._place_of[C]
        del pool._idle[place]
        pool._free.append(place)
        with pytest.raises(AssertionError):
            pool.check([])

    def test_an_idle_place_without_a_key(self) -> None:
        pool = Pool(2)
        place = cached(pool, A)
        del pool._key_of[place], pool._place_of[A]
        with pytest.raises(AssertionError):
            pool.check([])


def test_keys_are_found_up_to_the_first_gap_and_idle_places_counted() -> None:
    pool = Pool(4)
    places = [pool.allocate() or 0 for _ in range(3)]
    for place, key in zip(places, (b"a", b"b", b"d"), strict=True):
        pool.publish(place, key)
    assert [pool.num_found(keys) for keys in ([b"a", b"b"], [b"a", b"c", b"d"], [b"c"], [])] == [2, 1, 0, 0]
    pool.release(places[1])
    assert pool.num_idle(places) == 1
