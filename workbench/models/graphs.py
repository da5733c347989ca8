"""A decode step recorded once and replayed: what Python decides is decided once, what changes is read from buffers.

A step of a small model is hundreds of small operations, and starting one takes longer than many of them run. A graph
starts them all at once: recorded for a number of rows, replayed for every batch of at most as many.

    texts      A  B  C                      3 rows, replayed on the graph for 4
    rows       A  B  C  ·                   a padding row: length 0, writes to a scratch place, its logits are dropped
    buffers    token, position, place, length, source, advance [6, 4]  and  tables [4, width]
               at the addresses that were recorded

    record     step(buffers) runs once, and every operation it starts is kept with the addresses it works on
    replay     the operations alone; no Python of the model, the layers or the attention runs. The last of them adds 1
               to position, place and length, for the next step

While the same texts go on, the next step finds its numbers on the device, and its tokens where the step before left
them. The host knows what is there, and sends the numbers only where they are others: a text came or left, or begins a
new block.

So a number that Python read while recording, a length or a width, would be that number for ever. The step is therefore
given tensors and nothing else; what needs more than that (prompts, trees, hidden states) runs eagerly, and is counted.

Two recorders: `CudaGraphs` on a GPU, and `TracedGraphs` on any device, which keeps the operations as a torch.fx graph.
That one saves no time worth having; it shows, without a GPU, that a replay depends on the buffers alone.
CUDA graphs: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs". In engines: vLLM and SGLang record decode in the same
way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.transfers import moved, on_host

if TYPE_CHECKING:
    from workbench.models.decoder import Attends, CausalModel, Shaped

SPACING = 8  # rows between two graphs, beyond 1, 2 and 4
MAX_GRAPHS = 32  # each holds its own temporaries' addresses and takes a second or so to record
CHOICES = ("auto", True, False)
# how far a replay's logits may be from the step's own, of the largest one; for smaller types 5e-2
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
Outputs = tuple[torch.Tensor, ...]
Step = Callable[..., Outputs]


# -- recorders -------------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """replay() -> the step's outputs, valid until the next replay of any graph of the same recorder."""

    replay: Callable[[], tuple[torch.Tensor, ...]]
    operations: int | None  # started by one replay; None where the recorder cannot tell


class Recorder(Protocol):
    name: str

    def record(self, step: Step, inputs: tuple[torch.Tensor, ...]) -> Recorded:
        """Run `step` on the inputs, and keep what it does. Raises whatever a step raises that cannot be recorded."""
        ...


class CudaGraphs:
    """CUDA's own graphs. All graphs of one recorder share a pool of memory: only one of them runs at a time."""

    name = "CUDA graphs"
    WARM_UPS = 2  # before recording: kernels are compiled, workspaces allocated

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step, inputs: tuple[torch.Tensor, ...]) -> Recorded:
        with torch.cuda.device(self._device), torch.inference_mode(False), torch.no_grad():
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(self.WARM_UPS):
                    step(*inputs)
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, self._pool, stream, "thread_local"):
                    outputs = step(*inputs)
            except Exception:  # a recording that fails leaves its stream behind as the current one
                torch.cuda.set_stream(current)
                self._pool = torch.cuda.graph_pool_handle()
                raise

        def replay() -> tuple[torch.Tensor, ...]:
            graph.replay()
            return outputs

        return Recorded(replay, None)


class TracedGraphs:
    """The operations as torch.fx keeps them, with weights and pools by reference, called again one by one."""

    name = "traced with torch.fx"

    def record(self, step: Step, inputs: tuple[torch.Tensor, ...]) -> Recorded:
        from torch.fx.experimental.proxy_tensor import make_fx  # slow to load, and seldom needed

        with torch.inference_mode(False), torch.no_grad(), _launched_kernels() as launched:
            trouble: Exception | None = None
            try:
                module = make_fx(lambda *given: step(*given))(*inputs)
            except Exception as error:
                if not launched.total():
                    raise
                trouble = error
        if launched.total():
            names = ", ".join(sorted(launched))
            message = f"torch.fx does not see what Triton's kernels do, and this step launches {names}"
            raise WorkbenchError(message) from trouble
        operations = sum(node.op == "call_function" for node in module.graph.nodes)
        return Recorded(lambda: module(*inputs), operations)


