"""What a run says of a request: how long it waited, how fast it went, how long it was passed over."""

from collections.abc import Sequence

from longlane.simulate.machine import Job, Run, Step


def wait_s(job: Job) -> float:
    """From its arrival to the start of its first chunk."""
    assert job.started is not None
    return job.started - job.submitted


def ttft_s(job: Job) -> float:
    assert job.first_token is not None
    return job.first_token - job.submitted


def total_s(job: Job) -> float:
    assert job.ended is not None
    return job.ended - job.submitted


def longest_gap(steps: Sequence[Step], id: str) -> int:
    """Most chunks of others in a row between two chunks of one prompt."""
    longest, gap = 0, None
    for step in steps:
        if step.chunk is None:
            continue
        if step.chunk.id == id:
            longest, gap = max(longest, gap or 0), 0
        elif gap is not None:
            gap += 1
    return longest


def prefill_s(steps: Sequence[Step], id: str) -> float:
    """Of all chunks of one prompt."""
    return sum(step.prefill_s for step in steps if step.chunk and step.chunk.id == id)


def decode_rate(steps: Sequence[Step], id: str, begin: float, end: float) -> float:
    """Tokens per second that a decode row got in the steps that began in [begin, end)."""
    window = [step for step in steps if begin <= step.began < end]
    return sum(step.decode.get(id, 0) for step in window) / (window[-1].ended - window[0].began)


def throughput(run: Run) -> float:
    """Generated tokens per second over the whole run; 0 where nobody was served."""
    tokens = sum(len(job.ask.answer) for job in run.jobs.values() if job.outcome == "finished")
    return tokens / run.seconds if tokens else 0.0
