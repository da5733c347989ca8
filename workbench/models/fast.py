"""The decoder arranged for inference: the same numbers in fewer and larger operations.

    Decoder (training, the oracle)              FastDecoder (inference)
    q, k, v: three products                     one, with the matrices one below the other
    gate, up: two products                      one
    rotary: products, differences, joins        a table of cos and sin, made once; two products and a roll
    F.linear                                    a Linear (workbench.models.linear), plain or packed as measured
    modules in modules                          two functions a layer: before its attention, and after it

On one row these small operations, not the weights, would be a large part of a step of a small model. What of them is
left, torch.compile takes away (workbench.models.compiled), or kernels of our own (workbench.models.fused); and a
recorded step starts them all at once (workbench.models.graphs).
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_flag, shown, unknown
from workbench.models import fused
from workbench.models.batch import Batch
from workbench.models.compiled import CompiledSteps, why_not_at_all
from workbench.models.decoder import Attends, Decoder, Turns
from workbench.models.digest import model_digest
from workbench.models.experts import MixtureOfExperts, Router
from workbench.models.fast_experts import EXPERTS, FastExperts
from workbench.models.fast_layers import (
    FastLatentLayer,
    FastLayer,
    MakeLinear,
    Residual,
    RotaryTable,
    Stream,
    TorchNorm,
    detached,
    fast_layers,
    joined,
    small_norm,
)
from workbench.models.graphs import check_graphs
from workbench.models.linear import INPUTS, Linear, Matvec, linear_class, reason_of, weights_as_they_lie
from workbench.models.looped import LoopedAttention, LoopedLayer, LoopedNorm, Loops
from workbench.models.measured_linear import MeasuredLinear, maker_by_time
from workbench.models.measured_steps import choose, why_not_measured
from workbench.models.native_steps import NativeSteps, why_not_model, why_not_native
from workbench.models.one_call import StepParts
from workbench.native.large_pages import move_to_large_pages


def prepare(
    model: Decoder,
    *,
    linear: str = "auto",
    compile: bool = False,
    kernels: str = "auto",
    graphs: bool | str = "auto",
    dependent_launches: bool = False,
    experts: str = "loop",
    inputs: str = "exact",
    native: bool | str = False,
    say: Callable[[str], None] | None = None,
) -> FastDecoder:
    """The model arranged for inference. `model` stays as it was and may be dropped; weights that need no rearranging
    (embedding, norms, and with plain linears the matrices that stand alone) are shared with it.

    linear: "packed" or "looped" (CPU), "triton" (CUDA), "plain", or "auto": our kernel on a GPU where that can be; on a
    CPU each matrix as is fastest for its shape, which is measured once a machine, in a fraction of a second, and may
    change the last bits of logits (workbench.models.measured_linear; $WORKBENCH_MEASURE=off: packed where that can be).
    `linear_reason` of the result says why. compile: steps of one row are compiled, and the verification of a few
    drafted tokens where a step is one call (workbench.models.compiled), which needs a C++ compiler and takes half a
    minute at the first step, once a machine where it is one call; they read the weights unpacked, so both forms are
    kept, twice the memory. Where nothing can be compiled, steps run as they are. `compiled_reason` of the result says
    what came of it, `why_not_compiled` what hindered; `say` is told what takes time and what hinders, default a line on
    standard error. kernels: "torch", "triton" (workbench.models.fused; on a CPU in Triton's interpreter, which is for
    tests), "c++" (workbench.models.looped; CPU: norms, gates and attention are a call each of loops of our own, and
    matrices are looped; torch's operations where there are none, with one sentence), or "auto": triton on a CUDA device
    where there are kernels for the model's shape. What came of it, and why, are `kernels` and `kernels_reason` of the
    result. graphs: whether an `Engine` records its decode steps with this model and replays them
    (workbench.models.graphs): True, False, or "auto", on a CUDA device where kernels attend; not with compile.
    dependent_launches: our kernels begin while the one before them ends
    (`workbench.kernels.launch.dependent_launches`), on a GPU of compute capability 9.0 or newer; off, because nobody
    has measured yet what it gains. experts: how a mixture of experts runs, "loop" or "grouped"
    (workbench.models.fast_experts), which is not the default for the same reason. inputs: what quantized linears are
    multiplied with: "exact", or "q8" (CPU): rounded to 8 bits too, a scale a block, so that products are whole numbers.
    That is faster and moves the logits a little, so it is never chosen by itself. native: batches of a few rows (of any
    number in types of 16 bits that the processor does not multiply) are one function in C++ each, whatever sequences
    they belong to (workbench.models.native_steps; CPU, needs a C++ compiler once a machine); they too read the weights
    unpacked, so both forms are kept. Where that cannot be, they run as they are, and `why_not_native` of the result
    says why; `native_reason` says what became of the last batch. Not with compile. "auto": native steps where they are
    faster than eager ones, and for as many rows as they are, which is measured once a machine, in a second or two for
    each shape (workbench.models.measured_steps; $WORKBENCH_MEASURE=off: eager). It chooses between these two alone:
    compiled steps are asked for, never chosen, and compile=True with "auto" is compiled. `native_reason` says what was
    chosen, and why.
    Raises WorkbenchError for a linear, kernels, inputs or native that this model, dtype or device does not have.
    """
    if isinstance(model, FastDecoder):
        raise WorkbenchError(f"{model.name} is prepared already; prepare takes the model that `load` gives")
    if not isinstance(model, Decoder):
        raise WorkbenchError(f"prepare takes a Decoder, the model that `load` gives, got {type(model).__name__}")
    if model.config.mixers:
        raise WorkbenchError(
            f"{model.name} has layers of {', '.join(dict.fromkeys(model.config.mixers))}, which prepare does not "
            "arrange; the model that `load` gives runs as it is"
        )
    check_flag("compile", compile)
    _check_native(native, compiled=compile)
    if compile and model.config.experts is not None:
        raise WorkbenchError(
            f"{model.name} has experts, and which of them run is known only when a row is there; prepare it without"
            " compile"
        )
    check_flag("dependent_launches", dependent_launches)
    check_graphs(graphs, compiled=compile)
    _check_inputs(model, inputs, compiled=compile)
    chosen = fused.choose_kernels(model, kernels, compiled=compile)
    make, reason = _linear_maker(model, linear, chosen[0])
    if say is not None and not callable(say):
        raise WorkbenchError(f"say takes a function of one text, got {type(say).__name__}")
    if kernels == "c++" != chosen[0]:
        (say or to_standard_error)(f"{model.name} is arranged with torch's operations, not with loops: {chosen[1]}")
    made = FastDecoder(
        model,
        make,
        compile_steps=compile,
        kernels=chosen,
        experts=experts_class(model, experts),
        inputs=inputs,
        native=native,
        say=say,
    )
    reason = make.reason if isinstance(make, MeasuredLinear) else reason
    made.linear_reason, made.graphs = "; ".join([reason, *made.form_reasons]), graphs
    if dependent_launches:
        made.launch_dependents()
    return made


def _linear_maker(model: Decoder, linear: str, kernels: str) -> tuple[MakeLinear, str]:
    """What makes its linears, and why; a `MeasuredLinear` says why when they are made."""
    if kernels == "c++":
        if linear not in ("auto", "looped"):
            raise WorkbenchError(f'kernels="c++" goes with linear="looped", got linear={shown(linear)}')
        return linear_class("looped", model.dtype, model.device), 'through the C++ loop, as kernels="c++" takes them'
    if linear != "auto":
        return linear_class(linear, model.dtype, model.device), "as asked"
    return maker_by_time(model.dtype, model.device, sum(one.nbytes for one in model.parameters()))


def _check_native(native: bool | str, *, compiled: bool) -> None:
    if not isinstance(native, bool) and native != "auto":
        raise WorkbenchError(f'native must be True, False or "auto", got {shown(native)}')
    if native is True and compiled:
        raise WorkbenchError("compile=True and native=True are two ways to take the same steps; give one of them")


def _check_inputs(model: Decoder, inputs: str, *, compiled: bool) -> None:
    if not isinstance(inputs, str) or inputs not in INPUTS:
        raise unknown("inputs", inputs, INPUTS)
    if inputs == "exact":
        return
    if not any(hasattr(part, "for_inference") for part in model.modules()):
        raise WorkbenchError(
            f'inputs="{inputs}" is for quantized weights, and {model.name} has none; quantize it first, or prepare it '
            'with weights="int8"'
        )
    if compiled:
        raise WorkbenchError(f'inputs="{inputs}" does not go with compile=True, whose steps take inputs as they are')


def to_standard_error(line: str) -> None:
    print(f"workbench: {line}", file=sys.stderr, flush=True)


def experts_class(model: Decoder, name: str) -> type[FastExperts]:
    """Raises WorkbenchError for an unknown name, and where the kernel cannot run this model's experts."""
    if not isinstance(name, str) or name not in EXPERTS:
        raise unknown("way to run experts", name, EXPERTS)
    if name == "grouped" and (reason := _why_not_grouped(model)):
        raise WorkbenchError(f'experts="grouped" cannot run {model.name}: {reason}; use "loop"')
    return EXPERTS[name]


def _why_not_grouped(model: Decoder) -> str:
    from workbench.kernels.grouped_matmul import MAX_EXPERTS

    shape = model.config.experts
    if shape is None:
        return "it has none"
    if shape.num_experts > MAX_EXPERTS:
        return f"a layer has {shape.num_experts:,}, the kernel takes up to {MAX_EXPERTS:,}"
    mixtures = (layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts))
    if any(hasattr(part, "for_inference") for one in mixtures for part in one.experts.modules()):
        return "its experts are quantized, and the kernel reads weights as they are"
    return fused.why_not_here(model)


