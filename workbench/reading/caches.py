"""Claims about the cache: what it saves, what it takes, and its smaller forms (labs 03, 04 and 09)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.instruments.costs import causal_pairs, kv_bytes
from workbench.models.config import ModelConfig
from workbench.models.recipes import CACHE_VARIANTS
from workbench.models.shapes import public_shape
from workbench.reading.claim import Claim
from workbench.reading.decoding import rows_without_cache

MiB, GiB = 2**20, 2**30
K = 1024
FORMULA = "2·L·H_kv·D·S·b with 16-bit values"
OFTEN = "tables of cache sizes, often repeated"
DEEPSEEK_V2 = "DeepSeek-V2, arXiv 2405.04434"
VLLM = "Kwon et al., arXiv 2309.06180"


def pairs_ratio(prompt: int, new: int) -> float:
    without = sum(causal_pairs(length, 0) for length in range(prompt, prompt + new))
    return without / causal_pairs(prompt + new - 1, 0)


def rows_ratio(prompt: int, new: int) -> float:
    return rows_without_cache(prompt, new) / (prompt + new - 1)


def _size(name: str, model: str, tokens: int, said: str, unit: str, says: str) -> Claim:
    scale = {"MiB": MiB, "GiB": GiB}[unit]
    return Claim(name, 3, says, OFTEN, said, unit, FORMULA, lambda: kv_bytes(public_shape(model), tokens) / scale)


def _with_heads(heads: int) -> ModelConfig:
    return replace(public_shape("llama-2-70b"), num_kv_heads=heads)


def _in_two_units(size: float) -> dict[str, float]:
    return {"in GB of 10⁹": size / 1e9, "in GiB of 2³⁰": size / GiB}


def deepseek_67b() -> ModelConfig:
    """As far as its cache goes: 95 layers, 8 key-value heads of 128."""
    return replace(public_shape("llama-2-70b"), num_layers=95)


def _less_than_67b(bits: int) -> float:
    latent = kv_bytes(replace(public_shape("deepseek-v2"), experts=None), 1, bits / 8)
    return 100 * (1 - latent / kv_bytes(deepseek_67b(), 1, 2))


def _latent(part: Callable[[ModelConfig], float]) -> Callable[[], float]:
    return lambda: part(public_shape("deepseek-v3"))


def _cached(shape: ModelConfig) -> int:
    assert shape.latent_attention is not None
    return shape.latent_attention.kv_rank + shape.latent_attention.rotary_head_dim


def _keys(shape: ModelConfig) -> int:
    assert shape.latent_attention is not None
    return shape.num_heads * shape.latent_attention.content_head_dim


def _keys_and_values(shape: ModelConfig) -> int:
    assert shape.latent_attention is not None
    return _keys(shape) + shape.num_heads * shape.latent_attention.value_head_dim


def _shared() -> float:
    whole = CACHE_VARIANTS["stdlib-3m-mha"]
    return kv_bytes(CACHE_VARIANTS["stdlib-3m-shared"], 1) / kv_bytes(whole, 1)


def waste_of_blocks(tokens: int, block: int = 16) -> float:
    """Share of a sequence's blocks that holds nothing, in percent, when it ends: half a block in the mean."""
    return 100 * (block - 1) / 2 / (tokens + (block - 1) / 2)


