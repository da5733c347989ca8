"""From logits to text: sampling, one step for many sequences, the naive loop with its stream, beam search, grammars."""

from workbench.decoding.beam import Hypothesis, beam_search, generate_beam
from workbench.decoding.draws import BestDraws, RandomDraws, choose, draw
from workbench.decoding.filters import (
    FILTERS,
    apply_temperature,
    filter_stages,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
)
from workbench.decoding.guide import Guide
from workbench.decoding.loop import Generation, Stream, StreamedToken, token_loop
from workbench.decoding.sampling import Sampler, SamplingSettings, TokenDistribution
from workbench.decoding.sequence import LogProb, NewToken, Request, Sequence, Status
from workbench.decoding.step import Chunk, Step, StepOutput

__all__ = [
    "token_loop",
    "Stream",
    "StreamedToken",
    "Generation",
    "generate_beam",
    "beam_search",
    "Hypothesis",
    "Guide",
    "Request",
    "Sequence",
    "Status",
    "NewToken",
    "LogProb",
    "Step",
    "StepOutput",
    "Chunk",
    "Sampler",
    "TokenDistribution",
    "SamplingSettings",
    "RandomDraws",
    "BestDraws",
    "draw",
    "choose",
    "FILTERS",
    "filter_stages",
    "apply_temperature",
    "keep_top_k",
    "keep_top_p",
    "keep_min_p",
    "penalize_repetition",
    "penalize_presence",
    "penalize_frequency",
]
