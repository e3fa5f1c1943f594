"""The flags of a command are the fields of the configurations it takes; here is what `--help` says of each."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, get_type_hints

import typer

from longlane.config import MAX_LANES, MAX_LOOKUP_DRAFTS, MAX_TIMEOUT_MS, MAX_TOKENS, EngineConfig

MODEL = "An artifact, a Hugging Face directory, a GGUF file, demo or tiny."


# Far above what there is, so that a digit too many is refused where it was typed.
MOST_MIB, MOST_GIB, MOST_BYTES = 1 << 24, 1 << 20, 1 << 50
MOST_STATES, MOST_THREADS, MOST_RESTARTS, MOST_PENDING = 1 << 20, 1 << 10, 1 << 10, 1 << 16


def whole(help: str, least: int, most: int, *, auto: bool = False) -> Any:
    """A flag that takes a whole number from `least` to `most`; with `auto` that word too, which is None."""
    return _number(help, int, least, most, r"[+-]?[0-9]{1,20}", auto=auto)


def _decimal(help: str, least: float, most: float) -> Any:
    return _number(help, float, least, most, r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def _number(help: str, kind: type[int | float], least: float, most: float, form: str, *, auto: bool = False) -> Any:
    noun = f"a {'whole ' * (kind is int)}number from {least} to {most}"
    refused = f"is neither auto nor {noun}" if auto else f"is not {noun}"

    def parse(text: str | float) -> float | None:
        if not isinstance(text, str):
            return text  # the default
        if auto and text == "auto":
            return None
        if not re.fullmatch(form, text) or not least <= (value := kind(text)) <= most:
            raise typer.BadParameter(f"{text!r} {refused}")
        return value

    return _option(help, parser=parse, metavar=f"{least}..{most}" + "|auto" * auto)


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


HELP = {
    "device": _option("cpu, cuda, cuda:N, or auto: the first card if there is one."),
    "dtype": _option("Arithmetic: auto is the fastest route of the device."),
    "weights": _option("How a Hugging Face directory is loaded; an artifact is taken as it is."),
    "kv_dtype": _option("Format of cached keys and values."),
    "gdn_state": _option("Format of recurrent states; bf16 halves them."),
    "max_context": whole("Most tokens of prompt and answer together. Default 8192.", 1, MAX_TOKENS),
    "kv_capacity": whole(
        "Tokens in the KV pool, or auto: what lanes x context need, at most what fits. Default auto.",
        1,
        MAX_LANES * MAX_TOKENS,
        auto=True,
    ),
    "max_concurrency": whole("Lanes: requests that run at once.", 1, MAX_LANES),
    "max_pending_requests": whole("Requests that may wait; one more gets 429.", 1, MOST_PENDING),
    "pending_timeout_ms": whole("Longest wait for a lane; then 503.", 1, MAX_TIMEOUT_MS),
    "device_state_slots": whole(
        "State images beside the lanes', for prefixes to continue from. Default as lanes.", 0, MOST_STATES
    ),
    "prefix_reuse": _option("Keep prefixes for later prompts.", "--prefix-reuse/--no-prefix-reuse"),
    "host_kv_mib": whole(
        "Host memory for pages that left the device; default 8192 beside a card, else 0.", 0, MOST_MIB
    ),
    "host_state_slots": whole("State images in host memory; default by the three flags below.", 0, MOST_STATES),
    "max_private_continuations": whole(
        "Conversations to hold states for on the host; default 2 a lane.", 0, MOST_STATES
    ),
    "max_shared_prefixes": whole(
        "Shared prefixes to hold states for on the host; default one a lane, at least 4.", 0, MOST_STATES
    ),
    "max_long_anchors_per_continuation": whole("States inside a long history to hold on the host.", 0, MOST_STATES),
    "auto_long_anchors": whole("Keep a state at so many of a prompt's last message ends; 0 at none.", 0, MOST_STATES),
    "disk_cache": _option("Folder for prefixes that survive a restart."),
    "disk_cache_gib": whole("Most disk space of this model in it.", 1, MOST_GIB),
    "prefill_chunk": whole(
        "Most prompt tokens of one step, or auto: 1024, on a large card up to 4096. Default auto.",
        1,
        MAX_TOKENS,
        auto=True,
    ),
    "decode_floor": _decimal("Share of time that decoding keeps beside prefills.", 0, 0.95),
    "spec": _option("Speculative decoding."),
    "draft_tokens": whole(
        "Most drafted tokens a round: up to 5 of mtp, 15 of lookup. Default auto.", 1, MAX_LOOKUP_DRAFTS
    ),
    "lm_head_draft": _option("Draft with the reduced output head.", "--lm-head-draft"),
    "memory_bytes": whole("Plan for a device of so many bytes instead of asking it.", 1, MOST_BYTES),
    "threads": whole("CPU threads of the engine.", 1, MOST_THREADS),
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
    "max_restarts": whole("Restarts within ten minutes before the engine is left dead.", 0, MOST_RESTARTS),
    "watchdog_timeout": _decimal(
        "Longest silence of a loaded engine in seconds; then it is restarted.", 2, MAX_TIMEOUT_MS // 1000
    ),
    "fault_dir": _option("Folder for fault reports; default faults in the cache folder.", file_okay=False),
    "host": _option("Address to listen on."),
    "port": whole("Port to listen on.", 1, 65535),
    "api_key": _option("Ask for this key (Authorization: Bearer, or x-api-key)."),
    "model_id": _option("Public name of the model; default MODEL as it was given."),
    "default_max_tokens": whole("Limit of an answer whose request sets none.", 1, MAX_TOKENS),
    "max_request_mib": whole("Largest body; a larger one gets 413.", 1, MOST_MIB),
    "request_log_jsonl": _option("Append one JSON line for each event of a request; no text in it."),
    "log_level": _option("trace, debug, info, warning or error."),
    "cors": _option("Let any web page use the server.", "--cors"),
    "no_thinking": _option("Thinking is off unless a request asks for it.", "--no-thinking"),
    "default_thinking_budget": whole("Most thinking tokens of an answer whose request sets no budget.", 1, MAX_TOKENS),
    "chat_template": _option("Jinja file to use instead of the model's template.", exists=True, dir_okay=False),
    "temperature": _decimal("0 is greedy.", 0, 2),
    "top_p": _decimal("Keep the most likely tokens up to this mass.", 0, 1),
    "top_k": whole("Keep so many tokens; 0 keeps all.", 0, MAX_TOKENS),
    "min_p": _decimal("Keep tokens at least so likely beside the best.", 0, 1),
    "presence_penalty": _decimal("Taken off the logit of a token that was generated.", -2, 2),
    "frequency_penalty": _decimal("Taken off once for each time it was generated.", -2, 2),
    "repetition_penalty": _decimal("Divides the logit of a token in prompt or answer; 1 is none.", 0.01, 2),
    "seed": whole("Seed of requests that bring none; without it each gets its own.", 0, 2**64 - 1),
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
    """The engine's configuration, with the names of the flags that were typed."""
    named = tuple(name for name in values if given(context, name))
    config: EngineConfig = pick(EngineConfig, {"model": model, "named": named, **values})
    return config
