"""vLLM's engine without a server, in a process of its own: `python peer_vllm.py FOLDER '{"slots": 64, …}'`. The Python
is one that has vLLM (`VLLM_PYTHON`); nothing of this package is needed.

Lines in and out as of `peer_llama_cpp_slots`. Eager, float32, no prefix cache: every turn has the same prompts. All
requests are handed in at once; its own scheduler runs so many at a time. Its engine runs in this process, too.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(folder: str, settings: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it prints must not mix with the answers
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=settings["slots"],
        max_num_batched_tokens=settings["budget"],
        max_model_len=settings["context"],
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        how = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in asked["new_tokens"]
        ]
        started = time.perf_counter()
        outputs = engine.generate(prompts, how, use_tqdm=False)
        seconds = time.perf_counter() - started
        texts = [list(one.outputs[0].token_ids) for one in outputs]
        print(json.dumps({"texts": texts, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
