"""What the checks of lab 02 do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

Shapes and ceilings cross as dicts of numbers and become the workbench's own ModelConfig and Ceilings here, so that an
answer is called with what the real parts are called with.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from workbench.checks.tensors import as_tensor, kind_of
from workbench.instruments.device import Ceilings
from workbench.models.config import ModelConfig

READING = ("roof", "fraction", "help")
_compile = torch.compile  # bound here, before an answer can patch the module


def _returned(value: Any, apart: bool = True) -> dict:
    """Of a tuple or list its items, and the names of their types; of anything else the name of its type.

    apart: a mistake shows in each item by itself.
    """
    if not isinstance(value, list | tuple):
        return {"returned": type(value).__name__}
    items = {f"value {i}": item for i, item in enumerate(value)} if apart else {"values": list(value)}
    return {"types": [kind_of(item) for item in value]} | items


def _ceilings(read_bytes_per_s: float, flop_per_s: dict[str, float], launch_s: float = 1e-6) -> Ceilings:
    return Ceilings(
        read_bytes_per_s=read_bytes_per_s,
        copy_bytes_per_s=read_bytes_per_s,
        flop_per_s=dict(flop_per_s),
        launch_s=launch_s,
        measured=False,
        source="made up for a check",
        name="a device of the checks",
    )


def run_calls(answer: Any, calls: list[dict]) -> dict:
    """Call `layer_costs(calls)`."""
    return _returned(answer(copy.deepcopy(calls)))


def _of(answer: Any, name: str) -> Callable:
    """A function of a dict of functions. Raises TypeError where it is none."""
    if not hasattr(answer, "keys") or name not in answer:
        raise TypeError(f"a dict with the key {name!r} was expected, and a {type(answer).__name__} came")
    return answer[name]


def run_tpot(
    answer: Any,
    config: dict,
    batch: int,
    context: int,
    bytes_per_element: int,
    launches: int,
    ceilings: dict,
    dtype: str,
) -> dict:
    """Call `predict_tpot(config, batch=…, …)`, the function "predict" of a dict."""
    return _returned(
        _of(answer, "predict")(
            ModelConfig(**config),
            batch=batch,
            context=context,
            bytes_per_element=bytes_per_element,
            launches=launches,
            ceilings=_ceilings(**ceilings),
            dtype=dtype,
        ),
        apart=False,
    )


def run_measure(answer: Any, call_s: float, work_s: list[float], repeats: int) -> dict:
    """Call `measure_tpot(step, finish, clock, repeats)`, the function "measure" of a dict, on a machine whose clock
    stands still but for its steps.

    A step returns after `call_s` and is finished work_s[i] seconds later, the i-th one; steps wait for each other.
    """
    now, ready, steps = 0.0, 0.0, 0

    def step() -> None:
        nonlocal now, ready, steps
        now += call_s
        ready = max(now, ready) + work_s[min(steps, len(work_s) - 1)]
        steps += 1

    def finish() -> None:
        nonlocal now
        now = max(now, ready)

    seconds = _of(answer, "measure")(step, finish, lambda: now, repeats)
    return {"seconds": seconds, "type": kind_of(seconds), "steps": steps}


# --- The knee and the wall ---


class Lost(RuntimeError):
    """The device is gone; memory has nothing to do with it."""


def seconds_of(batch: int, fixed_s: float, each_s: float, compute_s: float, noise: list[list[float]]) -> list[float]:
    """Samples of a step of so many sequences: the first one slow, the others with the noise of one row."""
    true = max(fixed_s + batch * each_s, batch * compute_s)
    return [2.5 * true + 0.01, *(true * factor for factor in noise[batch % len(noise)])]


def run_limits(answer: Any, max_batch: int, room: int, lost: bool, **machine: Any) -> dict:
    """Call `batch_limits(measure, max_batch)` on a machine that has room for so many sequences.

    asked: the batches that it wanted to be measured, in order. lost: the device is gone from batch 2 on, and what was
    raised then is its text under "raised".
    """
    asked: list[int] = []

    def measure(batch: int) -> list[float]:
        asked.append(batch)
        if not (isinstance(batch, int) and batch >= 1) or len(asked) > 1000:
            raise ValueError(f"measure({batch!r}): a batch is an int from 1 on, and nobody measures 1,000 of them")
        if lost and batch > 1:
            raise Lost("the device does not answer")
        if batch > room:
            raise MemoryError(f"batch {batch} does not fit")
        return seconds_of(batch, **machine)

    try:
        came = answer(measure, max_batch)
    except Lost as error:
        return {"raised": str(error), "asked": asked}
    return _returned(came) | {"asked": asked}


def run_reading(answer: Any, points: list[list], ceilings: dict, dtype: str) -> dict:
    """Call `read_roofline(points, ceilings, dtype)` with points as (FLOPs, bytes, samples).

    Of what came for the points the roofs, the fractions and the helps; or the first that is no such triple.
    """
    given = [(flops, moved, list(samples)) for flops, moved, samples in points]
    came = answer(given, _ceilings(**ceilings), dtype)
    if not isinstance(came, list | tuple):
        return {"returned": type(came).__name__}
    for number, reading in enumerate(came, 1):
        if not isinstance(reading, list | tuple) or len(reading) != 3:
            return {"readings": len(came), "point": number, "came": repr(reading)[:100]}
    return {"readings": len(came)} | {part: [r[i] for r in came] for i, part in enumerate(READING)}


def run_price(answer: Any, steps: list[dict], rates: dict) -> dict:
    """Call `workload_price(steps, parameters=…, peak_flop_per_s=…, dollars_per_hour=…)`."""
    return _returned(answer(copy.deepcopy(steps), **rates))


# --- One graph ---


def run_eager(answer: Any, logits: list, limit: float, dtype: str = "float32") -> dict:
    """Call `cap_logits(logits [N, V], limit)` without a compiler."""
    given = torch.tensor(logits, dtype=getattr(torch, dtype))
    came = as_tensor(answer(given, limit))
    if not isinstance(came, torch.Tensor):
        return {"returned": type(came).__name__}
    return {"logits": came, "shape": list(came.shape), "dtype": str(came.dtype), "input_after": given}


def run_compiled(answer: Any, calls: list[dict]) -> dict:
    """Compile the answer once, call it with each of `calls` ({"logits", "limit"}), and count the graphs that were made.

    The backend runs a graph as it was captured: nothing is generated and no C++ compiler is needed. An answer that
    cannot be captured whole is told as {"broke": the reason}.
    """
    given = [(torch.tensor(call["logits"]), call["limit"]) for call in calls]
    eager = [answer(logits.clone(), limit) for logits, limit in given]  # the untouched stub ends here
    if not all(isinstance(came, torch.Tensor) for came in eager):
        return {"returned": next(type(came).__name__ for came in eager if not isinstance(came, torch.Tensor))}
    from torch._dynamo.exc import TorchDynamoException

    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    compiled = _compile(_copy(answer), backend=backend, fullgraph=True, dynamic=True)
    made, outputs = [], []
    for logits, limit in given:
        before = len(graphs)
        try:
            outputs.append(compiled(logits, limit))
        except TorchDynamoException as error:
            reason = re.sub(" at 0x[0-9a-f]+", "", str(error).split("\n\n")[0])
            return {"broke": reason[:600], "call": len(outputs) + 1}
        made.append(len(graphs) - before)
    return {"outputs": outputs, "graphs_a_call": made, "operations": graphs}


def _copy(answer: Any) -> Any:
    """The same function with code of its own: what was compiled from it before is not remembered."""
    if not isinstance(answer, types.FunctionType):
        return answer
    copy = types.FunctionType(
        answer.__code__.replace(), answer.__globals__, answer.__name__, answer.__defaults__, answer.__closure__
    )
    copy.__kwdefaults__ = answer.__kwdefaults__
    return copy


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
