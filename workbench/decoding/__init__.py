"""From logits to text: sampling filters, the generation loop with streaming, beam search."""

from workbench.decoding.beam import Hypothesis, beam_search, generate_beam
from workbench.decoding.guide import Guide
from workbench.decoding.law import SamplingLaw
from workbench.decoding.loop import Generation, Stream, StreamedToken, generate, stream, token_loop
from workbench.decoding.sampling import (
    FILTERS,
    SamplingSettings,
    apply_temperature,
    choose,
    filter_stages,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
)
from workbench.decoding.speculative import SpeculationStats

__all__ = [
    "generate",
    "stream",
    "generate_beam",
    "token_loop",
    "Guide",
    "SamplingLaw",
    "SpeculationStats",
    "Generation",
    "Stream",
    "StreamedToken",
    "beam_search",
    "Hypothesis",
    "SamplingSettings",
    "FILTERS",
    "filter_stages",
    "choose",
    "apply_temperature",
    "keep_top_k",
    "keep_top_p",
    "keep_min_p",
    "penalize_repetition",
    "penalize_presence",
    "penalize_frequency",
]
