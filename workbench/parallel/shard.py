"""A shard: what one rank has of a model, as a decoder of its own, and the forward that all ranks make together.

On rank 0 it stands wherever a model does: `logits = model(batch, kv)`, so `generate` and the engine run with it. Rank 0
begins the batch in its kv, tells the others (`link`), and computes its part; the others follow (`cluster`). With a
pipeline the batch goes through in `groups`, and rank 0 has at most as many groups under way as there are stages.

    rank = stage · t + part        t ranks of tensor parallelism in each stage, which is a group of collectives
    hidden states [N, d]           go from (stage, part) to (stage + 1, part): all parts of a stage have them
    logits [M, V]                  come from the first part of the last stage to rank 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from workbench.errors import WorkbenchError, check_whole
from workbench.kv import kind_of
from workbench.models.assembly import _NoInitialization
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Decoder, Turns
from workbench.models.experts import MixtureOfExperts
from workbench.models.fast_layers import RotaryTable, fast_layers, small_norm
from workbench.models.linear import chosen_linear
from workbench.models.tokenizer import Tokenizer
from workbench.parallel.collectives import Collectives
from workbench.parallel.expert import ExpertParallel
from workbench.parallel.mirror import Mirror, Notes, batch_message, mirrored
from workbench.parallel.pipeline import (
    Progress,
    chosen_rows,
    groups_of,
    rows_of_groups,
    rows_wanted,
    stage_config,
    stages_of,
)
from workbench.parallel.tensor import NO_TOKEN, Part, RowParallel, VocabularyHead, check_divides, part_config

WANTED = ("logits", "hidden", "best", "draw")


@dataclass(frozen=True)
class Layout:
    """How a model of this shape lies on `tensor` · `pipeline` ranks."""

    config: ModelConfig
    tensor: int = 1
    pipeline: int = 1
    attention: str = "heads"  # divided by heads, or "whole" on each rank

    @classmethod
    def checked(
        cls, config: ModelConfig, tensor: int, pipeline: int, name: str = "the model", attention: str = "heads"
    ) -> Layout:
        """Raises WorkbenchError, with the numbers, where the shape cannot be divided so."""
        check_divides(config, tensor, name, attention)
        stages_of(config, pipeline, name)
        return cls(config, tensor, pipeline, attention)

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, part)"""
        return divmod(rank, self.tensor)

    def members(self, stage: int) -> list[int]:
        """The ranks of a stage."""
        return list(range(stage * self.tensor, (stage + 1) * self.tensor))

    def layers(self, stage: int) -> range:
        return stages_of(self.config, self.pipeline)[stage]

    def config_of(self, stage: int) -> ModelConfig:
        """The shape of what each rank of a stage has."""
        return stage_config(part_config(self.config, self.tensor, self.attention), self.layers(stage))

    def part(self, rank: int) -> Part:
        return Part(self.config, self.place(rank)[1], self.tensor, self.attention)

    def parts_of(self, rank: int, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What a rank keeps of a parameter of the whole model: names in its shard, and tensors of its own."""
        stage, part = self.place(rank)[0], self.part(rank)
        first, last = stage == 0, stage == self.pipeline - 1
        if name.startswith("layers."):
            _, number, within = name.split(".", 2)
            layers = self.layers(stage)
            own = part.expert(within)
            if int(number) in layers and own is not None:
                yield f"layers.{int(number) - layers.start}.{own}", part.cut(within, tensor)
        elif name.startswith("embed"):
            if first:
                yield name, tensor.clone()
            elif last and name == "embed.weight" and self.config.tie_embeddings:
                yield "vocabulary.weight", part.cut_head(tensor).clone()
        elif last and name == "head.weight":
            yield "vocabulary.weight", part.cut_head(tensor).clone()
        elif last:
            assert name.startswith("norm."), f"a parameter that no rank takes: {name}"
            yield name, tensor.clone()


class Shard(Decoder):
    """See the module. `config` is that of this rank's part, `layout.config` that of the whole model.

    stage_group: the collectives of this stage's ranks; world: of all. Weights come with `fill_from`.
    """

    graphs = False  # an engine records no steps: a collective is no launch

    def __init__(
        self, layout: Layout, world: Collectives, stage_group: Collectives, *, name: str, tokenizer: Tokenizer | None
    ) -> None:
        self.layout, self.rank = layout, world.rank.rank
        stage, _ = layout.place(self.rank)
        with torch.device("meta"), _NoInitialization():
            super().__init__(layout.config_of(stage), name=name, tokenizer=tokenizer)
        self.stage, self.part = stage, layout.part(self.rank)
        self.world, self.stage_group = world, stage_group
        self.progress = Progress()
        self.groups = 1
        self.link: Link | None = None  # of rank 0
        self.is_first, self.is_last = stage == 0, stage == layout.pipeline - 1
        for layer in self.layers:
            if layout.attention == "heads":
                layer.attention.o = RowParallel(layer.attention.o, stage_group)
            if isinstance(layer.mlp, MixtureOfExperts):
                with torch.device("meta"), _NoInitialization():
                    layer.mlp = cast(Any, ExpertParallel(layout.config, stage_group))
            else:
                layer.mlp.down = RowParallel(layer.mlp.down, stage_group)
        if not self.is_first:
            del self.embed
            self.embed_positions = None
        self.vocabulary: VocabularyHead | None = None
        del self.head
        if self.is_last:
            rows = self.part.span("tokens")
            weight = torch.empty(rows[1] - rows[0], layout.config.hidden_size, device="meta")
            self.vocabulary = VocabularyHead(self.part, nn.Parameter(weight, requires_grad=False), stage_group)
        else:
            self.norm = cast(Any, nn.Identity())
        self._where = (torch.device("cpu"), torch.float32)
        self._fast: FastForm | None = None

    # -- weights -----------------------------------------------------------------------------------------------

    def fill_from(
        self, tensors: Iterator[tuple[str, torch.Tensor]], device: torch.device, dtype: torch.dtype | None = None
    ) -> Shard:
        """Take this rank's part of each parameter of the whole model, as they come by their names there."""
        with torch.no_grad():
            for name, tensor in tensors:
                for own, part in self.layout.parts_of(self.rank, name, tensor):
                    self.put(own, part.to(device, dtype or part.dtype))
        return self.ready(device)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter of this shard; the tensor becomes its own."""
        owner, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))

    def ready(self, device: torch.device) -> Shard:
        """After the last parameter."""
        if self.is_first and self.vocabulary is not None and self.layout.config.tie_embeddings:
            own = self.part.cut_head(self.embed.weight.detach())
            self.vocabulary.weight = nn.Parameter(own, requires_grad=False)
        for rotary in (self.rotary, self.local_rotary):
            if rotary is not None:
                rotary.put_on(device)
        assert not any(p.is_meta for p in self.parameters()), "a parameter was left without values"
        self._where = (device, next(self.parameters()).dtype)
        self.eval()
        return self

    def prepare(self) -> None:
        """Arrange this rank's part for inference, as `models.fast.prepare` does a whole model: the same numbers in
        fewer and larger operations."""
        assert self.layout.config.experts is None, "`Cluster.load` refuses to arrange experts"
        self._fast = FastForm(self)
        if self.vocabulary is not None:
            self.vocabulary.prepare()

    @property
    def device(self) -> torch.device:
        return self._where[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._where[1]

    # -- this rank's part of a forward -------------------------------------------------------------------------

    def compute(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """This stage's layers, for a batch that `kv.begin` has accepted: [N, d]; after the last stage, normed."""
        stream = self.dtype if self._fast is None else self._fast.stream
        if self.is_first:
            x = self.start(batch)[0].to(stream)
        else:
            x = torch.empty(batch.num_tokens, self.config.hidden_size, dtype=stream, device=self.device)
            self.world.receive(x, self.world.index - self.layout.tensor)
        self.world.clock = self.progress.compute(self.world.clock)
        if self._fast is not None:
            x = self._fast.layers(x, batch, kv)
        else:
            turns = self.turns_of(batch, self.dtype)
            for index in range(len(self.layers)):
                x = self.run_layer(index, x, turns, batch, kv)
        if not self.is_last:
            self.world.send(x, self.world.index + self.layout.tensor)
            return x
        return self.norm(x) if self._fast is None else self._fast.norm(x)

    def finish(self, hidden: torch.Tensor, wanted: str, temperature: float, uniforms: list[float]) -> Any:
        """What is wanted of rows [M, d] after the last stage, for its first rank; None for its others."""
        assert self.vocabulary is not None, "the last stage has the head"
        if wanted == "hidden":
            return hidden
        if wanted == "logits":
            return self.vocabulary.logits(hidden)
        if wanted == "best":
            return self.vocabulary.best(hidden)
        numbers = torch.tensor(uniforms, dtype=torch.float64, device=self.device)
        return self.vocabulary.draw(hidden, temperature, numbers)

    def answer(self, x: torch.Tensor, batch: Batch, wanted: str, temperature: float, uniforms: list[float]) -> Any:
        """The end of a forward: on the last stage what is wanted, sent to rank 0 where that is on another."""
        if not self.is_last or (wanted != "hidden" and not rows_wanted(batch)):
            return None
        made = self.finish(x if wanted == "hidden" else chosen_rows(x, batch), wanted, temperature, uniforms)
        self.send_back(made)
        return made

    def send_back(self, made: torch.Tensor | None) -> None:
        """From the first rank of the last stage to rank 0, where that is another."""
        if self.layout.pipeline > 1 and self.part.index == 0 and made is not None:
            self.world.send(made, 0)

    # -- rank 0: a model ---------------------------------------------------------------------------------------

    def make_kv(self, kind: Any, config: ModelConfig, **settings: Any) -> Any:
        """As `workbench.kv.make_kv`: a kv on each rank, which all do what this one does."""
        return mirrored(kind_of(kind, config, settings), self._led.notes)(config, **settings)

    def forward(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[M, V] logits."""
        return self._lead(batch, kv, "logits")

    def hidden(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[N, d]."""
        return self._lead(batch, kv, "hidden")

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] of any rows: they are sent to all ranks, and the last stage has the head."""
        with self._led.unbroken():
            self._led.tell({"do": "logits", "rows": len(hidden)})
            self.world.broadcast(hidden.contiguous())
            made = self.finish(hidden, "logits", 0.0, []) if self.is_last else None
            return self._receive(len(hidden), "logits") if made is None else made

    def best(self, batch: Batch, kv: Attends) -> list[int]:
        """[M] tokens of the highest logits; one number a rank and row is exchanged, instead of V."""
        return _tokens(self._lead(batch, kv, "best"))

    def draw(self, batch: Batch, kv: Attends, temperature: float, uniforms: list[float]) -> list[int]:
        """[M] tokens drawn at this temperature, with a uniform number of [0, 1) for each row."""
        rows = rows_wanted(batch)
        if not temperature > 0 or len(uniforms) != rows:
            raise WorkbenchError(
                f"draw takes a temperature above 0 and a uniform number for each of {rows} rows, got {temperature!r} "
                f"and {len(uniforms)}"
            )
        return _tokens(self._lead(batch, kv, "draw", temperature, uniforms))

    @property
    def _led(self) -> Link:
        assert self.link is not None, "rank 0 has a link to the others"
        return self.link

    def _lead(
        self, batch: Batch, kv: Any, wanted: str, temperature: float = 0.0, uniforms: list[float] | None = None
    ) -> torch.Tensor:
        """A forward of all ranks: what is wanted of all rows."""
        mirror = getattr(kv, "mirror", None)
        if not isinstance(mirror, Mirror) or mirror.notes is not self._led.notes:
            raise WorkbenchError(
                f"{self.name} lies on {self.layout.ranks} ranks, and its kv has to as well: give generate the name of "
                "a kind, or make one with workbench.kv.kv_for(kind, model)"
            )
        check_whole("groups", self.groups, 1)
        made: list[torch.Tensor] = []
        coming: deque[tuple[Batch, str]] = deque()
        parts = groups_of(batch, self.groups if self.layout.pipeline > 1 else 1)
        rows = [list(range(rows_wanted(batch)))] if len(parts) == 1 else rows_of_groups(batch, parts)
        before = {name: kv.lengths.get(name) for name in batch.sequences}
        for place, group in enumerate(parts):
            if len(coming) == self.layout.pipeline:
                made.append(self._take(coming.popleft()))
            try:
                kv.begin(group)
            except BaseException:
                for _ in range(len(coming)):
                    self._take(coming.popleft())
                _undo(kv, {name: before[name] for earlier in parts[:place] for name in earlier.sequences})
                raise
            own = [uniforms[row] for row in rows[place]] if uniforms else []
            message = {"do": "step", "kv": mirror.number, "batch": batch_message(group, mirror), "wanted": wanted}
            with self._led.unbroken():
                self._led.tell(message | {"temperature": temperature, "uniforms": own})
                x = self.compute(group, kv)
                answer = self.answer(x, group, wanted, temperature, own)
            if self.layout.pipeline == 1:
                made.append(answer)
            elif wanted == "hidden" or rows_wanted(group):
                coming.append((group, wanted))
        made += [self._take(one) for one in coming]
        together = made[0] if len(made) == 1 else torch.cat(made)
        order = [row for of_group in rows for row in of_group]
        if wanted == "hidden" or order == sorted(order):
            return together
        return together[torch.tensor(order, device=together.device).argsort()]

    def _take(self, coming: tuple[Batch, str]) -> torch.Tensor:
        group, wanted = coming
        with self._led.unbroken():
            return self._receive(group.num_tokens if wanted == "hidden" else rows_wanted(group), wanted)

    def _receive(self, rows: int, wanted: str) -> torch.Tensor:
        """What the last stage sends."""
        if wanted in ("best", "draw"):
            x = torch.empty(rows, dtype=torch.int64, device=self.device)
        else:
            width = self.config.hidden_size if wanted == "hidden" else self.config.vocab_size
            x = torch.empty(rows, width, dtype=self.dtype, device=self.device)
        return self.world.receive(x, self.layout.members(self.layout.pipeline - 1)[0])


class FastForm:
    """The layers of a shard arranged for inference, and its last norm. stream: type of the hidden states between them,
    float32 on a CPU whatever the weights are."""

    def __init__(self, shard: Shard) -> None:
        dtype, on_cpu = shard.dtype, shard.device.type == "cpu"
        self.stream = torch.promote_types(dtype, torch.float32) if on_cpu else dtype
        make, _ = chosen_linear(dtype, shard.device)
        with torch.no_grad():
            self._layers = fast_layers(shard, make, small_norm, self.stream)
            self.norm = small_norm(shard.norm, self.stream) if shard.is_last else shard.norm
            self._table = None if shard.rotary is None else RotaryTable(shard)
            self._local_table = None if shard.local_rotary is None else RotaryTable(shard, local=True)

    def layers(self, x: torch.Tensor, batch: Batch, kv: Attends) -> torch.Tensor:
        """x [N, d] through all of them; x is used up."""
        turns = tuple(None if table is None else table.turn(batch) for table in (self._table, self._local_table))
        for index, layer in enumerate(self._layers):
            mixed = layer.attend(index, x, cast(Turns, turns), batch, kv)
            x = layer.after(x, mixed.reshape(batch.num_tokens, -1))
        return x


def _tokens(chosen: torch.Tensor) -> list[int]:
    """Raises WorkbenchError where a row could not be chosen from; all ranks have done their part by then."""
    tokens: list[int] = chosen.tolist()
    if NO_TOKEN in tokens:
        raise WorkbenchError(
            f"the model's logits of row {tokens.index(NO_TOKEN)} are not all finite, so no token can be chosen"
        )
    return tokens


def _undo(kv: Any, before: dict[Any, int | None]) -> None:
    """Sequences as they were before groups of a batch that was refused in the middle."""
    for name, length in before.items():
        if length is not None:
            kv.truncate(name, length)
        elif name in kv.lengths:
            kv.release(name)


class Link:
    """How rank 0's shard reaches the others: `tell` sends a command, and `unbroken` stands around it and what follows,
    so that an error which leaves the ranks out of step ends the run."""

    def __init__(self, model: int, tell: Callable[[dict[str, Any]], None], broken: Callable[[str], None]) -> None:
        self.notes = Notes()
        self._model, self._tell, self._broken = model, tell, broken

    def tell(self, message: dict[str, Any]) -> None:
        self._tell({"model": self._model, "notes": self.notes.take(), **message})

    def unbroken(self) -> Unbroken:
        return Unbroken(self._broken)


class Unbroken:
    """Around what all ranks do together: when it fails on this one, the others wait for what never comes."""

    def __init__(self, broken: Callable[[str], None], what: str = "a step") -> None:
        self._broken, self._what = broken, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, _: object) -> None:
        if kind is not None:
            self._broken(f"rank 0 stopped in the middle of {self._what} ({kind.__name__}: {error})")
