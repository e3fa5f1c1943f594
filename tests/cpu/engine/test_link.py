"""The engine's end of the sockets, without a process around it."""

from types import SimpleNamespace

import msgspec
import pytest
import zmq

from longlane.engine import process
from longlane.engine.process import Link
from longlane.types import ENGINE_FAULT, Cancel, Fatal, FromEngine, Loading, Shutdown
from support.toy_engine import settings


def test_a_fault_at_start_is_told_to_the_parent(tmp_path):
    def load(config, progress):
        progress(Loading(stage="weights", done=0, total=1))
        raise RuntimeError("a fault at start")

    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    receiver.bind(f"ipc://{tmp_path}/from")
    assert process.run(str(tmp_path), settings(), load) == 1
    frames = [msgspec.msgpack.decode(receiver.recv(), type=list[FromEngine]) for _ in range(2)]
    assert isinstance(frames[0][0], Loading)
    receiver.close()
    context.term()
    [fatal] = frames[1]
    assert isinstance(fatal, Fatal)
    assert (fatal.message, fatal.code) == ("RuntimeError: a fault at start", ENGINE_FAULT)
    assert "in load" in fatal.traceback


class Looping:
    """Engine and link of a service in one; the first message ends it."""

    def __init__(self, *, idle: bool, stalled: bool) -> None:
        self.idle, self.stalled, self.busy, self.launching = idle, stalled, False, False
        self.waits: list[float] = []
        self.closed = 0

    def receive(self, wait_s):
        self.waits.append(wait_s)
        return [Shutdown()]

    def step(self):
        return []

    def stats(self, check):
        return SimpleNamespace(integrity=[])

    def abort(self, error): ...

    def send(self, messages): ...

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("idle", "stalled", "wait_s"),
    [(True, False, process.HEARTBEAT_S), (False, True, process.STALLED_S), (False, False, 0.0)],
)
def test_nothing_to_compute_is_waited_for_and_not_asked_for(idle, stalled, wait_s):
    both = Looping(idle=idle, stalled=stalled)
    process.Service(both, both).run()
    assert both.waits == [wait_s]
    assert both.closed == 1, "an orderly stop flushes the disk tier"


class Launching(Looping):
    """Whose chunk a thread launches while nothing else runs, until a message comes; then it is on the device."""

    def __init__(self, looks: int) -> None:
        super().__init__(idle=False, stalled=False)
        self.busy = self.launching = True
        self._looks = looks

    def receive(self, wait_s):
        self.waits.append(wait_s)
        if len(self.waits) == 3:
            self.launching = False
        self.busy = len(self.waits) < self._looks
        return [] if self.busy else [Shutdown()]

    def tend(self): ...


def test_messages_are_heard_while_a_thread_launches_a_chunk_and_it_gets_the_interpreter():
    both = Launching(6)
    process.Service(both, both).run()
    assert both.waits == [0.0, process.STALLED_S, process.STALLED_S, 0.0, 0.0, 0.0]


def test_malformed_frames_are_dropped_and_the_next_is_read(tmp_path, caplog):
    link = Link(str(tmp_path))
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.connect(f"ipc://{tmp_path}/to")
    for frame in (b"", b"\xc1garbage", msgspec.msgpack.encode({"type": "Unknown"}), b"\x80"):
        sender.send(frame)
    sender.send(msgspec.msgpack.encode(Cancel(id="a")))
    messages = []
    while not messages:
        messages = link.receive(5.0)
    assert messages == [Cancel(id="a")]
    assert caplog.text.count("malformed frame") == 4
    sender.close()
    context.term()
    link.close()
