"""The flags of a command are the fields of the configurations it takes; here is what `--help` says of each."""

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, get_type_hints

import typer

from longlane.config import MAX_LANES, EngineConfig

MODEL = "An artifact, a Hugging Face directory, a GGUF file, demo or tiny."


def _parse_tokens(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter("must be a number of tokens, at least 1, or auto")
    return int(text)


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


HELP = {
    "device": _option("cpu, cuda, cuda:N, or auto: the first card if there is one."),
    "dtype": _option("Arithmetic: auto is the fastest route of the device."),
    "weights": _option("How a Hugging Face directory is loaded; an artifact is taken as it is."),
    "kv_dtype": _option("Format of cached keys and values."),
    "gdn_state": _option("Format of recurrent states; bf16 halves them."),
    "max_context": _option("Most tokens of prompt and answer together. Default 8192.", min=1),
    "kv_capacity": _option(
        "Tokens in the KV pool, or auto: what lanes x context need, at most what fits. Default auto.",
        parser=_parse_tokens,
        metavar="N|auto",
    ),
    "max_concurrency": _option("Lanes: requests that run at once.", min=1, max=MAX_LANES),
    "max_pending_requests": _option("Requests that may wait; one more gets 429.", min=1),
    "pending_timeout_ms": _option("Longest wait for a lane; then 503.", min=1),
    "device_state_slots": _option(
        "State images beside the lanes', for prefixes to continue from. Default as lanes.", min=0
    ),
    "prefix_reuse": _option("Keep prefixes for later prompts.", "--prefix-reuse/--no-prefix-reuse"),
    "host_kv_mib": _option("Host memory for pages that left the device; default 8192 beside a card, else 0.", min=0),
    "host_state_slots": _option("State images in host memory; default by the three flags below.", min=0),
    "max_private_continuations": _option("Conversations to hold states for on the host; default 2 a lane.", min=0),
    "max_shared_prefixes": _option(
        "Shared prefixes to hold states for on the host; default one a lane, at least 4.", min=0
    ),
    "max_long_anchors_per_continuation": _option("States inside a long history to hold on the host.", min=0),
    "auto_long_anchors": _option("Keep a state at so many of a prompt's last message ends; 0 at none.", min=0),
    "disk_cache": _option("Folder for prefixes that survive a restart."),
    "disk_cache_gib": _option("Most disk space of this model in it.", min=1),
    "prefill_chunk": _option(
        "Most prompt tokens of one step, or auto: 1024, on a large card up to 4096. Default auto.",
        parser=_parse_tokens,
        metavar="N|auto",
    ),
    "decode_floor": _option("Share of time that decoding keeps beside prefills.", min=0, max=0.95),
    "spec": _option("Speculative decoding."),
    "draft_tokens": _option("Most drafted tokens a round: up to 5 of mtp, 15 of lookup. Default auto.", min=1, max=15),
    "lm_head_draft": _option("Draft with the reduced output head.", "--lm-head-draft"),
    "memory_bytes": _option("Plan for a device of so many bytes instead of asking it.", min=1),
    "threads": _option("CPU threads of the engine.", min=1),
    "cuda_graph": _option(
        "Replay decode steps as CUDA graphs, captured at start; without, the same code runs step by step.",
        "--cuda-graph/--no-cuda-graph",
    ),
    "overlap": _option(
        "Do the host's work while a step runs on the card, and launch a plain round before the one ahead of it is "
        "read; off is for debugging.",
        "--overlap/--no-overlap",
    ),
    "concurrent_prefill": _option(
        "Let a prefill run beside decoding where a card can be parted, instead of in turn with it.",
        "--concurrent-prefill/--no-concurrent-prefill",
    ),
    "on_fault": _option(
        "After a fault of the engine: restart without CUDA graphs if it used them, as it was, or not at all."
    ),
    "max_restarts": _option("Restarts within ten minutes before the engine is left dead.", min=0),
    "watchdog_timeout": _option("Longest silence of a loaded engine in seconds; then it is restarted.", min=2),
    "fault_dir": _option("Folder for fault reports; default faults in the cache folder.", file_okay=False),
    "host": _option("Address to listen on."),
    "port": _option("Port to listen on.", min=1, max=65535),
    "api_key": _option("Ask for this key (Authorization: Bearer, or x-api-key)."),
    "model_id": _option("Public name of the model; default MODEL as it was given."),
    "default_max_tokens": _option("Limit of an answer whose request sets none.", min=1),
    "max_request_mib": _option("Largest body; a larger one gets 413.", min=1),
    "request_log_jsonl": _option("Append one JSON line for each event of a request; no text in it."),
    "log_level": _option("trace, debug, info, warning or error."),
    "cors": _option("Let any web page use the server.", "--cors"),
    "no_thinking": _option("Thinking is off unless a request asks for it.", "--no-thinking"),
    "default_thinking_budget": _option("Most thinking tokens of an answer whose request sets no budget.", min=1),
    "chat_template": _option("Jinja file to use instead of the model's template.", exists=True, dir_okay=False),
    "temperature": _option("0 is greedy.", min=0, max=2),
    "top_p": _option("Keep the most likely tokens up to this mass.", min=0, max=1),
    "top_k": _option("Keep so many tokens; 0 keeps all.", min=0),
    "min_p": _option("Keep tokens at least so likely beside the best.", min=0, max=1),
    "presence_penalty": _option("Taken off the logit of a token that was generated.", min=-2, max=2),
    "frequency_penalty": _option("Taken off once for each time it was generated.", min=-2, max=2),
    "repetition_penalty": _option("Divides the logit of a token in prompt or answer; 1 is none.", min=0.01, max=2),
    "seed": _option("Seed of requests that bring none; without it each gets its own.", min=0, max=2**64 - 1),
    "greedy": _option("Always the most likely token, whatever a request says.", "--greedy"),
}


def takes(*configs: type, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every field of `configs` that `HELP` knows, with the field's type and default.

    The command receives them in `**values`; `pick` makes a configuration of them again.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        flags = [flag for config in configs for flag in _flags(config, without)]
        command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
        return command

    return decorate


def _flags(config: type, without: Collection[str]) -> list[inspect.Parameter]:
    assert dataclasses.is_dataclass(config)
    hints = get_type_hints(config)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], HELP[field.name]],
        )
        for field in dataclasses.fields(config)
        if field.name in HELP and field.name not in without
    ]


def given(context: typer.Context, name: str) -> bool:
    """Whether the flag of field `name` was typed, and is no default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def pick(config: type[Any], values: dict[str, Any]) -> Any:
    """A configuration made of those of `values` that it has a field for."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})


def pick_engine(context: typer.Context, model: str, values: dict[str, Any]) -> EngineConfig:
    """The engine's configuration, with the switches that are on anyway and were turned on by name."""
    on = {field.name for field in dataclasses.fields(EngineConfig) if field.default is True}
    named = tuple(name for name, value in values.items() if name in on and value and given(context, name))
    config: EngineConfig = pick(EngineConfig, {"model": model, "named": named, **values})
    return config
