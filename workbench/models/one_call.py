"""A decode step of one sequence as one call: compiled code that takes tokens' numbers and writes into the cache.

    in     numbers [5 + n]              position of the first new token, the sequence's slot, keys that this token
                                        sees, the first of them, how many tokens there are; then the tokens
           keys, values                 the whole cache [L, slots, H_kv, S, D]; the new tokens' are written into it
           tables                       cos and sin of every position [P, 2, D], where positions are turned
    out    logits [n, V]
           said [3]                     of a step of one row: the token of the highest logit, its log-probability, its
                                        logit; not for logits of 16 bits: the compiler would choose before they are
                                        rounded

n, the rows, is a constant of the code: 1 for decoding, a few for the verification of drafted tokens, which reads the
weights once for all of them. Fewer tokens than rows are padded: each row that is left stands for the last token once
more, sees what that one sees, and writes nothing.

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
# the norm of x is computed again for every row of the weights. 7 are what it takes to make a number of a code and
# multiply it, which is to stay in registers.
OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 7}
# weights stay outside, small ones too; the wrapper, which runs once a step, need not be optimized
AHEAD = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "compile_threads": 1,
    "aot_inductor.precompile_headers": False,
}


SAYING = (torch.float32, torch.float64)  # types of logits with which a step says its token
NUMBERS = 5  # before the tokens
Looks = tuple[torch.Tensor | None, torch.Tensor | None]  # of cached keys [n, S], of new ones [n, n]; None: all are seen


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
    """Where a sequence's keys and values lie; `first` … `length` − 1 are what its next token sees, beside itself."""

    keys: torch.Tensor  # [L, slots, H_kv, S, D], contiguous
    values: torch.Tensor
    slot: int
    first: int
    length: int


class ShowsStorage(Protocol):
    """A kv whose keys and values a compiled step reads and writes in place; see `workbench.kv.contract.KV`."""

    def step_storage(self, sequence: Any, rows: int = 1) -> Storage | None: ...
    def note_step(self, sequence: Any, rows: int = 1) -> None: ...


