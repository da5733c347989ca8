"""Side by side: our decode against transformers' `generate` and llama.cpp, on the same weights and prompt.

Everything runs in rounds, A B C … A B C …, so that a machine that slows down slows all; a plain read of memory is
one of them. What is reported is the median of the ratios within a round. Every engine's tokens are held against
our oracle (the plain Decoder without a cache): each must be the best one up to rounding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.greedy import ROUNDING, Tokens, check_greedy
from workbench.experiments.in_transformers import in_transformers
from workbench.experiments.inputs import plain, shape_of, text_ids
from workbench.generation import generate
from workbench.instruments.costs import decode_costs, predict
from workbench.instruments.timing import exclusive
from workbench.kv import stored_dtype
from workbench.labs.lab03_kv_cache.gguf_file import INSTALL, write_gguf
from workbench.models.checkpoints import save_checkpoint
from workbench.models.layout import config_to_hf

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

BASELINE = "transformers, dynamic cache, float32"
READ = "read"


class Engine:
    """One contender: `run(prompt, new_tokens)` -> its tokens, timed by the caller unless it says so itself."""

    def __init__(self, name: str, dtype: torch.dtype, run: Callable[[Tokens, int], Tokens], **about) -> None:
        self.name, self.dtype, self.run = name, dtype, run
        self.about = about
        self.samples: list[float] = []
        self.tokens: Tokens = []


def run_peers(
    bench: Bench, *, model, peers: str, compiled: bool, prompt_tokens: int, new_tokens: int, rounds: int
) -> Iterator[Measurement]:
    """One Measurement an engine (seconds per token, one sample a round), after one of the memory's read speed."""
    if bench.device != "cpu":
        raise WorkbenchError('decode.peers compares engines on a CPU; run it with device "cpu"')
    if not isinstance(model, str):
        raise WorkbenchError("decode.peers loads the model itself, in two formats: give its name or folder")
    shape = shape_of(model)
    if prompt_tokens + new_tokens > shape.context_length:
        raise WorkbenchError(
            f"{prompt_tokens} + {new_tokens} tokens are beyond the model's context of {shape.context_length:,}"
        )
    if config_to_hf(shape, torch.float32)["model_type"] == "workbench":
        raise WorkbenchError(f"{model} has a shape that no other engine knows: there is nothing to compare it with")
    decoder = bench.model(model, dtype="float32")
    prompt = text_ids(decoder, prompt_tokens)
    settings = plain({"model": model, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens})
    ceilings = bench.ceilings()
    with contextlib.ExitStack() as stack:
        engines = list(_engines(bench, stack, model, decoder, peers, compiled, prompt_tokens + new_tokens))
        reader, read_bytes = _reader()
        reads: list[float] = []
        for number in range(-1, rounds):  # the first round warms up (and compiles)
            bench.report(f"round {max(number, 0) + 1} of {rounds}" if number >= 0 else "warming up")
            with exclusive(bench.check_stop), torch.inference_mode():
                reads += _clock(reader)
            for engine in engines:
                bench.check_stop()
                with exclusive(bench.check_stop):
                    seconds, engine.tokens = _time(engine, prompt, new_tokens)
                if number >= 0:
                    engine.samples.append(seconds / new_tokens)
    read_rate = read_bytes / statistics.median(reads)
    yield bench.measurement(
        name="cache.peers",
        settings={**settings, "engine": READ},
        samples=[read_bytes / s / 1e9 for s in reads],
        unit="GB/s",
        counts={"bytes_read": read_bytes},
        check="a sum over memory far beyond the cache, once a round",
    )
    baseline = next((e.samples for e in engines if e.name == BASELINE), None)
    ours = next(e.samples for e in engines if e.name == "ours, float32")
    for engine in engines:
        bench.check_stop()
        yield _measured(bench, engine, decoder, prompt, new_tokens, settings, ceilings, read_rate, baseline, ours)


