"""An EAGLE head as the draft: it predicts the next hidden state from this one and the token after it (arXiv 2401.15077,
whose *features* are the hidden states after the target's last norm).

    committed   input i: the target's hidden state i and token i + 1, for all tokens but the last; kept in a kv cache of
                the head's own
    drafting    the predicted hidden state gives a distribution, from which a token is drawn; both are the next input

Drafted inputs leave the head's cache at the end of the round: the next ask brings the target's hidden states of the
accepted tokens, and their entries are computed again from these.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch

from workbench.errors import WorkbenchError
from workbench.kv import kv_for
from workbench.models.batch import Batch
from workbench.models.fast import Model
from workbench.models.fast_heads import FastEagle
from workbench.models.heads import EagleHead, Heads, load_heads
from workbench.speculation.drafts.contract import Ask, Draft, with_room
from workbench.speculation.drafts.growing import (
    Distributions,
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
    max_sequences, max_tokens: how many sequences it drafts for at a time (see `make_room`), and their length (default:
    its context).
    """

    wants_hidden_states = True

    def __init__(
        self,
        target: Model,
        head: Heads | str | None = None,
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
        self._make_kv = functools.partial(kv_for, "contiguous", self._fast, max_tokens=self.max_tokens)
        self._kv = self._make_kv(max_sequences=max_sequences)
        self._guesses: dict[Hashable, dict[Path, torch.Tensor]] = {}  # [d] hidden state predicted after each path
        self._begins: dict[Hashable, int] = {}  # the token whose hidden state was the first to come: position 0 here

    def check_fits(self, target: Model) -> None:
        self.head.check_target(target)

    def make_room(self, sequences: int) -> None:
        self._kv = with_room(self._kv, self._make_kv, sequences, self.name)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        with torch.inference_mode():
            self._read_committed(asks)
            room = [self.max_tokens - 1 - self._committed(ask) for ask in asks]
            levels = [levels_that_fit(self.branching, ask, places) for ask, places in zip(asks, room)]
            proposals = grow_together(asks, levels, functools.partial(self._distributions, asks))
        for ask in asks:
            self._kv.truncate(ask.sequence, self._committed(ask))
            del self._guesses[ask.sequence]
        return proposals

    def listen(self, ask: Ask, count: int) -> list[bool]:
        """For at most the tokens whose hidden states came since the last ask."""
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
        self._begins.pop(sequence, None)
        if sequence in self._kv.lengths:
            self._kv.release(sequence)

    def _committed(self, ask: Ask) -> int:
        """Inputs that are certain: all tokens but the last, from where hidden states begin."""
        return len(ask.token_ids) - 1 - self._begins[ask.sequence]

    def _read_committed(self, asks: Sequence[Ask]) -> torch.Tensor:
        """[N, d] predictions after the tokens that are certain, from the target's hidden states since the last ask."""
        lists, starts = [], []
        for ask in asks:
            first = len(ask.token_ids) - 1 - len(ask.hidden)
            begin = self._begins.setdefault(ask.sequence, first)
            start, known = first - begin, self._kv.lengths.get(ask.sequence, 0)
            assert known >= start, f"{known} rows are known, and the new hidden states begin at {start}"
            if known > start:  # the round before was interrupted
                self._kv.truncate(ask.sequence, start)
            lists.append(ask.token_ids[first + 1 :])
            starts.append(start)
        guesses = self._forward(asks, lists, starts, None, torch.cat([ask.hidden for ask in asks]))
        for ask, of_ask in zip(asks, guesses.split([len(one) for one in lists])):
            self._guesses[ask.sequence] = {(): of_ask[-1]}
        return guesses

    def _read_drafted(self, asks: Sequence[Ask], paths: Paths) -> None:
        """Run the head on the end of each path without a prediction. A chain continues from its cache; a tree is sent
        whole at each level, since it has few nodes."""
        who, lists, starts, trees, nodes = [], [], [], [], []
        for index, of_ask in paths.items():
            ask = asks[index]
            if () in map(tuple, of_ask):
                continue  # the first level follows the text
            start = self._kv.lengths[ask.sequence]
            if len(of_ask) == 1 and start == self._committed(ask) - 1 + len(of_ask[0]):
                sent, parents = [tuple(of_ask[0])], None
            else:
                start = self._committed(ask)
                self._kv.truncate(ask.sequence, start)
                sent, parents = tree_of(of_ask)
            who.append(ask)
            lists.append([path[-1] for path in sent])
            starts.append(start)
            trees.append(parents)
            nodes.append(sent)
        if not who:
            return
        hidden_states = [self._guesses[ask.sequence][path[:-1]] for ask, sent in zip(who, nodes) for path in sent]
        guesses = iter(self._forward(who, lists, starts, trees, torch.stack(hidden_states)))
        for ask, sent in zip(who, nodes):
            self._guesses[ask.sequence].update(zip(sent, guesses))

    def _forward(
        self,
        asks: Sequence[Ask],
        lists: Sequence[Sequence[int]],
        starts: Sequence[int],
        trees: Sequence[Sequence[int] | None] | None,
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        """[N, d] predictions from these tokens and hidden states, all sequences in one forward."""
        batch = Batch.of(
            lists,
            first_positions=starts,
            sequences=[ask.sequence for ask in asks],
            parents=trees,
            device=self._fast.device,
        )
        self.model_calls += 1
        self.rows_processed += batch.num_tokens
        return self._fast(batch, hidden_states, self._kv)

    def _distributions(self, asks: Sequence[Ask], paths: Paths) -> Distributions:
        """The distribution after each path."""
        self._read_drafted(asks, paths)
        guesses = [self._guesses[asks[i].sequence][tuple(path)] for i, of_ask in paths.items() for path in of_ask]
        logits = self._fast.logits_of(torch.stack(guesses))
        distributions, start = {}, 0
        for index, of_ask in paths.items():
            texts = [[*asks[index].token_ids, *path] for path in of_ask]
            rows = logits[start : start + len(texts)]
            start += len(texts)
            distributions[index] = list(asks[index].distribution.confidences(rows, texts.__getitem__))
        return distributions
