"""What a dead engine leaves behind, and what follows its death."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from longlane.config import FaultPolicy
from longlane.engine.client import EngineClient
from longlane.engine.faults import KEPT_REPORTS, StepRecorder, last_step, write_report
from longlane.engine.flags import check_flags
from longlane.engine.supervisor import Health
from longlane.errors import EngineError
from longlane.types import Request, Tokens
from support.toy_engine import oracle, settings
from support.toy_process import SLOW
from support.toy_run import COMMAND, until


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return


def request(id: str, first: int = SLOW, max_tokens: int = 30) -> Request:
    return Request(id=id, token_ids=[first, 1, 2, len(id)], max_tokens=max_tokens)


async def answer(client: EngineClient, wanted: Request) -> list[int]:
    tokens: list[int] = []
    async for message in client.generate(wanted):
        if isinstance(message, Tokens):
            tokens += message.token_ids
    return tokens


async def together(client: EngineClient, *wanted: Request) -> list[Any]:
    return await asyncio.gather(*(answer(client, one) for one in wanted), return_exceptions=True)


def report_of(client: EngineClient) -> dict[str, Any]:
    fault = client.health.last_fault
    assert fault is not None
    assert fault.report is not None
    found = json.loads(Path(fault.report).read_text())
    assert (found["time"], found["how"]) == (fault.time, fault.how)
    return found


async def test_a_fault_that_needs_graphs_and_two_rows_leads_to_a_safe_restart_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = FaultPolicy(fault_dir=tmp_path / "faults", max_restarts=5)
    config = settings(model="graph-fault", max_concurrency=2, named=("cuda_graph", "concurrent_prefill"))
    client = EngineClient(config, policy=policy, command=COMMAND)
    pair = [request("a"), request("bb")]
    await client.start()
    try:
        alone = request("ccc")
        assert await answer(client, alone) == oracle(alone).token_ids
        assert client.health.safe_mode is None
        errors = await together(client, *pair)
        assert all(isinstance(error, EngineError) and "it is restarting" in error.message for error in errors)

        mode = client.health.safe_mode
        assert "without CUDA graphs" in mode
        assert "met a fault (RuntimeError)" in mode
        assert "2 lanes, drafting off, last step decode of 2 rows" in mode
        report = report_of(client)
        assert f"fault report: {client.health.last_fault.report}" in caplog.text
        assert mode in caplog.text
        assert "a planted fault of graphs" in report["error"]
        assert "in forward" in report["traceback"]
        assert report["last_step"]["rows"] == 2
        assert report["last_step"]["columns"] == [1, 1]
        assert (report["flags"]["cuda_graph"], report["flags"]["max_concurrency"]) == (True, 2)
        assert (report["run"]["cuda_graphs"], report["next"]["safe_mode"]) == (True, mode)
        assert {"torch", "triton", "driver", "longlane", "python"} <= set(report["environment"])
        assert any("the engine met a fault" in line for line in report["log"])

        await until(lambda: client.state == "ready")
        assert client.ready.cuda_graphs is False, "what the new run says, not what the old one did"
        check_flags(client._supervisor.config)
        assert await together(client, *pair) == [oracle(one).token_ids for one in pair]
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.health.restarts == 2 and client.state == "ready")
        assert client.health.safe_mode == mode, "nothing turns the graphs on again"
        assert client.ready.cuda_graphs is False
        assert report_of(client)["how"] == "was ended by SIGKILL"
        assert report_of(client)["last_step"]["kind"] == "decode", "the last step outlives a SIGKILL"
    finally:
        await client.stop()


@pytest.mark.parametrize("on_fault", [pytest.param("same", marks=pytest.mark.nightly), "stop"])
async def test_other_policies_change_nothing_and_say_so(on_fault: Any, tmp_path: Path) -> None:
    policy = FaultPolicy(on_fault=on_fault, fault_dir=tmp_path)
    client = EngineClient(settings(model="graph-fault", max_concurrency=2), policy=policy, command=COMMAND)
    await client.start()
    try:
        errors = await together(client, request("a"), request("bb"))
        assert all(isinstance(error, EngineError) for error in errors)
        assert (client.state, client.health.restarts) == (("restarting", 1) if on_fault == "same" else ("dead", 0))
        assert client.health.safe_mode is None
        wanted = {"on_fault": on_fault, "restarts": on_fault == "same", "safe_mode": None}
        assert report_of(client)["next"] == wanted
        if on_fault == "same":
            await until(lambda: client.state == "ready")
            assert client.ready.cuda_graphs is True
        else:
            with pytest.raises(EngineError, match="dead"):
                await answer(client, request("late"))
    finally:
        await client.stop()


async def test_a_fault_at_the_first_start_is_reported_and_not_repeated(tmp_path: Path) -> None:
    client = EngineClient(settings(model="broken"), policy=FaultPolicy(fault_dir=tmp_path), command=COMMAND)
    with pytest.raises(EngineError, match="RuntimeError: a fault at start"):
        await client.start()
    report = report_of(client)
    assert (report["last_step"], report["run"]["was_ready"], report["device"]) == (None, False, None)
    assert client.state == "dead"


async def test_an_error_of_the_input_says_why_is_no_fault_and_is_not_repeated(tmp_path: Path) -> None:
    client = EngineClient(settings(model="missing"), policy=FaultPolicy(fault_dir=tmp_path), command=COMMAND)
    with pytest.raises(EngineError, match="there is no model 'missing'") as failed:
        await client.start()
    assert (failed.value.code, client.state) == ("invalid_checkpoint", "dead")
    assert client.health == Health()
    assert not list(tmp_path.iterdir())


def test_the_step_that_was_noted_last_is_found(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    record = StepRecorder(tmp_path)
    assert last_step(tmp_path) is None
    record({"number": 1, "contexts": [100_000] * 16})
    record({"number": 2})
    assert last_step(tmp_path) == {"number": 2}


def test_only_the_newest_reports_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("somebody's")
    now = datetime(2026, 11, 30, 23, 59, tzinfo=UTC)
    paths = [write_report(tmp_path, now + timedelta(seconds=7 * i), {"i": i}) for i in range(KEPT_REPORTS + 3)]
    assert sorted(map(str, tmp_path.glob("fault-*"))) == paths[3:]
    assert json.loads(Path(paths[-1]).read_text())["i"] == KEPT_REPORTS + 2
    assert (tmp_path / "notes.txt").exists()


def test_a_report_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.ERROR):
        assert write_report(tmp_path / "file", datetime.now(UTC), {}) is None
    assert "could not be written" in caplog.text
