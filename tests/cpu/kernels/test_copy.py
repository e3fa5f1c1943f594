"""Rows of planes, byte for byte, and the order of a side stream."""

import pytest
import torch

from longlane.kernels.copy import Rows, side_stream


@pytest.mark.parametrize("shapes", [[(3, 5)], [(3, 5), (7,)], [(2, 64, 4), (1,), (3,)]])
@pytest.mark.parametrize("dtypes", [[torch.float64], [torch.bfloat16, torch.uint8], [torch.uint8, torch.float16]])
def test_rows_come_back_as_they_were_and_nothing_else_changes(shapes, dtypes):
    planes = []
    for index, shape in enumerate(shapes):
        dtype = dtypes[index % len(dtypes)]
        raw = torch.randint(0, 256, (9, torch.empty(shape, dtype=dtype).nbytes), dtype=torch.uint8)
        planes.append(raw.view(dtype).view(9, *shape))
    before = [plane.clone() for plane in planes]
    rows = Rows(planes)
    assert rows.size == sum(plane[0].nbytes for plane in planes)
    packed = torch.full((3, rows.size), 0xFF, dtype=torch.uint8)
    rows.pack([7, 2, 4], packed)
    for plane in planes:
        plane.view(torch.uint8).fill_(0xEE)
    rows.unpack(packed[1:], [2, 8])
    for plane, old in zip(planes, before, strict=True):
        now, then = plane.view(torch.uint8), old.view(torch.uint8)
        assert torch.equal(now[2], then[2])
        assert torch.equal(now[8], then[4])
        assert all(bool((now[i] == 0xEE).all()) for i in (0, 1, 3, 4, 5, 6, 7))


def test_a_side_copy_runs_late_in_order_and_when_waited_for():
    side, seen = side_stream(torch.device("cpu")), []
    copies = [side.submit(lambda i=i: seen.append(i)) for i in range(4)]
    assert seen == []
    side.advance()
    assert (seen, [copy.done for copy in copies]) == ([0], [True, False, False, False])
    side.hold_main(copies[2])
    assert (seen, copies[3].done) == ([0, 1, 2], False)
