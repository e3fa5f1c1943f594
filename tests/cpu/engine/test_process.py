"""The real processes and sockets around the hash model: what a client sees when things go wrong."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from longlane.config import FaultPolicy
from longlane.engine.client import EngineClient
from longlane.engine.supervisor import Health
from longlane.errors import EngineError, RequestError
from longlane.types import Admitted, Finished, Loading, Request, Stats, Tokens
from support.toy_engine import oracle, settings
from support.toy_process import CRASH, HANG, SLOW
from support.toy_run import COMMAND, until

TESTS = Path(__file__).parents[2]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True, scope="module")
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("LONGLANE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@contextlib.asynccontextmanager
async def running(policy: FaultPolicy | None = None, **changes: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(settings(**{"max_concurrency": 4, **changes}), policy=policy, command=COMMAND)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(importable: None) -> AsyncIterator[EngineClient]:
    """One engine for many tests, since each start imports torch. Whatever a test does to it, it comes back."""
    policy = FaultPolicy(watchdog_timeout=6.0, max_restarts=10)
    async with running(policy, max_concurrency=2, max_pending_requests=8) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: EngineClient) -> EngineClient:
    await until(lambda: shared.state == "ready")
    await clean(shared)
    return shared


def request(id: str, first: int = 3, max_tokens: int = 8, prompt: int = 10) -> Request:
    return Request(id=id, token_ids=[first, *(index % 80 for index in range(prompt - 1))], max_tokens=max_tokens)


async def collect(client: EngineClient, wanted: Request) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    seen = []
    async for message in client.generate(wanted):
        seen.append(type(message))
        if isinstance(message, Tokens):
            tokens += message.token_ids
    assert seen[0] is Admitted
    assert isinstance(message, Finished)
    return tokens, message


async def clean(client: EngineClient) -> Stats:
    """Statistics once nothing runs, with every page and slot back."""
    while (stats := await client.stats(check=True)).running or stats.waiting:
        await asyncio.sleep(0.02)
    assert (stats.pages_free, stats.slots_free, stats.integrity) == (stats.pages_total, stats.slots_total, [])
    return stats


async def occupied(client: EngineClient, running: int) -> None:
    while (await client.stats()).running < running:
        await asyncio.sleep(0.02)


async def test_many_requests_over_the_sockets_get_their_own_answers(engine):
    wanted = [request(f"r{index}", first=index, prompt=1 + 23 * index, max_tokens=index) for index in range(8)]
    answers = await asyncio.gather(*(collect(engine, one) for one in wanted))
    for one, (tokens, finished) in zip(wanted, answers, strict=True):
        assert tokens == oracle(one).token_ids
        assert finished.timings.completion_tokens == one.max_tokens


async def test_errors_of_one_request_are_typed_and_leave_the_others_alone(engine):
    with pytest.raises(RequestError, match="no tokens") as empty:
        await collect(engine, Request(id="a", token_ids=[], max_tokens=1))
    assert (empty.value.code, empty.value.status) == ("invalid_prompt", 400)
    async with contextlib.aclosing(engine.generate(request("long", SLOW, 500))) as stream:
        assert isinstance(await anext(stream), Admitted)
        with pytest.raises(RequestError, match="already in use"):
            await collect(engine, request("long"))
        others = [asyncio.create_task(collect(engine, request(f"r{index}", SLOW, 4000))) for index in range(9)]
        await occupied(engine, 2)
        with pytest.raises(RequestError) as full:
            await collect(engine, request("b"))
        assert (full.value.code, full.value.status) == ("server_overloaded", 429)
        assert isinstance(await anext(stream), Tokens)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_a_client_that_leaves_frees_its_lane(engine):
    before = (await engine.stats()).decode_tokens
    async with contextlib.aclosing(engine.generate(request("closed", SLOW, 4000))) as stream:
        assert isinstance(await anext(stream), Admitted)
        assert isinstance(await anext(stream), Tokens)
    tasks = [asyncio.create_task(collect(engine, request(f"r{index}", SLOW, 4000))) for index in range(4)]
    await occupied(engine, 2)
    for task in tasks:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await clean(engine)).decode_tokens - before < 1000
    assert len((await collect(engine, request("next")))[0]) == 8


async def test_a_killed_engine_fails_its_requests_at_once_and_comes_back(engine):
    tasks = [asyncio.create_task(collect(engine, request(f"r{index}", SLOW, 4000))) for index in range(4)]
    await occupied(engine, 2)
    restarts, killed = engine.health.restarts, time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)
    errors = await asyncio.gather(*tasks, engine.stats(), return_exceptions=True)
    assert time.monotonic() - killed < 2
    assert all(isinstance(error, EngineError) and error.status == 503 for error in errors)
    assert "SIGKILL" in errors[0].message
    assert engine.state == "restarting"
    with pytest.raises(EngineError, match="restarting") as refused:
        await collect(engine, request("meanwhile"))
    assert (refused.value.code, refused.value.status) == ("model_loading", 503)
    await until(lambda: engine.state == "ready")
    wanted = request("after")
    assert (await collect(engine, wanted))[0] == oracle(wanted).token_ids
    assert engine.health.restarts == restarts + 1


async def test_a_fault_in_a_step_restarts_the_engine_and_hides_its_innards(engine):
    with pytest.raises(EngineError, match="exited with code 1; it is restarting") as fault:
        await collect(engine, request("a", CRASH))
    assert "planted" not in fault.value.message


async def test_a_step_that_hangs_is_ended_by_the_watchdog(engine):
    with pytest.raises(EngineError, match=r"no progress for \d\.\d s \(the watchdog limit is 6 s\)"):
        await collect(engine, request("a", HANG))


async def test_an_idle_engine_shows_life(engine):
    restarts = engine.health.restarts
    await asyncio.sleep(8)
    assert (engine.state, engine.health.restarts) == ("ready", restarts)


async def test_an_engine_that_may_not_restart_is_left_dead():
    async with running(FaultPolicy(max_restarts=0)) as client:
        with pytest.raises(EngineError, match="it is not restarted"):
            await collect(client, request("a", CRASH))
        assert client.state == "dead"
        assert client.health.safe_mode is None, "nothing runs, in no mode"
        with pytest.raises(EngineError, match="dead") as dead:
            await collect(client, request("b"))
        assert dead.value.code == "service_unavailable"


@pytest.mark.parametrize("broken", ["no such program", "no room for its sockets"])
async def test_a_process_that_cannot_be_started_is_an_error_and_not_a_hang(broken, tmp_path, monkeypatch):
    if broken == "no room for its sockets":
        # The path of a socket may have about a hundred characters.
        deep = tmp_path / ("d" * 120)
        deep.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = EngineClient(settings(), command=("/nowhere/engine",) if broken == "no such program" else COMMAND)
    async with asyncio.timeout(30):
        with pytest.raises(EngineError, match="could not be started"):
            await client.start()
    assert (client.state, client.pid) == ("dead", None)


async def test_a_message_that_the_server_trips_over_is_an_error_and_not_a_hang():
    def trip(loading: Loading) -> None:
        raise ValueError("planted")

    client = EngineClient(settings(), command=COMMAND)
    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match="nobody could read it"):
            await client.start(trip)
    assert client.state == "dead"


async def test_a_signal_to_the_terminal_does_not_reach_the_engine(engine):
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0)


async def test_a_start_can_be_cancelled():
    client = EngineClient(settings(), command=COMMAND)
    task = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    pid = client.pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.state == "dead"
    assert not psutil.pid_exists(pid)


async def test_an_engine_reports_its_start_and_stops_within_its_grace():
    progress: list[Loading] = []
    client = EngineClient(settings(max_concurrency=3), command=COMMAND)
    assert client.state == "loading"
    with pytest.raises(EngineError, match="loading"):
        await collect(client, request("early"))
    ready = await client.start(progress.append)
    assert (ready.model.name, ready.plan.lanes, client.state) == ("hash", 3, "ready")
    assert [(loading.done, loading.total) for loading in progress] == [(0, 2), (2, 2)]
    short = asyncio.create_task(collect(client, request("short", SLOW, 20)))
    long = asyncio.create_task(collect(client, request("long", SLOW, 4000)))
    await occupied(client, 2)
    stopping = asyncio.create_task(client.stop(grace_s=2.0))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="shutting down"):
        await collect(client, request("late"))
    assert len((await short)[0]) == 20
    with pytest.raises(EngineError, match="shutting down"):
        await long
    await stopping
    assert (client.state, client.pid, client.health) == ("dead", None, Health())
    with pytest.raises(EngineError, match="dead"):
        await collect(client, request("late"))
    await client.stop()


async def test_the_engine_leaves_when_its_parent_is_killed():
    script = (
        "import asyncio, sys\n"
        "from longlane.engine.client import EngineClient\n"
        "from longlane.config import EngineConfig\n"
        "async def main():\n"
        "    client = EngineClient(EngineConfig(model='hash'), command=(sys.executable, '-m', 'support.toy_process'))\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
