"""llama.cpp behind the three verbs of `cpu_peer.py`; runs under the interpreter that has llama-cpp-python.

Prompt and generation are measured as llama-bench does: one decode of n tokens, and n decodes of one token, from an
empty cache, without sampling.
"""

import json
import random
import sys
import time

import llama_cpp


def main(path: str, threads: int, busy: bool) -> None:
    clock = time.process_time if busy else time.perf_counter
    size = {"n_ctx": 2048, "n_batch": 1024, "n_ubatch": 512}
    model = llama_cpp.Llama(path, n_threads=threads, n_threads_batch=threads, verbose=False, **size)
    context = model._ctx.ctx
    vocabulary = model.n_vocab()
    draw = random.Random(0)

    def decode(count: int) -> None:
        tokens = (llama_cpp.llama_token * count)(*(draw.randrange(vocabulary) for _ in range(count)))
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)) == 0
        llama_cpp.llama_synchronize(context)

    def prompt(count: int) -> None:
        decode(count)

    def generate(count: int) -> None:
        for _ in range(count):
            decode(1)

    verbs = {"prompt": prompt, "generate": generate}
    print(json.dumps({"version": f"llama-cpp-python {llama_cpp.__version__}"}), flush=True)
    for line in sys.stdin:
        verb, count = json.loads(line)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = clock()
        verbs[verb](count)
        print(json.dumps(clock() - start), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "--busy" in sys.argv)
