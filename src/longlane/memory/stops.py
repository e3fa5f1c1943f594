"""Where a prompt's state is kept while it is computed, for whoever begins alike. A chunk must end there, so each place
costs a chunk, which is what 15 to 65 tokens cost (`docs/memory.md`), and a state slot."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from longlane.memory.plan import PAGE

# Tokens from one place to the next, at least: what closes an answer lies one behind the state that the answer left.
LEAST_APART = 8
# Tokens that a place inside of a message must spare beyond the one before it. Perhaps nobody comes: so the chunk should
# cost at most a quarter of them.
WORTH_A_CUT = 4 * PAGE
# The same beside a card, where nobody has come yet. There a chunk takes at least what the host needs to launch it, by
# estimate 50 ms (466 tokens have their first token after 66): in that time an H200 computes 600 tokens.
WORTH_A_LAUNCH = 32 * PAGE
# A place every so often beside those at boundaries: what an edited long prompt recomputes at most.
INTERVAL = 8192


def stops_of(boundaries: Iterable[int], parts: Iterable[int], cached: int, prompt: int, last: int) -> list[int]:
    """Offsets beyond what is cached: the first boundary, which is the end of the system block, the `last` ones, one
    every so often, and one before each place where the prompt `parts` from another: as two did so, a third may
    (Marconi, Pan et al., 2024)."""
    marks = sorted(mark for mark in boundaries if 0 < mark < prompt)
    chosen = {*marks[:1], *marks[max(0, len(marks) - last) :], *range(INTERVAL, prompt, INTERVAL)}
    stops: list[int] = []
    for mark in sorted(chosen):
        if mark - state_before(mark, stops, cached) >= LEAST_APART:
            stops.append(mark)
    for part in sorted({*parts}):
        stops += edge_before(min(part, prompt - 1), stops, cached)
    # Of an edge and a boundary just behind it the edge serves both, for the few tokens between.
    return [stop for before, stop in pairwise([cached, *sorted(stops)]) if stop - before >= LEAST_APART]


def edge_before(end: int, stops: Sequence[int], cached: int, least: int = WORTH_A_CUT) -> list[int]:
    """The last page edge up to `end`, or nothing where a state there would spare less than `least` tokens."""
    edge = end - end % PAGE
    return [edge] if edge - state_before(end, stops, cached) >= least else []


def state_before(end: int, stops: Sequence[int], cached: int) -> int:
    """The last position up to `end` where there is a state, or will be."""
    return max([cached, *(stop for stop in stops if stop <= end)])
