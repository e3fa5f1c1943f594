"""What a client or an operator can use is documented."""

import ast
import dataclasses
from pathlib import Path

import pytest

from longlane.api.app import ROUTES
from longlane.api.request_log import RequestLog
from longlane.api.schemas import UNSUPPORTED, ChatRequest, CompletionRequest
from longlane.config import EngineConfig, FaultPolicy, ServerConfig

ROOT = Path(__file__).parents[3]
API = (ROOT / "docs" / "api.md").read_text()
FLAGS = (ROOT / "docs" / "flags.md").read_text()
SOURCE = ROOT / "src" / "longlane"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_routes(route: object) -> None:
    for method in route.methods - {"HEAD"}:
        assert f"`{method} {route.path.replace(':path', '')}`" in API


FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *UNSUPPORTED}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_request_fields(field: str) -> None:
    assert f"`{field}`" in API


def error_codes() -> set[str]:
    """Every code that an error of a request may have, by keyword, default or table."""
    found = set()
    rooms = [file for room in ("api", "text", "sampling") for file in (SOURCE / room).glob("*.py")]
    for file in [*rooms, SOURCE / "engine" / "admission.py", SOURCE / "memory" / "manager.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
    return found | {"invalid_request", "service_unavailable", "internal_error", "route_not_found", "method_not_allowed"}


def test_error_codes() -> None:
    codes = error_codes()
    assert len(codes) > 15
    assert [code for code in sorted(codes) if f"`{code}`" not in API] == []


@pytest.mark.parametrize("config", [EngineConfig, FaultPolicy, ServerConfig])
def test_configuration(config: type) -> None:
    for field in dataclasses.fields(config):
        flag = "--" + field.name.replace("_", "-")
        others = {
            "--model": "MODEL",
            "--named": "named",
            "--cuda-graph": "--no-cuda-graph",
            "--overlap": "--no-overlap",
        }
        assert f"`{others.get(flag, flag)}`" in FLAGS, field.name


def test_log_events() -> None:
    for event in ("server_start", "request_start", "request_done", "request_rejected", "request_error"):
        assert f"`{event}`" in API
    assert RequestLog(None).instance_id


def test_load(api) -> None:
    load = api.http.get("/v1/load").json()
    sections = [section for section in load.values() if isinstance(section, dict)]
    assert len(sections) == 4
    for field in {*load}.union(*sections):
        assert f"`{field}`" in API


def test_usage(api) -> None:
    usage = api.post().json()["usage"]
    details = [detail for detail in usage.values() if isinstance(detail, dict)]
    for field in {*usage}.union(*details) - {"total_tokens", "prompt_tokens_details", "completion_tokens_details"}:
        assert field in API


def test_timings(api) -> None:
    for field in api.post().json()["timings"]:
        assert f"`{field}`" in API
