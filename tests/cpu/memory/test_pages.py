"""Page ids and their reference counts."""

import pytest

from longlane.memory.pages import PagePool


def test_every_page_but_zero_is_handed_out_once():
    pool = PagePool(5)
    pages = pool.take(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert pool.free == 0
    assert pool.take(1) is None


def test_taking_too_many_takes_none():
    pool = PagePool(3)
    assert pool.take(4) is None
    assert pool.free == 3
    assert pool.take(0) == []


def test_a_shared_page_is_free_after_its_last_owner():
    pool = PagePool(2)
    pages = pool.take(1)
    pool.share(pages)
    pool.give(pages)
    assert pool.free == 1
    pool.give(pages)
    assert pool.free == 2
    assert pool.check([]) == []


def test_giving_or_sharing_a_free_page_is_a_bug():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="page 1 is free"):
        pool.give([1])
    with pytest.raises(AssertionError, match="page 2 is free"):
        pool.share([2])


def test_check_names_what_is_wrong():
    pool = PagePool(3)
    first, second = pool.take(2)
    assert pool.check([("a", [first]), ("b", [second])]) == []
    assert pool.check([("a", [first])]) == [f"page {second} is held 0 times but counted 1"]
    assert pool.check([("a", [first, first]), ("b", [second])]) == [f"page {first} is held 2 times but counted 1"]
    assert pool.check([("a", [first, second, 9])]) == ["a holds page 9, which is not in 1..3"]


def test_check_finds_a_page_that_is_both_free_and_held():
    pool = PagePool(2)
    pages = pool.take(1)
    pool._free.append(pages[0])
    assert pool.check([("a", pages)]) == [f"page {pages[0]} with 1 references is 1 times free"]