class FastDecoder:
    """Stands wherever a `Decoder` does: `logits = model(batch, kv)`, with its config, tokenizer and name.

    On a CPU the residual stream is float32 even where the weights are bfloat16: small operations cost the same in
    both, and converting costs one more.

    kernels: "torch", "triton" or "c++", what does the norms, turns and gates; kernels_reason: why, in words.
    linear_reason: why the matrices are held as they are (`forms`). pages: what became of the memory of weights that
    steps in C++ read (`workbench.native.large_pages`). compiled: whether compiled steps were asked for.
    """

    def __init__(
        self,
        model: Decoder,
        make: MakeLinear,
        *,
        compile_steps: bool = False,
        kernels: tuple[str, str],
        experts: type[FastExperts] = FastExperts,
        inputs: str = "exact",
        native: bool | str = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """kernels: as `fused.choose_kernels` chose them, and why. The others: see `prepare`."""
        self.config, self.tokenizer, self.name = model.config, model.tokenizer, model.name
        self.device, self.dtype, self.digest = model.device, model.dtype, model_digest(model)
        if inputs != "exact":  # keys and values are other numbers, and nobody may take them for the exact ones
            self.digest = hashlib.sha256(f"{self.digest} {inputs}".encode()).hexdigest()
        self.compiled = compile_steps
        self.graphs: bool | str = "auto"  # see `prepare`
        self.linear_reason = ""
        self.kernels, self.kernels_reason = kernels
        self._fused = self.kernels == "triton"
        norm, kinds, table, dtype = small_norm, (FastLayer, FastLatentLayer), RotaryTable, model.dtype
        self._loops: Loops | None = None
        if self._fused:
            norm, kinds = fused.FusedNorm, (fused.FusedLayer, fused.FusedLatentLayer)
            table = fused.FusedRotaryTable
        elif self.kernels == "c++":
            norm, kinds, self._loops, dtype = LoopedNorm, (LoopedLayer, FastLatentLayer), Loops(model), torch.float32
        self._adds_later = self.kernels != "torch"  # the residual stream is a Stream
        self._parameters = model.num_parameters()
        with torch.no_grad():
            self._embedding = model.embed.weight.detach()
            self._position_embedding = detached(None if model.embed_positions is None else model.embed_positions.weight)
            self._wide = torch.promote_types(model.dtype, torch.float32) if model.device.type == "cpu" else model.dtype
            self._table = None if model.rotary is None else table(model)
            self._local_table = None if model.local_rotary is None else table(model, local=True)
            self._embedding_scale = model.embedding_scale
            self._norm = norm(model.norm, self._wide)
            self._layers = fast_layers(model, make, norm, self._wide, kinds, experts, inputs, dtype)
            self._head = joined(make, dtype, model.head, inputs=inputs)
            self._why_not_compiled, self._steps = "compile=False", None
            if compile_steps:
                self._why_not_compiled, self._steps = self._compiled(model, say or to_standard_error)
            self.asked_native, self._why_native = native, ""  # why, where it was chosen
            self.why_not_native, self._native = "native=False", None
            if native == "auto":
                self._choose_native(model, inputs, say or to_standard_error)
            elif native:
                self.why_not_native, self._native = self._as_native(model, inputs)
                if self.why_not_native:
                    self._say_eager(say or to_standard_error)
        self.pages = move_to_large_pages(self._read_by_steps())
        self._launching: Callable[[], AbstractContextManager[None]] = nullcontext

    def _read_by_steps(self) -> list[torch.Tensor]:
        """Weights that steps in C++, ours or compiled, read as they lie."""
        if self._native is not None:
            return [one for matrix in self._native.parts.matrices for one in matrix.tensors]
        if self._steps is not None:
            layers, head = self._steps.layers, self._steps.head
        elif self._loops is not None:
            layers, head = self._layers, self._head
        else:
            return []
        linears = [linear for layer in layers for linear in layer.linears.values()] + [head]
        return [tensor for linear in linears for tensor in weights_as_they_lie(linear)]

    def launch_dependents(self) -> None:
        """From here on launch our kernels as dependents in `model(batch, kv)`. Raises WorkbenchError where none are, or
        where this device cannot."""
        if not self._fused:
            raise WorkbenchError(
                f'dependent_launches=True is for our kernels on a GPU (kernels="triton"), and {self.name} is arranged'
                f' with kernels="{self.kernels}": {self.kernels_reason}'
            )
        from workbench.kernels import launch

        reason = launch.why_not_dependent(self.device)
        if reason:
            raise WorkbenchError(f"{self.name} cannot take dependent_launches=True: {reason}")
        self._launching = launch.dependent_launches

    def __call__(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[M, V] logits, one row for each of `batch.logit_rows` (or for all N tokens)."""
        if self._native is not None:
            made = self._native.rows(batch, kv, self._tables_for)
            if made is not None:
                return made.logits
        if self._steps is not None and batch.num_tokens == 1:
            if batch.parents is None and self._steps.may_call(kv):
                stepped = self.step(int(batch.token_ids), batch.first_positions[0], batch.sequences[0], kv)
                if stepped is not None:
                    return stepped[0]
            elif self._steps.takes(kv):
                return self._steps(*self._start(batch, kv), batch, kv)
        elif self._steps is not None:
            logits = self._steps.few_rows(batch, kv, self._tables_for)
            if logits is not None:
                return logits
        with self._launching():
            return self._logits(batch, kv)

    def _logits(self, batch: Batch, kv: Attends) -> torch.Tensor:
        x = self.hidden(batch, kv)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.logits_of(x)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] logits of n rows [n, d] that `hidden` gave, or of rows that stand for such."""
        return self._head(hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, d] rows of the embedding, as they are stored."""
        return F.embedding(token_ids, self._embedding)

    def hidden(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[N, d]: every row after the last layer and its norm. `kv.begin` may refuse the batch whole."""
        if self._loops is None:
            return self._through(batch, kv)
        looped = self._loops.over(kv, self._tables_for)
        hidden = self._through(batch, looped)
        looped.end(batch)
        return hidden

    def _through(self, batch: Batch, kv: Attends) -> torch.Tensor:
        start, turns = self._start(batch, kv)
        x: Residual = Stream(start) if self._adds_later else start
        for index, layer in enumerate(self._layers):
            mixed = layer.attend(index, x, turns, batch, kv)
            x = layer.after(x, mixed.reshape(batch.num_tokens, -1))
        return self._norm(x)

    def hidden_and_logits(self, batch: Batch, kv: Attends) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden` of all rows, and `logits_of` those that want them: ([N, d], [M, V]); natively in one call, and both
        in float32 then."""
        if self._native is not None:
            made = self._native.rows(batch, kv, self._tables_for, states=True)
            if made is not None:
                assert made.states is not None, "they were asked for"
                return made.states, made.logits
        return _hidden_then_logits(self, batch, kv)

    @property
    def native(self) -> NativeSteps | None:
        """Its steps as one function in C++, where it has them."""
        return self._native

    def step(
        self, token: int, position: int, sequence: Hashable, kv: Attends
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """A step of one token as one compiled call: (logits [1, V], said [3] float64). None where it is not one, and
        nothing has changed then; whoever sends the token in a batch gets its logits, or the error.

        said: the token of the highest logit, the natural log of its probability, and its logit, which is no finite
        number where the logits are no distribution. None for logits of 16 bits.
        """
        if self._native is not None:
            return self._native.one_call(token, position, sequence, kv, self._tables_for)
        return None if self._steps is None else self._steps.one_call(token, position, sequence, kv, self._tables_for)

    def may_step(self, kv: Attends) -> bool:
        """Whether `step` takes steps with this kv, from the first token after the prompt on."""
        steps = self._steps if self._native is None else self._native
        return steps is not None and steps.may_call(kv)

    @property
    def steps(self) -> str:
        """How steps of one row were asked for, or chosen: "eager", "compiled" or "native"."""
        if self._native is not None or self.asked_native is True:
            return "native"
        return "compiled" if self.compiled else "eager"

    @property
    def why_not_steps(self) -> str:
        """Why steps are not what was asked for; "" where they are."""
        reasons = {"native": self.why_not_native, "compiled": self.why_not_compiled, "eager": ""}
        return reasons[self.steps]

    @property
    def steps_reason(self) -> str:
        """What steps were, in words, why that was chosen (nothing of eager ones that nobody chose), and what became of
        the memory of weights that no cache holds."""
        chosen = self.native_reason if self.asked_native == "auto" else ""
        reasons = {"native": self.native_reason, "compiled": self.compiled_reason, "eager": chosen}
        return "; ".join(filter(None, (reasons[self.steps], self.pages)))

    @property
    def native_reason(self) -> str:
        """What the last batch was: one function, or why not; with native="auto" also what was chosen, and why."""
        if self._native is None:
            return self.why_not_native
        return "; ".join(filter(None, (self._native.reason, self._why_native)))

    @property
    def compiled_reason(self) -> str:
        """What steps of one token are, in words, and after a semicolon what the last batch of several rows was that
        wanted logits for all of them, as the verification of drafted tokens does. compile=True is never chosen by
        itself, nor given up for what is faster: nobody measures whether it gains."""
        if self._steps is None:
            return self._why_not_compiled
        return "; ".join(filter(None, (self._steps.reason, self._steps.rows_reason)))

    @property
    def why_not_compiled(self) -> str:
        """Why steps of one token run as they are; "" where they are compiled."""
        return self._why_not_compiled if self._steps is None else self._steps.why_not

    def _compiled(self, model: Decoder, say: Callable[[str], None]) -> tuple[str, CompiledSteps | None]:
        if reason := why_not_at_all(model.device):
            say(f"{model.name} is not compiled, its steps run as they are: {reason}")
            return reason, None
        given = StepParts(
            embedding=self._embedding,
            position_embedding=self._position_embedding,
            embedding_scale=self._embedding_scale,
            stream=self._wide,
            layers=fast_layers(model, Matvec, TorchNorm, self._wide),
            norm=TorchNorm(model.norm, self._wide),
            head=joined(Matvec, model.dtype, model.head),
            attention_scale=self.config.attention_scale,
            tables=len(self._tables),
            window=self.config.sliding_window is not None,
        )
        return "", CompiledSteps(given, self.config, model.name, model.device, say)

    def _as_native(self, model: Decoder, inputs: str) -> tuple[str, NativeSteps | None]:
        try:
            reason = why_not_native(model)
            return reason, None if reason else NativeSteps.of(model, inputs)
        except WorkbenchError as error:
            return str(error), None

    def _choose_native(self, model: Decoder, inputs: str, say: Callable[[str], None]) -> None:
        """Only what this machine lacks is told unasked: that a model has no native steps hinders nothing."""
        asked = "compile=True" if self.compiled else f'kernels="{self.kernels}"' if self._adds_later else ""
        reason = f"{asked} was asked for" if asked else why_not_measured() or why_not_model(model)
        if reason:
            self.why_not_native = reason
            return
        self.why_not_native, made = self._as_native(model, inputs)
        if made is None:
            if why_not_native(model):
                self._say_eager(say)
            return
        choice = choose(made, self._logits, self._tables_for, self.forms.values(), inputs)
        if choice.rows == 0:
            self.why_not_native = choice.reason
            return
        made.max_rows, self._native, self._why_native = choice.rows, made, choice.reason

    def _say_eager(self, say: Callable[[str], None]) -> None:
        say(f"steps of {self.name} are not one function in C++ and run as they are: {self.why_not_native}")

    @property
    def _tables(self) -> list[RotaryTable]:
        return [table for table in (self._table, self._local_table) if table is not None]

    def _tables_for(self, positions: int) -> list[torch.Tensor]:
        return [table.reach_length(positions) for table in self._tables]

    def _start(self, batch: Batch, kv: Attends) -> tuple[torch.Tensor, Turns]:
        kv.begin(batch)
        x = F.embedding(batch.token_ids, self._embedding)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        x = x.to(self._wide)
        if isinstance(kv, LoopedAttention) and kv.attends:
            return x, (None, None)  # the loop turns q and k itself
        if self._table is None:
            assert self._position_embedding is not None, "positions are turned or embedded"
            return x + F.embedding(batch.positions, self._position_embedding), (None, None)
        return x, (self._table.turn(batch), None if self._local_table is None else self._local_table.turn(batch))

    def reserve_positions(self, positions: int) -> list[torch.Tensor]:
        """Make the rotary tables this long, and return them: a recorded step reads them where they are, so whoever
        records it has to keep them."""
        return self._tables_for(positions)

    def num_parameters(self) -> int:
        """A tied output head is counted once."""
        return self._parameters

    @property
    def routers(self) -> dict[int, Router]:
        """{layer: its router}; {} without experts."""
        every = ((index, layer.experts) for index, layer in enumerate(self._layers))
        return {index: experts.router for index, experts in every if experts is not None}

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step with logits reads: every matrix once, whatever N is. Of experts all, which a
        step of many rows reads; few rows read fewer (`models.experts.expected_different`)."""
        return sum(layer.weight_bytes for layer in self._layers) + self._head.weight_bytes

    @property
    def step_weight_bytes(self) -> int:
        """The same of a step of one token: where it is compiled its matrices lie in forms of their own."""
        if self._native is not None:
            return self._native.weight_bytes
        if self._steps is None or self._steps.why_not:
            return self.weight_bytes
        return sum(layer.weight_bytes for layer in self._steps.layers) + self._steps.head.weight_bytes

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes of weights in memory, without the embedding: native and compiled steps read forms of
        their own, which may be shared."""
        others = self._native is not None or (self._steps is not None and not self._steps.why_not)
        return self.weight_bytes + (self.step_weight_bytes if others else 0)

    @property
    def step_head_bytes(self) -> int:
        """Of those the head's."""
        if self._native is not None:
            return self._native.parts.output.nbytes
        steps = self if self._steps is None or self._steps.why_not else self._steps
        return steps.head.weight_bytes

    @property
    def head(self) -> Linear:
        return self._head

    @property
    def forms(self) -> dict[str, str]:
        """How each matrix is held, in a few words: {"layers.0.qkv": "packed", …, "head": "packed"}."""
        found = {
            f"layers.{index}.{name}": linear.form
            for index, layer in enumerate(self._layers)
            for name, linear in layer.linears.items()
        }
        return found | {"head": self._head.form}

    @property
    def form_reasons(self) -> list[str]:
        """Why quantized matrices have their forms, each reason once."""
        every = [reason_of(linear) for layer in self._layers for linear in layer.linears.values()]
        every.append(reason_of(self._head))
        return list(dict.fromkeys(filter(None, every)))


Model = Decoder | FastDecoder  # as it was loaded, or arranged for inference


def hidden_and_logits(model: Any, batch: Batch, kv: Attends) -> tuple[torch.Tensor, torch.Tensor]:
    """`FastDecoder.hidden_and_logits` of any decoder, or of what stands for one."""
    both = model.hidden_and_logits if isinstance(model, FastDecoder) else functools.partial(_hidden_then_logits, model)
    return both(batch, kv)


def _hidden_then_logits(model: Any, batch: Batch, kv: Attends) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = model.hidden(batch, kv)
    return hidden, model.logits_of(hidden if batch.logit_rows is None else hidden[batch.logit_rows])
