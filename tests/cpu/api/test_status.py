"""Routes that say how the server is."""

import pytest

from .conftest import Api


@pytest.mark.parametrize("state", ["loading", "restarting", "dead"])
def test_health_is_the_engines(api: Api, state: str) -> None:
    assert (api.http.get("/health").status_code, api.http.get("/health").json()) == (200, {"status": "ok"})
    api.engine.state = state
    for path in ("/health", "/ready"):
        reply = api.http.get(path)
        assert (reply.status_code, reply.json()) == (503, {"status": state})


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
