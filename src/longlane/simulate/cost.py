"""What a step costs on a card, in seconds, as a function of its rows, depths, columns and chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

# Qwen3.8-27B with groupwise-int weights. Weights of a plain step; the MTP layer and the reduced head of one draft; a
# state image read and written; keys and values of one token as int8.
WEIGHT_BYTES = 15.73e9
DRAFT_BYTES = 0.81e9
STATE_BYTES = 2 * 147.75 * 2**20
KV_BYTES = 33_792
# Tokens that it was trained for.
MAX_CONTEXT = 262_144
# 700 small dependent kernels of 1.07 us in a graph.
FIXED_S = 0.75e-3
# Of the 27B on 64 and 68 multiprocessors of an H200, the default floor: with them its model keeps what the whole engine
# was measured to keep beside a prefill, 0.545 of a lane's rate and 0.537 of the prefill's (`bench/results/log.md`).
DECODE_SHARE, PREFILL_SHARE = 0.54, 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of steps of one card.

    weight_rate and kv_rate: bytes per second at which weights and states, and keys and values, are read. many_s: once
    for a decode step of more columns than `free_columns`, and column_s for each one more. token_s: each prompt token;
    depth_s: each pair of a prompt token and one before it; chunk_s: each chunk. decode_share, prefill_share: of their
    speed, what a round and a chunk keep that run at the same time.
    """

    weight_rate: float
    kv_rate: float
    many_s: float
    column_s: float
    free_columns: int
    token_s: float
    depth_s: float
    chunk_s: float
    kv_bytes: int = KV_BYTES
    decode_share: float = DECODE_SHARE
    prefill_share: float = PREFILL_SHARE

    def decode_s(self, depths: Sequence[int], drafts: int = 0) -> float:
        """One round: `drafts` proposals, then drafts + 1 columns of every row. depths: tokens in the cache, by row."""
        beyond = max(0, len(depths) * (drafts + 1) - self.free_columns)
        return (
            FIXED_S
            + decode_bytes(len(depths), drafts) / self.weight_rate
            + self.kv_bytes * sum(depths) / self.kv_rate
            + self.many_s * bool(beyond)
            + self.column_s * beyond
        )

    def prefill_s(self, depth: int, tokens: int) -> float:
        """One chunk of `tokens` after `depth` others."""
        return self.chunk_s + self.token_s * tokens + self.depth_s * token_pairs(depth, tokens)

    def prompt_s(self, tokens: int, chunk: int) -> float:
        """A whole prompt in chunks of at most `chunk` tokens, with nothing beside it."""
        return self.chunk_s * -(-tokens // chunk) + self.token_s * tokens + self.depth_s * token_pairs(0, tokens)


def decode_bytes(rows: int, drafts: int) -> float:
    """Read and written by a round whatever the depth."""
    return WEIGHT_BYTES + DRAFT_BYTES * drafts + STATE_BYTES * rows


def token_pairs(depth: int, tokens: int) -> float:
    """How often one of `tokens` tokens after `depth` others looks at one before it."""
    return tokens * (depth + tokens / 2)
