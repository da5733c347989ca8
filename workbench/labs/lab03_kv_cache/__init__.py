"""Lab 03, the KV cache: what remembering saves and what it takes.

Beside them: `peer_engines` has the contenders of `peers`, `peer_oracles` what their tokens are held against;
`gguf_file` writes a model for llama.cpp, `peer_llama_cpp` times it in a process of its own.
"""

PREFIX = "cache"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "token_times",
    "growth",
    "memory",
    "chunks",
    "cache_batch",
    "peers",
)
PANELS = ("token_times", "growth", "memory", "chunks", "cache_batch")  # those that have a panel, by the same stem
