"""An engine process over the hash model. Some tokens in a prompt make it misbehave, some model names at its start."""

import sys
import time
from collections.abc import Callable

import torch

from longlane.config import EngineConfig
from longlane.engine.loop import Engine
from longlane.engine.process import main
from longlane.engine.runner import Runner
from longlane.errors import CheckpointError
from longlane.layers.batch import Batch, Caches, Output
from longlane.memory.manager import Memory
from longlane.memory.pages import PagePool
from longlane.memory.states import SlotPool
from longlane.types import Loading, MemoryPlan, ModelInfo, Ready
from support.hash_model import VOCAB, HashModel, poisoned_caches

HANG, CRASH, SLOW = 86, 87, 88
PAGES = 64


class FaultyModel(HashModel):
    """Hangs or raises when a prompt begins with `HANG` or `CRASH`; every step beside a row that holds `SLOW` in its
    first place takes 10 ms."""

    def forward(self, batch: Batch, caches: Caches) -> Output:
        output = super().forward(batch, caches)
        first = {int(caches.kv[0].k[table[0], 0, 0, 0]) for table in batch.block_table}
        if HANG in first:
            time.sleep(3600)
        if CRASH in first:
            raise RuntimeError("a planted fault")
        if SLOW in first:
            time.sleep(0.01)
        return output


def load(config: EngineConfig, progress: Callable[[Loading], None]) -> tuple[Engine, Ready]:
    progress(Loading(stage="hashing", done=0, total=2))
    if config.model == "missing":
        raise CheckpointError("there is no model 'missing'")
    if config.model == "broken":
        raise RuntimeError("a fault at start")
    progress(Loading(stage="hashing", done=2, total=2))
    lanes, context = config.max_concurrency, config.max_context or 4096
    runner = Runner(FaultyModel(), poisoned_caches(PAGES, lanes), torch.device("cpu"), VOCAB)
    memory = Memory(PagePool(PAGES), SlotPool(lanes), context)
    info = ModelInfo(name="hash", family="hash", parameters=0, vocab_size=VOCAB, max_context=context, weights_bytes=0)
    plan = MemoryPlan(
        device_bytes=0, pools=[], kv_dtype="float64", kv_pages=PAGES, kv_tokens=PAGES * 64, lanes=lanes,
        max_context=context, guaranteed_context=context,
    )  # fmt: skip
    return Engine(runner, memory, config), Ready(model=info, plan=plan)


if __name__ == "__main__":
    sys.exit(main(load))
