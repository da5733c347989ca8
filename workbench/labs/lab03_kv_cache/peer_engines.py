"""The contenders of cache.peers: ours, transformers and llama.cpp, each with its weights in float32, bfloat16 or few
bits.

    format      ours                                      llama.cpp   bits per weight
    float32     `prepare`: eager, looped, compiled, native float32     32
    bfloat16    the same                                  bfloat16    16
    8 bits      `quantize`, RTN in groups of 32           q8_0        8.5
    4 bits      the same                                  q4_0        4.5

Few bits are those of the layers' matrices; the head has 8 in both, ours and llama.cpp's. Embeddings and norms of ours
stay in the model's type, float32 or bfloat16, both of which run. transformers has no weights in few bits here. Who
cannot run is left out by name, with the reason, through `bench.report`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.greedy import Tokens
from workbench.experiments.in_transformers import in_transformers
from workbench.experiments.loops import Loops, steps_taken
from workbench.generation import generate
from workbench.instruments.costs import StepCosts, weights_read
from workbench.kv import stored_dtype
from workbench.labs.lab03_kv_cache.gguf_file import INSTALL, bytes_of_a_step, decoder_of, write_gguf
from workbench.labs.lab03_kv_cache.peer_oracles import dequantized
from workbench.models import prepare
from workbench.models.checkpoints import save_checkpoint
from workbench.models.fast import FastDecoder
from workbench.native.compiler import why_no_compiler
from workbench.quantization import QuantizationRecipe, quantize
from workbench.quantization.linear import QuantizedLinear

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder
    from workbench.models.fast import Model

Run = Callable[[Tokens, int], Tokens]
MakeOracle = Callable[[], "Decoder"]
DTYPES = (torch.float32, torch.bfloat16)
BASELINE = "transformers, dynamic cache, float32"
OURS = "ours, float32"
GROUP = 32  # weights that share a scale in few bits, as in llama.cpp's formats
SCALE_BYTES = 2  # float16
HEAD_BITS = 8
BITS = {"8 bits": 8, "4 bits": 4}
GGUF_NAMES = {"8 bits": "q8_0", "4 bits": "q4_0"}
KERNELS = "C++ kernels"
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # label before and after the format, and what `prepare` is given
    ("", "", {}),
    ("", ", inputs in 8 bits", {"inputs": "q8"}),
    (f"{KERNELS}, ", "", {"kernels": "c++"}),
    (f"{KERNELS}, ", ", inputs in 8 bits", {"kernels": "c++", "inputs": "q8"}),
    ("compiled, ", "", {"compile": True}),
    ("compiled, ", ", inputs in 8 bits", {"compile": True, "inputs": "q8"}),
    ("native, ", "", {"native": True}),
    ("native, ", ", inputs in 8 bits", {"native": True, "inputs": "q8"}),
)


@dataclass
class Engine:
    """One contender.

    run(prompt, new_tokens) -> its tokens; timed by the caller, unless it is a process that times itself.
    format: see the module. Engines of one format have the same bits per weight. dtype: of what its tokens are granted.
    oracle: makes the plain Decoder that its tokens are held against; engines that share the function share it.
    loops: of ours, how its steps are taken and which loops multiply.
    element_bytes: what the cost model is to know of it. weight_bytes: that a step reads, where the file says so.
    rounded: the products whose inputs it rounds to 8 bits, see `peer_oracles`. about: more settings of a Measurement.
    stepping: the model whose steps are compiled or native, which may come out otherwise. words: more for its check.
    samples: {what was measured: seconds of each round}; tokens: the last ones.
    """

    name: str
    format: str
    dtype: torch.dtype
    run: Run
    oracle: MakeOracle
    element_bytes: dict[str, float]
    weight_bytes: float | None = None
    rounded: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    loops: Loops | None = None
    stepping: FastDecoder | None = None
    words: Callable[[], str] = lambda: ""
    samples: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")

    @property
    def why_not(self) -> str:
        """Why it is not what its name says, known after the first request; "" where it is."""
        return "" if self.stepping is None else self.stepping.why_not_steps

    def counted(self, costs: StepCosts) -> StepCosts:
        """As its steps are taken: those of one call start nothing."""
        return costs if self.loops is None else self.loops.counted(costs)


def engines(
    bench: Bench,
    stack: contextlib.ExitStack,
    model: str,
    decoder: Decoder,
    *,
    weights: str,
    peers: str,
    compiled: bool,
    context: int,
) -> Iterator[Engine]:
    """All contenders of these settings, ready. stack: of what ends with the run. context: tokens of the longest text.

    With weights in few bits alone two others run too, because ratios are to them: OURS and the BASELINE.
    """
    if compiled and (reason := why_no_compiler()):
        bench.report(f"contenders in C++ are left out: {reason}")
        compiled = False
    in_full, in_few = weights != "few bits", weights != "as trained"

    def as_trained() -> Decoder:
        return decoder

    if in_full:
        yield from _ours_as_trained(bench, model, as_trained, compiled)
    else:
        ready = bench.model(model, dtype="float32", arrangement="fast")
        yield _ours(OURS, "float32", torch.float32, ready, as_trained)
    if in_few:
        yield from _ours_in_few_bits(bench, model, decoder, compiled)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
    if peers in ("all", "transformers"):
        save_checkpoint(decoder, folder / "model")
        yield from _transformers(bench, folder / "model", as_trained, compiled, whole=in_full)
    if peers in ("all", "llama.cpp"):
        formats: dict[str, torch.dtype | str] = {name_of(dtype): dtype for dtype in DTYPES} if in_full else {}
        formats |= GGUF_NAMES if in_few else {}
        yield from _llama_cpp(bench, stack, folder, decoder, as_trained, context, formats)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- ours --------------------------------------------------------------------------------------------------------


def _ours_as_trained(bench: Bench, model: str, oracle: MakeOracle, compiled: bool) -> Iterator[Engine]:
    for dtype in DTYPES:
        name = name_of(dtype)
        ways = {"ours": "fast", f"ours, {KERNELS}": "looped", "ours, compiled": "compiled", "ours, native": "native"}
        for label, arrangement in ways.items():
            if arrangement != "fast" and not compiled:
                continue
            ready = bench.model(model, dtype=name, arrangement=arrangement)
            if _is_named_so(bench, f"{label}, {name}", ready):
                yield _ours(f"{label}, {name}", name, dtype, ready, oracle)


def _ours_in_few_bits(bench: Bench, model: str, decoder: Decoder, compiled: bool) -> Iterator[Engine]:
    for dtype in DTYPES:
        plain = bench.model(model, dtype=name_of(dtype))
        for format, bits in BITS.items():
            bench.report(f"{model} in {name_of(dtype)}: its linears to {format}")
            try:
                quantized = quantize(plain, recipe(bits), check_stop=bench.check_stop)
            except WorkbenchError as error:
                bench.report(f"ours, {format}, {name_of(dtype)} is left out: {error}")
                continue
            oracle = functools.partial(dequantized, quantized, decoder)
            for before, after, settings in WAYS:
                name = f"ours, {before}{format}{after}, {name_of(dtype)}"
                if before and not compiled:
                    continue
                try:
                    ready = prepare(quantized, say=bench.report, **settings)
                except WorkbenchError as error:
                    bench.report(f"{name} is left out: {error}")
                    continue
                if not _is_named_so(bench, name, ready):
                    continue
                inputs = settings.get("inputs", "exact")
                engine = _ours(name, format, dtype, ready, oracle)
                engine.element_bytes |= _bytes_in_few_bits(ready, quantized)
                engine.loops = Loops(steps_taken(ready), dtype, bits, HEAD_BITS, inputs)
                engine.about |= {"format": f"int{bits}", "group": GROUP, "inputs": inputs}
                engine.rounded, engine.words = "all" * (inputs == "q8"), functools.partial(_forms, ready)
                yield engine


def _is_named_so(bench: Bench, name: str, ready: Model) -> bool:
    """Whether its kernels are those that its name says; what its steps are is known later (`Engine.why_not`)."""
    if KERNELS in name and isinstance(ready, FastDecoder) and ready.kernels != "c++":
        bench.report(f"{name} is left out: {ready.kernels_reason}")
        return False
    return True


def recipe(bits: int) -> QuantizationRecipe:
    """A code and its share of a scale: bits + 0.5 bits per weight."""
    return QuantizationRecipe("rtn", bits, GROUP, {"symmetric": True}, head_bits=HEAD_BITS)


def _ours(name: str, format: str, dtype: torch.dtype, ready, oracle: MakeOracle) -> Engine:
    def run(prompt: Tokens, new_tokens: int) -> Tokens:
        return generate(ready, prompt, max_new_tokens=new_tokens, stop_token_ids=(), kv="contiguous").tokens

    stepping = None if ready.steps == "eager" else ready
    loops = Loops(steps_taken(ready), dtype)
    return Engine(name, format, dtype, run, oracle, _element_bytes(dtype), loops=loops, stepping=stepping)


def _element_bytes(dtype: torch.dtype) -> dict[str, float]:
    return {"weight_bytes_per_element": dtype.itemsize, "kv_bytes_per_element": stored_dtype(dtype, "cpu").itemsize}


def _bytes_in_few_bits(ready: FastDecoder, quantized: Decoder) -> dict[str, float]:
    """Bytes of a weight of the layers, and of the head, scales and all, in the form that a step reads. Biases are
    counted elsewhere."""
    linears = [one for one in quantized.get_submodule("layers").modules() if isinstance(one, QuantizedLinear)]
    weights = sum(one.in_features * one.out_features for one in linears)
    biases = sum(one.bias.nbytes for one in linears if one.bias is not None)
    head = ready.step_head_bytes
    return {
        "linear_bytes_per_element": (ready.step_weight_bytes - head - biases) / weights,
        "head_bytes_per_element": head / (quantized.head.in_features * quantized.head.out_features),
    }


def _forms(ready: FastDecoder) -> str:
    if ready.steps != "eager":
        return f"; {ready.steps_reason}"
    forms = dict.fromkeys(form for name, form in ready.forms.items() if name != "head")
    return f"; linears held as: {', '.join(forms)}"


# -- transformers ------------------------------------------------------------------------------------------------


def _transformers(bench: Bench, folder: Path, oracle: MakeOracle, compiled: bool, *, whole: bool) -> Iterator[Engine]:
    """whole: all kinds of cache in both types of number; else the BASELINE alone."""
    kinds: list[tuple[str, str | None, bool]] = [("dynamic cache", None, False)]
    if whole:
        kinds.append(("static cache", "static", False))
    if whole and compiled:
        kinds.append(("static cache, compiled", "static", True))
    for dtype in DTYPES if whole else DTYPES[:1]:
        for label, cache, compile_it in kinds:
            name = f"transformers, {label}, {name_of(dtype)}"
            bench.report(name)
            run = _in_transformers(folder, dtype, cache, compile_it)
            yield Engine(name, name_of(dtype), dtype, run, oracle, _element_bytes(dtype))


def _in_transformers(folder: Path, dtype: torch.dtype, cache: str | None, compile_it: bool) -> Run:
    model: Any = in_transformers(folder, dtype)
    from transformers import GenerationConfig

    by_length = {length: copy.copy(model) for length in ("one", "several")}  # each remembers its own longest cache
    if compile_it:
        for one in by_length.values():
            one.forward = torch.compile(one.forward)

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
        chosen = by_length["one" if new_tokens == 1 else "several"]
        out = chosen.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
        return out[0, len(prompt) :].tolist()

    return run


# -- llama.cpp ---------------------------------------------------------------------------------------------------


def _llama_cpp(
    bench: Bench,
    stack: contextlib.ExitStack,
    folder: Path,
    decoder: Decoder,
    as_trained: MakeOracle,
    context: int,
    formats: dict[str, torch.dtype | str],
) -> Iterator[Engine]:
    """In few bits it rounds the inputs of every product to 8 bits, 32 with a scale, and computes in float32."""
    if not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf")):
        bench.report(f"llama.cpp is left out: it is not installed ({INSTALL})")
        return
    for format, weights in formats.items():
        name = weights if isinstance(weights, str) else name_of(weights)
        bench.report(f"llama.cpp, {name}")
        try:
            file = write_gguf(decoder, folder / f"{name}.gguf", weights)
        except WorkbenchError as error:
            bench.report(f"llama.cpp, {name} is left out: {error}")
            continue
        read = bytes_of_a_step(file)
        oracle = functools.partial(decoder_of, file, decoder) if format in BITS else as_trained
        for label, exact in (("float32 cache, no flash attention", True), ("its defaults", False)):
            process = stack.enter_context(LlamaCpp(file, context, exact=exact))
            yield Engine(
                f"llama.cpp, {label}, {name}",
                format,
                weights if isinstance(weights, torch.dtype) else torch.float32,
                process.run,
                oracle,
                {
                    "weight_bytes_per_element": read / weights_read(decoder.config, 1, 1),
                    "activation_bytes_per_element": torch.float32.itemsize,
                    "kv_bytes_per_element": (torch.float32 if exact else torch.float16).itemsize,
                },
                weight_bytes=read,
                rounded="all" if format in BITS else "",
                about={"exact": exact} | ({"format": name, "inputs": "q8"} if format in BITS else {}),
            )


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
    def __init__(self, file: Path, context: int, *, exact: bool) -> None:
        settings = {"threads": torch.get_num_threads(), "context": max(256, context + 8), "exact": exact}
        module = "workbench.labs.lab03_kv_cache.peer_llama_cpp"
        super().__init__("llama.cpp", [sys.executable, "-m", module, str(file), json.dumps(settings)])
        self.seconds = 0.0

    def run(self, prompt: Tokens, new_tokens: int) -> Tokens:
        answer = self.ask({"prompt": prompt, "new_tokens": new_tokens})
        self.seconds = answer["seconds"]
        return answer["tokens"]
