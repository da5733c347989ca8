"""server.engines: ours, transformers, llama.cpp and vLLM over HTTP: the same weights and requests, one at a time.

Every server runs in a process of its own and is stopped (SIGSTOP) while another is measured. All requests are sent at
once and streamed; the clock runs from the first byte sent to the last one read, and a ratio is of two runs of one turn.
No prompt comes twice. Outputs are compared with ours, text by text. Then each is asked what it can do (`probes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.timing import exclusive
from workbench.labs.lab08_continuous_batching.peers import requests_for
from workbench.labs.lab11_serving.probes import YES, probe
from workbench.labs.lab11_serving.servers import LLAMA_CPP, OURS, OURS_PROCESS, TRANSFORMERS, VLLM, Peer, started
from workbench.models.evaluation import held_out_passages
from workbench.serving.bench.client import Client, Target
from workbench.serving.bench.recording import Planned

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.labs.lab08_continuous_batching.contenders import Asked

CHOICES = {
    "all": (OURS, OURS_PROCESS, TRANSFORMERS, LLAMA_CPP, VLLM),
    "ours": (OURS,),
    "transformers": (OURS, TRANSFORMERS),
}
LIMIT_S = 600


async def ask_all(peer: Peer, prompts: Sequence[str | list[int]], new_tokens: Sequence[int]) -> list[str]:
    """The texts, in the order of the prompts. Raises WorkbenchError where one is not answered."""
    client = Client(Target.of(peer.url), timeout_s=LIMIT_S)

    async def one(index: int) -> str:
        body = {"model": peer.model, "prompt": prompts[index], "max_tokens": new_tokens[index], "temperature": 0}
        body |= {"stream": True, **({} if peer.name == TRANSFORMERS else {"ignore_eos": True})}
        planned = Planned(index, None, max(1, len(prompts[index])), new_tokens[index])
        result = await client.ask(planned, json.dumps(body).encode())
        if not result.ok:
            raise WorkbenchError(f"{peer.name} did not answer request {index}: {result.outcome} {result.reason}")
        return result.text

    return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def run_engines(
    bench: Bench, *, model, peers: str, requests: int, max_new_tokens: int, seed: int, repeats: int, abilities: bool
) -> Iterator[Measurement]:
    """A Measurement a server: seconds of all requests, a sample a turn, with ratios and equal texts in the counts; then
    one for each ability that it was asked for (unit "yes": 1 or 0), with what came as its verdict."""
    if bench.device != "cpu":
        raise WorkbenchError('server.engines compares servers on a CPU; run it with device "cpu"')
    decoder = bench.model(model)
    if decoder.dtype != torch.float32 or decoder.tokenizer is None:
        raise WorkbenchError("server.engines compares texts in float32; take a model with a tokenizer, in float32")
    tokenizer = decoder.tokenizer
    asked = requests_for(decoder, requests, max_new_tokens, seed)
    new_tokens = asked.new_tokens
    turns = _turns(tokenizer, asked, repeats + 1)
    wanted: dict[str, list[list[str]]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-")))
        ready = []
        for name in CHOICES[peers]:
            made = started(bench, [name], model, folder, folder / "log")
            stack.enter_context(contextlib.closing(made))
            for peer in made:
                peer.pause()
                ready.append(peer)
                break
        for turn in range(-1, repeats):  # the first warms up
            for peer in ready:
                bench.report(f"turn {turn + 1} of {repeats}: {peer.name}" if turn >= 0 else "warming up")
                bench.check_stop()
                texts, ids = turns[turn + 1]
                prompts: list = ids if peer.token_ids else texts
                peer.go_on()
                with exclusive(bench.check_stop):
                    began = time.perf_counter()
                    answers = asyncio.run(ask_all(peer, prompts, new_tokens))
                    seconds = time.perf_counter() - began
                peer.pause()
                wanted.setdefault(peer.name, []).append(answers)
                if turn >= 0:
                    peer.samples.append(seconds)
        for peer in ready:
            bench.check_stop()
            bench.report(f"{peer.name}: what it can do")
            peer.go_on()
            theirs, ours = (itertools.chain(*wanted[name]) for name in (peer.name, OURS))
            equal = sum(_text(peer, a, tokenizer) == b for a, b in zip(theirs, ours, strict=True))
            total = requests * len(turns)
            ratios = [other / own for other, own in zip(peer.samples, ready[0].samples)]
            tokens = sum(new_tokens)
            yield bench.measurement(
                name="server.engines",
                settings={**plain({"model": model}), "server": peer.name, "requests": requests, "seed": seed},
                samples=peer.samples,
                unit="s",
                counts={
                    "tokens": tokens,
                    "tokens_per_s": tokens / statistics.median(peer.samples),
                    "times_ours": statistics.median(ratios),
                    "texts_equal": equal,
                },
                check=f"{equal} of {total} texts are ours",
            )
            for ability, verdict in probe(peer).items() if abilities else ():
                yield bench.measurement(
                    name="server.engines",
                    settings={**plain({"model": model}), "server": peer.name, "ability": ability, "verdict": verdict},
                    samples=[float(verdict.startswith(YES))],
                    unit="yes",
                    check=verdict,
                )


def _turns(tokenizer, asked: Asked, turns: int) -> list[tuple[list[str], list[list[int]]]]:
    """(texts, token ids) of each turn: of the same lengths, and no text twice, so that no prefix cache knows one."""
    count, longest = len(asked.prompts), max(map(len, asked.prompts))
    passages = held_out_passages(tokenizer, longest, count * turns).tolist()
    made = []
    for turn in range(turns):
        cut = zip(passages[turn * count :], asked.prompts)  # ends with the shorter one
        texts = [tokenizer.decode(passage[: len(prompt)]) for passage, prompt in cut]
        made.append((texts, [tokenizer.encode_prompt(text) for text in texts]))  # a piece may be cut into other tokens
    return made


def _text(peer: Peer, text: str, tokenizer) -> str:
    """llama.cpp's vocabulary here names each token id: "<17><4>"."""
    if peer.name != LLAMA_CPP:
        return text
    return str(tokenizer.decode([int(number) for number in re.findall(r"<(\d+)>", text)]))


EXPERIMENT = Experiment(
    name="server.engines",
    lab=11,
    question="How fast are four servers on the same load, and what does each do?",
    how=(
        "the same greedy float32 requests over HTTP, streamed, all sent at once; the same weights and threads; "
        "servers in processes of their own, one at a time, the others stopped; ratios are medians over the turns."
    ),
    settings=(
        MODEL,
        Setting("peers", "all", "choice", choices=tuple(CHOICES), help="who else runs, of those that are installed"),
        Setting("requests", 64, "int", low=1, high=256, brief=4, help="sent at once"),
        Setting(
            "max_new_tokens", 160, "int", low=8, high=512, brief=8, help="new tokens of the longest; most are short"
        ),
        Setting("seed", 0, "int", low=0, high=1_000_000, help="of the lengths"),
        Setting("repeats", 3, "int", low=1, high=20, brief=1, help="timed turns"),
        Setting("abilities", True, "flag", help="also ask what each can do"),
    ),
    run=run_engines,
    predict=lambda ceilings, **settings: [],
    record={"cpu": ({},), "cuda": ()},
)
