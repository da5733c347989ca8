"""A decode step of one sequence as one call: compiled code that takes a token's number and writes into the cache.

    in     numbers [5]                  token, its position, the sequence's slot, keys that it sees, the first of them
           keys, values                 the whole cache [L, slots, H_kv, S, D]; the new token's are written into it
           tables                       cos and sin of every position [P, 2, D], where positions are turned
    out    logits [1, V]
           said [3]                     the token of the highest logit, its log-probability, its logit; not for logits
                                        of 16 bits: the compiler would choose before they are rounded

Between the two lie the embedding, the turn, every layer with its attention over the cache, the last norm, the head and
the choice. No Python runs there: `torch.export` traces the step once, and AOTInductor (torch's compiler ahead of time)
makes a library of it. On a CPU that is one C++ function, one parallel region for all of it, and weights are read at
the memory's speed. The weights are not in it: they are handed over by name when it is loaded
(`workbench.models.parts`), so one library serves every checkpoint of the same shape, and a library is small.

Numbers that change from step to step come in a tensor, so that no length is a constant of the code, and no length
needs code of its own. `workbench.models.kept` keeps libraries for the next process.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from workbench.files import write_bytes
from workbench.models import parts
from workbench.models.config import ModelConfig
from workbench.models.fast_layers import FastLayer
from workbench.models.linear import Linear

# Inductor computes a value again wherever it is used unless that takes more operations than this: at its default of 30
# the norm of x is computed again for every row of the weights. 6 are what it takes to make a number of half a byte and
# multiply it, which is to stay in registers.
OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 6}
# weights stay outside, small ones too; the wrapper, which runs once a step, need not be optimized
AHEAD = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "compile_threads": 1,
    "aot_inductor.precompile_headers": False,
}


SAYING = (torch.float32, torch.float64)  # types of logits with which a step says its token


@dataclass
class StepParts:
    """What a step is made of. layers, head: with linears for one row."""

    embedding: torch.Tensor  # [V, d]
    position_embedding: torch.Tensor | None
    embedding_scale: float
    stream: torch.dtype  # of the residual stream
    layers: list[FastLayer]
    norm: Any
    head: Linear
    attention_scale: float
    tables: int  # 0, 1, or 2 where some layers turn by a table of their own
    window: bool  # all layers have one


class Storage(NamedTuple):
    """Where a sequence's keys and values lie; `first` … `length` − 1 are what its next token sees."""

    keys: torch.Tensor  # [L, slots, H_kv, S, D], contiguous
    values: torch.Tensor
    slot: int
    first: int
    length: int


class ShowsStorage(Protocol):
    """A kv whose keys and values a compiled step reads and writes in place; see `workbench.kv.contract.KV`."""

    def step_storage(self, sequence: Any) -> Storage | None: ...
    def note_step(self, sequence: Any) -> None: ...


class _Step(torch.nn.Module):
    """The step as `torch.export` takes it: weights are buffers w0, w1, … and everything else is an input."""

    def __init__(self, given: StepParts) -> None:
        super().__init__()
        self.given = given
        self.names = dict(zip(parts.tensors_of(given), _buffers(given)))
        for name, tensor in _buffers(given).items():
            self.register_buffer(name, tensor)

    def forward(self, numbers: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *tables: torch.Tensor) -> Any:
        p = parts.with_tensors(self.given, {name: getattr(self, w) for name, w in self.names.items()})
        token, at, slot = numbers[0:1], numbers[1:2], numbers[2:3]
        own: Any = numbers[2].item()  # to who traces this a symbol, which int() would ask for its value
        count: Any = numbers[3].item()
        first: Any = 0
        _holds(own >= 0, own < keys.shape[1], count >= 1)
        if p.window:
            first = numbers[4].item()
            _holds(first >= 0)
        _holds(first + count < keys.shape[3])
        seen_keys, seen_values = (one.select(1, own).narrow(2, first, count) for one in (keys, values))
        x = p.embedding.index_select(0, token)
        x = (x * p.embedding_scale if p.embedding_scale != 1 else x).to(p.stream)
        if p.position_embedding is not None:
            x = x + p.position_embedding.index_select(0, at)
        rows = [table.index_select(0, at) for table in tables]
        turns: list[Any] = [(row[:, :1], row[:, 1:]) for row in rows] + [None] * (2 - len(rows))
        new_keys, new_values = [], []
        for index, layer in enumerate(p.layers):
            q, k, v = layer.before(x, (turns[0], turns[1]))
            mixed = attend_one(q[0], k[0], v[0], seen_keys[index], seen_values[index], p.attention_scale)
            x = layer.after(x, mixed.reshape(1, -1).to(q.dtype))
            new_keys.append(k[0])
            new_values.append(v[0])
        logits = p.head(p.norm(x))
        place = torch.arange(keys.shape[0])[:, None], slot[None], torch.arange(keys.shape[2])[None], at[None]
        for stored, new in ((keys, new_keys), (values, new_values)):
            stored.index_put_(place, torch.stack(new).to(stored.dtype))
        if logits.dtype not in SAYING:
            return (logits,)
        row = logits[0]
        top = row.amax()
        log_prob = -torch.log(torch.exp(row - top).sum())
        return logits, torch.stack([one.double() for one in (row.argmax(), log_prob, top)])


