"""The part of the workbench that an answer is to write, and may not use. Read by the grader, never handed out.

What the setup cell does not import is forbidden anyway (`Exercise.forbidden`). These functions and classes are also
taken out of order while the answer runs (`workbench.grading.reference`).
"""

from __future__ import annotations

FORBIDDEN = {
    "naive-loop": ("workbench.decoding.loop:token_loop",),
    "sampling-filters": tuple(
        f"workbench.decoding.filters:{name}" for name in ("apply_temperature", "keep_top_k", "keep_top_p", "keep_min_p")
    ),
    "repetition-penalty": ("workbench.decoding.filters:penalize_repetition",),
    "beam-search": ("workbench.decoding.beam:beam_search",),
    "kv-append": ("workbench.kv.contiguous:Contiguous",),
    "kv-truncate": ("workbench.kv.contiguous:Contiguous",),
    "kv-bug": ("workbench.kv.contiguous:Contiguous",),
    "smaller-window": ("workbench.kv.window:Window",),
    "smaller-latent": ("workbench.kv.latent:Latent",),
    "smaller-int8": ("workbench.kv.quantized:Quantized",),
    "smaller-convert": ("workbench.models.conversion:mean_pool_heads",),
    "quant-awq": ("workbench.quantization.awq:search",),
    "quant-gptq": ("workbench.quantization.gptq:gptq",),
    "quant-codebook": ("workbench.quantization.squeezellm:weighted_kmeans",),
    "spec-rule": ("workbench.speculation.rule:verify",),
    "spec-residual": ("workbench.speculation.rule:residual",),
    "drafts-lookup": ("workbench.speculation.drafts.lookup:PromptLookupDraft",),
    "drafts-medusa": ("workbench.speculation.drafts.medusa:best_paths",),
    "batching-scheduler": ("workbench.serving.scheduler:Scheduler",),
    "server-stops": ("workbench.decoding.text:StopStrings",),
    "server-events": ("workbench.serving.api.events:Events", "workbench.serving.api.events:event"),
    "server-admission": ("workbench.serving.api.forecast:first_token_s",),
    "server-goodput": (
        "workbench.serving.bench.definitions:our_good",
        "workbench.serving.bench.definitions:vllm_bench_good",
    ),
    "paged-pool": ("workbench.kv.blocks:BlockTables",),
    "paged-cow": ("workbench.kv.blocks:BlockTables",),
    "paged-prefix": ("workbench.kv.prefix:HashChain", "workbench.kv.prefix:RadixTree"),
    "parallel-split": ("workbench.parallel.tensor:Part", "workbench.parallel.tensor:RowParallel"),
    "parallel-count": ("workbench.parallel.costs:step_counts",),
    "parallel-schedule": ("workbench.parallel.pipeline:Progress", "workbench.parallel.pipeline:bubble"),
    "parallel-connector": ("workbench.parallel.disaggregated.connector:Receiver",),
    "beyond-discretize": ("workbench.models.mixers.s4:bilinear", "workbench.models.mixers.s4:zero_order_hold"),
    "beyond-convolution": tuple(
        f"workbench.models.mixers.s4:{name}" for name in ("diagonal_kernel", "causal_convolution", "direct_convolution")
    ),
    "beyond-scan": tuple(
        f"workbench.models.mixers.{name}"
        for name in ("scan:sequential", "scan:blelloch", "scan:chunked", "mamba:selective")
    ),
    "beyond-rollback": ("workbench.kv.state:State", "workbench.kv.state_cells:StateCells"),
    "beyond-unmask": (
        "workbench.diffusion.samplers:Confidence",
        "workbench.diffusion.samplers:due",
        "workbench.diffusion.samplers:highest",
    ),
    "beyond-passes": (
        "workbench.diffusion.costs:pass_costs",
        "workbench.diffusion.denoise:diffuse",
        "workbench.labs.lab14_beyond_transformers.few_passes:few_passes",
        "workbench.labs.lab14_beyond_transformers.few_passes:few_passes_by_roofline",
    ),
    "capstone-price": ("workbench.capstone.course_clock:ClockRates",),
    "capstone-points": ("workbench.capstone.score:level", "workbench.capstone.score:points"),
    "capstone-pairs": ("workbench.capstone.score:ratios_of",),
    "capstone-least-rows": ("workbench.capstone.gates:least_rows",),
    "capstone-plan": ("workbench.serving.scheduler:Scheduler",),
}
