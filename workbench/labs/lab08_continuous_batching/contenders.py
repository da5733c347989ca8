"""Who serves the requests of serving.peers: ours, transformers, llama.cpp and vLLM, each one by one, in groups, or
continuously.

A contender's `run()` serves all requests and returns (seconds, texts). The clock runs from the first request that is
handed in to the last token of the last one. What an engine sets up once and keeps (its pool, its threads) is made
before the clock starts, but for ours, whose engine is new in every turn and inside the clock: it would know the prompts
of the turn before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.labs.lab03_kv_cache.gguf_file import INSTALL, write_gguf
from workbench.labs.lab03_kv_cache.peer_engines import PeerProcess
from workbench.models.checkpoints import save_checkpoint
from workbench.serving.engine import Engine
from workbench.serving.load import Arrival, requests_of
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder
    from workbench.models.fast import Model

Tokens = list[int]
BLOCK, BUDGET = 16, 512  # tokens of a block of ours; rows of a step, ours and transformers'
OURS, OURS_STATIC, OURS_ALONE = "ours, continuous", "ours, static", "ours, one by one"
THEIR_STATIC = "transformers, static"
VLLM_PYTHON = "WORKBENCH_VLLM_PYTHON"  # names a Python that has vLLM, in an environment of its own


@dataclass(frozen=True)
class Asked:
    """The requests, in the order of their arrival, all there from the start."""

    arrivals: tuple[Arrival, ...]
    prompts: list[Tokens]

    @property
    def new_tokens(self) -> list[int]:
        return [arrival.new_tokens for arrival in self.arrivals]

    @property
    def longest(self) -> int:
        """Tokens of a row of a static batch, at most: the longest prompt and the longest output."""
        return max(map(len, self.prompts)) + max(self.new_tokens)

    def first(self, count: int) -> Asked:
        return Asked(self.arrivals[:count], self.prompts[:count])


Run = Callable[[Asked], tuple[float, list[Tokens]]]


@dataclass
class Contender:
    """`exact`: its arithmetic is float32, so its texts must be the greedy ones. `samples`: seconds of each turn."""

    name: str
    run: Run
    exact: bool = True
    samples: list[float] = field(default_factory=list)
    texts: list[Tokens] = field(default_factory=list)


def contenders(
    bench: Bench, stack: contextlib.ExitStack, model, asked: Asked, slots: int, peers: str, arrangement: str = "fast"
) -> Iterator[Contender]:
    """Ours first, the model arranged so. peers: "all", "transformers" or "ours"; who is not installed is left out."""
    plain, ready = bench.model(model), bench.model(model, arrangement=arrangement)
    yield Contender(OURS_ALONE, _timed(lambda asked: _alone(ready, asked)))
    yield Contender(OURS_STATIC, _timed(lambda asked: _engine(ready, asked, slots, "static")))
    yield Contender(OURS, _timed(lambda asked: _engine(ready, asked, slots, "continuous")))
    if peers == "ours":
        return
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
    yield from _transformers(bench, folder, plain, asked.longest, slots)
    if peers != "all":
        return
    if os.environ.get(VLLM_PYTHON):
        bench.report("vLLM")
        process = stack.enter_context(vllm_engine(folder / "model", asked.longest, slots))
        yield Contender(f"vLLM's engine, {slots} sequences, eager", process.serve)
    else:
        bench.report(f"vLLM is left out: {VLLM_PYTHON} names no Python that has it")
    if not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf")):
        bench.report(f"llama.cpp is left out: it is not installed ({INSTALL})")
        return
    bench.report("llama.cpp")
    file = write_gguf(plain, folder / "model.gguf", torch.float32)
    for label, exact in (("float32 cache, no flash attention", True), ("its defaults", False)):
        process = stack.enter_context(llama_cpp_slots(file, asked.longest, slots, exact=exact))
        yield Contender(f"llama.cpp, {slots} slots, {label}", process.serve, exact)


def _timed(serve: Callable[[Asked], list[Tokens]]) -> Run:
    def run(asked: Asked) -> tuple[float, list[Tokens]]:
        started = time.perf_counter()
        texts = serve(asked)
        return time.perf_counter() - started, texts

    return run


# -- ours ------------------------------------------------------------------------------------------------------


def _alone(model: Model, asked: Asked) -> list[Tokens]:
    how = {"stop_token_ids": (), "kv": "contiguous"}
    pairs = zip(asked.prompts, asked.new_tokens)
    return [generate(model, prompt, max_new_tokens=count, **how).tokens for prompt, count in pairs]


def _engine(model: Model, asked: Asked, slots: int, batching: str) -> list[Tokens]:
    settings = SchedulerSettings(max_running=slots, token_budget=max(BUDGET, slots), batching=batching)
    blocks = slots * (-(-asked.longest // BLOCK) + 1)  # one more: of the padding of a row
    engine = Engine(model, settings, num_blocks=blocks, block_size=BLOCK)
    texts: list[Tokens] = [[] for _ in asked.prompts]
    for done in engine.run(requests_of(asked.prompts, asked.new_tokens)):
        if done.error is not None:
            raise done.error
        assert isinstance(done.request_id, int), "as requests_of names them"
        texts[done.request_id] = list(done.token_ids)
    return texts


# -- transformers ----------------------------------------------------------------------------------------------


def _transformers(bench: Bench, folder: Path, decoder: Decoder, longest: int, slots: int) -> Iterator[Contender]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    bench.report("transformers")
    save_checkpoint(decoder, folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()

    def greedy(count: int, eos: int | None = None) -> GenerationConfig:
        return GenerationConfig(
            do_sample=False, max_new_tokens=count, pad_token_id=0, eos_token_id=eos, disable_compile=True
        )

    def group(prompts: Sequence[Tokens], count: int) -> list[Tokens]:
        """A batch, padded on the left, as its documentation says."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(ids, attention_mask=mask, generation_config=greedy(count))
        return out[:, width:].tolist()

    def groups_of(size: int) -> Run:
        def serve(asked: Asked) -> list[Tokens]:
            texts = []
            for start in range(0, len(asked.prompts), size):
                wanted = asked.new_tokens[start : start + size]
                found = group(asked.prompts[start : start + size], max(wanted))
                texts += [text[:count] for text, count in zip(found, wanted)]
            return texts

        return _timed(serve)

    def continuous(asked: Asked) -> tuple[float, list[Tokens]]:
        settings = ContinuousBatchingConfig(max_requests_per_batch=slots, max_batch_tokens=max(BUDGET, slots))
        settings.num_blocks = slots * (-(-longest // settings.page_size) + 1)
        with (
            lone_thread(),
            model.continuous_batching_context_manager(
                greedy(1, eos=-1), continuous_batching_config=settings
            ) as manager,
        ):
            return serve_continuously(manager, asked)

    yield Contender("transformers, one by one", groups_of(1))
    yield Contender(THEIR_STATIC, groups_of(slots))
    yield Contender("transformers, continuous", continuous)


def serve_continuously(manager, asked: Asked) -> tuple[float, list[Tokens]]:
    """Hand all requests to a continuous batching manager that has started, and take what it delivers."""
    texts: list[Tokens] = [[] for _ in asked.prompts]
    left = len(texts)
    started = time.perf_counter()
    for number, (prompt, count) in enumerate(zip(asked.prompts, asked.new_tokens)):
        manager.add_request(prompt, request_id=str(number), max_new_tokens=count)
    while left:
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise WorkbenchError(f"transformers' continuous batching gave up a request: {result.error}")
        if result is not None and result.is_finished():
            texts[int(result.request_id)] = [int(token) for token in result.generated_tokens]
            left -= 1
        elif result is None and not manager.is_running():
            raise WorkbenchError(f"transformers' continuous batching ended with {left} requests unanswered")
    return time.perf_counter() - started, texts


@contextlib.contextmanager
def lone_thread() -> Iterator[None]:
    """What is started inside has ended at the exit: nothing polls beside the next one that is timed."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    if left:
        raise WorkbenchError(
            f"an engine left {len(left)} threads behind ({', '.join(left)}); nothing is timed beside them"
        )


# -- llama.cpp and vLLM ----------------------------------------------------------------------------------------


class Slots(PeerProcess):
    """An engine that runs several requests at a time."""

    def serve(self, asked: Asked) -> tuple[float, list[Tokens]]:
        """It times itself, without the way there and back."""
        answer = self.ask({"prompts": asked.prompts, "new_tokens": asked.new_tokens})
        return answer["seconds"], answer["texts"]


def llama_cpp_slots(file: Path, longest: int, slots: int, *, exact: bool) -> Slots:
    context = slots * -(-(longest + 8) // 256) * 256  # all slots together; it wants multiples of 256
    settings = {"threads": torch.get_num_threads(), "context": context, "slots": slots, "exact": exact}
    module = "workbench.labs.lab08_continuous_batching.peer_llama_cpp_slots"
    return Slots("llama.cpp", [sys.executable, "-m", module, str(file), json.dumps(settings)])


def vllm_engine(folder: Path, longest: int, slots: int) -> Slots:
    """folder: of the checkpoint. Bound to as many cores as we have threads, as its documentation says."""
    settings = {"slots": slots, "context": longest + 8, "budget": max(BUDGET, slots, longest + 8)}
    script = str(Path(__file__).with_name("peer_vllm.py"))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{torch.get_num_threads() - 1}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [os.environ[VLLM_PYTHON], "-P", script, str(folder), json.dumps(settings)]
    return Slots("vLLM", command, HF_HUB_OFFLINE="1", **own)
