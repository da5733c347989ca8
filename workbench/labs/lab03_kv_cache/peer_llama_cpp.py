"""llama.cpp in a process of its own: `python -m …peer_llama_cpp FILE.gguf '{"threads": 2, …}'`.

One JSON line in, {"prompt": [ids], "new_tokens": n}; one out, {"tokens": [ids], "seconds": s}. A process of its
own because its idle worker threads go on spinning: whoever times something else stops this process meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time


def main(path: str, settings: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp itself prints must not mix with the answers
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = settings["context"], 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_prompt, params.verbosity = False, -1
    params.cache_ram_mib = 0  # else it keeps a copy of the request before, inside the time of the next
    if settings["exact"]:  # its flash attention on a CPU moves logits by about 1e-2, even in float32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        request = {
            "prompt": asked["prompt"],
            "n_predict": asked["new_tokens"],
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
        }
        started = time.perf_counter()
        answer = server.handle_completions(request)
        seconds = time.perf_counter() - started
        answer = json.loads(answer) if isinstance(answer, str) else answer
        text = answer["choices"][0]["text"]  # the vocabulary names each id: "<17><4>"
        tokens = [int(number) for number in re.findall(r"<(\d+)>", text)]
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