def _buffers(given: StepParts) -> dict[str, torch.Tensor]:
    """{w0, w1, …: tensor}: the same order in every process, for parts that are described by the same lines."""
    return {f"w{index}": tensor for index, tensor in enumerate(parts.tensors_of(given).values())}


def _holds(*conditions: Any) -> None:
    for condition in conditions:
        torch._check(condition)


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one query over the cached tokens and itself, written as sums that the compiler turns into loops.

    q [H_q, D], k, v [H_kv, D] of the new token; keys, values [H_kv, S, D] -> [H_q, D] float32. The new token is no
    row of the cache yet: its weight is added to the sums.
    """
    heads, width = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).view(heads, -1, 1, width) * scale  # [H_kv, G, 1, D]
    kept = (q * keys[:, None]).sum(-1)  # [H_kv, G, S]
    own = (q * k[:, None, None]).sum(-1)  # [H_kv, G, 1]
    top = torch.maximum(kept.amax(-1, keepdim=True), own)
    kept, own = torch.exp(kept - top), torch.exp(own - top)
    mixed = (kept[..., None] * values[:, None]).sum(-2) + own * v[:, None].to(wide)  # [H_kv, G, D]
    return (mixed / (kept.sum(-1, keepdim=True) + own)).flatten(0, 1)


# -- compiled, and loaded ------------------------------------------------------------------------------------------


def described(given: StepParts, config: ModelConfig, stored: torch.dtype) -> list[str]:
    """All that the compiled code of a step depends on and that the model says. stored: what the cache keeps."""
    return [repr(config), f"stored {stored}", f"threads {torch.get_num_threads()}", *parts.described(given)]


def build(given: StepParts, config: ModelConfig, stored: torch.dtype, compiler: str, folder: Path) -> Path:
    """Compile a step in `folder`, which is ours alone: the library.

    Raises whatever torch's compiler raises: many kinds of errors, a failing C++ compiler's among them.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor import config as inductor
    from torch._inductor.utils import fresh_cache

    step, some, free = _Step(given), 2, torch.export.Dim.DYNAMIC
    shape = (config.num_layers, some, config.num_kv_heads, 8)
    caches = [torch.zeros((*shape, size), dtype=stored) for size in (config.head_dim, config.value_head_dim)]
    tables = [torch.zeros(8, 2, config.head_dim, dtype=given.embedding.dtype) for _ in range(given.tables)]
    inputs = torch.tensor([0, 3, 0, 3 - given.window, int(given.window)]), *caches, *tables
    cache_dims, table_dims = {1: free, 3: free}, {0: free}
    settings = {"cpp.cxx": (compiler,), **OPTIONS, **AHEAD}
    with torch.no_grad(), warnings.catch_warnings(), fresh_cache(dir=str(folder)), inductor.patch(settings):
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of itself
        traced = torch.export.export(
            step,
            inputs,
            dynamic_shapes=(None, cache_dims, cache_dims, *([tuple(table_dims for _ in tables)] if tables else [])),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        package = aoti_compile_and_package(traced, package_path=str(folder / "step.pt2"))
    library = folder / "step.so"
    with zipfile.ZipFile(package) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".so")]
        write_bytes(library, archive.read(name))
    return library


def _runner(library: Path) -> Any:
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)


class OneCall:
    """A loaded step around the tensors of one model.

    library: whose code runs in this process, so the caller knows who wrote it.
    """

    def __init__(self, library: Path, given: StepParts) -> None:
        tensors = _buffers(given)
        self._runner = _runner(library)
        asked = self._runner.get_constant_names_to_original_fqns().values()
        self._weights = {name: tensors[name] for name in asked}  # the library owns none
        self._runner.update_constant_buffer(self._weights, False, True, True)

    def __call__(
        self, token: int, position: int, storage: Storage, tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits [1, V], said [3] float64 or None); the new token's keys and values are in the storage then.

        The caller has seen that there is room for them, and that the token and the position exist.
        """
        numbers = torch.tensor([token, position, storage.slot, storage.length - storage.first, storage.first])
        logits, *said = self._runner.run([numbers, storage.keys, storage.values, *tables])
        return logits, said[0] if said else None
