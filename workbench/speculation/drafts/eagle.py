"""An EAGLE head as the draft: the next feature from this one and the token that came after it (arXiv 2401.15077).

    committed   row i: feature i (the target's) and token i + 1, for all but the last token; kept in a cache of its own
    drafting    the last row's guess of a feature gives a law, a token is drawn; guess and token are the next row, …

Rows that were drafted go from the cache when the round is over: the next ask brings the target's features of what was
accepted, and the rows are made again from these.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch

from workbench.errors import WorkbenchError
from workbench.kv import kv_for
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.models.fast_heads import FastEagle
from workbench.models.heads import EagleHead, load_heads
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.drafts.growing import (
    Laws,
    Path,
    Paths,
    check_branching,
    grow_together,
    levels_that_fit,
    tree_of,
)
from workbench.speculation.proposal import Proposal


class EagleDraft(Draft):
    """An EAGLE head of the target. `head`: a trained one or its name, default "<target>-eagle".

    branching: children a node has, level by level, drawn without replacement; None: a chain as long as the ask allows.
    max_sequences, max_tokens: how many texts it can draft for at the same time, and how long (default: its context).
    """

    wants_features = True

    def __init__(
        self,
        target: Decoder,
        head: EagleHead | str | None = None,
        *,
        branching: Sequence[int] | None = None,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        name: str = "eagle",
    ) -> None:
        super().__init__()
        if head is None or isinstance(head, str):
            head = load_heads(head or f"{target.name}-eagle", dtype=target.dtype, device=target.device)
        if not isinstance(head, EagleHead):
            raise WorkbenchError(
                f"an EAGLE draft takes an EAGLE head, got {getattr(head, 'kind', type(head).__name__)}"
            )
        self.name, self.head, self.branching = name, head, check_branching(branching)
        self._fast = FastEagle(head, target)
        self.max_tokens = max_tokens or head.config.context_length
        self._kv = kv_for("contiguous", self._fast, max_sequences=max_sequences, max_tokens=self.max_tokens)
        self._guesses: dict[Hashable, dict[Path, torch.Tensor]] = {}  # [d] feature guessed after each path

    def check_fits(self, target: Decoder) -> None:
        self.head.check_target(target)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        with torch.inference_mode():
            self._read_committed(asks)
            room = [self.max_tokens - len(ask.token_ids) for ask in asks]
            levels = [levels_that_fit(self.branching, ask, places) for ask, places in zip(asks, room)]
            found = grow_together(asks, levels, functools.partial(self._laws, asks))
        for ask in asks:
            self._kv.truncate(ask.sequence, len(ask.token_ids) - 1)
            del self._guesses[ask.sequence]
        return found

    def listen(self, ask: Ask, count: int) -> list[bool]:
        """Of tokens whose features came since the last ask, at most."""
        with torch.inference_mode():
            guesses = self._read_committed([ask])  # the row of token i guesses token i + 1
            del self._guesses[ask.sequence]
            count = min(count, len(guesses) - 1)
            if count < 1:
                return []
            best = self._fast.logits_of(guesses[-1 - count : -1]).argmax(dim=-1).tolist()
        return [guess == token for guess, token in zip(best, ask.token_ids[-count:])]

    def release(self, sequence: Hashable) -> None:
        self._guesses.pop(sequence, None)
        if sequence in self._kv.lengths:
            self._kv.release(sequence)

    def _read_committed(self, asks: Sequence[Ask]) -> torch.Tensor:
        """[N, d] guesses of the rows of what is certain, from the target's features: those since the last ask."""
        lists, starts = [], []
        for ask in asks:
            rows = len(ask.token_ids) - 1
            start = rows - len(ask.features)
            known = self._kv.lengths.get(ask.sequence, 0)
            assert known >= start, f"{known} rows are known, and the new features begin at {start}"
            if known > start:  # the round before was interrupted
                self._kv.truncate(ask.sequence, start)
            lists.append(ask.token_ids[start + 1 :])
            starts.append(start)
        guesses = self._forward(asks, lists, starts, None, torch.cat([ask.features for ask in asks]))
        for ask, of_ask in zip(asks, guesses.split([len(one) for one in lists])):
            self._guesses[ask.sequence] = {(): of_ask[-1]}
        return guesses

    def _read_drafted(self, asks: Sequence[Ask], paths: Paths) -> None:
        """One row for the end of each path that has no guess yet. A chain goes on; a tree is sent whole, level by level
        again: its rows are few."""
        who, lists, starts, trees, nodes = [], [], [], [], []
        for index, of_ask in paths.items():
            ask = asks[index]
            if () in map(tuple, of_ask):
                continue  # the first level follows the text
            start = self._kv.lengths[ask.sequence]
            if len(of_ask) == 1 and start == len(ask.token_ids) - 2 + len(of_ask[0]):
                sent, parents = [tuple(of_ask[0])], None
            else:
                start = len(ask.token_ids) - 1
                self._kv.truncate(ask.sequence, start)
                sent, parents = tree_of(of_ask)
            who.append(ask)
            lists.append([path[-1] for path in sent])
            starts.append(start)
            trees.append(parents)
            nodes.append(sent)
        if not who:
            return
        features = [self._guesses[ask.sequence][path[:-1]] for ask, sent in zip(who, nodes) for path in sent]
        guesses = iter(self._forward(who, lists, starts, trees, torch.stack(features)))
        for ask, sent in zip(who, nodes):
            self._guesses[ask.sequence].update(zip(sent, guesses))

    def _forward(self, asks, lists, starts, trees, features: torch.Tensor) -> torch.Tensor:
        """[N, d] guesses of the rows of these tokens and features, all sequences in one forward."""
        batch = Batch.of(
            lists,
            first_positions=starts,
            sequences=[ask.sequence for ask in asks],
            parents=trees,
            device=self._fast.device,
        )
        self.model_calls += 1
        self.rows_processed += batch.num_tokens
        return self._fast(batch, features, self._kv)

    def _laws(self, asks: Sequence[Ask], paths: Paths) -> Laws:
        """The law after each path."""
        self._read_drafted(asks, paths)
        guesses = [
            self._guesses[asks[i].sequence][tuple(path)] for i, of_ask in paths.items() for path in of_ask
        ]
        logits = self._fast.logits_of(torch.stack(guesses))
        found, start = {}, 0
        for index, of_ask in paths.items():
            texts = [[*asks[index].token_ids, *path] for path in of_ask]
            rows = logits[start : start + len(texts)]
            start += len(texts)
            found[index] = list(asks[index].law.beliefs(rows, texts.__getitem__))
        return found
