"""Cases of the attention kernels: prompts, single tokens, keys in one piece, in blocks, in few bits, latent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from workbench.labs.lab10_kernels.case import FULL, HERE, TINY, Case, Inputs, Maker, Sizes, bounded, module

COUNTERS = 1 << 14  # as `kv.paged_triton` has them
DECODE_SIZES = {
    TINY: {"texts": 2, "tokens": 70, "heads": 4, "kv_heads": 2, "d": 32, "block": 16},
    HERE: {"texts": 8, "tokens": 512, "heads": 32, "kv_heads": 8, "d": 128, "block": 16},
    FULL: {"texts": 64, "tokens": 2048, "heads": 32, "kv_heads": 8, "d": 128, "block": 16},
}


def _of_texts(s: Sizes) -> str:
    return f"{s['texts']} texts of {s['tokens']:,}, {s['heads']} over {s['kv_heads']} heads of {s['d']}"


def _kv(t: Maker, s: Sizes, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (t.normal(*lead, s["kv_heads"], s["d"]) for _ in "kv")
    return k, v


def _over(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """torch's fused attention: q [B, n, H, D], k, v [B, S, G, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _flash_attention() -> Case:
    m = module("flash_attention")

    def make(t: Maker, s: Sizes) -> Inputs:
        n = s["texts"] * s["tokens"]
        k, v = _kv(t, s, n)
        return {
            "q": t.normal(n, s["heads"], s["d"]),
            "k": k,
            "v": v,
            "starts": t.starts(s["texts"], s["tokens"]),
            "scale": s["d"] ** -0.5,
            "max_queries": s["tokens"],
        }

    def call(function: Callable, i: Inputs) -> Any:
        return function(
            i["q"], i["k"], i["v"], i["starts"], i["starts"], max_queries=i["max_queries"], scale=i["scale"]
        )

    def by_torch(i: Inputs) -> object:
        q, k, v = (i[name].view(-1, i["max_queries"], *i[name].shape[1:]) for name in "qkv")
        return _over(q, k, v, causal=True)

    return Case(
        "flash_attention",
        make,
        lambda i: call(m.flash_attention, i),
        lambda i: call(m.flash_attention_reference, i),
        lambda i: call(m.flash_attention_work, i),
        by_torch,
        "scaled_dot_product_attention",
        {
            TINY: {**DECODE_SIZES[TINY], "tokens": 40},
            HERE: {**DECODE_SIZES[HERE], "texts": 1, "tokens": 512},
            FULL: {**DECODE_SIZES[FULL], "texts": 4, "tokens": 4096},
        },
        _of_texts,
        tune=lambda i: call(bounded(m.tune_flash_attention), i),
    )


def _flash_decode() -> Case:
    m = module("flash_decoding")

    def make(t: Maker, s: Sizes) -> Inputs:
        k, v = _kv(t, s, s["texts"], s["tokens"])
        return {
            "q": t.normal(s["texts"], s["heads"], s["d"]),
            "k": k,
            "v": v,
            "lengths": t.same(s["tokens"], s["texts"]),
            "scale": s["d"] ** -0.5,
        }

    def call(function: Callable, i: Inputs) -> Any:
        return function(i["q"], i["k"], i["v"], i["lengths"], scale=i["scale"])

    return Case(
        "flash_decode",
        make,
        lambda i: call(m.flash_decode, i),
        lambda i: call(m.flash_decode_reference, i),
        lambda i: call(m.flash_decode_work, i),
        lambda i: _over(i["q"][:, None], i["k"], i["v"]),
        "scaled_dot_product_attention",
        DECODE_SIZES,
        _of_texts,
        tune=lambda i: call(bounded(m.tune_flash_decode), i),
    )


