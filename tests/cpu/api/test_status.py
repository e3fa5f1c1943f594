"""Routes that say how the server is."""

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longlane.engine.faults import Fault
from longlane.engine.supervisor import Health
from longlane.errors import EngineError
from support.http_server import serving
from support.scripted_engine import ScriptedEngine, says

from .conftest import Api


@pytest.mark.parametrize("state", ["loading", "restarting", "dead"])
def test_health_is_the_engines(api: Api, state: str) -> None:
    assert (api.http.get("/health").status_code, api.http.get("/health").json()) == (200, {"status": "ok"})
    api.engine.state = state
    reply = api.http.get("/health")
    assert (reply.status_code, reply.json()) == (503, {"status": state})
    reply = api.http.get("/ready")
    assert (reply.status_code, reply.json()["status"]) == (503, state)
    assert f"the engine is {state}" in reply.json()["reason"]


def test_while_loading_models_are_listed_and_requests_told_to_come_back(api: Api) -> None:
    api.engine.state = "loading"
    assert api.http.get("/v1/models").json()["data"][0]["id"] == "M"
    for reply in (api.post(), api.post(stream=True), api.post("/v1/completions"), api.http.get("/v1/load")):
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_loading")
        assert reply.headers["retry-after"] == "2"


def test_models(api: Api) -> None:
    listed = api.served.openai().models.list().data
    assert [(model.id, model.object, model.owned_by) for model in listed] == [("M", "model", "longlane")]
    assert api.http.get("/v1/models/M").json()["max_model_len"] == 1000
    assert api.http.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_load(api: Api) -> None:
    body = api.http.get("/v1/load").json()
    assert body["capacity"] == {
        "max_concurrency": 4,
        "max_pending_requests": 16,
        "max_admitted_requests": 20,
        "max_context": 1000,
        "guaranteed_context": 256,
        "kv_capacity_tokens": 1024,
        "kv_capacity_pages": 16,
        "kv_page_tokens": 64,
        "state_slots": 4,
    }
    assert body["requests"] == {"running": 0, "prefilling": 0, "waiting": 0}
    assert body["occupancy"]["kv_pages"] == 0
    assert body["counters"] == {"steps": 7, "computed_prefill_tokens": 5, "decode_tokens": 3}


def test_health_tells_of_a_fault_for_good(api: Api) -> None:
    fault = Fault(time="2026-11-30T00:00:00+00:00", how="was ended by SIGKILL", report="/faults/a.json")
    api.engine.health = Health(restarts=2, last_fault=fault, safe_mode="without CUDA graphs, since it died")
    told = {
        "restarts": 2,
        "last_fault": {"time": fault.time, "how": "was ended by SIGKILL", "report": "/faults/a.json"},
        "safe_mode": "without CUDA graphs, since it died",
    }
    assert api.http.get("/health").json() == {"status": "ok", **told}
    api.engine.state = "restarting"
    assert api.http.get("/health").json() == {"status": "restarting", **told}


def test_where_a_report_lies_is_told_to_holders_of_the_key_alone() -> None:
    engine = ScriptedEngine(says("ok"))
    fault = Fault(time="2026-11-30T00:00:00+00:00", how="was ended by SIGKILL", report="/faults/a.json")
    engine.health = Health(restarts=1, last_fault=fault)
    with serving(engine, api_key="k3y") as served, httpx2.Client(base_url=served.url) as http:
        for headers, report in (({}, None), ({"x-api-key": "wrong"}, None), ({"x-api-key": "k3y"}, "/faults/a.json")):
            reply = http.get("/health", headers=headers)
            assert reply.status_code == 200
            told = reply.json()["last_fault"]
            assert told == {"time": fault.time, "how": "was ended by SIGKILL", "report": report}


def metrics(api: Api) -> dict[str, float]:
    reply = api.http.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(reply.text)
    return {sample.name + "".join(sample.labels.values()): sample.value for f in families for sample in f.samples}


def test_metrics_count_what_was_answered(api: Api) -> None:
    before = metrics(api)
    api.engine.cached_tokens = 2
    used = api.post().json()["usage"]
    api.post(temperature=9)
    api.engine.refuse = EngineError("full", code="server_overloaded", status=429)
    api.post()
    after = metrics(api)
    grown = {
        name: after[name] - before[name] for name in after if name.endswith(("total", "done", "rejected", "error"))
    }
    assert grown["longlane:requests_totaldone"] == 1
    assert grown["longlane:requests_totalrejected"] == 2
    assert grown["longlane:requests_totalerror"] == 0
    assert grown["llamacpp:prompt_tokens_total"] == used["prompt_tokens"] - 2
    assert grown["longlane:prefix_cache_hit_tokens_total"] == 2
    assert grown["llamacpp:tokens_predicted_total"] == used["completion_tokens"]
    assert grown["llamacpp:tokens_predicted_seconds_total"] == 2.0
    assert (after["longlane:engine_up"], after["longlane:kv_pages_total"]) == (1, 16)


def test_metrics_say_that_the_engine_is_down_and_what_it_runs_without(api: Api) -> None:
    api.engine.health = Health(restarts=3, safe_mode='without "graphs"')
    api.engine.state = "restarting"
    found = metrics(api)
    assert (found["longlane:engine_up"], found["longlane:engine_restarts"]) == (0, 3)
    assert found['longlane:engine_safe_modewithout "graphs"'] == 1
    api.engine.health = Health()
    assert not [name for name in metrics(api) if name.startswith("longlane:engine_safe_mode")]
