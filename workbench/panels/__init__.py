"""Panels: experiments with controls, live in a notebook. Each is `panels.NAME(**settings)`.

>>> panel = step_time(max_length=256)   # the last line of a cell shows it
>>> panel.run()                         # or without a click: the Measurements
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.panels.base import Panel


def step_time(**settings: Any) -> Panel:
    """Lab 01: step time against text length, without a cache. rows=your count_rows is compared with the count."""
    from workbench.panels.naive_step_time import StepTimePanel

    return StepTimePanel(**settings)


def strategies(**settings: Any) -> Panel:
    """Lab 01: the next token's distribution before and after each filter. filters=, loop=: yours beside ours."""
    from workbench.panels.naive_strategies import StrategiesPanel

    return StrategiesPanel(**settings)


def request(**settings: Any) -> Panel:
    """Lab 01: one request from outside: TTFT, TPOT, tokens a second. loop=, filters=: yours beside ours."""
    from workbench.panels.naive_request import RequestPanel

    return RequestPanel(**settings)


def roofline(**settings: Any) -> Panel:
    """Lab 02: the operations of a step under the roofs of four machines. layers=: your intensities beside ours."""
    from workbench.panels.time_roofline import RooflinePanel

    return RooflinePanel(**settings)


def phases(**settings: Any) -> Panel:
    """Lab 02: what a token costs as one of a prompt and as one that is written."""
    from workbench.panels.time_phases import PhasesPanel

    return PhasesPanel(**settings)


def batch_sweep(**settings: Any) -> Panel:
    """Lab 02: step time and throughput against batch size. knee=your batch_limits, tpot=your predict_tpot."""
    from workbench.panels.time_batch_sweep import BatchSweepPanel

    return BatchSweepPanel(**settings)


def launch(**settings: Any) -> Panel:
    """Lab 02: half the bytes, for models of growing size: where the step only waits for its own operations."""
    from workbench.panels.time_launch import LaunchPanel

    return LaunchPanel(**settings)


def compile_step(**settings: Any) -> Panel:
    """Lab 02: eager against torch.compile, graph breaks, new shapes. one_graph=your cap_logits beside ours."""
    from workbench.panels.time_compile import CompilePanel

    return CompilePanel(**settings)


def price(**settings: Any) -> Panel:
    """Lab 02: TTFT, TPOT and dollars a million tokens for a shape on a card. price=your workload_price."""
    from workbench.panels.time_price import PricePanel

    return PricePanel(**settings)


def cache(**settings: Any) -> Panel:
    """Lab 03: every token without a cache and with one. kv=: your own cache class beside ours."""
    from workbench.panels.cache_decode import CachePanel

    return CachePanel(**settings)


def growth(**settings: Any) -> Panel:
    """Lab 03: how the slot of one sequence fills, token by token."""
    from workbench.panels.cache_growth import GrowthPanel

    return GrowthPanel(**settings)


def memory(**settings: Any) -> Panel:
    """Lab 03: bytes of weights and cache for every shape, against the memory of cards. Loads no model."""
    from workbench.panels.cache_memory import MemoryPanel

    return MemoryPanel(**settings)


def chunks(**settings: Any) -> Panel:
    """Lab 03: the same prompt in chunks. kv=: your own cache class beside ours."""
    from workbench.panels.cache_chunks import ChunksPanel

    return ChunksPanel(**settings)


def cache_batch(**settings: Any) -> Panel:
    """Lab 03: sequences side by side with a cache, and when a cache gains nothing."""
    from workbench.panels.cache_batches import CacheBatchPanel

    return CacheBatchPanel(**settings)


def quality(**settings: Any) -> Panel:
    """Lab 04: held-out loss of every trained variant against its cache bytes, and what fits a memory."""
    from workbench.panels.smaller_quality import QualityPanel

    return QualityPanel(**settings)


def variants(**settings: Any) -> Panel:
    """Lab 04: decode time and bytes of every attention variant. kv=: your own cache class beside ours."""
    from workbench.panels.smaller_decode import SmallerDecodePanel

    return SmallerDecodePanel(**settings)


def latent(**settings: Any) -> Panel:
    """Lab 04: what latent attention keeps and folds, in both its forms, and where they cross."""
    from workbench.panels.smaller_forms import LatentPanel

    return LatentPanel(**settings)


