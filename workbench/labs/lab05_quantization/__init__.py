"""Lab 05, quantization: formats, methods, what they cost in quality and save in bytes and time.

Beside them: `inputs`, calibration and the linears of a layer; `recipes`, the list of recipes that `quantizers`
compares.
"""

PREFIX = "quantize"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "numbers",
    "weight_row",
    "quantizers",
    "stored_formats",
    "outliers",
    "salient",
    "awq_search",
    "gptq_steps",
)
PANELS = (
    "numbers",
    "weight_row",
    "quantizers",
    "stored_formats",
    "outliers",
    "salient",
    "awq_search",
    "gptq_steps",
)  # those that have a panel, by the same stem
