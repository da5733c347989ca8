"""Lab 13, parallelism and experts: a model on several processes, what they exchange, and when that pays."""

PREFIX = "parallel"
EXPERIMENTS = ("messages", "tensor_step", "bubbles", "experts")
PANELS = ("messages", "tensor_step", "bubbles", "experts")
