"""An engine that says what a test tells it to, through the same seam as the real one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from longlane.engine.supervisor import EngineState, Health
from longlane.errors import EngineError
from longlane.types import (
    Admitted,
    Finished,
    FinishReason,
    Loading,
    MemoryPlan,
    ModelInfo,
    Ready,
    Request,
    Stats,
    Timings,
    TokenLogprobs,
    Tokens,
)

# Token ids that come together, a pause in seconds, or a failure.
Step = Sequence[int] | float | Exception
Script = Callable[[Request], Sequence[Step]]


class ScriptedEngine:
    """`script` gives the steps of each request. A stop id or the token limit ends it earlier, the end of the script
    as a stop. `refuse` fails a request before it is admitted, `queue_s` is how long that takes."""

    def __init__(self, script: Script, max_context: int = 1000) -> None:
        self.reset(script)
        plan = MemoryPlan(
            device_bytes=1 << 30,
            pools=[],
            kv_dtype="bf16",
            kv_pages=16,
            kv_tokens=1024,
            lanes=4,
            max_context=max_context,
            guaranteed_context=256,
            prefill_chunk=1024,
        )
        info = ModelInfo(
            name="M", family="llama", parameters=1, vocab_size=264, max_context=max_context, weights_bytes=1
        )
        self.loaded = Ready(model=info, plan=plan)

    def reset(self, script: Script) -> None:
        self.script = script
        self.state: EngineState = "ready"
        self.health = Health()
        self.full = False
        self.refuse: Exception | None = None
        self.queue_s = 0.0
        self.cached_tokens = 0
        self.requests: list[Request] = []
        self.open: set[str] = set()
        self.most_open = 0
        self.cancelled: list[str] = []
        self.told_to_end: set[str] = set()

    @property
    def ready(self) -> Ready | None:
        return None if self.state == "loading" else self.loaded

    async def start(self, progress: Callable[[Loading], None] | None = None) -> Ready:
        return self.loaded

    async def stop(self, grace_s: float = 0.0) -> None:
        self.state = "dead"

    def check_room(self) -> None:
        if self.full:
            raise EngineError("full", code="server_overloaded", status=429)

    def cancel(self, id: str) -> None:
        self.told_to_end.add(id)

    async def stats(self, check: bool = False) -> Stats:
        return Stats(
            running=len(self.open),
            prefilling=0,
            waiting=0,
            pages_total=16,
            pages_free=16 - len(self.open),
            pages_cached=0,
            slots_total=4,
            slots_free=4,
            slots_cached=0,
            steps=7,
            computed_prefill_tokens=5,
            decode_tokens=3,
            rss_bytes=1,
        )

    async def generate(self, request: Request) -> AsyncGenerator[Admitted | Tokens | Finished, None]:
        self.requests.append(request)
        self.open.add(request.id)
        self.most_open = max(self.most_open, len(self.open))
        ended = False
        try:
            await asyncio.sleep(self.queue_s)
            if self.refuse is not None:
                ended = True
                raise self.refuse
            yield Admitted(id=request.id, cached_tokens=self.cached_tokens, queue_s=self.queue_s)
            count = 0
            reason: FinishReason = "stop"
            stop_id: int | None = None
            for step in self.script(request):
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                ids = list(step)
                stop_id = next((token for token in ids if token in request.stop_ids), None)
                ids = ids if stop_id is None else ids[: ids.index(stop_id)]
                ids = ids[: request.max_tokens - count]
                count += len(ids)
                if ids:
                    yield Tokens(id=request.id, token_ids=ids, logprobs=self._logprobs(request, ids))
                if stop_id is not None:
                    break
                if count >= request.max_tokens:
                    reason = "length"
                    break
                if request.id in self.told_to_end:
                    reason = "cancelled"
                    break
            ended = True
            yield Finished(id=request.id, reason=reason, timings=self._timings(request, count), stop_id=stop_id)
        finally:
            self.open.discard(request.id)
            if not ended:
                self.cancelled.append(request.id)

    def _logprobs(self, request: Request, ids: Sequence[int]) -> list[TokenLogprobs] | None:
        if request.top_logprobs is None:
            return None
        return [
            TokenLogprobs(chosen=-id / 256, top=[(i, -float(i)) for i in range(request.top_logprobs)]) for id in ids
        ]

    def _timings(self, request: Request, count: int) -> Timings:
        return Timings(
            queue_s=self.queue_s,
            prefill_s=0.5,
            ttft_s=0.75 if count else None,
            decode_s=2.0 if count else None,
            total_s=3.0,
            prompt_tokens=len(request.token_ids),
            cached_tokens=self.cached_tokens,
            computed_prefill_tokens=len(request.token_ids) - self.cached_tokens,
            completion_tokens=count,
        )


def says(text: str, *, end: Sequence[int] = (260,)) -> Script:
    """One byte a token, then the end token (of the byte tokenizer)."""
    return lambda _: [*([byte] for byte in text.encode()), list(end)]