def _launched_kernels() -> AbstractContextManager[Counter[str]]:
    """Counts what our kernels launch. Where they were never loaded, none is."""
    module = sys.modules.get("workbench.kernels.launch")
    return nullcontext(Counter()) if module is None else module.launches()


def _rows_of(noted: Sequence[int], batch: Batch) -> list[int] | None:
    """The row of each token of the batch among those noted, −1 where another stands in its row."""
    if batch.token_ids.device.type != "cpu":
        return None
    return [
        row if row < len(noted) and noted[row] == token else -1 for row, token in enumerate(batch.token_ids.tolist())
    ]


def recorder_for(device: torch.device | str) -> Recorder:
    return CudaGraphs(device) if torch.device(device).type == "cuda" else TracedGraphs()


# -- whether ---------------------------------------------------------------------------------------------------------


def check_graphs(graphs: bool | str, *, compiled: bool) -> None:
    """Raise WorkbenchError for a choice that is none, and for one that torch.compile rules out."""
    if graphs not in CHOICES:
        raise WorkbenchError(f'graphs must be True, False or "auto", got {graphs!r}')
    if graphs is True and compiled:
        raise WorkbenchError(
            "graphs=True and compile=True exclude each other: steps of one row would be torch.compile's own; prepare"
            " the model without compile, or take graphs=False"
        )


def why_no_graphs(graphs: bool | str, model: Shaped) -> str:
    """Why steps of this model are not recorded; "" where they are. Raises as `check_graphs`."""
    compiled = getattr(model, "compiled", False)
    check_graphs(graphs, compiled=compiled)
    if graphs is False:
        return "graphs=False"
    reason = ""
    if model.config.state_layers:
        reason = "layers that keep a state read and write other cells in every step, which is not recorded"
    elif model.config.experts is not None:
        reason = "layers with experts, which start other products in every step; only the same step can be recorded"
    if reason:
        if graphs is True:
            raise WorkbenchError(f"graphs=True, and {model.name} has {reason}; take graphs='auto' or False")
        return reason
    if compiled:
        return "the model was prepared with compile=True"
    if graphs == "auto" and not hasattr(model, "compiled"):
        return "the model is as it was loaded; prepare(model) arranges it for inference"
    if graphs == "auto" and model.device.type != "cuda":
        return f"on {model.device.type} nothing is gained; graphs=True records there too, to be looked at"
    return ""


def bucket_sizes(largest: int, max_sizes: int = MAX_GRAPHS) -> list[int]:
    """1, 2, 4, 8, 16, 24, … `largest`: at most `max_sizes` of them, further apart where it takes that.

    >>> bucket_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    spacing = SPACING
    while True:
        found = [n for n in (1, 2, 4, *range(spacing, largest, spacing)) if n < largest] + [largest]
        if len(found) <= max(max_sizes, 4):
            return found
        spacing *= 2


# -- buffers ---------------------------------------------------------------------------------------------------------


class StaticTables:
    """[rows, width] int32 on the device, of which every graph reads the first rows, and how the host writes them.

    A block table changes once per block of tokens, so most steps send nothing.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.blocks = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._sent: list[list[int]] = [[] for _ in range(rows)]  # what each row begins with

    def forget(self) -> None:
        """What the device holds is not known, after a step that failed."""
        self._sent = [[] for _ in self._sent]

    def prepare(self, tables: Sequence[Sequence[int]]) -> Callable[[], object] | None:
        """The host's half; what is returned is the device's: one copy, from the first row that changed to the last.
        None: nothing changed."""
        changed = [row for row, table in enumerate(tables) if table != self._sent[row]]
        if not changed:
            return None
        first, end = changed[0], changed[-1] + 1
        some = on_host(end - first, self.blocks.shape[1], dtype=torch.int32, device=self.blocks.device)
        host = some.numpy()
        for row in range(first, end):
            host[row - first, : len(tables[row])] = tables[row]
            self._sent[row] = list(tables[row])
        return lambda: self.blocks[first:end].copy_(some, non_blocking=True)


