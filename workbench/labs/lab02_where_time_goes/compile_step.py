"""time.compile_step: what torch.compile gains on a decode step, and what makes it break or begin again."""

from __future__ import annotations

import os
import re
import shutil
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, within_context
from workbench.experiments.steps import WEIGHTS, Sequences, decode_step, fits_context
from workbench.models import prepare

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

LIMIT = 30.0  # of the example: a row of logits whose largest exceeds it is scaled down
VOCABULARIES = (8, 16, 24, 32, 40)  # of the rows that a compiled function is given, one after the other
HOW_SHAPES = {"every shape for itself": False, "as torch.compile does it": None, "one graph for all": True}
COMPILERS = ("g++", "clang++", "c++")
INSTALL = (
    "torch.compile needs a C++ compiler and found none: install one (Debian, Ubuntu: apt install g++; macOS: "
    "xcode-select --install; Windows: the Build Tools for Visual Studio), then run this again"
)


# -- what is compiled in the examples --------------------------------------------------------------------------


def cap_with_if(logits: torch.Tensor, limit: float) -> torch.Tensor:
    """[1, V]: scaled down when the largest is beyond the limit. Python must look at a number to know how to go on."""
    if logits.max() > limit:
        logits = logits * (limit / logits.max())
    return logits


def cap_with_where(logits: torch.Tensor, limit: float) -> torch.Tensor:
    """[N, V]: the same for every row, without a decision. Both results are there, and torch.where takes one."""
    largest = logits.amax(-1, keepdim=True)
    return torch.where(largest > limit, logits * (limit / largest), logits)


def row(largest: float, size: int = 64) -> torch.Tensor:
    """[1, size] logits from −largest to largest."""
    return torch.linspace(-largest, largest, size)[None]


def count_graphs(
    function: Callable, inputs: Sequence[torch.Tensor], *, dynamic: bool | None = None
) -> tuple[int, list[torch.Tensor]]:
    """(graphs that torch.compile makes of function(logits, LIMIT) for these inputs, its outputs).

    The backend counts and runs each graph as it is, so no compiler is needed. The function is compiled as if for
    the first time: torch keeps what it has learnt with the code, so here the code is a copy under a new name.
    """
    graphs = 0

    def counting(module: torch.fx.GraphModule, example_inputs: list) -> Callable:
        nonlocal graphs
        graphs += 1
        return module.forward

    if isinstance(function, types.FunctionType):
        code = function.__code__.replace(co_name=f"{function.__name__}_{uuid.uuid4().hex}")
        fresh = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        fresh.__kwdefaults__ = function.__kwdefaults__
        function = fresh
    compiled = torch.compile(function, backend=counting, dynamic=dynamic)
    outputs = [compiled(x, LIMIT) for x in inputs]
    return graphs, outputs


def why_no_compiler(device: str = "cpu") -> str:
    """What to install where torch.compile has no C++ compiler to work with; "" where it has one, or needs none."""
    if device.startswith("cuda"):
        return ""
    chosen = os.environ.get("CXX")
    known = (chosen,) if chosen else (*COMPILERS, "cl") if sys.platform == "win32" else COMPILERS
    return "" if any(shutil.which(name) for name in known) else INSTALL


# -- what is generated -----------------------------------------------------------------------------------------


