"""Steps that read and write the pool by themselves: the host keeps the books of a batch, and says where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.kv.paged_store import KeysAndValues, Store
from workbench.kv.slots import Places, Slots
from workbench.models.batch import Batch
from workbench.models.placed import Placed, blocks_of

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

    def attends_as_paged(self) -> bool:
        return type(self).attend is type(self).attend_of_pool

    def _copy(self, source: int, target: int, length: int) -> None:
        """A fork shares its blocks until one of the two writes."""

    def place_batch(self, batch: Batch) -> Placed | None:
        """As `Contiguous.place_batch`; None also where keys and values are stored as something else."""
        if not self.attends_as_paged() or not isinstance(self.store, KeysAndValues):
            return None
        if self.store.tensors[0].device.type != "cpu":
            return None
        self._begin_books(batch)
        where = blocks_of(*self.store.whole(), self.block_size)
        return Placed(where, self.tables_of(batch))

    def tables_of(self, batch: Batch) -> list[Sequence[int]]:
        """The blocks of each of its sequences."""
        return [self.tables.tables[name] for name in batch.sequences]

    def note_batch(self, batch: Batch) -> None:
        """A step has written the keys and values of all layers of the batch that was placed."""
        self._enter(self.config.num_layers - 1, batch)

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
