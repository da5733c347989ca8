"""Steps that read and write the pool by themselves: the host keeps the books of a batch, and says where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.kv.paged_store import Store
from workbench.kv.slots import Places, Slots
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.placed import InCodedBlocks, Keys, Placed

if TYPE_CHECKING:
    from workbench.kv.blocks import BlockTables


class PlacesInBlocks(Slots):
    """What `Paged` is besides: see the module. A class on top whose `attend` is its own keeps its batches to itself."""

    tables: BlockTables
    store: Store
    block_size: int
    attend: ClassVar[Any]
    attend_of_pool: ClassVar[Any]  # that of `Paged`, whatever a class on top has
    books_only = False  # while a batch begins that nobody will attend with
    bytes_read = 0  # of keys and values in codes, by steps that read them by themselves
    _where: Keys | InCodedBlocks | None = None  # of the batch that was placed
    config: ModelConfig
    format: str | None

    def attends_as_paged(self) -> bool:
        return type(self).attend is type(self).attend_of_pool

    def _copy(self, source: int, target: int, length: int) -> None:
        """A fork shares its blocks until one of the two writes."""

    def why_not_placed(self, batch: Batch) -> str:
        """Why a batch has to come through `attend`; "" where it does not."""
        if not self.attends_as_paged():
            return f"a {type(self).__name__} attends in a way of its own"
        where = self.store.where(self.block_size)
        if where is None:
            return f"this {type(self).__name__} keeps keys and values in another form or place"
        if self.store.tensors[0].device.type != "cpu":
            return f"it is for CPUs, and this cache is on {self.store.tensors[0].device}"
        if not isinstance(where, InCodedBlocks):
            return ""
        if self.format == "int4" and self.config.head_dim % 16:
            return f"codes of 4 bits are read for heads of a multiple of 16 values; these have {self.config.head_dim}"
        return "" if batch.parents is None else "a tree over a cache in codes runs as it is"

    def place_batch(self, batch: Batch) -> Placed | None:
        """As `Contiguous.place_batch`; None where `why_not_placed` says why."""
        if self.why_not_placed(batch):
            return None
        self._begin_books(batch)
        self._where = self.store.where(self.block_size)
        assert self._where is not None, "why_not_placed was asked"
        return Placed(self._where, self.tables_of(batch))

    def tables_of(self, batch: Batch) -> list[Sequence[int]]:
        """The blocks of each of its sequences."""
        return [self.tables.tables[name] for name in batch.sequences]

    def note_batch(self, batch: Batch) -> None:
        """A step has written the keys and values of all layers of the batch that was placed."""
        self._enter(self.config.num_layers - 1, batch)
        if isinstance(self._where, InCodedBlocks):
            self.bytes_read += self._where.bytes_read
        self._where = None

    def begin_books(self, batch: Batch) -> Places:
        """`begin` for a step that attends by itself: only tables and lengths change, as if all layers had run."""
        places = self._begin_books(batch)
        self.note_batch(batch)
        return places

    def _begin_books(self, batch: Batch) -> Places:
        """Until `note_batch` the batch is an unfinished one: the next `begin` undoes it."""
        self.books_only = True
        try:
            self.begin(batch)
        finally:
            self.books_only = False
        assert self._places is not None, "a batch was accepted"
        return self._places
