"""`longlane serve`: a model behind an OpenAI-compatible server."""

import asyncio
import dataclasses
import json
import logging
import shlex
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console

import longlane
from longlane.api.server import listen
from longlane.api.server import serve as serve_http
from longlane.api.state import ServerState
from longlane.cli.options import MODEL, given, pick, pick_engine, takes
from longlane.cli.session import LoadingBars, check_folder, open_session
from longlane.cli.tables import print_plan
from longlane.config import EngineConfig, FaultPolicy, ServerConfig
from longlane.errors import ConfigError
from longlane.types import Ready

LEVELS = {"trace": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
LEVELS |= {"warn": logging.WARNING, "error": logging.ERROR}


@takes(EngineConfig, FaultPolicy, ServerConfig)
def serve(context: typer.Context, model: Annotated[str, typer.Argument(help=MODEL)], **values: Any) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C."""
    engine_config = pick_engine(context, model, values)
    config: ServerConfig = pick(ServerConfig, values)
    set_log_level(config.log_level)
    if config.api_key == "":
        raise ConfigError("--api-key is empty, which would let everybody in; leave it out to serve without a key")
    if config.model_id == "":
        raise ConfigError("--model-id is empty, which no request could name; leave it out to serve it as MODEL")
    policy: FaultPolicy = pick(FaultPolicy, values)
    if policy.on_fault == "stop" and given(context, "max_restarts"):
        raise ConfigError("--max-restarts has no effect beside --on-fault stop; leave one of them out")
    check_folder("--fault-dir", policy.fault_dir)
    console = Console(highlight=False)
    with listen(config.host, config.port) as sock:
        state = open_session(engine_config, config, console, policy)
        with LoadingBars(console) as bars, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

            def announce(ready: Ready) -> None:
                bars.stop()
                _announce(state, policy, ready, console)

            runner.run(serve_http(state, sock, bars, announce))


def set_log_level(level: str) -> None:
    if level not in LEVELS:
        raise ConfigError(f"--log-level {level}: must be one of {', '.join(LEVELS)}")
    logging.basicConfig(level=LEVELS[level], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(max(LEVELS[level], logging.WARNING))


def _announce(state: ServerState, policy: FaultPolicy, ready: Ready, console: Console) -> None:
    config = state.config
    started = {"version": longlane.__version__, "model_id": state.model_id, "config": _settings(state, policy)}
    state.request_log.write("server_start", started | {"plan": msgspec.to_builtins(ready.plan)})
    print_plan(ready.plan, console)
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.port}/v1"
    body = {"model": state.model_id, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    console.print(f"\n[bold]{state.model_id}[/bold] is served at [bold]{url}[/bold]; for instance:\n")
    example = (
        f"curl -N {url}/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
    console.print(example, soft_wrap=True, markup=False)


def _settings(state: ServerState, policy: FaultPolicy) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in (state.engine_config, policy, state.config):
        settings |= dataclasses.asdict(part)
    if settings["api_key"] is not None:
        settings["api_key"] = "redacted"
    return {name: str(value) if hasattr(value, "__fspath__") else value for name, value in settings.items()}
