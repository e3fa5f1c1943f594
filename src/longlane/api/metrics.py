"""`GET /metrics`: Prometheus text. Names that llama.cpp has are llama.cpp's, so that its dashboards work."""

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from longlane.api.usage import Tally
from longlane.engine.supervisor import Health
from longlane.types import Stats

# When each counter began is of no use: all of them begin with the server.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Counters of one server since its start, and gauges that are set at each look."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("longlane:requests", "Requests by how they ended.", ["how"], registry=self._registry)
        self._sums = {name: Counter(name, text, registry=self._registry) for name, text in SUMS.items()}
        self._gauges = {name: Gauge(name, text, registry=self._registry) for name, text in GAUGES.items()}
        self._safe_mode = Gauge(
            "longlane:engine_safe_mode", "1 while the engine runs in a safe mode, with its reason.", ["reason"],
            registry=self._registry,
        )  # fmt: skip
        for how in ("done", "rejected", "error"):
            self._requests.labels(how)

    def count_failure(self, event: str) -> None:
        """`event` is that of the request log: request_rejected or request_error."""
        self._requests.labels(event.removeprefix("request_")).inc()

    def count_done(self, tally: Tally) -> None:
        self._requests.labels("done").inc()
        timings = [ended.timings for ended in tally.ended.values()]
        for name, amount in {
            "llamacpp:prompt_tokens": sum(t.computed_prefill_tokens for t in timings),
            "llamacpp:prompt_seconds": sum(t.prefill_s for t in timings),
            "llamacpp:tokens_predicted": tally.completion_tokens,
            "llamacpp:tokens_predicted_seconds": sum(t.decode_s or 0.0 for t in timings),
            "longlane:prefix_cache_hit_tokens": sum(t.cached_tokens for t in timings),
            "longlane:thinking_tokens": tally.thinking_tokens or 0,
            "longlane:thinking_control_tokens": tally.control_tokens or 0,
            "longlane:draft_tokens": sum(t.drafted_tokens for t in timings),
            "longlane:draft_accepted_tokens": sum(t.accepted_tokens for t in timings),
        }.items():
            self._sums[name].inc(amount)

    def render(self, health: Health, stats: Stats | None) -> bytes:
        """The text of now. Without `stats`, while no engine serves, its gauges are zero and `engine_up` says why."""
        self._safe_mode.clear()
        if health.safe_mode:
            self._safe_mode.labels(health.safe_mode).set(1)
        for name, value in {
            "longlane:engine_up": stats is not None,
            "longlane:engine_restarts": health.restarts,
            "llamacpp:requests_processing": stats.running if stats else 0,
            "llamacpp:requests_deferred": stats.waiting if stats else 0,
            "longlane:kv_pages_used": stats.pages_total - stats.pages_free if stats else 0,
            "longlane:kv_pages_cached": stats.pages_cached if stats else 0,
            "longlane:kv_pages_total": stats.pages_total if stats else 0,
            "longlane:state_slots_used": stats.slots_total - stats.slots_free if stats else 0,
            "longlane:state_slots_total": stats.slots_total if stats else 0,
            "longlane:engine_rss_bytes": stats.rss_bytes if stats else 0,
        }.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)


SUMS = {
    "llamacpp:prompt_tokens": "Prompt tokens computed.",
    "llamacpp:prompt_seconds": "Time of their computation, summed over requests.",
    "llamacpp:tokens_predicted": "Tokens of answers, withheld end tokens among them.",
    "llamacpp:tokens_predicted_seconds": "From the first token of an answer to its last, summed over requests.",
    "longlane:prefix_cache_hit_tokens": "Prompt tokens that needed no computation.",
    "longlane:thinking_tokens": "Tokens of thoughts.",
    "longlane:thinking_control_tokens": "Tokens forced to close thoughts.",
    "longlane:draft_tokens": "Tokens drafted.",
    "longlane:draft_accepted_tokens": "Drafted tokens that stood.",
}
GAUGES = {
    "longlane:engine_up": "1 while the engine serves.",
    "longlane:engine_restarts": "Restarts of the engine since the server started.",
    "llamacpp:requests_processing": "Requests that run.",
    "llamacpp:requests_deferred": "Requests that wait for a lane.",
    "longlane:kv_pages_used": "Pages of the KV pool in use, cached ones among them.",
    "longlane:kv_pages_cached": "Pages that hold nothing but reusable prefixes.",
    "longlane:kv_pages_total": "Pages of the KV pool.",
    "longlane:state_slots_used": "State images in use.",
    "longlane:state_slots_total": "State images.",
    "longlane:engine_rss_bytes": "Resident memory of the engine process.",
}
