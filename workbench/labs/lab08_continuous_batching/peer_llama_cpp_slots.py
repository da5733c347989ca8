"""llama.cpp with several slots, in a process of its own: `python -m …peer_llama_cpp_slots FILE.gguf '{"threads": 2,
…}'`.

One JSON line in, {"prompts": [[ids], …], "new_tokens": [n, …]}; one out, {"texts": [[ids], …], "seconds": s}. All
requests are handed in at once, in their order; its own scheduler gives them the slots as these become free. A process
of its own, as in `peer_llama_cpp`: whoever times something else stops it meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time


def main(path: str, settings: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp itself prints must not mix with the answers
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = settings["context"], settings["slots"], 0
    params.kv_unified = False  # a part of the cache for each slot: no row attends over another's places
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_prompt, params.verbosity = False, -1
    if settings["exact"]:  # its flash attention on a CPU moves logits by about 1e-2, even in float32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        texts = serve(server, asked["prompts"], asked["new_tokens"])
        seconds = time.perf_counter() - started
        print(json.dumps({"texts": texts, "seconds": seconds}), file=answers, flush=True)


def serve(server, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    """A thread a request, which only waits: the work is done by the server's own threads."""
    texts: list[list[int]] = [[] for _ in prompts]

    def ask(number: int) -> None:
        request = {
            "prompt": prompts[number],
            "n_predict": new_tokens[number],
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
        }
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        text = answer["choices"][0]["text"]  # the vocabulary names each id: "<17><4>"
        texts[number] = [int(found) for found in re.findall(r"<(\d+)>", text)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
