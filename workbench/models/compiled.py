"""Steps of one row, compiled: the whole step as one call where that can be, else three pieces for all layers. The
verification of a few drafted tokens is one call too where a step is.

one call   embedding, every layer, the attention between them, the head and the choice (`workbench.models.one_call`). It
           needs a kv that lets a step read and write its storage (`step_storage`, `note_step`), and a compilation
           that is kept for the next process (`workbench.models.kept`). On a CPU.
whole      on other devices: every layer in one graph of torch.compile, for a kv that shows what it remembers at once
           (`before_step`, `put_step`).
pieces     what lies between two attentions is one graph, the same for all layers ("piecewise", as vLLM compiles
           its models), because it depends on nothing but x. Attention stays with the kv, whatever kv it is.

Where nothing can be compiled, steps run as they are, and `why_not` says why.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import torch

from workbench.errors import WorkbenchError
from workbench.models import kept
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Turns
from workbench.models.fast_layers import FastLayer, Projected
from workbench.models.linear import Linear
from workbench.models.one_call import OPTIONS, OneCall, ShowsStorage, StepParts, attend_rows
from workbench.native.compiler import why_no_compiler

Norm = Callable[..., torch.Tensor]
Stepped = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, and k, v of all layers
Tables = Callable[[int], list[torch.Tensor]]
Which = tuple[torch.dtype, int]  # type of the cached keys and values, rows
# Of compiled verifications, for 4 and 8 drafted tokens; a batch is padded to the next. 3 rows took 0.92 of the time of
# 5, which is not worth another compilation; with many more the sums of all rows no longer fit into the registers.
ROWS = (5, 9)
WHOLE_LAYERS = 16  # a graph of more layers takes minutes to compile


def why_not_whole(config: ModelConfig) -> str:
    """Why a step of this shape is not compiled as one graph; "" where it is."""
    if config.latent_attention is not None or config.kv_sources is not None:
        return "latent attention and shared layers are compiled in pieces"
    if config.sliding_window is not None and (config.global_layers or config.attention_sinks):
        return "layers that differ in what they see are compiled in pieces"
    if config.num_layers > WHOLE_LAYERS:
        return f"{config.num_layers} layers would take minutes to compile at once"
    return ""


def why_not_at_all(device: torch.device) -> str:
    """Why nothing is compiled for this device; "" where something is."""
    return why_no_compiler() if device.type == "cpu" else ""


class ShowsAll(Attends, Protocol):
    """A kv that returns the cached keys and values of all layers at once; see `workbench.kv.contract.KV`."""

    def before_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]: ...
    def put_step(self, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None: ...


class CompiledSteps:
    """Steps of one token and of a few, for a model of these parts. Everything is compiled when it is first used.

    reason: in words, what the last step was: compiled, how, and where the code came from. rows_reason: the same of the
    last batch of several rows with logits for all, "" before the first. why_not: why steps run as they are; "" where
    they are compiled. say: is told, once each, what takes time and what is not compiled.
    """

    def __init__(
        self, given: StepParts, config: ModelConfig, name: str, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.given, self.config, self.name, self._say = given, config, name, say
        self.layers, self.norm, self.head = given.layers, given.norm, given.head
        self.reason, self.why_not, self.rows_reason = "no step was taken yet", "", ""
        self._pieces_reason = why_not_whole(config)
        self._on_cpu = device.type == "cpu"
        self._calls: dict[Which, OneCall | None] = {}  # None: it cannot be had
        self._came_from: dict[int, str] = {}  # by rows
        self._why_not_rows: dict[int, str] = {}
        self._lock = threading.Lock()
        self._pieces: list[Callable[..., Any]] | None = None

    # -- one call ----------------------------------------------------------------------------------------------

    def one_call(
        self, token: int, position: int, sequence: Hashable, kv: Any, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(logits [1, V], said [3] or None) of `OneCall`, and the kv has the token. None where it is not one call.

        tables: the tables of cos and sin, for so many positions.
        """
        if not self.may_call(kv):
            return None
        return self._called([token], position, sequence, kv, 1, tables)

    def few_rows(self, batch: Batch, kv: Any, tables: Tables) -> torch.Tensor | None:
        """logits [N, V] of a batch that verifies drafted tokens, and the kv has them. None where it goes the ordinary
        way: `rows_reason` says why.

        A verification is a chain of up to ROWS[-1] tokens of one sequence that is cached already, with logits for all
        of them. A prompt, or a part of one, wants logits for its last token or none, and changes nothing here; one that
        wants more, for its log-probabilities, is a batch of a class of its own.
        """
        if batch.logit_rows is not None or max(batch.first_positions) == 0 or type(batch) is not Batch:
            return None
        self.rows_reason = self._why_not_few(batch, kv)
        if self.rows_reason:
            return None
        tokens, [sequence] = batch.token_ids.tolist(), batch.sequences
        size = next(size for size in ROWS if size >= batch.num_tokens)
        called = self._called(tokens, batch.first_positions[0], sequence, kv, size, tables)
        if called is None:
            why = self._why_not_rows.get(size, "the kv takes these tokens in a batch alone")
            self.rows_reason = f"{len(tokens)} rows run as they are: {why}"
            return None
        self.rows_reason = f"{len(tokens)} rows are one call of {size}, {self._came_from[size]}"
        return called[0]

    def _why_not_few(self, batch: Batch, kv: Any) -> str:
        """Why this batch is not one call by its form alone; "" where it may be."""
        if batch.parents is not None:
            return "a tree runs as it is"
        if len(batch.sequences) > 1:
            return f"{len(batch.sequences)} sequences together run as they are"
        if batch.num_tokens > ROWS[-1]:
            return f"{batch.num_tokens} rows run as they are: up to {ROWS[-1]} are compiled"
        if not self.may_call(kv):
            why = self.why_not or self._pieces_reason or f"{type(kv).__name__} shows no storage for one call"
            return f"{batch.num_tokens} rows run as they are: {why}"
        return ""

    def _called(
        self, tokens: list[int], position: int, sequence: Hashable, kv: ShowsStorage, rows: int, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """These tokens by the step of so many rows. None where it cannot be, and nothing has changed."""
        storage = kv.step_storage(sequence, len(tokens))
        known = min(tokens) >= 0 and max(tokens) < self.config.vocab_size
        if storage is None or storage.length != position or not known:
            return None  # whoever takes the step the ordinary way says what is wrong
        which = storage.keys.dtype, rows
        step = self._calls[which] if which in self._calls else self._ready(*which)
        if step is None:
            return None
        stepped = step(tokens, storage, tables(position + len(tokens)))
        kv.note_step(sequence, len(tokens))
        return stepped

    def may_call(self, kv: Any) -> bool:
        """Whether steps with this kv are one call each, from its first token on. Where it is empty yet the first token
        is a prompt, and runs as prompts do."""
        return (
            self._on_cpu
            and not self._pieces_reason
            and not self.why_not
            and hasattr(kv, "step_storage")
            and bool(kv.config == self.config)
        )

    def _ready(self, stored: torch.dtype, rows: int) -> OneCall | None:
        with self._lock:
            which = stored, rows
            if which not in self._calls:
                try:
                    given = self.given, self.config, stored, rows, self.name, self._say
                    self._calls[which], where = kept.ready_step(*given)
                    self._came_from[rows] = where
                    if rows == 1:
                        self.reason = f"a step is one call, {where}"
                except WorkbenchError as error:
                    self._calls[which] = None
                    self._give_up(rows, str(error))
            return self._calls[which]

    def _give_up(self, rows: int, why: str) -> None:
        if rows == 1:
            self._run_as_they_are(why)
            return
        self._why_not_rows[rows] = why
        self._say(f"steps of {rows} rows of {self.name} are not compiled and run as they are: {why}")

    def _run_as_they_are(self, why: str) -> None:
        self.why_not, self.reason = why, f"steps run as they are: {why}"
        self._say(f"{self.name} is not compiled, its steps run as they are: {why}")

    # -- graphs of torch.compile -------------------------------------------------------------------------------

    def takes(self, kv: Attends) -> bool:
        """Whether `__call__` is compiled for steps with this kv."""
        return not self.why_not and not self.may_call(kv)

    def __call__(self, x: torch.Tensor, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        """logits [1, V] of a batch of one token that the kv has accepted."""
        if self._shows_all(kv) and batch.first_positions[0] > 1:
            keys, values = kv.before_step(batch)
            for tensor in (keys, values):
                torch._dynamo.maybe_mark_dynamic(tensor, 2)  # one graph for all lengths, from the first
            logits, k, v = self._whole(x, turns, keys, values)
            kv.put_step(k, v, batch)
            self.reason = "a step is one graph of torch.compile"
            return logits
        return self._in_pieces(x, turns, batch, kv)

    def _shows_all(self, kv: Attends) -> TypeGuard[ShowsAll]:
        """A kv of another shape does not: layer by layer it says what is wrong."""
        whole = not self._on_cpu and not self._pieces_reason
        return whole and hasattr(kv, "before_step") and getattr(kv, "config", None) == self.config

    @functools.cached_property
    def _whole(self) -> Callable[..., Stepped]:
        return torch.compile(self._whole_step, options=OPTIONS)

    def _whole_step(self, x: torch.Tensor, turns: Turns, keys: torch.Tensor, values: torch.Tensor) -> Stepped:
        """x [1, d], keys and values [L, H_kv, S, D] -> logits [1, V] and the new k, v [L, H_kv, D]."""
        new_keys, new_values = [], []
        for layer, kept_keys, kept_values in zip(self.layers, keys.unbind(0), values.unbind(0)):
            q, k, v = layer.before(x, turns)
            assert k is not None and v is not None, "every layer has keys of its own"
            mixed = attend_rows(q, k, v, kept_keys, kept_values, self.config.attention_scale)
            x = layer.after(x, mixed.reshape(1, -1).to(q.dtype))
            new_keys.append(k[0])
            new_values.append(v[0])
        return self.head(self.norm(x)), torch.stack(new_keys), torch.stack(new_values)

    def _in_pieces(self, x: torch.Tensor, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        layers, why = self.layers, self._pieces_reason
        self.reason = f"a step is compiled in pieces: {why or f'{type(kv).__name__} shows no storage for one call'}"
        q, k, v = self._piece(0, layers[0], x, turns)
        for index, (layer, following) in enumerate(pairwise(layers)):
            mixed = kv.attend(index, q, k, v, batch, **layer.extra).reshape(1, -1)
            x, q, k, v = self._piece(1, layer, following, x, mixed, turns)
        mixed = kv.attend(len(layers) - 1, q, k, v, batch, **layers[-1].extra).reshape(1, -1)
        return self._piece(2, layers[-1], self.norm, self.head, x, mixed)

    def _piece(self, which: int, *given: Any) -> Any:
        """One of PIECES, compiled. One that cannot be compiled runs as it is, so that the step that began with it ends;
        after it no step is compiled."""
        if self.why_not:
            return PIECES[which](*given)
        from torch._dynamo.exc import TorchDynamoException

        if self._pieces is None:
            self._pieces = [torch.compile(piece, dynamic=False, options=OPTIONS) for piece in PIECES]
        try:
            return self._pieces[which](*given)
        except TorchDynamoException as error:
            self._run_as_they_are(f"torch.compile failed: {kept.telling_line(error)}")
            return PIECES[which](*given)


def before(layer: FastLayer, x: torch.Tensor, turns: Turns) -> Projected:
    """All that lies before the attention of a layer: q, k, v."""
    return layer.before(x, turns)


def between(
    layer: FastLayer, following: FastLayer, x: torch.Tensor, mixed: torch.Tensor, turns: Turns
) -> tuple[torch.Tensor, *Projected]:
    """All that lies between the attention of one layer and that of the next: (x, q, k, v)."""
    x = layer.after(x, mixed)
    return x, *following.before(x, turns)


def ending(layer: FastLayer, norm: Norm, head: Linear, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """After the last attention: logits [N, V]."""
    return head(norm(layer.after(x, mixed)))


PIECES: Sequence[Callable[..., Any]] = (before, between, ending)
