"""A model larger than its device generates: FlexGen's block schedule, over the project's own layers.

    for step in range(new_tokens):               the prompts first, then one token of each sequence
        for layer in layers:                     its weights are brought once for the whole block …
            for batch in block:                  … and the next layer's come while all batches are computed
                hidden[batch] = layer(hidden[batch])

"Device", "host" and "disk" are a budget of bytes, the rest of memory, and a file that is read without the page cache.
Everything on the device is entered in the budget before it is allocated: embedding, head, norms and the matrices that
stay, two staging buffers, keys and values, hidden states between two layers, and what one batch's layer computes.

Greedy, without stop tokens: every prompt has as many tokens as the others, and gets as many new ones, as the cost model
assumes. Sheng et al., FlexGen, arXiv 2303.06865, §4.2 and algorithm 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from workbench.errors import WorkbenchError, check_path, check_whole, shown
from workbench.kv.contiguous import Contiguous
from workbench.kv.slots import stored_dtype
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder, check_all_attend
from workbench.offload.budget import DeviceBudget
from workbench.offload.cache import DiskCache, TieredCache
from workbench.offload.cost_model import Decoding, OffloadMachine, Shape, Shares, two_threads
from workbench.offload.disk import Matrices, check_room, whole_blocks
from workbench.offload.placement import DEVICE, DISK, HOST, Placement, place
from workbench.offload.program import Plan, solve
from workbench.offload.traffic import DOWN, UP, Moved, Traffic
from workbench.offload.weights import SLOTS, TieredWeights

MAX_SEQUENCES = 1_000_000  # of one block; more is a mistake, not a plan


@dataclass(frozen=True)
class Generated:
    """tokens: the new ones of each sequence. moved and busy_s: bytes and seconds of each link; computed_s: seconds in
    which the layers were computed; waited_s: in which computing waited for weights; peak_bytes: on the device."""

    tokens: list[list[int]]
    prompt_s: float
    decode_s: float
    computed_s: float
    waited_s: float
    moved: dict[str, int]
    busy_s: dict[str, float]
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / (self.prompt_s + self.decode_s)


def computed_bytes(config: ModelConfig, rows: int, sequences: int, value_bytes: int) -> int:
    """At most what torch allocates for `rows` rows between a layer's input and its output, or for the logits of
    `sequences` rows: norms in float32; queries, keys and values and their turned copies; attention's result; the
    feed-forward's three rows; here and there a copy."""
    d, wide = config.hidden_size, config.intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_layer = rows * (4 * 4 * d + value_bytes * (3 * d + 4 * wide) + max(4, value_bytes) * 4 * heads)
    of_head = sequences * (4 * 4 * d + 3 * value_bytes * config.vocab_size)
    return max(of_layer, of_head)


class DeviceNeeds:
    """Bytes that a placement takes on the device, by what they are; `peak` is the most at once."""

    def __init__(self, model: Decoder, placement: Placement, work: Decoding, batch: int) -> None:
        config, value = model.config, model.dtype.itemsize
        every = sum(parameter.nbytes for parameter in model.parameters())
        self.weights = every - placement.weight_bytes(HOST) - placement.weight_bytes(DISK)
        self.staging = SLOTS * placement.staged_bytes
        tokens = work.prompt_tokens + work.new_tokens
        self.cache = Contiguous.reserved_bytes_for(
            config,
            max_sequences=placement.sequences()[0],
            max_tokens=tokens,
            dtype=stored_dtype(model.dtype, model.device),
        )
        self.batches_here = placement.hidden.count(DEVICE)
        self.row = config.hidden_size * value
        self.prompt_rows = work.prompt_tokens * batch
        self.computed = computed_bytes(config, self.prompt_rows, batch, value)

    def hidden(self, rows: int) -> int:
        """Of a batch of so many rows: what lies between two layers, and one batch's while it is computed."""
        return (self.batches_here + 1) * rows * self.row

    @property
    def peak(self) -> int:
        return self.weights + self.staging + self.cache + self.hidden(self.prompt_rows) + self.computed


