"""Lab 08, continuous batching: schedules, policies, load and goodput.

Beside them: `inputs`, requests and recorded frames; `contenders`, other engines; `peer_llama_cpp_slots` and
`peer_vllm`, two of them, each in a process of its own.
"""

PREFIX = "serving"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "timelines",
    "scheduler_steps",
    "load_curve",
    "overhead",
    "batch_size",
    "peers",
    "twin",
)
PANELS = ("timelines", "scheduler_steps", "load_curve")  # those that have a panel, by the same stem
