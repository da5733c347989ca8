"""What an answer may not use of the workbench: the part that it is to write. Read by the grader, never handed out.

"workbench" stands for everything that the setup cell does not import by name; with a colon, a function or class that is
also taken out of order while the answer runs (`workbench.grading.reference`).
"""

from __future__ import annotations

from workbench.checks import exercise_sets

FREE = ("spec-proof",)  # asks for all that can happen under our rule
REFERENCES = {
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
}
FORBIDDEN = {
    exercise.grade_id: ("workbench", *REFERENCES.get(exercise.grade_id, ()))
    for exercises in exercise_sets().values()
    for exercise in exercises.exercises
    if exercise.grade_id not in FREE
}
