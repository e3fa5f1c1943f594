"""The engine dies under load, again and again: every request ends in time, and the server tells the truth meanwhile."""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest

from longlane.config import EngineConfig, FaultPolicy
from longlane.engine.client import EngineClient
from longlane.types import Request, SamplingParams
from support.http_server import Served, serving
from support.toy_engine import oracle, settings
from support.toy_process import CRASH, HANG, SLOW
from support.toy_run import COMMAND

from .conftest import until

WATCHDOG_S = 4.0
IN_TIME_S = 2.0
COMPLETIONS = "/v1/completions"
SEEN_BEFORE = [index % 80 for index in range(200)]


def right_answer(prompt: list[int], max_tokens: int) -> str:
    greedy = SamplingParams(temperature=0)
    return bytes(oracle(Request(id="a", token_ids=prompt, max_tokens=max_tokens, sampling=greedy)).token_ids).decode()


@dataclass
class Ended:
    began: float
    ended: float
    code: str


@dataclass
class Load:
    """Clients that ask without pause. A connection that is refused, a wrong answer or an error without type fails."""

    served: Served
    ended: list[Ended] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    over: bool = False

    @contextlib.contextmanager
    def running(self, clients: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over = True
            for thread in threads:
                thread.join(60)

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx2.Client(base_url=self.served.url, timeout=60) as http:
            while not self.over:
                try:
                    self._one(rng, http)
                except Exception as error:
                    self.faults.append(repr(error))
                    return

    def _one(self, rng: random.Random, http: httpx2.Client) -> None:
        prompt = [SLOW, *(rng.randrange(80) for _ in range(rng.randrange(1, 90)))]
        body = {"model": "M", "prompt": prompt, "max_tokens": rng.randrange(1, 60), "temperature": 0}
        began = time.monotonic()
        reply = http.post(COMPLETIONS, json=body)
        ended = time.monotonic()
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["text"] == right_answer(prompt, body["max_tokens"])
            self.ended.append(Ended(began, ended, "ok"))
            return
        code = reply.json()["error"]["code"]
        assert (reply.status_code, code in ("service_unavailable", "model_loading")) == (503, True), reply.text
        self.ended.append(Ended(began, ended, code))
        time.sleep(0.2)


class Killer:
    """Ends the engine in one of three ways, and checks what the server says until it serves again."""

    def __init__(self, served: Served, engine: EngineClient, rng: random.Random) -> None:
        self.served, self.engine, self.rng = served, engine, rng
        self.deaths: list[float] = []

    def kill(self, way: str) -> None:
        time.sleep(self.rng.random() / 2)
        before = self.engine.health
        if way == "SIGKILL":
            at = time.monotonic()
            os.kill(self.engine.pid, signal.SIGKILL)
        else:
            first = CRASH if way == "exception" else HANG
            with httpx2.Client(base_url=self.served.url, timeout=60) as http:
                reply = http.post(COMPLETIONS, json={"model": "M", "prompt": [first], "max_tokens": 1})
                at = time.monotonic()
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "service_unavailable")
        until(lambda: self.engine.health != before, IN_TIME_S)
        self.deaths.append(at)
        self._follow(before.restarts + 1, way)

    def _follow(self, restarts: int, way: str) -> None:
        with httpx2.Client(base_url=self.served.url, timeout=60) as http:
            told = http.get("/health")
            assert (told.status_code, told.json()["status"]) == (503, "restarting")
            assert told.json()["restarts"] == restarts
            how = {"SIGKILL": "SIGKILL", "exception": "code 1", "hang": "watchdog"}[way]
            assert how in told.json()["last_fault"]["how"]
            assert Path(told.json()["last_fault"]["report"]).exists()
            until(lambda: http.get("/health").status_code == 200, 120)
            assert http.get("/health").json()["restarts"] == restarts
            assert f"longlane:engine_restarts {restarts}.0" in http.get("/metrics").text


def check_kills(served: Served, ways: list[str], rss_mib: int) -> None:
    engine = served.state.engine
    assert isinstance(engine, EngineClient)
    load, killer = Load(served), Killer(served, engine, random.Random(7))
    with httpx2.Client(base_url=served.url, timeout=60) as http:
        first = http.post(COMPLETIONS, json={"model": "M", "prompt": SEEN_BEFORE, "max_tokens": 0}).json()
        assert first["timings"]["cache_n"] == 0
        until(lambda: len(list(served.state.engine_config.disk_cache.glob("*.state"))) > 0, 10)
        with load.running(clients=4):
            killer.kill(ways[0])
            rss = psutil.Process().memory_info().rss
            for way in ways[1:]:
                killer.kill(way)
            time.sleep(0.5)
        longer = [*SEEN_BEFORE, 1, 2, 3]
        again = http.post(COMPLETIONS, json={"model": "M", "prompt": longer, "max_tokens": 9, "temperature": 0}).json()
    assert load.faults == []
    for death in killer.deaths:
        late = [one for one in load.ended if one.began < death and one.ended > death + IN_TIME_S]
        assert [one for one in late if one.code != "ok"] == []
    codes = {one.code for one in load.ended}
    assert {"ok", "service_unavailable", "model_loading"} <= codes
    assert again["timings"]["cache_n"] == len(SEEN_BEFORE), again["timings"]
    assert "disk" in again["timings"]["cache_reuse"]
    assert again["choices"][0]["text"] == right_answer(longer, 9)
    assert psutil.Process().memory_info().rss - rss < rss_mib << 20
    assert served.call(engine.stats(check=True)).integrity == []
    assert len(served.state.running) == 0


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config: EngineConfig = settings(max_concurrency=3, disk_cache=tmp_path / "disk")
    policy = FaultPolicy(max_restarts=100, watchdog_timeout=WATCHDOG_S, fault_dir=tmp_path / "faults")
    with serving(EngineClient(config, policy=policy, command=COMMAND), engine_config=config) as served:
        yield served


def test_deaths_under_load(served: Served) -> None:
    check_kills(served, ["SIGKILL", "exception"], rss_mib=32)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_twenty_deaths_under_load(served: Served) -> None:
    check_kills(served, list(itertools.islice(itertools.cycle(["SIGKILL", "exception", "hang"]), 20)), rss_mib=32)