def generated_loop(function: Callable, *inputs: torch.Tensor) -> tuple[Callable | None, str]:
    """(the compiled function, the loops that Inductor wrote for it, shortened by `shortened`), on a CPU.

    (None, what is missing) where there is no C++ compiler, or it fails: whoever shows a loop says so and goes on.
    """
    if missing := why_no_compiler():
        return None, missing
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(function, dynamic=False)
    try:
        with torch.no_grad(), config.patch(compile_threads=1):
            _, (code, *_) = run_and_get_code(compiled, *inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return None, f"torch.compile failed ({str(error).splitlines()[0]:.200}). {INSTALL}"
    return compiled, "\n".join(shortened(kernel) for kernel in re.findall(r"r'''\n(.*?)'''", code, re.S))


SHORTER = (  # of generated C++, without a change of meaning for who reads it
    (r"static_cast<int64_t>\((\w+)\)", r"\1"),
    (r"static_cast<float>\(([^()]*)\)", r"\1"),
    (r"at::vec::Vectorized<float>", "Vec"),
    (r"\b(\d+)L\b", r"\1"),
    (r"int64_t ", "int "),
    (r"(\w+) \+ 0\b", r"\1"),
    (r"for\(int (\w+)=", r"for (int \1 = "),
)


def shortened(kernel: str) -> str:
    """A kernel of Inductor's without its includes, its guards against what cannot happen, and braces of their own."""
    lines: list[str] = []
    blocks: list[bool] = []  # of each open brace: whether it belongs to what stands before it
    for line in re.sub(r",\n\s+", ", ", kernel).splitlines():
        text = line.strip()
        for old, new in SHORTER:
            text = re.sub(old, new, text)
        if not text or text.startswith(("#include", "#pragma")) or "div_error" in text or "C10_LIKELY" in text:
            continue
        if text == "{":
            blocks.append(bool(lines) and lines[-1].endswith(")"))
            lines += [f"{lines.pop()} {{"] if blocks[-1] else []
        elif text == "}":
            owned = blocks.pop()
            lines += ["    " * sum(blocks) + "}"] if owned else []
        else:
            lines.append("    " * sum(blocks) + text)
    return "\n".join(lines)


# -- the experiment ----------------------------------------------------------------------------------------------


def predict_compile(
    ceilings: Ceilings, *, model, context: int, weights: str, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(1, seconds, limit) of the eager step; what compiling saves are launches, which no prediction counts."""
    _costs, expected = decode_step(ceilings, model, batch=1, context=context, weights=weights)
    return [(1, expected.seconds, expected.limit)]


def run_compile(
    bench: Bench, *, model, context: int, weights: str, repeats: int, one_graph: Callable | None = None
) -> Iterator[Measurement]:
    """Graphs first (unit "graphs"), counted without a compiler; then the eager and the compiled step (unit "s")
    and their ratios pair by pair (unit "ratio", eager over compiled). Without a C++ compiler the eager step
    alone, and its check says what to install."""
    fits_context(shape_of(model), context + 1)
    ceilings = bench.ceilings()
    yield from _graphs(bench, one_graph)
    sequences = Sequences(bench, model, weights, context=context, max_sequences=1)
    costs, expected = decode_step(ceilings, model, batch=1, context=context, weights=weights)
    shared = {**plain({"model": model, "weights": weights}), "context": context}

    def step(by: str, samples: list[float], check: str) -> Measurement:
        return bench.measurement(
            name="time.compile_step",
            settings={**shared, "by": by},
            samples=samples,
            unit="s",
            counts={**costs.counts(), "model_calls": 1} if by == "eager" else {"model_calls": 1},
            predicted=expected.seconds if by == "eager" else None,
            limit=expected.limit if by == "eager" else None,
            check=check,
        )

    missing = why_no_compiler(bench.device)
    if missing:
        timed = sequences.time(1, repeats)
        yield step("eager", timed.samples, f"{timed.check}; not compiled: {missing}")
        return
    bench.check_stop()
    bench.report("compiling: some seconds, and Stop waits for it")
    compiled = prepare(sequences.decoder, compile=True, say=bench.report)
    sequences.run(compiled, sequences.step(1, 0))
    if compiled.compiled and compiled.why_not_compiled:
        raise WorkbenchError(f"the step was not compiled: {compiled.why_not_compiled}. {INSTALL}")
    bench.report("eager and compiled, in turn")
    compiled_s: list[Any]
    eager_s: list[Any]
    eager_s, compiled_s = [], []
    for run in range(-1, repeats):
        same = sequences.step(1, run, last=run == repeats - 1)
        for by, samples in ((sequences.fast, eager_s), (compiled, compiled_s)):
            seconds, logits = sequences.run(by, same)
            if run >= 0:
                samples.append(seconds)
            if run == repeats - 1:
                check = sequences.check(logits[-1])
    yield step("eager", eager_s, check)
    yield step("compiled", compiled_s, check)
    yield bench.measurement(
        name="time.compile_step",
        settings={**shared, "by": "eager ÷ compiled"},
        samples=[a / b for a, b in zip(eager_s, compiled_s)],
        unit="ratio",
        check="steps of both timed in alternation, on the same tokens",
    )


def _graphs(bench: Bench, one_graph: Callable | None) -> Iterator[Measurement]:
    """Graph breaks of a decision in Python, and recompilations for new shapes."""
    inputs = [row(2 * LIMIT), row(0.5 * LIMIT)]  # one for each side of the decision
    expected = [cap_with_if(x, LIMIT) for x in inputs]
    functions = {"if": cap_with_if, "torch.where": cap_with_where}
    for by, function in {**functions, **({"yours": one_graph} if one_graph else {})}.items():
        bench.check_stop()
        bench.report(f"counting the graphs of the function with {by}")
        outputs = [count_graphs(function, [x])[1][0] for x in inputs]
        for ours, wanted in zip(outputs, expected):
            if not (isinstance(ours, torch.Tensor) and ours.shape == wanted.shape and torch.allclose(ours, wanted)):
                raise WorkbenchError(f"the function with {by} does not give what cap_with_if(logits, limit) gives")
        graphs = max(count_graphs(function, [x])[0] for x in inputs)
        yield bench.measurement(
            name="time.compile_step",
            settings={"example": "graph breaks", "by": by},
            samples=[float(graphs)],
            unit="graphs",
            counts={"graphs": graphs, "breaks": graphs - 1},
            check="the same result as the function with if, on both sides of the decision",
        )
    rows = [row(2 * LIMIT, size) for size in VOCABULARIES]
    for by, dynamic in HOW_SHAPES.items():
        bench.check_stop()
        graphs, outputs = count_graphs(cap_with_where, rows, dynamic=dynamic)
        assert all(torch.allclose(a, cap_with_where(x, LIMIT)) for a, x in zip(outputs, rows))
        yield bench.measurement(
            name="time.compile_step",
            settings={"example": "shapes", "by": by},
            samples=[float(graphs)],
            unit="graphs",
            counts={"graphs": graphs, "shapes": len(VOCABULARIES), "recompilations": graphs - 1},
            check=f"rows of {len(VOCABULARIES)} sizes, each with the result of the function run eagerly",
        )


EXPERIMENT = Experiment(
    name="time.compile_step",
    lab=2,
    question="What does a compiler gain on a decode step, and what makes it give up?",
    how="graphs are counted by a backend that only counts; one decode step of one sequence is timed eager and "
    "through torch.compile in alternation, on the same tokens, and its greedy token is compared with that of the "
    "plain model. The time of compiling is not in it.",
    settings=(
        MODEL,
        WEIGHTS,
        Setting(
            "context",
            64,
            "choice",
            choices=(16, 32, 64, 128, 256, 512, 1024),
            unit="tokens",
            help="S, remembered by the sequence",
        ),
        Setting("repeats", 25, "int", 1, 200, brief=2, help="timed pairs of steps"),
    ),
    run=run_compile,
    limits=within_context("context", more=1),
    predict=predict_compile,
    learner=("one_graph",),
    record={"cuda": ({"model": "llama-3.2-1b", "weights": "bfloat16"},)},
)