class StaticNumbers:
    """[6, rows] int64 on the device: what else one graph reads of each text, sent in one copy where the host cannot
    leave it to the step before.

    source: the row of `previous` that the token is read from, −1 for the one in the first line. advance: what a step
    adds to position, place and length when it ends; 0 for a padding row.
    """

    TOKEN, POSITION, WRITE_AT, LENGTH, SOURCE, ADVANCE = range(6)
    ADVANCED = slice(POSITION, LENGTH + 1)
    UNKNOWN = -2  # a token that the host has not seen

    def __init__(self, rows: int, scratch: int, device: torch.device) -> None:
        self._padding = torch.tensor([0, 0, scratch, 0, -1, 0])[:, None].expand(6, rows).numpy()
        self._there = self._padding.copy()  # on the device, when what was prepared so far has run
        self.values = torch.from_numpy(self._padding.copy()).to(device)

    def forget(self) -> None:
        """What the device holds is not known, after a step that failed."""
        self._there[:] = self.UNKNOWN

    def prepare(
        self, batch: Batch, write_at: Sequence[int], lengths: Sequence[int], sources: Sequence[int] | None
    ) -> Callable[[], object] | None:
        """The host's half; what is returned is the device's. None: the device has it all."""
        count, knows_tokens = batch.num_tokens, batch.token_ids.device.type == "cpu"
        host = self._padding.copy()
        host[self.POSITION, :count] = batch.first_positions
        host[self.WRITE_AT, :count] = write_at
        host[self.LENGTH, :count] = lengths
        host[self.ADVANCE, :count] = 1
        if sources is not None:
            host[self.SOURCE, :count] = sources
        unused = host[self.SOURCE, :count] >= 0
        before = self._there[self.TOKEN, :count]
        host[self.TOKEN, :count] = np.where(unused, before, batch.token_ids.numpy()) if knows_tokens else before
        copies: list[Callable[[], object]] = []
        if not np.array_equal(host, self._there):
            values = on_host(*host.shape, dtype=torch.int64, device=self.values.device)
            values.numpy()[:] = host
            copies.append(lambda: self.values.copy_(values, non_blocking=True))
        self._there = host
        host[self.ADVANCED] += host[self.ADVANCE]
        if not knows_tokens:
            copies.append(lambda: self.values[self.TOKEN, :count].copy_(batch.token_ids))
            host[self.TOKEN, :count] = self.UNKNOWN
        return (lambda: [copy() for copy in copies]) if copies else None


# -- steps -----------------------------------------------------------------------------------------------------------