def _paged_inputs(t: Maker, s: Sizes) -> Inputs:
    blocks = -(-s["tokens"] // s["block"])
    k, v = _kv(t, s, s["texts"] * blocks * s["block"])
    tables = t.tables(s["texts"], blocks)
    return {
        "k": k,
        "v": v,
        "tables": tables,
        "lengths": t.same(s["tokens"], s["texts"]),
        "block_size": s["block"],
        "scale": s["d"] ** -0.5,
        "places": _places(tables, s),
    }


def _places(tables: torch.Tensor, s: Sizes) -> torch.Tensor:
    """[B, S] where each token lies, by the tables: what PyTorch gathers by."""
    at = torch.arange(s["tokens"], device=tables.device)
    return tables.long()[:, at // s["block"]] * s["block"] + at % s["block"]


def _paged_decode() -> Case:
    m = module("paged_decode")

    def make(t: Maker, s: Sizes) -> Inputs:
        arrivals = t.counters(COUNTERS)
        return {"q": t.normal(s["texts"], s["heads"], s["d"]), **_paged_inputs(t, s), "arrivals": arrivals}

    def call(function: Callable, i: Inputs, **more: Any) -> Any:
        look = {"block_size": i["block_size"], "scale": i["scale"], **more}
        return function(i["q"], i["k"], i["v"], i["tables"], i["lengths"], **look)

    def by_torch(i: Inputs) -> object:
        at = i["places"]
        return _over(i["q"][:, None], i["k"][at], i["v"][at])

    return Case(
        "paged_decode",
        make,
        lambda i: call(m.paged_decode, i, arrivals=i["arrivals"]),
        lambda i: call(m.paged_decode_reference, i),
        lambda i: call(m.paged_decode_work, i, merges=True),
        by_torch,
        "gather, then scaled_dot_product_attention",
        DECODE_SIZES,
        _of_texts,
        tune=lambda i: call(bounded(m.tune_paged_decode), i),
    )


def _paged_prefill() -> Case:
    m = module("paged_prefill")

    def make(t: Maker, s: Sizes) -> Inputs:
        return {
            "q": t.normal(s["texts"] * s["new"], s["heads"], s["d"]),
            **_paged_inputs(t, s),
            "starts": t.starts(s["texts"], s["new"]),
            "new": s["new"],
            "mask": t.seen(s["new"], s["tokens"]),
        }

    def call(function: Callable, i: Inputs) -> Any:
        return function(
            i["q"],
            i["k"],
            i["v"],
            i["tables"],
            i["starts"],
            i["lengths"],
            max_queries=i["new"],
            block_size=i["block_size"],
            scale=i["scale"],
        )

    def by_torch(i: Inputs) -> object:
        at, new = i["places"], i["new"]
        q, k, v = (x.transpose(1, 2) for x in (i["q"].view(len(at), new, *i["q"].shape[1:]), i["k"][at], i["v"][at]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=i["mask"], enable_gqa=q.shape[1] != k.shape[1])

    return Case(
        "paged_prefill",
        make,
        lambda i: call(m.paged_prefill, i),
        lambda i: call(m.paged_prefill_reference, i),
        lambda i: call(m.paged_prefill_work, i),
        by_torch,
        "gather, then scaled_dot_product_attention",
        {
            TINY: {**DECODE_SIZES[TINY], "new": 20},
            HERE: {**DECODE_SIZES[HERE], "texts": 2, "new": 128},
            FULL: {**DECODE_SIZES[FULL], "texts": 32, "tokens": 4096, "new": 256},
        },
        lambda s: f"the last {s['new']} of {_of_texts(s)}",
        tune=lambda i: call(bounded(m.tune_paged_prefill), i),
    )


def _latent_decode() -> Case:
    m = module("latent_decode")

    def make(t: Maker, s: Sizes) -> Inputs:
        blocks, width = -(-s["tokens"] // s["block"]), s["rank"] + s["rotary"]
        tables = t.tables(s["texts"], blocks)
        return {
            "q": t.normal(s["texts"], s["heads"], width, scale=width**-0.5),
            "latents": t.normal(s["texts"] * blocks * s["block"], 1, width),
            "tables": tables,
            "lengths": t.same(s["tokens"], s["texts"]),
            "rank": s["rank"],
            "block_size": s["block"],
            "places": _places(tables, s),
        }

    def call(function: Callable, i: Inputs) -> Any:
        return function(
            i["q"], i["latents"], i["tables"], i["lengths"], kv_rank=i["rank"], block_size=i["block_size"], scale=1.0
        )

    def by_torch(i: Inputs) -> object:
        rows = i["latents"][i["places"]]
        return _over(i["q"][:, None], rows, rows[..., : i["rank"]], scale=1.0)

    return Case(
        "latent_decode",
        make,
        lambda i: call(m.latent_decode, i),
        lambda i: call(m.latent_decode_reference, i),
        lambda i: m.latent_decode_work(i["q"], i["lengths"].tolist(), kv_rank=i["rank"], block_size=i["block_size"]),
        by_torch,
        "gather, then scaled_dot_product_attention",
        {
            TINY: {"texts": 2, "tokens": 40, "heads": 4, "rank": 32, "rotary": 16, "block": 16},
            HERE: {"texts": 4, "tokens": 512, "heads": 16, "rank": 512, "rotary": 64, "block": 16},
            FULL: {"texts": 64, "tokens": 8192, "heads": 16, "rank": 512, "rotary": 64, "block": 64},
        },
        lambda s: f"{s['texts']} texts of {s['tokens']:,}, {s['heads']} heads over {s['rank']} + {s['rotary']}",
        tune=lambda i: call(bounded(m.tune_latent_decode), i),
    )


def _paged_quantized() -> Case:
    m = module("paged_quantized")

    def make(t: Maker, s: Sizes) -> Inputs:
        blocks = -(-s["tokens"] // s["block"])
        places = s["texts"] * blocks * s["block"]

        def coded() -> Any:
            codes = t.whole(0, 256, places, s["kv_heads"], s["d"], dtype=torch.uint8)
            scale, zero = (t.normal(places, s["kv_heads"], 1, dtype=torch.float16, scale=size) for size in (0.01, 1.0))
            return m.Coded(codes, scale, zero, "int8")

        tables = t.tables(s["texts"], blocks)
        return {
            "q": t.normal(s["texts"], s["heads"], s["d"]),
            "k": coded(),
            "v": coded(),
            "tables": tables,
            "lengths": t.same(s["tokens"], s["texts"]),
            "block_size": s["block"],
            "scale": s["d"] ** -0.5,
            "places": _places(tables, s),
        }

    def call(function: Callable, i: Inputs) -> Any:
        return function(i["q"], i["k"], i["v"], i["tables"], i["lengths"], block_size=i["block_size"], scale=i["scale"])

    def by_torch(i: Inputs) -> object:
        at = i["places"]
        k, v = (
            m.decoded(m.Coded(c.codes[at], c.scale[at], c.zero[at], c.format), i["q"].dtype) for c in (i["k"], i["v"])
        )
        return _over(i["q"][:, None], k, v)

    return Case(
        "paged_decode_quantized",
        make,
        lambda i: call(m.paged_decode_quantized, i),
        lambda i: call(m.paged_decode_quantized_reference, i),
        lambda i: m.paged_decode_quantized_work(
            i["q"], i["k"], i["v"], i["lengths"].tolist(), block_size=i["block_size"]
        ),
        by_torch,
        "gather, dequantize, then scaled_dot_product_attention",
        {**DECODE_SIZES, FULL: {**DECODE_SIZES[FULL], "tokens": 4096}},
        lambda s: f"int8, {_of_texts(s)}",
        tune=lambda i: call(bounded(m.tune_paged_quantized), i),
    )


MAKERS: dict[str, Callable[[], Case]] = {
    "flash_attention": _flash_attention,
    "flash_decode": _flash_decode,
    "paged_decode": _paged_decode,
    "paged_decode_quantized": _paged_quantized,
    "paged_prefill": _paged_prefill,
    "latent_decode": _latent_decode,
}
