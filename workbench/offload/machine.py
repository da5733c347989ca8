"""This machine's constants for the cost model, measured with the parts that will run and at the sizes of a plan.

A rate is what the plan's own operation moves or computes per second: reading a layer's matrices from disk and copying
them into a staging buffer one after the other, all products, norms and gates of a layer over as many rows, attention
over a cache that is half full of new tokens. So a rate of few rows is far below that of many: it is the memory's. For
the cost model without this, `at_one_rate` has a single rate of products, that of many rows, and the bandwidth apart.

Copies and reads are measured beside products, as they run: they share the memory's bandwidth. Products have the loader
beside them for a part of the time only. So they are measured alone, and once more beside copies and beside reads: of
the time in which the loader works, so much is lost to it. FlexGen's authors found that rates of single parts do not
predict a run, and fitted theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from workbench.kv.contiguous import Contiguous
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.models.latent import UpProjections
from workbench.offload.cache import TieredCache
from workbench.offload.cost_model import Decoding, OffloadMachine, Shape
from workbench.offload.disk import Matrices, Memory, nameless, whole_blocks
from workbench.offload.placement import matrices
from workbench.offload.traffic import Traffic
from workbench.offload.weights import SLOTS


class _NoAttention:
    """A kv with which a layer does all that it does but attend."""

    def begin(self, batch: Batch) -> None:
        pass

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        return q


class Meter:
    """Of one model, whose matrices `stored` has (`weights.store`), and of the disk of one folder.

    budget_s: for each operation, which is done twice at least, after once that warms up. Its mean counts, and not its
    median: what a run adds up are means, with all that other work on the machine takes of it.
    """

    def __init__(self, model: Decoder, stored: Matrices, folder: Path, *, budget_s: float = 0.1) -> None:
        self.model, self.budget_s, self._disk, self._folder = model, budget_s, stored, folder
        self.shape = Shape.of(model.config, model.dtype.itemsize)
        self._layers = matrices(model)
        largest = max(sum(value.numel() for _, value in layer) for layer in self._layers)
        self._staging = [torch.empty(largest, dtype=model.dtype) for _ in range(SLOTS)]
        self._order = itertools.cycle(range(len(self._layers)))
        self._memory = Memory(max(sum(stored.room(name) for name, _ in layer) for layer in self._layers))

    def _seconds(self, run: Callable[[], object], beside: Callable[[], object] | None = None) -> float:
        """Of one call, while another thread does something else again and again."""
        with _again_and_again(beside):
            run()
            began, count = time.perf_counter(), 0
            while count < 2 or time.perf_counter() - began < self.budget_s:
                run()
                count += 1
            return (time.perf_counter() - began) / count

    @torch.inference_mode()
    def machine(
        self, work: Decoding, *, batch: int, device_bytes: float, host_bytes: float, disk_bytes: float
    ) -> OffloadMachine:
        """At these sizes; the bytes are given, and all of them may be planned with. Matrices are read alike in all
        steps."""
        s, d, b = work.prompt_tokens, self.shape.hidden_size, self.shape.value_bytes
        cached = s + work.new_tokens / 2
        rows, layer_bytes, layer_flops = batch * s, self.shape.layer_bytes, self.shape.layer_flops
        new, of_prompts = 2 * b * d * batch, 2 * b * d * rows
        prompts, decode = self._attention(batch, work)
        put, clone, write = self._storing(batch, s)
        products = self._products(batch)
        alone = self._seconds(products)
        lost = [max(0.0, 1 - alone / self._seconds(products, other)) for other in (self._copy, self._read)]
        decode_write = self._writing(batch, 1)
        x = torch.zeros(batch, d, dtype=self.model.dtype)
        to_host_and_back = self._seconds(lambda: [x.clone() for _ in range(4)])  # query, key, value; the result
        return OffloadMachine(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            host_to_device=layer_bytes / self._seconds(self._copy, products),
            cache_to_host=of_prompts / put,
            hidden_to_host=of_prompts / 2 / clone,
            disk_to_host=layer_bytes / self._seconds(self._read, products),
            prompt_cache_to_disk=of_prompts / write,
            prompt_hidden_to_disk=of_prompts / write,
            decode_to_disk=new / decode_write,
            prompt_flops=rows * layer_flops / self._seconds(self._products(rows)),
            prompt_attention_flops=4 * batch * s**2 * d / prompts,
            decode_flops=batch * layer_flops / alone,
            decode_attention_flops=4 * batch * cached * d / decode,
            host_attention_flops=4 * batch * cached * d / (decode + to_host_and_back),
            usable=1.0,
            decode_weights=1.0,
            device_read=layer_bytes / self._seconds(self._products(1)),
            slowed_by_copies=lost[0],
            slowed_by_reads=lost[1],
            outside_s=self._seconds(self._outside(batch)) / batch,
        )

    def _copy(self) -> None:
        index, begin = next(self._order), 0
        staging = self._staging[index % SLOTS]
        for _, value in self._layers[index]:
            staging[begin : begin + value.numel()].copy_(value.view(-1))
            begin += value.numel()

    def _read(self) -> None:
        at = 0
        for name, _ in self._layers[next(self._order)]:
            _, at = self._disk.tensor(name, self._memory, at)

    def _products(self, rows: int) -> Callable[[], object]:
        """All of a layer but attention, over as many rows; each time of another layer, whose weights no cache has."""
        x = torch.randn(rows, self.shape.hidden_size, dtype=self.model.dtype)
        batch = Batch.of([[0] * rows])
        turns = self.model.turns_of(batch, x.dtype)
        return lambda: self.model.run_layer(next(self._order), x, turns, batch, _NoAttention())

    def _attention(self, batch: int, work: Decoding) -> tuple[float, float]:
        """Seconds in one layer: of the prompts with themselves, and of a decode step with what is cached, the mean over
        all steps of a run."""
        c, s, n = self.model.config, work.prompt_tokens, work.new_tokens
        kv = TieredCache(c, (batch, 0, 0), s + n, self.model.dtype, Traffic())
        began, runs, seconds = time.perf_counter(), 0, [0.0, 0.0]
        while runs < 2 or time.perf_counter() - began < self.budget_s:
            kv.release()
            for step in range(n):
                new = 1 if step else s
                given = Batch.of([[0] * new] * batch, first_positions=[s + step - 1 if step else 0] * batch)
                q = torch.randn(batch * new, c.num_heads, c.head_dim, dtype=self.model.dtype)
                start = time.perf_counter()
                kv.begin(given)
                for layer in range(c.num_layers):
                    kv.attend(layer, q, q, q, given)
                seconds[step > 0] += time.perf_counter() - start
            runs += 1
        return seconds[0] / runs / c.num_layers, seconds[1] / runs / max(1, n - 1) / c.num_layers

    def _outside(self, batch: int) -> Callable[[], object]:
        """What a step does outside its layers: embedding, rotary positions, norm, head, the largest logit."""
        given = [[0]] * batch

        def run() -> None:
            x, _ = self.model.start(Batch.of(given))
            self.model.logits_of(self.model.norm(x)).argmax(-1).tolist()

        return run

    def _storing(self, batch: int, prompt: int) -> tuple[float, float, float]:
        """Seconds of the prompts' keys and values of a layer into the host, of their hidden states there, and of the
        keys and values onto disk."""
        c = self.model.config
        kv = Contiguous(c, max_sequences=batch, max_tokens=prompt, dtype=self.model.dtype)
        given = Batch.of([[0] * prompt] * batch)
        k = torch.randn(batch * prompt, c.num_heads, c.head_dim, dtype=self.model.dtype)
        kv.begin(given)
        put = self._seconds(lambda: kv.put(c.num_layers - 1, k, k, given))
        clone = self._seconds(k.clone)
        return put, clone, self._writing(batch, prompt)

    def _writing(self, batch: int, tokens: int) -> float:
        num_bytes = tokens * whole_blocks(2 * batch * self.shape.hidden_size * self.shape.value_bytes)
        file, memory = nameless(self._folder, num_bytes, self._disk.direct), Memory(num_bytes)
        try:
            return self._seconds(lambda: file.write(memory, num_bytes, 0))
        finally:
            file.close()


@contextmanager
def _again_and_again(run: Callable[[], object] | None) -> Iterator[None]:
    """Another thread runs it within the block. Raises what it raises."""
    if run is None:
        yield
        return
    ended = threading.Event()

    @torch.inference_mode()
    def keep_on() -> None:
        while not ended.is_set():
            run()

    with ThreadPoolExecutor(1, "offload meter") as pool:
        work = pool.submit(keep_on)
        try:
            yield
        finally:
            ended.set()
        work.result()


def at_one_rate(machine: OffloadMachine, *, with_bandwidth: bool) -> OffloadMachine:
    """As FlexGen's constants are: one rate of products for many rows and for few; and its roofline with the memory's
    bandwidth."""
    read = machine.device_read if with_bandwidth else None
    return dataclasses.replace(machine, decode_flops=machine.prompt_flops, device_read=read)
