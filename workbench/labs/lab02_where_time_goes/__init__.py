"""Lab 02, where the time goes: rooflines, prefill and decode, batches, launches, a step's parts, compilers, prices.

`calls` writes down what a function of torch calls, for the exercise that counts it; `ways` has the ways to take a
decode step that `decode_waterfall` goes through.
"""

PREFIX = "time"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "roofline",
    "phases",
    "batch_sweep",
    "launch",
    "waterfall",
    "trace",
    "compile_step",
    "decode_waterfall",
    "price",
    "prediction",
)
PANELS = (
    "roofline",
    "phases",
    "batch_sweep",
    "launch",
    "waterfall",
    "compile_step",
    "decode_waterfall",
    "price",
)  # those that have a panel, by the same stem