def plan_within(model: Decoder, machine: OffloadMachine, work: Decoding, *, batch: int, batches: int) -> Plan:
    """The program's plan for these sizes, of those as fast the one that moves least. Made of whole tensors, and with
    all that the cost model leaves out, it lies within `machine.device_bytes`. Raises WorkbenchError where there is
    none."""
    shape, room, over = Shape.of(model.config, model.dtype.itemsize), machine.device_bytes, 0.0
    while room > 0:
        given = dataclasses.replace(machine, device_bytes=room)
        plan = solve(given, shape, work, batch=batch, batches=batches, schedule=two_threads(machine), move_least=True)
        if plan is None:
            break
        over = DeviceNeeds(model, place(model, plan.shares, batch=batch, batches=batches), work, batch).peak
        if over <= machine.device_bytes:
            return plan
        room -= over - machine.device_bytes
    raise WorkbenchError(
        f"a block of {batches} batches of {batch} does not fit: the device has {machine.device_bytes:,.0f} bytes, the"
        f" host {machine.host_bytes:,.0f}, the disk {machine.disk_bytes:,.0f}"
        + (f"; the last plan takes {over:,} on the device" if over else "")
        + "; take a smaller batch, or a higher limit"
    )


class Offloaded:
    """A model on three tiers, for a block of `batches` batches of `batch` sequences. Use it in a `with`, or close it.

    limit_bytes: of the device. folder: for what lies on disk; needed if anything does. direct: whether files are opened
    with O_DIRECT; None: where the filesystem has it. stored: matrices that lie on disk already (`weights.store`); they
    stay open. placement: what came of the shares, made whole.
    Raises WorkbenchError before anything is allocated or written: for a model whose layers do not all attend over keys
    of their own; for a limit that two staging buffers, or all that the shares put on the device, do not fit in; for
    hidden states on disk; for a disk without room.
    """

    def __init__(
        self,
        model: Decoder,
        shares: Shares,
        work: Decoding,
        *,
        batch: int,
        batches: int,
        limit_bytes: int,
        folder: str | Path | None = None,
        direct: bool | None = None,
        stored: Matrices | None = None,
    ) -> None:
        check_model(model)
        shares = Shares.checked(*shares)
        if shares.hidden[2]:
            raise WorkbenchError(f"hidden states lie on the device or in the host, got {shares.hidden}")
        self.batch, self.batches = check_whole("batch", batch, 1), check_whole("batches", batches, 1)
        if batch * batches > MAX_SEQUENCES:
            raise WorkbenchError(
                f"a block of {batches:,} batches of {batch:,} is more than {MAX_SEQUENCES:,} sequences; take fewer"
            )
        tokens = work.prompt_tokens + work.new_tokens
        if tokens > model.config.context_length:
            raise WorkbenchError(
                f"{work.prompt_tokens} and {work.new_tokens} tokens are more than the {model.config.context_length}"
                f" that {model.name} reads"
            )
        self.work, self.budget, self._traffic = work, DeviceBudget(limit_bytes), Traffic()
        self.placement = place(model, shares, batch=batch, batches=batches)
        self.needs = DeviceNeeds(model, self.placement, work, batch)
        _check_fits(self.needs, limit_bytes)
        place_on_disk = _check_disk(model, self.placement, tokens, folder, stored)
        with contextlib.ExitStack() as stack:
            self._weights = TieredWeights(
                model, self.placement, self.budget, self._traffic, place_on_disk, direct, stored
            )
            stack.callback(self._weights.close)
            self.budget.take("keys and values", self.needs.cache)
            self._disk = None
            on_disk = [split[2] for split in self.placement.cache]
            if any(on_disk):
                assert place_on_disk is not None
                self._disk = DiskCache(model.config, on_disk, tokens, model.dtype, self._traffic, place_on_disk, direct)
                stack.callback(self._disk.close)
            self._kvs = [
                TieredCache(model.config, split, tokens, model.dtype, self._traffic, self._disk, number)
                for number, split in enumerate(self.placement.cache)
            ]
            self._closing = stack.pop_all()
        self._closed, self._turn = False, threading.Lock()
        self.model = self._weights.model

    @property
    def how_disk(self) -> str:
        """ "O_DIRECT" or "posix_fadvise": how matrices on disk are read; "" where none are."""
        return self._weights.how

    def formula(self) -> dict[str, int]:
        """Bytes that a run moves over each link, counted without one."""
        return Moved(
            self.model.config,
            self.placement.weight_bytes(HOST),
            self.placement.weight_bytes(DISK),
            self.placement.sequences(),
            self.placement.hidden.count(HOST) * self.batch,
            self.work.prompt_tokens,
            self.work.new_tokens,
            self.model.dtype.itemsize,
            stored_dtype(self.model.dtype, self.model.device).itemsize,
        ).by_link()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]]) -> Generated:
        """Greedy tokens of a block of prompts. What an interrupted run left is dropped by the next. Raises
        WorkbenchError for prompts of another shape, after `close`, and while another thread generates."""
        lists = self._checked(prompts)
        if not self._turn.acquire(blocking=False):
            raise WorkbenchError("another thread generates; its staging buffers are there once, so wait for it")
        try:
            if self._closed:
                raise WorkbenchError("this model was closed, and its loaders with it; make a new one")
            return self._generate(lists)
        finally:
            self._turn.release()

    def _generate(self, lists: list[list[int]]) -> Generated:
        for part in (self._weights, self._disk):
            if part is not None:
                part.drop()
        for kv in self._kvs:
            kv.release()
        self._traffic.clear()
        run = _Run(self)
        if self._disk is not None:
            self._disk.begin(self.work.prompt_tokens + self.work.new_tokens - 2)
        began = time.perf_counter()
        self._weights.begin(self.work.new_tokens)
        new, ends = [run.step(lists, 0)], [time.perf_counter()]
        for at in range(self.work.new_tokens - 1):
            new.append(run.step([[token] for token in new[-1]], self.work.prompt_tokens + at))
            ends.append(time.perf_counter())
        tokens = [list(of_sequence) for of_sequence in zip(*new)]
        moved, busy = self._traffic.taken()
        return Generated(
            tokens,
            ends[0] - began,
            ends[-1] - ends[0],
            run.computed_s,
            self._weights.waited_s,
            moved,
            busy,
            self.budget.peak,
        )

    def _checked(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        block, length = self.batch * self.batches, self.work.prompt_tokens
        try:
            lists = [list(one) for one in prompts]
        except TypeError as error:
            raise WorkbenchError(f"prompts are lists of token ids, got {shown(prompts)}") from error
        if len(lists) != block or any(len(one) != length for one in lists):
            sizes = sorted({len(one) for one in lists})
            raise WorkbenchError(
                f"a block is {self.batches} batches of {self.batch} prompts of {length} tokens, got {len(lists)}"
                f" prompts of {', '.join(map(str, sizes)) or 'no'} tokens"
            )
        vocabulary = self.model.config.vocab_size
        if any(type(t) is not int or not 0 <= t < vocabulary for one in lists for t in one):
            raise WorkbenchError(f"token ids of {self.model.name} are whole numbers from 0 to {vocabulary - 1}")
        return lists

    def close(self) -> None:
        """Ends the loaders' threads and the files, when a run of another thread has ended. May be called again."""
        with self._turn:
            self._closed = True
            self._closing.close()

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """One run of the block; `computed_s` counts the layers, without what the loader was waited for."""

    def __init__(self, over: Offloaded) -> None:
        self._over, self._model = over, over.model
        self._names = range(over.batch)
        self.computed_s = 0.0

    def step(self, lists: list[list[int]], past: int) -> list[int]:
        """One pass over all layers: the next token of each sequence of the block."""
        o, model = self._over, self._model
        size = o.batch
        parts = [lists[first : first + size] for first in range(0, len(lists), size)]
        batches = [Batch.of(part, first_positions=[past] * size) for part in parts]
        rows = batches[0].num_tokens
        with (
            o.budget.holding("hidden states", o.needs.hidden(rows)),
            o.budget.holding("computed", computed_bytes(model.config, rows, size, model.dtype.itemsize)),
        ):
            for kv, batch in zip(o._kvs, batches):
                kv.begin(batch)
            turns = [model.turns_of(batch, model.dtype) for batch in batches]
            hidden = [self._put(number, model.start(batch)[0]) for number, batch in enumerate(batches)]
            for index in range(model.config.num_layers):
                with o._weights.layer(index):
                    began = time.perf_counter()
                    for number, batch in enumerate(batches):
                        x = self._get(number, hidden[number])
                        x = model.run_layer(index, x, turns[number], batch, o._kvs[number])
                        hidden[number] = self._put(number, x)
                    self.computed_s += time.perf_counter() - began
            new: list[int] = []
            for number, batch in enumerate(batches):
                x = self._get(number, hidden[number])
                x = x if batch.logit_rows is None else x[batch.logit_rows]
                new += model.logits_of(model.norm(x)).argmax(-1).tolist()
        return new

    def _put(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return self._moved(number, x, DOWN)

    def _get(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return self._moved(number, x, UP)

    def _moved(self, number: int, x: torch.Tensor, link: str) -> torch.Tensor:
        """Hidden states of a batch to where they lie, or from there."""
        if self._over.placement.hidden[number] == DEVICE:
            return x
        with self._over._traffic.over(link, x.nbytes):
            return x.clone()


def check_model(model: Decoder) -> None:
    """Raises WorkbenchError for a model that is not run like this."""
    if not isinstance(model, Decoder):
        raise WorkbenchError(f"offloading takes a Decoder, the model that `load` gives, got {type(model).__name__}")
    check_all_attend(model, "offloading")
    c = model.config
    for what, has in (
        ("experts", c.experts is not None),
        ("latent attention", c.latent_attention is not None),
        ("layers that attend over another's keys", c.kv_sources is not None),
        (f"its weights on {model.device.type}", model.device.type != "cpu"),
    ):
        if has:
            raise WorkbenchError(
                f"{model.name} has {what}; offloading takes models whose layers all have keys, values and a"
                " feed-forward of their own, on the CPU"
            )


def _check_fits(needs: DeviceNeeds, limit_bytes: int) -> None:
    limit = check_whole("limit_bytes", limit_bytes, 1)
    least = needs.weights + needs.staging
    if least > limit:
        raise WorkbenchError(
            f"a device of {limit:,} bytes is too small: two staging buffers take {needs.staging:,}"
            f" ({needs.staging // SLOTS:,} for what is brought of a layer), and embedding, head, norms and the matrices"
            f" that stay {needs.weights:,}; give at least {needs.peak:,}, or keep less on the device"
        )
    if needs.peak > limit:
        raise WorkbenchError(
            f"a device of {limit:,} bytes is too small: with weights {needs.weights:,}, staging {needs.staging:,}, keys"
            f" and values {needs.cache:,}, hidden states {needs.hidden(needs.prompt_rows):,} and what a batch's layer"
            f" computes {needs.computed:,} it would hold {needs.peak:,}; put less on the device, or take smaller"
            " batches"
        )


def _check_disk(
    model: Decoder, placement: Placement, tokens: int, folder: str | Path | None, stored: Matrices | None
) -> Path | None:
    """The folder, where anything is to be written to disk, and there is room for it."""
    pair = 2 * model.config.num_kv_heads * model.config.head_dim * stored_dtype(model.dtype, "cpu").itemsize
    cache = sum(whole_blocks(split[2] * pair) for split in placement.cache) * tokens * model.config.num_layers
    needed = cache + (placement.weight_bytes(DISK) if stored is None else 0)
    if not needed:
        return None
    if folder is None:
        raise WorkbenchError(f"{needed:,} bytes are to lie on disk: name a folder for them")
    check_room(check_path("folder", folder), needed)
    return Path(folder)
