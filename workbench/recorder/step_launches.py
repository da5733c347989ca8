"""How often a decode step launches, and what: counted on a GPU that is described, so no GPU is needed.

$ python -m workbench.recorder.step_launches                          # Llama 3 8B, 1, 8 and 32 sequences
$ python -m workbench.recorder.step_launches qwen3-8b --rows 16 --tokens 4096

A model of that shape without memory is prepared as on a GPU, its decode step is recorded as `GraphedSteps` records it
over a paged cache, and each launch is counted instead of made: of our kernels by name, and each operation of torch that
is more than another view. One operation of torch is a launch or more, so its number is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

NOT_LAUNCHED = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "resize")  # memory, no work


def step_launches(name: str, rows: int, tokens: int) -> dict[str, dict[str, int]]:
    """{"triton": kernel -> launches, "torch": operation -> calls} of one step of `rows` sequences of up to `tokens`
    tokens. In a process in which Triton compiles; see `table`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from workbench.kernels.compiling import described
    from workbench.models.assembly import hollow_decoder
    from workbench.models.shapes import public_shape

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counted: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            plain = func.overloadpacket.__name__
            if not func.is_view and plain not in NOT_LAUNCHED:
                self.counted[plain] += 1
            return func(*args, **(kwargs or {}))

    class Counts:
        name = "counted"

        def record(self, step, inputs):
            with torch.no_grad(), Operations() as operations, launch.launches() as launched:
                step(*inputs)
            if len(inputs[2]) == len(inputs[3]):  # the largest graph; fewer rows have smaller ones
                counted.update(triton=dict(launched), torch=dict(operations.counted))
            return Recorded(lambda: (), None)

    counted: dict[str, dict[str, int]] = {}
    with described("9.0"):
        from workbench.kernels import launch
        from workbench.kv.paged_static import StaticPaged
        from workbench.models import prepare
        from workbench.models.graphs import GraphedSteps, Recorded

        with launch.instead(lambda *_: None):
            model = hollow_decoder(public_shape(name), name=name, tokenizer=None).to(torch.bfloat16)
            kv = StaticPaged(
                model.config, max_sequences=rows, max_tokens=tokens, dtype=model.dtype, device="cuda", attention="auto"
            )
            graphed = GraphedSteps(prepare(model), kv, rows, recorder=Counts())
            failed = graphed.warm_up()
    assert not failed, failed
    return counted


def table(name: str, rows: Sequence[int], tokens: int) -> dict[int, dict[str, dict[str, int]]]:
    """rows -> `step_launches`, counted in a process of its own."""
    command = [sys.executable, "-m", __name__, name, "--json", "--tokens", str(tokens), "--rows", *map(str, rows)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(answer.stderr[-2000:])
    return {int(count): steps for count, steps in json.loads(answer.stdout).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workbench.recorder.step_launches", description=__doc__)
    parser.add_argument("model", nargs="?", default="llama-3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="sequences that decode together")
    parser.add_argument("--tokens", type=int, default=4096, help="of the longest sequence that the cache holds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    steps = {rows: step_launches(given.model, rows, given.tokens) for rows in given.rows}
    if given.json:
        print(json.dumps(steps))
        return 0
    for rows, kinds in steps.items():
        for kind, counted in kinds.items():
            print(f"{rows} rows, {kind}: {sum(counted.values())}")
            for kernel, count in sorted(counted.items(), key=lambda one: -one[1]):
                print(f"    {count:5} {kernel}")
    return 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported, by whomever
    sys.exit(main())