class _Step(torch.nn.Module):
    """The step as `torch.export` takes it: weights are buffers w0, w1, … and everything else is an input."""

    def __init__(self, given: StepParts, rows: int, window: int | None) -> None:
        super().__init__()
        self.given, self.rows, self.window = given, rows, window
        self.names = dict(zip(parts.tensors_of(given), _buffers(given)))
        for name, tensor in _buffers(given).items():
            self.register_buffer(name, tensor)

    def forward(self, numbers: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *tables: torch.Tensor) -> Any:
        p = parts.with_tensors(self.given, {name: getattr(self, w) for name, w in self.names.items()})
        slot, tokens = numbers[1:2], numbers[NUMBERS:]
        own: Any = numbers[1].item()  # to who traces this a symbol, which int() would ask for its value
        count: Any = numbers[2].item()
        first: Any = 0
        _holds(own >= 0, own < keys.shape[1], count >= 1)
        if p.window:
            first = numbers[3].item()
            _holds(first >= 0)
        _holds(first + count < keys.shape[3])
        seen_keys, seen_values = (one.select(1, own).narrow(2, first, count) for one in (keys, values))
        stands_for = self._stands_for(numbers)
        at = numbers[0:1] + stands_for  # [n] positions
        looks = self._looks(numbers, stands_for, count)
        x = p.embedding.index_select(0, tokens)
        x = (x * p.embedding_scale if p.embedding_scale != 1 else x).to(p.stream)
        if p.position_embedding is not None:
            x = x + p.position_embedding.index_select(0, at)
        rows = [table.index_select(0, at) for table in tables]
        turns: list[Any] = [(row[:, :1], row[:, 1:]) for row in rows] + [None] * (2 - len(rows))
        new_keys, new_values = [], []
        for index, layer in enumerate(p.layers):
            q, k, v = layer.before(x, (turns[0], turns[1]))
            mixed = attend_rows(q, k, v, seen_keys[index], seen_values[index], p.attention_scale, looks)
            x = layer.after(x, mixed.reshape(self.rows, -1).to(q.dtype))
            new_keys.append(k)
            new_values.append(v)
        logits = p.head(p.norm(x))
        place = torch.arange(keys.shape[0])[:, None, None], slot, torch.arange(keys.shape[2])[:, None], at
        for stored, new in ((keys, new_keys), (values, new_values)):
            written = torch.stack(new).index_select(1, stands_for).transpose(1, 2)  # [L, H_kv, n, D]
            stored.index_put_(place, written.to(stored.dtype))
        if self.rows > 1 or logits.dtype not in SAYING:
            return (logits,)
        row = logits[0]
        top = row.amax()
        log_prob = -torch.log(torch.exp(row - top).sum())
        return logits, torch.stack([one.double() for one in (row.argmax(), log_prob, top)])

    def _stands_for(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n] of each row the token, counted from 0, that it is or repeats."""
        return torch.minimum(torch.arange(self.rows), numbers[4:5] - 1)

    def _looks(self, numbers: torch.Tensor, stands_for: torch.Tensor, count: Any) -> Looks:
        """Of each row, which of the `count` cached keys and which new ones it sees."""
        if self.rows == 1:
            return None, None
        token, new = stands_for[:, None], torch.arange(self.rows)
        sees_new = new <= token
        if self.window is None:
            return None, sees_new
        cached = numbers[3:4] - numbers[0:1] + torch.arange(count)  # counted from the first new token: below 0
        return cached > token - self.window, sees_new & (new > token - self.window)


def _buffers(given: StepParts) -> dict[str, torch.Tensor]:
    """{w0, w1, …: tensor}: the same order in every process, for parts that are described by the same lines."""
    return {f"w{index}": tensor for index, tensor in enumerate(parts.tensors_of(given).values())}


def _holds(*conditions: Any) -> None:
    for condition in conditions:
        torch._check(condition)


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    looks: Looks = (None, None),
) -> torch.Tensor:
    """Attention of n queries over the cached tokens and the new ones, written as sums that the compiler turns into
    loops.

    q [n, H_q, D], k, v [n, H_kv, D] of the new tokens; keys, values [H_kv, S, D] -> [n, H_q, D] float32. The new tokens
    are no rows of the cache yet: their weights are added to the sums. looks: which cached keys [n, S] and which new
    ones [n, n] a row sees, None: all; some new one at least.
    """
    rows, heads, width = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).view(rows, heads, -1, 1, width) * scale  # [n, H_kv, G, 1, D]
    new_k, new_v = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None].to(wide)  # [H_kv, 1, n, D]
    kept = _seen((q * keys[:, None]).sum(-1), looks[0])  # [n, H_kv, G, S]
    new = _seen((q * new_k).sum(-1), looks[1])  # [n, H_kv, G, n]
    top = torch.maximum(kept.amax(-1, keepdim=True), new.amax(-1, keepdim=True))
    kept, new = torch.exp(kept - top), torch.exp(new - top)
    mixed = (kept[..., None] * values[:, None]).sum(-2) + (new[..., None] * new_v).sum(-2)  # [n, H_kv, G, D]
    return (mixed / (kept.sum(-1, keepdim=True) + new.sum(-1, keepdim=True))).flatten(1, 2)


def _seen(scores: torch.Tensor, look: torch.Tensor | None) -> torch.Tensor:
    """scores [n, H_kv, G, S] of what look [n, S] lets a row see; −∞ elsewhere."""
    return scores if look is None else scores.masked_fill(~look[:, None, None], float("-inf"))


# -- compiled, and loaded ------------------------------------------------------------------------------------------


def described(given: StepParts, config: ModelConfig, stored: torch.dtype, rows: int) -> list[str]:
    """All that the compiled code of a step depends on and that the model says. stored: what the cache keeps."""
    of_step = [f"stored {stored}", f"rows {rows}", f"threads {torch.get_num_threads()}"]
    return [repr(config), *of_step, *parts.described(given)]


def build(given: StepParts, config: ModelConfig, stored: torch.dtype, rows: int, compiler: str, folder: Path) -> Path:
    """Compile a step of so many rows in `folder`, which is ours alone: the library.

    Raises whatever torch's compiler raises: many kinds of errors, a failing C++ compiler's among them.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor import config as inductor
    from torch._inductor.utils import fresh_cache

    step, some, free = _Step(given, rows, config.sliding_window), 2, torch.export.Dim.DYNAMIC
    shape = (config.num_layers, some, config.num_kv_heads, 8)
    caches = [torch.zeros((*shape, size), dtype=stored) for size in (config.head_dim, config.value_head_dim)]
    tables = [torch.zeros(8, 2, config.head_dim, dtype=given.embedding.dtype) for _ in range(given.tables)]
    numbers = [3, 0, 3 - given.window, int(given.window), rows, *[0] * rows]
    inputs = torch.tensor(numbers), *caches, *tables
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
    """A loaded step of `rows` rows around the tensors of one model.

    library: whose code runs in this process, so the caller knows who wrote it.
    """

    def __init__(self, library: Path, given: StepParts, rows: int) -> None:
        self.rows, tensors = rows, _buffers(given)
        self._runner = _runner(library)
        asked = self._runner.get_constant_names_to_original_fqns().values()
        self._weights = {name: tensors[name] for name in asked}  # the library owns none
        self._runner.update_constant_buffer(self._weights, False, True, True)

    def __call__(
        self, tokens: Sequence[int], storage: Storage, tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits [tokens, V], said [3] float64 or None); the new tokens' keys and values are in the storage then.

        tokens: as many as the step has rows, or fewer. The caller has seen that there is room for them, and that the
        tokens and their positions exist.
        """
        count = len(tokens)
        where = storage.length, storage.slot, storage.length - storage.first, storage.first, count
        numbers = torch.tensor([*where, *tokens, *[tokens[-1]] * (self.rows - count)])
        logits, *said = self._runner.run([numbers, storage.keys, storage.values, *tables])
        return logits[:count], said[0] if said else None
