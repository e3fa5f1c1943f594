"""`longlane chat`: a conversation in the terminal, or one answer."""

import asyncio
import contextlib
import io
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from longlane.api.chat import prepare
from longlane.api.generation import Delta, Ended, run
from longlane.api.schemas import ChatRequest
from longlane.api.state import ServerState
from longlane.api.thinking import END
from longlane.api.usage import milliseconds, rate, timings
from longlane.cli.options import MODEL, pick, pick_engine, takes, whole
from longlane.cli.session import LoadingBars, open_session
from longlane.config import MAX_TOKENS, EngineConfig, ServerConfig
from longlane.errors import ConfigError, LonglaneError, counted

T = TypeVar("T")

ASKING = "> "

OF_A_SERVER = frozenset(
    {"max_concurrency", "max_pending_requests", "pending_timeout_ms", "decode_floor", "concurrent_prefill"}
    | {"host", "port", "api_key", "model_id", "default_max_tokens", "max_request_mib", "request_log_jsonl"}
    | {"log_level", "cors"}
)


class Background:
    """An event loop in a thread of its own, so that waiting for the keyboard does not stop it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`; a signal that ends or interrupts the program cancels it and is raised here."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@takes(EngineConfig, ServerConfig, without=OF_A_SERVER)
def chat(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[str | None, typer.Option(help="Ask this, print the answer, leave.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, whole("Limit of an answer.", 1, MAX_TOKENS)] = 1024,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Do not show thoughts.")] = False,
    **values: Any,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    for flag, text in (("--prompt", prompt), ("--system", system)):
        check_text(flag, text)
    if prompt is None and sys.stdin is None:
        raise ConfigError("standard input is closed, so there is nothing to answer to; give a --prompt")
    console = Console(stderr=True, highlight=False)
    screen = Screen(console, hide_thinking)
    server_config: ServerConfig = pick(ServerConfig, values | {"default_max_tokens": max_tokens})
    state = open_session(pick_engine(context, model, values), server_config, console)
    messages = [{"role": "system", "content": system}] if system else []
    with _loaded(state, console) as background:
        for question in [prompt] if prompt is not None else _questions():
            messages.append({"role": "user", "content": question})
            parts: list[str] = []
            try:
                background.run(_answer(state, messages, parts, screen))
            except KeyboardInterrupt:
                print(flush=True)
            except LonglaneError as error:
                if prompt is not None or state.engine.state == "dead":
                    raise
                console.print(f"longlane: {error.message}", markup=False)
                messages.pop()
                continue
            # What is left of thoughts that did not end is no answer.
            messages.append({"role": "assistant", "content": "".join(parts) + END * screen.thinking})


def check_text(flag: str, text: str | None) -> None:
    """Raises `ConfigError` for a text that nothing can be answered to."""
    if text is not None and not text.strip():
        raise ConfigError(f"{flag} is empty; give it a text, or leave it out")
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{flag} is no text in UTF-8; write it in that encoding") from None


def _leave(number: int, _: object) -> None:
    """Ends the program as any end does, engine and sockets included, with the status of the signal."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _loaded(state: ServerState, console: Console) -> Iterator[Background]:
    background, before = Background(), signal.signal(signal.SIGTERM, _leave)
    try:
        with LoadingBars(console) as bars:
            background.run(state.engine.start(bars))
        yield background
    finally:
        background.run(state.engine.stop())
        background.close()
        signal.signal(signal.SIGTERM, before)


def _questions() -> Iterator[str]:
    """What is typed or piped in. Only somebody who types is asked for it, and on standard output only at a terminal:
    elsewhere that is the answers' alone."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    typed = sys.stdin.isatty()
    at_terminal = typed and sys.stdout.isatty()
    while True:
        if typed and not at_terminal:
            print(ASKING, end="", file=sys.stderr, flush=True)
        try:
            question = input(ASKING if at_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if typed:
                print(file=sys.stdout if at_terminal else sys.stderr)
            return
        if question.strip():
            yield question


class Screen:
    """Where an answer is shown: itself on standard output, its thoughts dimmed on standard error or not at all, and
    there too what it took."""

    def __init__(self, console: Console, hide_thinking: bool) -> None:
        self._console = console
        self._hide_thinking = hide_thinking
        self.thinking = self._between = False

    def begin(self, thinking: bool) -> None:
        """Before each answer; `thinking`: it begins inside of thoughts."""
        self.thinking, self._between = thinking, False

    def show(self, text: str) -> None:
        if self.thinking:
            thought, end, text = text.partition(END)
            self.thinking, self._between = not end, bool(end)
            if not self._hide_thinking:
                self._console.out(thought + "\n" * bool(end), style="dim", end="", highlight=False)
        if self._between:
            text = text.lstrip("\n")
            self._between = not text
        print(text, end="", flush=True)

    def end(self, ended: Ended, max_tokens: int) -> None:
        """Say where thoughts did not end by themselves, then what the answer took. `max_tokens`: its limit."""
        print(flush=True)
        t, note = ended.timings, ""
        if self.thinking:
            begun = "" if self._hide_thinking else "\n"
            note = f"{begun}longlane: {unanswered(ended, max_tokens)}"
        elif t.control_tokens:
            note = f"longlane: --default-thinking-budget ended the thoughts after {counted(t.thinking_tokens, 'token')}"
        lines = ["", note, summary(ended)] if note else ["", summary(ended)]
        self._console.print("\n".join(lines), soft_wrap=True, markup=False)


async def _answer(state: ServerState, messages: list[dict[str, Any]], parts: list[str], screen: Screen) -> None:
    """Print the answer as it comes, then what it took; `parts` collects it, so that a stopped one is kept too."""
    job, _ = prepare(state, ChatRequest(model=state.model_id, messages=messages))
    thinking = job.requests[0].thinking
    screen.begin(thinking is not None and thinking.open)
    events = run(state.engine, state.frontend.tokenizer, job, 1, state.running)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                parts.append(event.text)
                screen.show(event.text)
            if isinstance(event, Ended):
                screen.end(event, job.requests[0].max_tokens)


def unanswered(ended: Ended, max_tokens: int) -> str:
    """Why thoughts were all that came. The engine lowers `max_tokens` to what the context and the KV pool hold."""
    if ended.reason != "length":
        return "the model stopped inside its thoughts, so there is no answer"
    if ended.completion_tokens < max_tokens:
        return "the context or the KV pool was full before the end of the thoughts, so there is no answer"
    return "--max-tokens came before the end of the thoughts, so there is no answer; raise it"


def summary(ended: Ended) -> str:
    """One line: what was measured, and over how many tokens."""
    t = timings([ended])
    prefill, decode = rate(t["prompt_per_second"]), rate(t["predicted_per_second"])
    return " | ".join(
        [
            f"TTFT {milliseconds(t['ttft_ms'])}",
            f"prefill {prefill} ({counted(t['prompt_n'], 'token')})",
            f"decode {decode} ({counted(t['predicted_n'], 'token')})",
            f"finish {ended.reason}",
        ]
    )
