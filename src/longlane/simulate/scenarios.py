"""Questions about the schedule, each a workload and what is read off its run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from longlane.config import EngineConfig
from longlane.simulate.cost import CostModel
from longlane.simulate.machine import Job, Machine, PolicyName, Run
from longlane.simulate.measures import decode_rate, longest_gap, prefill_s, throughput, total_s, ttft_s, wait_s
from longlane.simulate.presets import card
from longlane.simulate.workload import TEXTS, Ask, Ids

LONG, SHORT = 92_700, 466
# When a probe comes, as parts of the time that the long prompt takes alone. On the 4080s it then has the published 16.4
# to 17.0 s before it.
MOMENTS = tuple(0.802 + 0.001 * step for step in range(8))

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Report:
    """summary: named figures. rows: a table. run: what the plot shows."""

    scenario: str
    policy: PolicyName
    summary: dict[str, Cell]
    rows: list[dict[str, Cell]]
    run: Run


@dataclass(frozen=True, slots=True)
class Setting:
    """A card, an engine's flags and a policy."""

    cost: CostModel
    config: EngineConfig
    policy: PolicyName = "longlane"

    def run(self, asks: Sequence[Ask], lanes: int, policy: PolicyName | None = None) -> Run:
        """With lanes of a scenario's own, where nobody is turned away. Raises `RequestError` for a prompt that the pool
        cannot hold."""
        config = replace(self.config, max_concurrency=lanes, max_pending_requests=10**6, pending_timeout_ms=10**9)
        run = Machine(self.cost, config, policy or self.policy).run(asks)
        for job in run.jobs.values():
            if job.error:
                raise job.error
        return run

    def report(self, scenario: str, run: Run, **summary: Cell) -> Report:
        return Report(scenario, self.policy, summary, [describe(job) for job in run.jobs.values()], run)


def published_config(preset: str) -> EngineConfig:
    """The flags of the engines whose figures a preset follows: three MTP drafts, prefills in turn with decoding."""
    config = EngineConfig(model=preset, spec="mtp", draft_tokens=3, concurrent_prefill=False)
    return with_pool(config, preset)


def with_pool(config: EngineConfig, preset: str) -> EngineConfig:
    """`config` with the card's pool where its own is auto."""
    return config if config.kv_capacity else replace(config, kv_capacity=card(preset).kv_tokens)


def describe(job: Job) -> dict[str, Cell]:
    """One request as a row of a table."""
    served = job.outcome == "finished"
    return {
        "request": job.id,
        "prompt": len(job.ask.prompt),
        "cached": job.cached_tokens,
        "answer": len(job.ask.answer),
        "outcome": job.outcome,
        "arrival_s": job.submitted,
        "wait_s": wait_s(job) if served else None,
        "ttft_s": ttft_s(job) if served else None,
        "total_s": total_s(job) if served else None,
        "pauses": job.pauses,
    }


def short_behind_long(setting: Setting) -> Report:
    """A 466-token request comes late in a 92,700-token prefill, in each of several runs at another moment.

    `long_loss`: how much later the long one gets its first token than alone and first come, first served.
    `chunk_loss`: how much longer its own chunks take than there; the rest is the short one's prefill.
    """
    ids = Ids()
    long, prompt = Ask(id="long", prompt=ids(LONG), answer=ids(1)), ids(SHORT)
    alone_s = ttft_s(setting.run([long], 2, "fcfs").jobs["long"])
    shorts = [Ask(id="short", prompt=prompt, answer=[0], arrival_s=part * alone_s) for part in MOMENTS]
    runs = [setting.run([long, short], 2) for short in shorts]
    waits = [wait_s(run.jobs["short"]) for run in runs]
    summary: dict[str, Cell] = {
        "median_wait_s": median(waits),
        "worst_wait_s": max(waits),
        "median_ttft_s": median(ttft_s(run.jobs["short"]) for run in runs),
        "long_alone_s": alone_s,
        "long_loss": max(ttft_s(run.jobs["long"]) for run in runs) / alone_s - 1,
        "chunk_loss": max(prefill_s(run.steps, "long") for run in runs) / alone_s - 1,
    }
    rows = [describe(job) for run in runs for job in run.jobs.values() if job.id == "short"]
    return Report("short-behind-long", setting.policy, summary, rows, runs[-1])


def decode_beside_prefill(setting: Setting) -> Report:
    """An answer is generated while a 92,700-token prompt comes in after 20 s."""
    ids = Ids()
    long = Ask(id="long", prompt=ids(LONG), answer=ids(1), arrival_s=20.0)
    alone_s = ttft_s(setting.run([replace(long, arrival_s=0.0)], 2, "fcfs").jobs["long"])
    writer = Ask(id="writer", prompt=ids(SHORT), answer=ids(16_000))
    run = setting.run([writer, long], 2)
    begin, end = run.jobs["long"].started, run.jobs["long"].first_token
    assert begin is not None
    assert end is not None
    solo = decode_rate(run.steps, "writer", 1.0, begin)
    beside = decode_rate(run.steps, "writer", begin, end)
    return setting.report(
        "decode-beside-prefill",
        run,
        solo_tokens_s=solo,
        beside_tokens_s=beside,
        kept=beside / solo,
        prefill_speed=alone_s / (end - begin),
    )


