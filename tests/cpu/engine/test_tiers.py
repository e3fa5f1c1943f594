"""Warm equals cold below the device: spilled, restored, paused, written to disk and found again after a restart."""

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longlane.engine.loop import Engine
from longlane.engine.runner import Runner
from longlane.layers.batch import new_caches
from longlane.memory.disk import Disk, fingerprint
from longlane.memory.events import BlockStored, Event, Ledger
from longlane.memory.manager import Memory
from longlane.memory.pages import PagePool
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.memory.tiers import Tiers
from longlane.models.decoder import Decoder
from longlane.models.registry import build as build_model
from longlane.spec.speculator import Speculator
from longlane.types import Request, SamplingParams
from support.checkpoints import SIZES, dense_weights, randomised
from support.conversations import Conversation, Turn, drain, serve, turns
from support.hash_model import VOCAB
from support.late_executor import LateExecutor
from support.random_checkpoint import write_side_files
from support.toy_engine import Clock, Guesser, Log, PatientLane, arena, build, oracle, settings

MODEL = fingerprint("hash", "float64")


class Blocks:
    """What a router would believe, from events alone."""

    def __init__(self) -> None:
        self.known: set[tuple[str, bytes]] = set()

    def __call__(self, event: Event) -> None:
        block = event.tier, event.digest
        if isinstance(event, BlockStored):
            assert block not in self.known
            self.known.add(block)
        else:
            self.known.remove(block)


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def check_intact(engine: Engine, blocks: Blocks | None = None) -> None:
    stats = engine.stats(check=True)
    assert stats.integrity == []
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    if blocks is not None:
        assert blocks.known == restorable(engine)


def restorable(engine: Engine) -> set[tuple[str, bytes]]:
    """Every page of every tier under a state of any tier, from the contents and not from counts."""
    memory = engine._memory
    tree, host, disk = memory._tree, memory._tiers._host.shelf, memory._tiers._disk
    shelves = [host] + ([disk.shelf] if disk else [])
    covered = {node.digest for checkpoint in tree.checkpoints() for node in checkpoint.node.path()}
    covered |= {digest for shelf in shelves for state in shelf.states.values() for digest in state.path}
    there = {("device", node.digest) for node in tree.nodes()}
    there |= {(shelf.tier, digest) for shelf in shelves for digest in shelf.pages}
    return {(tier, digest) for tier, digest in there if digest in covered}


