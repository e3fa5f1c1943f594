"""An engine process over the hash model. Some tokens in a prompt make it misbehave, some model names all of it."""

import sys
import time
from collections.abc import Callable

from longlane.config import EngineConfig
from longlane.engine.loop import Engine
from longlane.engine.process import main
from longlane.errors import CheckpointError
from longlane.layers.batch import Batch, Caches, Output
from longlane.memory.disk import Disk, fingerprint
from longlane.types import Loading, MemoryPlan, ModelInfo, Ready
from support.hash_model import VOCAB, HashModel
from support.toy_engine import build

HANG, CRASH, SLOW = 86, 87, 88
PAGES = 64


class FaultyModel(HashModel):
    """Hangs or raises when a prompt begins with `HANG` or `CRASH`; every step beside a row that holds `SLOW` in its
    first place takes 10 ms. `graph_fault`: raises in every round of two rows or more."""

    def __init__(self, graph_fault: bool) -> None:
        super().__init__()
        self._graph_fault = graph_fault

    def forward(self, batch: Batch, caches: Caches) -> Output:
        output = super().forward(batch, caches)
        first = {int(caches.kv[0].k[table[0], 0, 0, 0]) for table in batch.block_table}
        if HANG in first:
            time.sleep(3600)
        if CRASH in first:
            raise RuntimeError("a planted fault")
        if self._graph_fault and batch.kind != "prefill" and batch.rows > 1:
            raise RuntimeError("a planted fault of graphs")
        if SLOW in first:
            time.sleep(0.01)
        return output


def load(config: EngineConfig, progress: Callable[[Loading], None]) -> tuple[Engine, Ready]:
    """With `disk_cache`, over a prefix cache down to the disk."""
    progress(Loading(stage="hashing", done=0, total=2))
    if config.model == "missing":
        raise CheckpointError("there is no model 'missing'")
    if config.model == "broken":
        raise RuntimeError("a fault at start")
    progress(Loading(stage="hashing", done=2, total=2))
    lanes, context = config.max_concurrency, config.max_context or 4096
    disk = Disk(config.disk_cache, 1 << 30, fingerprint("hash")) if config.disk_cache else None
    engine = build(
        config,
        pages=PAGES,
        model=FaultyModel(config.model == "graph-fault" and config.cuda_graph),
        clock=time.monotonic,
        spare_slots=4 if disk else None,
        host=(PAGES, 8) if disk else None,
        disk=disk,
    )
    info = ModelInfo(name="hash", family="hash", parameters=0, vocab_size=VOCAB, max_context=context, weights_bytes=0)
    plan = MemoryPlan(
        device_bytes=0, pools=[], kv_dtype="float64", kv_pages=PAGES, kv_tokens=PAGES * 64, lanes=lanes,
        max_context=context, guaranteed_context=context, prefill_chunk=1024,
    )  # fmt: skip
    return engine, Ready(model=info, plan=plan, cuda_graphs=config.cuda_graph)


if __name__ == "__main__":
    sys.exit(main(load))