def _measured(bench, engine, decoder, prompt, new_tokens, settings, ceilings, read_rate, baseline, ours) -> Measurement:
    size = engine.dtype.itemsize
    costs = decode_costs(
        decoder.config,
        batch=1,
        context=len(prompt) + new_tokens // 2,
        weight_bytes_per_element=size,
        kv_bytes_per_element=stored_dtype(engine.dtype, "cpu").itemsize,
    )
    weights = costs.bytes_by_part["weights"]
    seconds = statistics.median(engine.samples)
    counts = {
        **costs.counts(),
        "weight_bytes": weights,
        "share_of_read_bandwidth": weights / seconds / read_rate,
        "times_as_fast_as_ours_in_float32": _ratio(ours, engine.samples),
    }
    if baseline is not None:
        counts["times_as_fast_as_transformers"] = _ratio(baseline, engine.samples)
    mine = engine.name.startswith("ours")
    prediction = predict(costs, ceilings, engine.dtype) if mine else None
    return bench.measurement(
        name="cache.peers",
        settings={**settings, "engine": engine.name, **engine.about},
        samples=engine.samples,
        unit="s",
        counts=counts,
        predicted=prediction.seconds if prediction else None,
        limit=prediction.limit if prediction else None,
        check=check_greedy(decoder, prompt, engine.tokens, new_tokens, ROUNDING[engine.dtype], engine.about),
    )


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the rounds of slow / fast: how many times as fast the second is."""
    return statistics.median(a / b for a, b in zip(slow, fast))


# -- the contenders ----------------------------------------------------------------------------------------


def _engines(
    bench: Bench, stack: contextlib.ExitStack, model, decoder: Decoder, peers: str, compiled: bool, length: int
) -> Iterator[Engine]:
    compiled = compiled and has_cpp_compiler()
    for dtype in (torch.float32, torch.bfloat16):
        name = _name(dtype)
        for label, arrangement in (("ours", "fast"), ("ours, compiled", "compiled")):
            if arrangement == "compiled" and not compiled:
                continue
            ready = bench.model(model, dtype=name, arrangement=arrangement)
            yield Engine(f"{label}, {name}", dtype, _ours(ready))
    if peers in ("all", "transformers"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        save_checkpoint(decoder, folder / "model")
        for dtype in (torch.float32, torch.bfloat16):
            yield from _transformers(bench, folder / "model", dtype, compiled)
    if peers == "all" and importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        yield from _llama_cpp(bench, stack, folder, decoder, length)
    elif peers == "all":
        bench.report(f"llama.cpp is left out: it is not installed ({INSTALL})")


def _ours(model) -> Callable[[Tokens, int], Tokens]:
    def run(prompt: Tokens, new_tokens: int) -> Tokens:
        return generate(model, prompt, max_new_tokens=new_tokens, stop_token_ids=(), kv="contiguous").tokens

    return run


def _transformers(bench: Bench, folder: Path, dtype: torch.dtype, compiled: bool) -> Iterator[Engine]:
    def contender(cache: str | None, compile_it: bool) -> Callable[[Tokens, int], Tokens]:
        model = in_transformers(folder, dtype)
        from transformers import GenerationConfig

        if compile_it:
            model.forward = torch.compile(model.forward)

        def run(prompt: Tokens, new_tokens: int) -> Tokens:
            ids = torch.tensor([prompt])
            asked = GenerationConfig(
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                eos_token_id=None,
                cache_implementation=cache,
                disable_compile=True,
            )
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
            return out[0, len(prompt) :].tolist()

        return run

    kinds = [("dynamic cache", None, False), ("static cache", "static", False)]
    if compiled:
        kinds.append(("static cache, compiled", "static", True))
    for label, cache, compile_it in kinds:
        bench.report(f"transformers, {label}, {_name(dtype)}")
        yield Engine(f"transformers, {label}, {_name(dtype)}", dtype, contender(cache, compile_it))


def _llama_cpp(
    bench: Bench, stack: contextlib.ExitStack, folder: Path, decoder: Decoder, length: int
) -> Iterator[Engine]:
    for dtype in (torch.float32, torch.bfloat16):
        bench.report(f"llama.cpp, {_name(dtype)}")
        file = write_gguf(decoder, folder / f"{_name(dtype)}.gguf", dtype)
        for label, exact in (("float32 cache, no flash attention", True), ("its defaults", False)):
            process = stack.enter_context(LlamaCpp(file, length, exact=exact))
            yield Engine(f"llama.cpp, {label}, {_name(dtype)}", dtype, process.run, exact=exact)


class PeerProcess:
    """An engine of others in a process that is stopped (SIGSTOP) whenever it is not asked. It takes and gives lines of
    JSON, the first when it is ready. name: whose engine, for errors. environment: beside ours."""

    def __init__(self, name: str, command: Sequence[str], **environment: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return self._answer()
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkbenchError(
                f"{self.name} ended with exit code {self._process.wait()} before it answered; leave it out with"
                " peers=transformers"
            )
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


class LlamaCpp(PeerProcess):
    def __init__(self, file: Path, length: int, *, exact: bool) -> None:
        settings = {"threads": torch.get_num_threads(), "context": max(256, length + 8), "exact": exact}
        module = "workbench.labs.lab03_kv_cache.peer_llama_cpp"
        super().__init__("llama.cpp", [sys.executable, "-m", module, str(file), json.dumps(settings)])
        self.seconds = 0.0

    def run(self, prompt: Tokens, new_tokens: int) -> Tokens:
        answer = self.ask({"prompt": prompt, "new_tokens": new_tokens})
        self.seconds = answer["seconds"]
        return answer["tokens"]


# -- the clock ---------------------------------------------------------------------------------------------


def _time(engine: Engine, prompt: Tokens, new_tokens: int) -> tuple[float, Tokens]:
    """Seconds of one whole request, prompt and all. A process of its own times itself, without the way there."""
    started = time.perf_counter()
    tokens = engine.run(prompt, new_tokens)
    seconds = time.perf_counter() - started
    owner = getattr(engine.run, "__self__", None)
    return (owner.seconds if isinstance(owner, LlamaCpp) else seconds), tokens


def _clock(function: Callable[[], object]) -> list[float]:
    samples = []
    for _ in range(3):
        started = time.perf_counter()
        function()
        samples.append(time.perf_counter() - started)
    return samples


def _reader() -> tuple[Callable[[], object], int]:
    """A plain read of 256 MiB, and how many bytes that is."""
    source = torch.ones(256 << 17, dtype=torch.int64)
    return source.sum, source.nbytes


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler here."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def predict_peers(ceilings, *, model, prompt_tokens: int, new_tokens: int, **_: Any) -> list[tuple]:
    """(bytes per weight, seconds per token, limit) of our two formats."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        costs = decode_costs(
            shape_of(model),
            batch=1,
            context=prompt_tokens + new_tokens // 2,
            weight_bytes_per_element=dtype.itemsize,
            kv_bytes_per_element=stored_dtype(dtype, "cpu").itemsize,
        )
        prediction = predict(costs, ceilings, dtype)
        found.append((dtype.itemsize, prediction.seconds, prediction.limit))
    return found


EXPERIMENT = Experiment(
    name="cache.peers",
    lab=3,
    question="How fast is our decode beside transformers and llama.cpp, on the same weights?",
    how=(
        "whole greedy requests in rounds, one engine after the other, after a round that warms up; ratios are "
        "medians over the rounds; tokens are held against the plain decoder without a cache; two threads each; "
        "llama.cpp in a process that is stopped while another is timed."
    ),
    settings=(
        Setting("model", "stdlib-10m", "model", help="a shipped model, or random-110m: beyond the CPU's cache"),
        Setting("peers", "all", "choice", choices=("all", "transformers", "ours"), help="who else runs"),
        Setting("compiled", True, "flag", help="torch.compile as well, where a C++ compiler is found"),
        Setting("prompt_tokens", 32, "int", 1, 1024, help="tokens of held-out text to go on from"),
        Setting("new_tokens", 96, "int", 2, 1024, help="tokens to write"),
        Setting("rounds", 5, "int", 1, 100, help="timed rounds"),
    ),
    run=run_peers,
    predict=predict_peers,
    record={"cuda": ()},  # it compares engines on a CPU
)