def check(
    work: list[Turn],
    *,
    system: int,
    raw: bool,
    lanes: int,
    slots: int,
    spare: int,
    drafts: int,
    host: tuple[int, int],
    disk: int,
    pace: float,
    beside: int | None,
) -> None:
    """Run `work` with a restart in the middle; `disk` is the bytes that the disk tier may use, 0 for none, and `pace`
    how likely a look finds its next task done."""
    worker = partial(LateExecutor, random.Random(0), pace)
    talk = Conversation(system, raw)
    wanted = [talk.request(index, turn) for index, turn in enumerate(work)]
    pages = -(-max(len(text) for text in talk.texts) // 64) + spare
    half = len(work) // 2 if disk else len(work)
    log = Log()
    with folder() as path:
        for part in (range(half), range(half, len(work))):
            blocks = Blocks()
            ledger = Ledger(blocks)
            engine = build(
                settings(max_concurrency=lanes, prefill_chunk=64),
                pages=pages,
                speculator=Guesser(drafts, 3) if drafts else None,
                clock=Clock(tick=0.001),
                spare_slots=slots,
                host=host,
                disk=Disk(path, disk, MODEL, ledger, worker) if disk else None,
                ledger=ledger,
                overlap=beside is not None,
                beside=None if beside is None else PatientLane(beside),
            )
            for index in part:
                engine.submit(wanted[index])
                if work[index].wait:
                    drain(engine, log)
                    check_intact(engine, blocks)
            drain(engine, log)
            check_intact(engine, blocks)
            engine.close()
    assert not log.failed
    for one in wanted:
        assert log.tokens.get(one.id, []) == talk.answers[one.id], one.id


case = given(
    work=turns,
    system=st.sampled_from([1, 64, 90, 330]),
    raw=st.booleans(),
    lanes=st.integers(1, 3),
    slots=st.integers(0, 3),
    spare=st.integers(0, 4),
    drafts=st.sampled_from([0, 3]),
    host=st.tuples(st.integers(1, 20), st.integers(1, 5)),
    disk=st.sampled_from([0, 0, 20_000, 1 << 30]),
    pace=st.sampled_from([0.05, 0.3, 1.0]),
    beside=st.sampled_from([None, 0, 2, 20]),
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


@case
@examples(max_examples=40, deadline=None, suppress_health_check=slow)
def test_warm_equals_cold(work, **machine):
    check(work, **machine)


@pytest.mark.nightly
@case
@examples(max_examples=300, deadline=None, suppress_health_check=slow)
def test_warm_equals_cold_at_length(work, **machine):
    check(work, **machine)


def request(id: str, tokens: list[int], answer: int = 3) -> Request:
    return Request(id=id, token_ids=tokens, max_tokens=answer, boundaries=[len(tokens)])


def words(symbol: int, count: int) -> list[int]:
    return [(symbol * 7 + i * symbol) % VOCAB for i in range(count)]


def following(id: str, earlier: Request) -> Request:
    """The next turn: what an earlier request and its answer spell, and a token more."""
    return request(id, [*earlier.token_ids, *oracle(earlier).token_ids, 5])


def test_what_the_device_has_no_room_for_comes_back_from_the_host():
    engine = build(settings(max_concurrency=1), pages=6, spare_slots=2, host=(20, 4))
    first = request("a", words(1, 300))
    assert serve(engine, first).cached_tokens == 0
    serve(engine, request("b", words(2, 300)))
    log = Log()
    again = following("c", first)
    engine.submit(again)
    drain(engine, log)
    assert log.reuse["c"] == "host state at 302"
    assert log.tokens["c"] == oracle(again).token_ids
    assert log.finished["c"].timings.computed_prefill_tokens == 2
    check_intact(engine)


def test_a_restart_continues_from_the_disk():
    with folder() as path:
        first = request("a", words(1, 300))
        engine = build(settings(), pages=20, spare_slots=2, host=(20, 4), disk=Disk(path, 1 << 30, MODEL))
        serve(engine, first)
        engine.close()
        engine = build(settings(), pages=20, spare_slots=2, host=(20, 4), disk=Disk(path, 1 << 30, MODEL))
        log = Log()
        engine.submit(following("b", first))
        drain(engine, log)
        assert log.reuse["b"] == "disk state at 302"
        assert log.tokens["b"] == oracle(following("b", first)).token_ids
        check_intact(engine)
        engine.close()


def test_a_restore_holds_up_nobody_else():
    engine = build(settings(max_concurrency=2, prefill_chunk=64), pages=14, spare_slots=2, host=(20, 4))
    first = request("a", words(1, 700))
    serve(engine, first)
    serve(engine, request("b", words(2, 800)))
    log = Log()
    engine.submit(request("beside", words(3, 60), 40))
    while len(log.tokens.get("beside", [])) < 2:
        log.take(engine.step())
    engine.submit(following("back", first))
    answered = len(log.tokens["beside"])
    while "back" not in log.reuse:
        log.take(engine.step())
    # It took several steps, which decoded the other request, and nothing was said of the prefix before it was there.
    assert len(log.tokens["beside"]) > answered + 2
    assert log.reuse["back"] == "host state at 702"
    drain(engine, log)
    for one in (request("beside", words(3, 60), 40), following("back", first)):
        assert log.tokens[one.id] == oracle(one).token_ids
    check_intact(engine)


def test_a_cancelled_restore_gives_everything_back():
    engine = build(settings(max_concurrency=2, prefill_chunk=64), pages=14, spare_slots=2, host=(20, 4))
    first = request("a", words(1, 700))
    serve(engine, first)
    serve(engine, request("b", words(2, 800)))
    for steps in range(4):
        engine.submit(following(f"gone{steps}", first))
        for _ in range(steps):
            engine.step()
        engine.cancel(f"gone{steps}")
        engine.step()
        check_intact(engine)
    back = following("back", first)
    log = Log()
    engine.submit(back)
    drain(engine, log)
    assert (log.reuse["back"], log.tokens["back"]) == ("host state at 702", oracle(back).token_ids)


def test_a_paused_request_comes_back_from_the_host_and_computes_nothing_twice():
    engine = build(settings(max_concurrency=2, prefill_chunk=64), pages=6, spare_slots=0, host=(20, 4))
    both = [request("old", words(1, 100), 220), request("young", words(2, 100), 220)]
    log = Log()
    for one in both:
        engine.submit(one)
    drain(engine, log)
    for one in both:
        assert log.tokens[one.id] == oracle(one).token_ids
    # After a pause, the last token is computed from what came back.
    assert log.finished["old"].timings.computed_prefill_tokens == 100
    assert 100 < log.finished["young"].timings.computed_prefill_tokens <= 110
    check_intact(engine)


def test_a_prefix_larger_than_the_arena_is_computed_again():
    engine = build(settings(max_concurrency=1), pages=6, spare_slots=2, host=(3, 4))
    first = request("a", words(1, 300))
    serve(engine, first)
    serve(engine, request("b", words(2, 300)))
    again = following("c", first)
    assert serve(engine, again).cached_tokens < 200
    check_intact(engine)


def talk(index: int) -> Request:
    """Few beginnings, so that later requests find what earlier ones left."""
    tokens = [index % 5] * 150 + [(index * 3 + i) % VOCAB for i in range(70 + index % 60)]
    return Request(id=f"r{index}", token_ids=tokens, max_tokens=3, boundaries=[150, len(tokens)])


def small(path: Path) -> Engine:
    return build(settings(), pages=8, spare_slots=1, host=(12, 4), disk=Disk(path, 60_000, MODEL))


def serve_forever(path: Path, start: int) -> None:
    engine = small(path)
    for index in range(start, start + 100_000):
        serve(engine, talk(index))


def check_kills(times: int) -> None:
    """Kill a server that writes at random moments; after each, the next one answers right, from the disk too."""
    chance, reused = random.Random(times), 0
    fork = multiprocessing.get_context("fork")
    with folder() as path:
        for turn in range(times):
            server = fork.Process(target=serve_forever, args=(path, turn * 1000), daemon=True)
            server.start()
            time.sleep(chance.uniform(0.1, 0.4))
            assert server.is_alive()
            os.kill(server.pid, signal.SIGKILL)
            server.join()
            engine, log = small(path), Log()
            for index in range(5):
                engine.submit(talk(turn * 1000 + 5 + index))
            drain(engine, log)
            check_intact(engine)
            for index in range(5):
                one = talk(turn * 1000 + 5 + index)
                assert log.tokens[one.id] == oracle(one).token_ids
            reused += sum(reuse.startswith("disk") for reuse in log.reuse.values())
            engine.close()
    assert reused >= times


def test_a_kill_while_writing_costs_no_answer():
    check_kills(10)


@pytest.mark.nightly
def test_many_kills_while_writing_cost_no_answer():
    check_kills(50)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Decoder:
    """Heads of 64, the least that every codec takes."""
    directory = tmp_path_factory.mktemp("hybrid")
    rope = {**SIZES["rope_parameters"], "mrope_section": [6, 5, 5]}
    sizes = {**SIZES, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    randomised(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))).save_pretrained(directory)
    write_side_files(directory, sizes["vocab_size"])
    config, weights = dense_weights(directory)
    return build_model(config, weights, dtype=torch.float64)


def serve_turns(model: Decoder, codec: str, spec: str, path: Path | None) -> list[tuple[list[int], str]]:
    """Two conversations in turns over a pool that holds one; with `path`, over all tiers and a restart in the middle.
    What each turn answered, and where its prefix came from."""
    prompts, answers = {0: words(3, 70), 1: words(5, 90)}, []
    engine = None
    for turn in range(6):
        if engine is None or (path and turn == 3):
            engine = real_engine(model, codec, spec, path)
        one = Request(id=f"t{turn}", token_ids=prompts[turn % 2], max_tokens=8, sampling=SamplingParams(temperature=0))
        log = Log()
        engine.submit(one)
        drain(engine, log)
        answers.append((log.tokens[one.id], log.reuse[one.id].split(" ")[0]))
        prompts[turn % 2] = [*one.token_ids, *log.tokens[one.id], *words(turn, 40)]
        check_intact(engine)
        if turn in (2, 5):
            engine.close()
    return answers


def real_engine(model: Decoder, codec: str, spec: str, path: Path | None) -> Engine:
    config = settings(spec=spec, draft_tokens=3, max_context=256)
    caches = new_caches(model.spec, pages=5, slots=2, codec=codec, dtype=torch.float64, device="cpu")
    speculator = None if spec == "off" else Speculator(config, model.mtp, caches)
    runner = Runner(model, caches, torch.device("cpu"), 320, speculator and speculator.drafter)
    pages, slots = PagePool(4), SlotPool(1)
    if path is None:
        return Engine(runner, Memory(pages, slots, 256), config, speculator)
    tiers = Tiers(arena(caches, 10, 4), Disk(path, 1 << 30, MODEL))
    tree = PrefixTree(pages, slots, stateful=True, page_bytes=1000, slot_bytes=4000, watchers=[tiers])
    return Engine(runner, Memory(pages, slots, 256, tree=tree, mover=caches, tiers=tiers), config, speculator)


@pytest.mark.parametrize(
    ("codec", "spec"),
    [
        ("float64", "lookup"),
        ("bf16", "off"),
        ("int8", "lookup"),
        pytest.param("fp8", "off", marks=pytest.mark.nightly),
        pytest.param("rk8v4", "off", marks=pytest.mark.nightly),
        pytest.param("rk4v4", "off", marks=pytest.mark.nightly),
        ("rk4v4-e8", "lookup"),
        pytest.param("rk2v4-e8", "off", marks=pytest.mark.nightly),
    ],
)
def test_a_real_model_answers_the_same_from_every_tier(hybrid, codec, spec):
    with folder() as path:
        warm = serve_turns(hybrid, codec, spec, path)
    cold = serve_turns(hybrid, codec, spec, None)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    assert [tier for _, tier in warm][2:5] == ["host", "disk", "disk"]


DAMAGE = {
    "flip": lambda body: body[:-10] + bytes([body[-10] ^ 4]) + body[-9:],
    "header": lambda body: body[:40] + bytes([body[40] ^ 4]) + body[41:],
    "cut": lambda body: body[:-1],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damaged_file_is_skipped(damage):
    first = request("a", words(1, 200))
    again = following("b", first)
    with folder() as path:
        engine = build(settings(), pages=20, spare_slots=2, host=(20, 4), disk=Disk(path, 1 << 30, MODEL))
        serve(engine, first)
        engine.close()
        whole = {file: file.read_bytes() for file in path.iterdir()}
        assert sorted(file.suffix for file in whole) == [".page"] * 3 + [".state"]
        for victim, body in whole.items():
            for file, content in whole.items():
                file.write_bytes(content)
            victim.write_bytes(DAMAGE[damage](body))
            log = Log()
            engine = build(settings(), pages=20, spare_slots=2, host=(20, 4), disk=Disk(path, 1 << 30, MODEL))
            engine.submit(again)
            drain(engine, log)
            assert log.tokens["b"] == oracle(again).token_ids
            assert log.finished["b"].timings.cached_tokens == 0
            check_intact(engine)
            engine.close()