def rolling(**settings: Any) -> Panel:
    """Lab 04: what a rolling buffer holds, token by token, with a Play button."""
    from workbench.panels.smaller_rolling import RollingPanel

    return RollingPanel(**settings)


def kv_formats(**settings: Any) -> Panel:
    """Lab 04: keys and values in 8 and 4 bits: error by channel, perplexity by format. kv=: yours beside ours."""
    from workbench.panels.smaller_kv_formats import KVFormatsPanel

    return KVFormatsPanel(**settings)


def windows(**settings: Any) -> Panel:
    """Lab 04: loss by position through windows, with attention sinks and without. kv=: your own beside ours."""
    from workbench.panels.smaller_windows import WindowsPanel

    return WindowsPanel(**settings)


def convert(**settings: Any) -> Panel:
    """Lab 04: heads averaged, MHA to GQA or MQA, and a minute of training that mends it, live."""
    from workbench.panels.smaller_convert import ConvertPanel

    return ConvertPanel(**settings)


def numbers(**settings: Any) -> Panel:
    """Lab 05: the bits of a number to flip, in every format; its neighbours, and how far each format reaches."""
    from workbench.panels.quantize_numbers import NumbersPanel

    return NumbersPanel(**settings)


def weight_row(**settings: Any) -> Panel:
    """Lab 05: one row of weights in few bits, live: levels, codes, errors, bytes, and what an outlier spoils."""
    from workbench.panels.quantize_row import WeightRowPanel

    return WeightRowPanel(**settings)


def quantizers(**settings: Any) -> Panel:
    """Lab 05: bytes, perplexity and decode time of every method of quantization, and the best within a budget."""
    from workbench.panels.quantize_quantizers import QuantizersPanel

    return QuantizersPanel(**settings)


def stored_formats(**settings: Any) -> Panel:
    """Lab 05: a decode step with weights stored in fewer bits, predicted by their bytes and measured."""
    from workbench.panels.quantize_decode import QuantizeDecodePanel

    return QuantizeDecodePanel(**settings)


def outliers(**settings: Any) -> Panel:
    """Lab 05: outlier channels planted: what breaks, and what LLM.int8(), SmoothQuant and AWQ rescue."""
    from workbench.panels.quantize_outliers import OutliersPanel

    return OutliersPanel(**settings)


def awq_search(**settings: Any) -> Panel:
    """Lab 05: how AWQ searches its scales: output error against α, and what the scale does to each channel."""
    from workbench.panels.quantize_awq_search import AWQSearchPanel

    return AWQSearchPanel(**settings)


def gptq_steps(**settings: Any) -> Panel:
    """Lab 05: GPTQ column by column, with a Play button: what is rounded, and where the error goes."""
    from workbench.panels.quantize_gptq_steps import GPTQStepsPanel

    return GPTQStepsPanel(**settings)


def stepper(**settings: Any) -> Panel:
    """Lab 06: draft and verify, round by round, with every probability and who wrote each token; with a Play button."""
    from workbench.panels.speculate_stepper import StepperPanel

    return StepperPanel(**settings)


def draft_lengths(**settings: Any) -> Panel:
    """Lab 06: speed-up by α, K and c, predicted by sliders and measured with the shipped pair."""
    from workbench.panels.speculate_lengths import LengthsPanel

    return LengthsPanel(**settings)


def draft_origin(**settings: Any) -> Panel:
    """Lab 07: a text coloured by who wrote each token, calls saved, speed predicted and measured; with a Play button."""
    from workbench.panels.drafts_origin import OriginPanel

    return OriginPanel(**settings)


def draft_threshold(**settings: Any) -> Panel:
    """Lab 07: the moving threshold and the dynamic K along a text, and where a fixed K loses."""
    from workbench.panels.drafts_threshold import ThresholdPanel

    return ThresholdPanel(**settings)


def draft_tree(**settings: Any) -> Panel:
    """Lab 07: the draft tree of each round, its mask and the branch that stays; with a Play button."""
    from workbench.panels.drafts_tree import TreePanel

    return TreePanel(**settings)


