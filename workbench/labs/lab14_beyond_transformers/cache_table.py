"""beyond.cache_table: bytes that public models keep of one text, counted, beside what was published of them.

Keys and values grow with the text, states do not. Shapes are those of the models' own config.json; experts are left
out, of which a cache has nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.errors import unknown
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.costs import kv_bytes
from workbench.kv import KV, make_kv
from workbench.labs.lab14_beyond_transformers.state_memory import made
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape
from workbench.models.state_shape import StateShape

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "beyond.cache_table"
DTYPES = {16: torch.float16, 32: torch.float32}  # of keys and values, by their bits
ASKED = (16, 48)  # tokens at which a real cache says its bytes
CLOSE = 0.05  # as a share: a published number that is no further off is called rounded
JAMBA, JAMBA_PAPER = "jamba-v0.1", "Jamba, arXiv 2403.19887, table 1"
LLAMA_BLOG = "huggingface.co/blog/llama31"


def _mamba(layers: int, hidden: int, rank: int) -> ModelConfig:
    """Mamba (arXiv 2312.00752): E = 2d, N = 16, W = 4, no feed-forward."""
    shape = StateShape(inner_size=2 * hidden, state_size=16, rank=rank, conv_width=4, conv_bias=True)
    return ModelConfig(
        family="mamba",
        vocab_size=50_280,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        intermediate_size=0,
        context_length=1 << 20,
        mixers=("mamba",) * layers,
        state_shape=shape,
    )


def _jamba() -> ModelConfig:
    """ai21labs/Jamba-v0.1: of 8 layers the one at offset 4 attends, the others are Mamba."""
    return ModelConfig(
        family="jamba",
        vocab_size=65_536,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        context_length=262_144,
        rotary_dim=0,
        mixers=tuple("attention" if layer % 8 == 4 else "mamba" for layer in range(32)),
        state_shape=StateShape(
            inner_size=8192, state_size=16, rank=256, conv_width=4, conv_bias=True, inner_norms=True
        ),
    )


def _mixtral() -> ModelConfig:
    """mistralai/Mixtral-8x7B-v0.1, the attention of Mistral 7B without its window."""
    return dataclasses.replace(public_shape("mistral-7b"), sliding_window=None)


def _mamba2() -> ModelConfig:
    """state-spaces/mamba2-130m (arXiv 2405.21060): the same sizes with N = 128 and heads of 64."""
    shape = StateShape(inner_size=1536, state_size=128, num_heads=24, conv_width=4, conv_bias=True)
    return dataclasses.replace(_mamba(24, 768, 48), family="mamba2", mixers=("mamba2",) * 24, state_shape=shape)


@functools.cache
def shapes() -> Mapping[str, ModelConfig]:
    """What caches need to know of each model, by its name."""
    known = ("llama-2-7b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-405b")
    latent = dataclasses.replace(public_shape("deepseek-v3"), experts=None)
    return {
        JAMBA: _jamba(),
        "mixtral-8x7b": _mixtral(),
        **{name: public_shape(name) for name in known},
        "deepseek-v3": latent,
        "gpt2": public_shape("gpt2"),
        "mamba-130m": _mamba(24, 768, 48),
        "mamba2-130m": _mamba2(),
    }


def shape_called(name: str) -> ModelConfig:
    """Raises WorkbenchError for a name that is none of `shapes`."""
    if name not in shapes():
        raise unknown("model", name, shapes())
    return shapes()[name]


# -- what was published ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A published size of the cache of one text, keys and values in 16 bits and states in float32."""

    model: str
    context: int  # tokens
    number: str  # as it was written, with its digits
    unit: str  # as it was written: "MB" or "GB"
    source: str
    note: str = ""  # where a number that is not right comes from

    @property
    def published(self) -> str:
        return f"{self.number} {self.unit}"

    def in_unit(self, size: float, base: int) -> float:
        """Bytes in the claim's unit of 1,000 or 1,024 to the power."""
        return size / base ** {"kB": 1, "MB": 2, "GB": 3}[self.unit]

    def binary_unit(self) -> str:
        return {"kB": "KiB", "MB": "MiB", "GB": "GiB"}[self.unit]


