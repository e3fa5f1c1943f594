"""What `serve` and `chat` share: from configurations to a server's state, and progress while the model loads."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import zmq
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from longlane.api.request_log import RequestLog
from longlane.api.sampling import SamplingDefaults
from longlane.api.state import ServerState
from longlane.api.thinking import END
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.config import EngineConfig, FaultPolicy, ServerConfig
from longlane.engine.client import EngineClient
from longlane.engine.flags import check_flags, check_machine, check_model_flags, check_sampling, driver_is_there
from longlane.engine.planning import check_model
from longlane.errors import ConfigError
from longlane.text.frontend import Frontend
from longlane.types import Loading


def open_session(
    engine: EngineConfig, server: ServerConfig, console: Console, policy: FaultPolicy | None = None
) -> ServerState:
    """Everything but the engine process. Raises a `LonglaneError` for a model or a flag that cannot be used."""
    check_flags(engine)
    check_sampling(server)
    check_folder("--disk-cache", engine.disk_cache)
    check_sockets()
    check_machine(engine)
    with console.status(f"opening {engine.model}"):
        path = resolve(engine.model)
        resources = open_resources(path)
        if engine.device == "cpu" or not driver_is_there():
            check_model(engine, resources.config, path, card_bytes=None)
        else:
            check_model_flags(engine, resources.config, path)
        frontend = Frontend.load(resources.get, resources.config, _template(server), path)
    check_thinking(server, frontend)
    model_id = server.model_id or engine.model
    engine = replace(engine, model=str(path))
    return ServerState(
        config=server,
        engine_config=engine,
        model_id=model_id,
        engine=EngineClient(engine, policy=policy),
        frontend=frontend,
        request_log=RequestLog(server.request_log_jsonl),
        sampling=SamplingDefaults.of(frontend.generation, server),
    )


def check_thinking(server: ServerConfig, frontend: Frontend) -> None:
    """Raises `ConfigError` for a flag about thoughts of a model that has none."""
    asked = (("--no-thinking", server.no_thinking), ("--default-thinking-budget", server.default_thinking_budget))
    for flag, given in asked:
        if given and frontend.tokenizer.id_of(END) is None:
            raise ConfigError(f"{flag} has no effect on a model without thoughts ({END}), as this one is; leave it out")


def check_sockets() -> None:
    """Raises `ConfigError` where the sockets of an engine would have longer names than the system takes."""
    most = zmq.IPC_PATH_MAX_LEN - len("/longlane-12345678/from")
    if len(os.fsencode(folder := tempfile.gettempdir())) > most:
        raise ConfigError(f"the name of the temporary folder {folder} is too long for a socket; set TMPDIR to another")


def check_folder(flag: str, directory: Path | None) -> None:
    """Raises `ConfigError` now for a place that could not be written to later. Makes nothing: a start that fails leaves
    nothing behind."""
    if directory is None:
        return
    try:
        nearest = next(place for place in (directory, *directory.parents) if place.exists())
    except OSError as error:
        raise ConfigError(f"{flag} {directory}: {error.strerror}; name a folder that can be made") from None
    if not nearest.is_dir():
        raise ConfigError(f"{flag} {directory}: {nearest} is no folder; name a folder that can be made")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {directory}: {nearest} cannot be written to; name a folder that can")


def _template(server: ServerConfig) -> str | None:
    if server.chat_template is None:
        return None
    try:
        text = server.chat_template.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {server.chat_template}: {error}; name a Jinja file in UTF-8") from None
    if not text.strip():
        raise ConfigError(f"--chat-template {server.chat_template} is empty; name a Jinja file, or leave the flag out")
    return text


class LoadingBars:
    """A bar for each stage of loading, or a line where no terminal shows bars. Call it with what the engine says."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> "LoadingBars":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def __call__(self, loading: Loading) -> None:
        total = loading.total or None
        if loading.stage not in self._stages:
            self._stages[loading.stage] = self._progress.add_task(loading.stage, total=total)
            if not self._console.is_terminal:
                self._console.print(f"{loading.stage} ...")
        self._progress.update(self._stages[loading.stage], completed=loading.done, total=total)