CLAIMS = (
    Claim(
        "44-times",
        3,
        "With a prompt of 4,096 and 512 new tokens a cache saves 44 times the work",
        "in print",
        "44",
        "times",
        "rows and pairs of attention without a cache over those with one",
        lambda: {"rows": rows_ratio(4096, 512), "pairs": pairs_ratio(4096, 512)},
        about=0.05,
    ),
    _size("7b-token", "llama-2-7b", 1, "0.5", "MiB", "A token of Llama 2 7B takes 0.5 MiB"),
    _size("7b-4k", "llama-2-7b", 4 * K, "2", "GiB", "4K tokens of Llama 2 7B take 2 GiB"),
    _size("13b-token", "llama-2-13b", 1, "0.78", "MiB", "A token of Llama 2 13B takes 0.78 MiB"),
    _size("70b-token", "llama-2-70b", 1, "0.31", "MiB", "A token of Llama 2 70B, with 8 key-value heads, 0.31 MiB"),
    _size("70b-4k", "llama-2-70b", 4 * K, "1.25", "GiB", "4K tokens of Llama 2 70B take 1.25 GiB"),
    _size("70b-128k", "llama-2-70b", 128 * K, "40", "GiB", "128K tokens of Llama 2 70B take 40 GiB"),
    Claim(
        "70b-64-heads",
        3,
        "With 64 key-value heads 128K tokens of Llama 2 70B would take 320 GiB",
        OFTEN,
        "320",
        "GiB",
        FORMULA,
        lambda: kv_bytes(_with_heads(64), 128 * K) / GiB,
    ),
    _size("8b-token", "llama-3-8b", 1, "0.125", "MiB", "A token of Llama 3 8B takes 0.125 MiB"),
    _size("8b-128k", "llama-3.1-8b", 128 * K, "16", "GiB", "128K tokens of Llama 3.1 8B take 16 GiB"),
    _size("405b-token", "llama-3.1-405b", 1, "0.49", "MiB", "A token of Llama 3.1 405B takes 0.49 MiB"),
    _size("405b-128k", "llama-3.1-405b", 128 * K, "63", "GiB", "128K tokens of Llama 3.1 405B take 63 GiB"),
    Claim(
        "gpt2-values",
        3,
        "1,000 tokens of GPT-2 small are 18,432,000 numbers",
        OFTEN,
        "18,432,000",
        "numbers",
        "2·L·H·D·S",
        lambda: kv_bytes(public_shape("gpt2"), 1000, 1),
    ),
    Claim(
        "64-users",
        3,
        "64 users of 4K tokens take 86 GB on Llama 2 70B, more than a card of 80 GB",
        OFTEN,
        "86",
        "GB",
        FORMULA,
        lambda: 64 * kv_bytes(public_shape("llama-2-70b"), 4 * K) / 1e9,
    ),
    Claim(
        "opt-13b-token",
        3,
        "A token of OPT-13B takes 800 KB",
        VLLM,
        "800",
        "KB",
        "2 · 5,120 · 40 · 2 bytes: the cache of Llama 2 13B's shape",
        lambda: {
            "in kB of 1,000": kv_bytes(public_shape("llama-2-13b"), 1) / 1e3,
            "in KiB": kv_bytes(public_shape("llama-2-13b"), 1) / K,
        },
    ),
    Claim(
        "opt-13b-request",
        3,
        "A request of 2,048 tokens takes 1.6 GB with OPT-13B",
        VLLM,
        "1.6",
        "GB",
        "the same, 2,048 times",
        lambda: _in_two_units(kv_bytes(public_shape("llama-2-13b"), 2048)),
    ),
    Claim(
        "llama-2-mqa",
        4,
        "Llama 2 uses multi-query attention: one key-value head",
        "summaries, often repeated",
        "1",
        "key-value heads",
        "the models' own config.json",
        lambda: {n: public_shape(f"llama-2-{n}").num_kv_heads for n in ("7b", "13b", "70b")},
    ),
    Claim(
        "70b-heads",
        4,
        "Llama 2 70B with a key-value head per query head would have 32",
        "a table in print",
        "32",
        "key-value heads",
        "its query heads, by its config.json",
        lambda: public_shape("llama-2-70b").num_heads,
    ),
    Claim(
        "gqa-shrinks",
        4,
        "Groups of 8 query heads shrink the cache of Llama 2 70B 8 times",
        "Ainslie et al., arXiv 2305.13245",
        "8",
        "times",
        "H_q / H_kv",
        lambda: kv_bytes(_with_heads(64), 1) / kv_bytes(public_shape("llama-2-70b"), 1),
    ),
    Claim(
        "mla-token",
        4,
        "Latent attention caches 576 numbers per token and layer",
        DEEPSEEK_V2,
        "576",
        "numbers",
        "latent + rotary key of DeepSeek-V3",
        _latent(_cached),
    ),
    Claim(
        "mla-keys",
        4,
        "Keys of all heads would be 16,384 numbers, 28 times what latent attention caches",
        DEEPSEEK_V2,
        "28",
        "times",
        "H·D of the keys / 576",
        _latent(lambda s: _keys(s) / _cached(s)),
    ),
    Claim(
        "mla-both",
        4,
        "Keys and values of all heads would be 32,768 numbers, 57 times what latent attention caches",
        DEEPSEEK_V2,
        "57",
        "times",
        "both / 576",
        _latent(lambda s: _keys_and_values(s) / _cached(s)),
    ),
    Claim(
        "mla-groups",
        4,
        "The cache of latent attention is that of grouped-query attention with 2.25 groups",
        DEEPSEEK_V2,
        "2.25",
        "groups",
        "576 / (2·128)",
        _latent(lambda s: _cached(s) / (2 * 128)),
    ),
    Claim(
        "mla-67b",
        4,
        "DeepSeek-V2 reduces the KV cache of DeepSeek 67B by 93.3 %",
        f"{DEEPSEEK_V2}, abstract",
        "93.3",
        "%",
        "60 layers of 576 numbers against 95 of 2·8·128",
        lambda: {"both in 16 bits": _less_than_67b(16), "the latent in 6 bits": _less_than_67b(6)},
    ),
    Claim(
        "cla",
        4,
        "Two layers that share one cache halve its bytes",
        "Brandon et al., arXiv 2405.12981",
        "0.5",
        "of the cache",
        "layers with keys of their own / layers",
        _shared,
    ),
    Claim(
        "blocks-waste",
        9,
        "Blocks of 16 tokens waste under 4 % of the memory",
        VLLM,
        "≤ 4",
        "%",
        "7.5 empty places of the last block in the mean, when a sequence ends",
        lambda: {f"{n:,} tokens": waste_of_blocks(n) for n in (100, 180, 500, 2000)},
    ),
)
