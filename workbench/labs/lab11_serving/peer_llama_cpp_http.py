"""llama.cpp's own HTTP server, in a process of its own: `python -m …peer_llama_cpp_http FILE.gguf '{"port": 8080, …}'`.

Its cache in float32 and no flash attention, so that its greedy tokens are those of float32 (as in lab 08).
"""

from __future__ import annotations

import json
import signal
import sys


def main(path: str, settings: dict) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = settings["context"] * settings["slots"], settings["slots"], 0
    params.kv_unified = False  # a part of the cache for each slot
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_prompt, params.verbosity, params.port = False, -1, settings["port"]
    params.endpoint_metrics = True
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