SIXTEEN_HEADS = "twice what its 8 key-value heads take (arXiv 2407.21783, table 3), and what 16 would, in GiB"
CLAIMS = (
    Claim(JAMBA, 262_144, "4", "GB", JAMBA_PAPER),
    Claim("mixtral-8x7b", 262_144, "32", "GB", JAMBA_PAPER),
    Claim("llama-2-7b", 262_144, "128", "GB", JAMBA_PAPER),
    Claim("llama-3.1-8b", 128_000, "15.62", "GB", LLAMA_BLOG),
    Claim("llama-3.1-405b", 128_000, "123.05", "GB", LLAMA_BLOG, SIXTEEN_HEADS),
    Claim(
        "mamba-130m",
        8192,
        "2.9",
        "MB",
        "often quoted of a 130M Mamba",
        "with all 4 inputs of the short convolution kept, as transformers keeps them; 3 are enough",
    ),
    Claim("gpt2", 8192, "302", "MB", "often quoted beside it, of 12 layers of width 768"),
)


@dataclass(frozen=True)
class Verdict:
    """right: rounds to the digits that were written; rounded: within 5 %; wrong: further off. In the unit of 1,000 or
    1,024 that is nearer to what was written."""

    word: str
    unit: str
    value: float  # in that unit


def judged(claim: Claim, size: float) -> Verdict:
    """What a claim is, of a cache that takes `size` bytes."""
    digits, written = len(claim.number.partition(".")[2]), float(claim.number)
    readings = [(claim.unit, claim.in_unit(size, 1000)), (claim.binary_unit(), claim.in_unit(size, 1024))]
    unit, value = min(readings, key=lambda reading: abs(reading[1] - written))
    if round(value, digits) == written:
        return Verdict("right", unit, value)
    return Verdict("rounded" if abs(value - written) <= CLOSE * written else "wrong", unit, value)


# -- counted -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Bytes that a model keeps of one text: of states whatever its length, and per token."""

    states: float
    per_token: float

    def at(self, context: int) -> float:
        return self.states + self.per_token * context


@functools.lru_cache(maxsize=64)
def by_formula(name: str, bits: int) -> Kept:
    """2·H_kv·D·b of each layer that attends, (rank + rotary)·b where latents are kept; states in float32."""
    config = shape_called(name)
    return Kept(config.state_bytes(), kv_bytes(config, 1, bits / 8))


def asked(name: str, bits: int) -> Kept:
    """The same, as the engine's own caches say it at two lengths: a line goes through both."""
    kv, sizes = _cache(shape_called(name), max(ASKED), DTYPES[bits]), []
    for tokens in ASKED:
        kv.begin(Batch.of([[0] * tokens]))
        sizes.append(kv.bytes_in_use)
        kv.release(0)
    per_token = (sizes[1] - sizes[0]) / (ASKED[1] - ASKED[0])
    return Kept(sizes[0] - ASKED[0] * per_token, per_token)


def _cache(config: ModelConfig, tokens: int, dtype: torch.dtype) -> KV:
    if config.latent_attention is not None:
        return make_kv("latent", config, max_tokens=tokens, dtype=dtype)
    return made(config, max_tokens=tokens, dtype=dtype)


def run_cache_table(bench: Bench, *, context: int, bits: int) -> Iterator[Measurement]:
    """A Measurement per model (unit "bytes"): what its cache takes at this context, from a real one at two small
    lengths, beside the formula; then one per claim, at the claim's own context and in 16 bits."""
    for name in shapes():
        bench.check_stop()
        bench.report(f"a cache of {name}")
        kept, formula = asked(name, bits), by_formula(name, bits)
        yield bench.measurement(
            name=NAME,
            settings={"measured": "cache", "model": name, "context": context, "bits": bits},
            samples=[kept.at(context)],
            unit="bytes",
            counts={"states": kept.states, "per_token": kept.per_token},
            predicted=formula.at(context),
            check="a cache of this shape says so at 16 and at 48 tokens; a line goes through both",
        )
    for claim in CLAIMS:
        bench.check_stop()
        kept = asked(claim.model, 16)
        yield bench.measurement(
            name=NAME,
            settings={"measured": "claim", "model": claim.model, "context": claim.context, "bits": 16},
            samples=[kept.at(claim.context)],
            unit="bytes",
            counts={"states": kept.states, "per_token": kept.per_token},
            predicted=by_formula(claim.model, 16).at(claim.context),
            check=f"published: {claim.published} ({claim.source})",
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=14,
    question="What do public models keep of a long text, and is what was published of it right?",
    how=(
        "a cache of each shape is made with room for 48 tokens and says its bytes at 16 and at 48; longer texts are on"
        " the line through both, since a token adds as much as every other. States are float32"
    ),
    settings=(
        Setting(
            "context",
            262_144,
            "choice",
            choices=tuple(2**n for n in range(10, 21)),
            unit="tokens",
            help="of one text; a model that reads fewer is counted as if it did not",
        ),
        Setting("bits", 16, "choice", choices=tuple(DTYPES), unit="bits", help="of a key's or value's number"),
    ),
    run=run_cache_table,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # bytes are the same everywhere
)