def lanes(setting: Setting) -> Report:
    """1 to 16 clients at once, each asking three times in a row for 512 tokens after a prompt of 512, or of 2,048."""
    rows: list[dict[str, Cell]] = []
    for clients in range(1, 17):
        equal, long = (setting.run(in_turns(clients, prompt), clients) for prompt in (512, 2048))
        total, longer = throughput(equal), throughput(long)
        rows.append({"lanes": clients, "tokens_s": total, "a_lane": total / clients, "tokens_s_after_2048": longer})
    return Report("lanes", setting.policy, {"tokens_s_of_16": total, "after_2048": longer}, rows, equal)


def in_turns(clients: int, prompt: int) -> list[Ask]:
    ids = Ids()
    return [
        Ask(id=f"{client}.{turn}", prompt=ids(prompt), answer=ids(512), after=f"{client}.{turn - 1}" if turn else None)
        for client in range(clients)
        for turn in range(3)
    ]


def agents(setting: Setting) -> Report:
    """Ten agents in ten lanes, with a system prompt of 8,192 tokens in common, take six turns each: 600 new tokens in,
    200 out, and two seconds of tools between. The last five of the 600 open the answer, after a message's end."""
    ids = Ids()
    system, asks = ids(8192), []
    for agent in range(10):
        prompt, cut = list(system), [len(system)]
        for turn in range(6):
            prompt += ids(595)
            cut.append(len(prompt))
            prompt += ids(5)
            ask = Ask(
                id=f"agent {agent}, turn {turn}",
                prompt=list(prompt),
                answer=ids(200),
                arrival_s=2.0 if turn else 0.5 * agent,
                after=f"agent {agent}, turn {turn - 1}" if turn else None,
                boundaries=list(cut),
            )
            asks.append(ask)
            prompt += ask.answer
            cut.append(len(prompt))
    run = setting.run(asks, 10)
    jobs = run.jobs.values()
    firsts = [ttft_s(job) for job in jobs]
    return setting.report(
        "agents",
        run,
        seconds=run.seconds,
        tokens_s=throughput(run),
        median_ttft_s=median(firsts),
        worst_ttft_s=max(firsts),
        reused=sum(job.cached_tokens for job in jobs) / sum(len(job.ask.prompt) for job in jobs),
    )


def drafting(setting: Setting) -> Report:
    """One answer of 4,000 tokens of each kind of text: every depth of drafting, and the depth that `auto` chooses."""
    rows: list[dict[str, Cell]] = []
    for text, acceptance in TEXTS.items():
        ask = Ask(id=text, prompt=range(100), answer=range(4000), acceptance=acceptance)
        drafts = [replace(setting.config, spec="mtp", draft_tokens=depth) for depth in (*range(6), None)]
        depths = [replace(setting, config=config) for config in drafts]
        *fixed, auto = (throughput(run := one.run([ask], 1)) for one in depths)
        best = max(fixed)
        speeds: dict[str, Cell] = {f"draft_{depth}": speed for depth, speed in enumerate(fixed)}
        rows.append({"text": text, **speeds, "auto": auto, "auto_to_best": auto / best})
    shares = {f"auto_to_best_{row['text']}": row["auto_to_best"] for row in rows}
    return Report("drafting", setting.policy, shares, rows, run)


def many_shorts(setting: Setting) -> Report:
    """100 requests of 466 tokens come in a row during a 92,700-token prefill: there is always one to go first."""
    ids = Ids()
    shorts = [Ask(id=f"short {i}", prompt=ids(SHORT), answer=ids(1), arrival_s=1.0) for i in range(100)]
    run = setting.run([Ask(id="long", prompt=ids(LONG), answer=ids(1)), *shorts], 2)
    waits = [wait_s(run.jobs[short.id]) for short in shorts]
    return setting.report(
        "many-shorts",
        run,
        longest_gap_rounds=longest_gap(run.steps, "long"),
        median_wait_s=median(waits),
        worst_wait_s=max(waits),
        long_ttft_s=ttft_s(run.jobs["long"]),
    )


def replay(setting: Setting, asks: Sequence[Ask]) -> Report:
    """The requests of a trace, as an engine with these flags serves them or turns them away."""
    run = Machine(setting.cost, setting.config, setting.policy).run(asks)
    rows = [describe(job) | {"error": job.error.message if job.error else None} for job in run.jobs.values()]
    return Report("trace", setting.policy, {"seconds": run.seconds, "tokens_s": throughput(run)}, rows, run)


SCENARIOS: dict[str, Callable[[Setting], Report]] = {
    "short-behind-long": short_behind_long,
    "decode-beside-prefill": decode_beside_prefill,
    "lanes": lanes,
    "agents": agents,
    "many-shorts": many_shorts,
    "drafting": drafting,
}