class StaticKV(Protocol):
    """What a kv must offer for its decode steps to be recorded; implemented by `kv.paged_static.StaticPaged`."""

    scratch: int
    max_tokens: int

    @property
    def table_width(self) -> int: ...
    def begin_static(self, batch: Batch) -> tuple[list[int], tuple[int, ...], list[Sequence[int]]]: ...
    def static_attention(self, write_at: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> Attends: ...


class Decoded(NamedTuple):
    """Logits of the last token of each sequence. Valid until the next replay: all graphs write to the same buffer."""

    logits: torch.Tensor  # [n, V], float32 at least
    best: torch.Tensor  # [n] int64, the token of the highest logit
    top: torch.Tensor  # [n] that logit: not finite where a row is no distribution


@dataclass
class _Graph:
    numbers: StaticNumbers
    buffers: tuple[torch.Tensor, ...]  # what the step reads, at the addresses that were recorded
    recorded: Recorded
    replays: int = 0


class GraphedSteps:
    """Called like the model, `logits = steps(batch, kv)`: replays a graph where possible, else runs eagerly.

    largest: rows of the largest graph, that is, sequences that decode together. A graph is recorded when it is first
    needed, or by `warm_up`. The first replay of each is compared with an eager step on the same buffers; where they
    differ, the graph is not used. check_every: compare again after so many replays (0: never), for developers of the
    recorded step. replayed: number of replays by rows of the graph. eager: number of eager steps by reason.
    padding_rows: rows that were replayed for no sequence. sent: copies to the device for replays, "numbers" and
    "tables".

    Give batches on the host, `batches_on`: of one on the device the tokens cannot be compared, and are copied at each
    step.
    """

    batches_on = "cpu"

    def __init__(
        self, model: CausalModel, kv: StaticKV, largest: int, *, recorder: Recorder | None = None, check_every: int = 0
    ) -> None:
        self.model, self.kv = model, kv
        self.recorder = recorder or recorder_for(model.device)
        self.sizes, self.check_every = bucket_sizes(largest), check_every
        self.replayed: Counter[int] = Counter()
        self.eager: Counter[str] = Counter()
        self.padding_rows = 0
        self.sent: Counter[str] = Counter()
        self._noted: list[int] = []  # tokens that `previous` begins with, as far as the host has seen them
        self._best: torch.Tensor | None = None  # of the last step, where it was replayed
        self.previous = torch.zeros(largest, dtype=torch.int64, device=model.device)  # see `prepare`
        wide = torch.promote_types(model.dtype, torch.float32)
        self._logits = torch.zeros(largest, model.config.vocab_size, dtype=wide, device=model.device)
        self._tables = StaticTables(largest, kv.table_width, model.device)
        self._graphs: dict[int, _Graph] = {}
        self._failed: dict[int, str] = {}
        reserve = getattr(model, "reserve_positions", None)
        self._held: list[torch.Tensor] = reserve(kv.max_tokens) if reserve else []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)  # what is not about steps is the model's

    @property
    def recorded(self) -> dict[int, int | None]:
        """Operations of one replay by rows of the graph; None where not known."""
        return {rows: graph.recorded.operations for rows, graph in sorted(self._graphs.items())}

    @property
    def failed(self) -> dict[int, str]:
        """Why a step of so many rows could not be recorded, by rows."""
        return dict(self._failed)

    def __call__(self, batch: Batch, kv: Attends) -> torch.Tensor:
        self._best, reason = None, self.why_eager(batch)
        noted, self._noted = self._noted, []  # `previous` may be written before the next call
        if reason:
            self.eager[reason] += 1
            return self.model(batch.to(self.model.device), kv)
        assert id(kv) == id(self.kv), "graphs are recorded over one kv"
        decoded = self.decode(batch, _rows_of(noted, batch))
        self._best = decoded.best
        if batch.logit_rows is None:
            return decoded.logits
        return decoded.logits[moved([batch.logit_rows], self.model.device)[0]]

    def hidden(self, batch: Batch, kv: Attends) -> torch.Tensor:
        self.eager["hidden states are wanted"] += 1
        return self.model.hidden(batch.to(self.model.device), kv)

    def note_best(self, tokens: Sequence[int]) -> None:
        """The host has read the best tokens of the last call's first rows. Those that the next batch goes on with are
        taken from the device, where they are, and not sent."""
        if self._best is not None:
            self.previous[: len(tokens)].copy_(self._best[: len(tokens)])
            self._noted = list(tokens)

    def why_eager(self, batch: Batch) -> str:
        """Why this batch cannot be replayed; "" where it can. Records the graph that it needs."""
        if batch.parents is not None:
            return "a tree"
        if batch.num_tokens != len(batch.sequences):
            return "more than one token of a text"
        if batch.num_tokens > self.sizes[-1]:
            return f"more than {self.sizes[-1]} texts"
        size = self._size_for(batch)
        self._record(size)
        return self._failed.get(size, "")

    def warm_up(self) -> dict[int, str]:
        """Record all graphs now, the largest first, so that the others fit into its memory. Returns what failed."""
        for size in reversed(self.sizes):
            self._record(size)
        return self.failed

    def decode(self, batch: Batch, sources: Sequence[int] | None = None) -> Decoded:
        """One step of a batch for which `why_eager` returns ""."""
        return self.prepare(batch, sources)()

    def prepare(self, batch: Batch, sources: Sequence[int] | None = None) -> Callable[[], Decoded]:
        """The host's half of a step: the bookkeeping and the new contents of the buffers. Returns the device's half, a
        function.

        sources: for each text the row of `previous` that its token is to be read from when the step begins, −1 for the
        one in the batch. So a step can be prepared before the tokens of the one before it are known.
        """
        size, rows = self._size_for(batch), batch.num_tokens
        graph = self._graphs[size]
        write_at, lengths, tables = self.kv.begin_static(batch)
        send_numbers = graph.numbers.prepare(batch, write_at, lengths, sources)
        send_tables = self._tables.prepare(tables)
        copies = {"numbers": send_numbers, "tables": send_tables}
        self.sent.update(what for what, copy in copies.items() if copy is not None)
        graph.replays += 1
        self.replayed[size] += 1
        self.padding_rows += size - rows
        checks = graph.replays == 1 or (self.check_every and graph.replays % self.check_every == 0)

        def run() -> Decoded:
            try:
                for copy in copies.values():
                    if copy is not None:
                        copy()
                before = graph.numbers.values.clone() if checks else None
                outputs = self._step(*graph.buffers) if size in self._failed else graph.recorded.replay()
                if before is not None:
                    outputs = self._checked(size, graph, outputs, rows, before)
            except BaseException:
                graph.numbers.forget()
                self._tables.forget()
                raise
            return Decoded(*(output[:rows] for output in outputs))

        return run

    def _size_for(self, batch: Batch) -> int:
        return next(size for size in self.sizes if size >= batch.num_tokens)

    def _record(self, size: int) -> None:
        if size in self._graphs or size in self._failed:
            return
        with torch.inference_mode(False):  # buffers that may be written in any mode
            numbers = StaticNumbers(size, self.kv.scratch, self.model.device)
        buffers = (numbers.values, self._tables.blocks[:size], self.previous, self._logits[:size])
        try:
            recorded = self.recorder.record(self._step, buffers)
        except Exception as error:  # nothing was sent, nothing is lost
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._failed[size] = f"not recorded: {first}"
            return
        self._graphs[size] = _Graph(numbers, buffers, recorded)

    def _step(
        self, numbers: torch.Tensor, tables: torch.Tensor, previous: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What is recorded. numbers [6, rows], tables [rows, width], previous: the tokens of the step before
        -> logits [rows, V], which are written where they were given, best [rows], top [rows].
        The numbers are the next step's when it ends."""
        token_ids, positions, write_at, lengths, source, advance = numbers.unbind(0)
        before = previous.index_select(0, source.clamp(min=0))
        token_ids = torch.where(source >= 0, before, token_ids)
        rows = len(token_ids)
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            sequences=tuple(range(rows)),
            query_starts=tuple(range(rows + 1)),
            first_positions=(0,) * rows,  # nobody looks: the numbers are on the device
            logit_rows=None,
        )
        attention = self.kv.static_attention(write_at, tables, lengths.to(torch.int32))
        logits.copy_(self.model(batch, attention))
        numbers[StaticNumbers.ADVANCED].add_(advance)
        return logits, logits.argmax(dim=-1), logits.amax(dim=-1)

    def _checked(self, size: int, graph: _Graph, outputs: Outputs, rows: int, numbers: torch.Tensor) -> Outputs:
        """The replay's outputs, or the step's own where they differ. Running it again on the same numbers writes the
        same once more."""
        replayed = outputs[0][:rows].clone()
        graph.numbers.values.copy_(numbers)
        with torch.no_grad():
            truth = self._step(*graph.buffers)
        expected = truth[0][:rows]
        close = CLOSE.get(self.model.dtype, 5e-2) * expected.nan_to_num(0.0, 0.0, 0.0).abs().amax().item()
        if torch.allclose(replayed, expected, rtol=0.0, atol=close, equal_nan=True):
            return outputs
        self._failed[size] = "the recorded step gave other logits than the step itself"
        del self._graphs[size]
        return truth