def draft_grammar(**settings: Any) -> Panel:
    """Lab 07: a text that a grammar guides, and how many of its tokens needed the model."""
    from workbench.panels.drafts_grammar import GrammarPanel

    return GrammarPanel(**settings)


def draft_speed(**settings: Any) -> Panel:
    """Lab 07: every draft on every kind of text, predicted, measured and recorded."""
    from workbench.panels.drafts_speed import SpeedPanel

    return SpeedPanel(**settings)


def block_pool(**settings: Any) -> Panel:
    """Lab 09: who holds which block: the pool, tables with arrows, sharing, copies, eviction; with a Play button."""
    from workbench.panels.paging_blocks import BlockPoolPanel

    return BlockPoolPanel(**settings)


def allocators(**settings: Any) -> Panel:
    """Lab 09: what a contiguous maximum, a buddy and blocks waste of the memory, over time, and how many texts fit."""
    from workbench.panels.paging_allocators import AllocatorsPanel

    return AllocatorsPanel(**settings)


def prefix_hits(**settings: Any) -> Panel:
    """Lab 09: how much of the prompts a pool finds again, against the best there is, and what it saves of TTFT."""
    from workbench.panels.paging_prefixes import PrefixHitsPanel

    return PrefixHitsPanel(**settings)


def timelines(**settings: Any) -> Panel:
    """Lab 08: static and continuous batching side by side, slot by slot, from real runs; with a Play button."""
    from workbench.panels.serve_timelines import TimelinesPanel

    return TimelinesPanel(**settings)


def scheduler_steps(**settings: Any) -> Panel:
    """Lab 08: the scheduler, step by step: queue, chunks, budget, blocks, who gives way; with a Play button."""
    from workbench.panels.serve_steps import SchedulerStepsPanel

    return SchedulerStepsPanel(**settings)


def load_curve(**settings: Any) -> Panel:
    """Lab 08: latency against throughput at growing rates, the knee, and goodput; simulated on a card's data sheet."""
    from workbench.panels.serve_load import LoadPanel

    return LoadPanel(**settings)


def tiles(**settings: Any) -> Panel:
    """Lab 10: FlashAttention's tiles over a causal grid, the maximum and sum of one row, bytes; with a Play button."""
    from workbench.panels.kernel_tiles import TilesPanel

    return TilesPanel(**settings)


def attention_traffic(**settings: Any) -> Panel:
    """Lab 10: the bytes that attention moves, by algorithm, predicted; eager and fused, measured."""
    from workbench.panels.kernel_traffic import TrafficPanel

    return TrafficPanel(**settings)


def bounds(**settings: Any) -> Panel:
    """Lab 10: every kernel against the least time it can take on a card, and on this machine its twin in PyTorch."""
    from workbench.panels.kernel_bounds import BoundsPanel

    return BoundsPanel(**settings)


def graphs(**settings: Any) -> Panel:
    """Lab 10: a decode step with and without a graph, by shape, format and batch: launches against bytes."""
    from workbench.panels.kernel_graphs import GraphsPanel

    return GraphsPanel(**settings)


def crossover(**settings: Any) -> Panel:
    """Lab 10: from launch-bound to bandwidth-bound over the size of the model; fewer launches, measured."""
    from workbench.panels.kernel_crossover import CrossoverPanel

    return CrossoverPanel(**settings)


__all__ = [
    "step_time",
    "strategies",
    "request",
    "roofline",
    "phases",
    "batch_sweep",
    "launch",
    "compile_step",
    "price",
    "cache",
    "growth",
    "memory",
    "chunks",
    "cache_batch",
    "quality",
    "variants",
    "latent",
    "rolling",
    "kv_formats",
    "windows",
    "convert",
    "numbers",
    "weight_row",
    "quantizers",
    "stored_formats",
    "outliers",
    "awq_search",
    "gptq_steps",
    "stepper",
    "draft_lengths",
    "draft_origin",
    "draft_threshold",
    "draft_tree",
    "draft_grammar",
    "draft_speed",
    "timelines",
    "scheduler_steps",
    "load_curve",
    "block_pool",
    "allocators",
    "prefix_hits",
    "tiles",
    "attention_traffic",
    "bounds",
    "graphs",
    "crossover",
]
