"""Finding and holding what a restore needs, where the arena is too small for everything at once."""

from array import array
from pathlib import Path

import pytest

from longlane.memory.disk import Disk, fingerprint
from longlane.memory.node import Checkpoint, Node, chain
from longlane.memory.tiers import Restore, Tiers
from support.arena_device import Device

MODEL = fingerprint("numbers")
TOKENS = list(range(400))


def path(count: int) -> Node:
    """A path of pages 1 to `count`, as a tree would hold it, without the tree."""
    at = Node(None, b"", b"", 0, 0)
    for page in range(count):
        tokens = array("i", TOKENS[page * 64 : page * 64 + 64]).tobytes()
        at = Node(at, tokens, chain(at.digest, tokens), page + 1, page + 1)
    return at


def spill(tiers: Tiers, count: int) -> None:
    kept = Checkpoint(path(count), b"", 0, 1)
    tiers.kept(kept, 1.0)
    tiers.flush()
    tiers.checkpoint_leaves(kept, 1.0)
    for node in kept.node.path()[::-1]:
        tiers.leaves(node)
    tiers.flush()


def tiers_over(device: Device, root: Path) -> Tiers:
    return Tiers(device.arena, Disk(root, 1 << 20, MODEL))


def bring(device: Device, tiers: Tiers, restore: Restore) -> None:
    tiers.begin(restore, range(20, 20 + len(restore.pages)), 2)
    for _ in range(1_000_000):
        tiers.poll()
        if restore.done or restore.failed:
            return
    raise AssertionError("the restore makes no progress")


def filled(pages: int, states: int) -> Device:
    device = Device(pages=pages, states=states)
    for page in range(20):
        device.write(page, page)
    device.state[1] = 9.0
    return device


def written(root: Path, *counts: int) -> None:
    """A disk with the states after so many pages."""
    tiers = tiers_over(filled(8, 4), root)
    for count in counts:
        spill(tiers, count)
    tiers.close()


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_room_that_comes_from_a_neighbour_on_the_same_pages(tmp_path, rows):
    written(tmp_path, 2, 3)
    device = filled(rows, 1)
    tiers = tiers_over(device, tmp_path)
    short = tiers.find(path(0), TOKENS[:130], 0)
    assert (short.length, short.source) == (128, "disk")
    bring(device, tiers, short)
    # The one state row must go from the shorter prefix to the longer, while the pages of both are the same.
    longer = tiers.find(path(0), TOKENS[:200], 0)
    assert (longer.length, len(longer.pages)) == (192, 3)
    bring(device, tiers, longer)
    assert longer.done
    assert [device.read(page) for page in (20, 21, 22)] == [1, 2, 3]
    assert tiers.check([]) == []
    tiers.close()


def test_what_the_arena_cannot_hold_is_not_found(tmp_path):
    written(tmp_path, 3)
    device = filled(2, 1)
    tiers = tiers_over(device, tmp_path)
    assert tiers.find(path(0), TOKENS[:200], 0) is None
    assert tiers.longest(path(0), TOKENS[:200], 0) == 192
    assert tiers.check([]) == []
    # What is on the device already needs no row.
    on_device = path(2).path()
    root = on_device[0].parent
    for node in on_device:
        node.parent.children[node.tokens] = node
    restore = tiers.find(root, TOKENS[:200], 0)
    assert (restore.node, restore.length, len(restore.pages)) == (on_device[-1], 192, 1)
    tiers.cancel(restore)
    tiers.close()


def test_nothing_is_found_that_the_device_has_itself(tmp_path):
    written(tmp_path, 2)
    tiers = tiers_over(filled(8, 2), tmp_path)
    assert tiers.find(path(0), TOKENS[:200], 128) is None
    assert tiers.longest(path(0), TOKENS[:200], 130) == 130
    assert tiers.find(path(0), TOKENS[:128], 0) is None
    assert tiers.find(path(0), [*TOKENS[:100], 0, *TOKENS[101:200]], 0) is None
    tiers.close()
