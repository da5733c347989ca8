"""Trees in a batch, in every kind of kv: what a node sees, what stays of a tree, and how many drafts leave no trace.

Every node of a tree has the logits of its own branch sent as a plain text. Where a kind is exact the oracle is eager
attention over the whole text; where it is not (`quantized`) the same kind, fed one token at a time.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_kv_contiguous import relative_difference, text
from test_kv_smaller import LATENT, SHARING, W

from workbench.errors import WorkbenchError
from workbench.kv import KINDS, DraftingKV, Recompute, Window, make_kv
from workbench.models import Batch, Decoder, prepare
from workbench.models.attention import causal_mask, eager_attention, sdpa_attention, tree_mask
from workbench.models.batch import depths

EXACT = 1e-9  # of the largest logit, float64

HEADS = {
    "mha": {"num_kv_heads": 4},
    "gqa": {},
    "gpt2": {"family": "gpt2", "num_kv_heads": 4},
    "windows": {"num_layers": 3, "sliding_window": W, "global_layers": (1,)},
    "sinks": {"sliding_window": W, "attention_sinks": 3},
    "narrow": {"sliding_window": 1, "attention_sinks": 2},
    "latent": {"num_kv_heads": 4, "head_dim": 12, "family": "deepseek_v3", "latent_attention": LATENT},
    "shared": SHARING,
    "shared windows": {"num_layers": 4, "sliding_window": W, "kv_sources": (0, 1, 0, 1)},
}
FEW = {"rewind": 5}
INT8 = {"format": "int8", "group": 8}
CASES: dict[str, tuple[str, str, dict]] = {
    **{
        f"{kind}, {heads}": (kind, heads, {})
        for kind in ("recompute", "contiguous")
        for heads in ("mha", "gqa", "gpt2", "windows", "sinks", "latent", "shared", "shared windows")
    },
    **{f"latent, {form}": ("latent", "latent", {"form": form}) for form in ("absorbed", "expanded", "auto")},
    "shared_layers": ("shared_layers", "shared", {}),
    **{f"window, {heads}": ("window", heads, FEW) for heads in ("windows", "sinks", "narrow", "shared windows")},
    "window, given": ("window", "gqa", FEW | {"window": W, "sinks": 2}),
    **{f"quantized, {heads}": ("quantized", heads, INT8) for heads in ("gqa", "windows", "sinks", "latent", "shared")},
    **{
        f"paged, {heads}": ("paged", heads, {"block_size": size})
        for heads, size in zip(
            ("mha", "gqa", "gpt2", "windows", "sinks", "latent", "shared", "shared windows"), (4, 1, 16, 3, 5, 4, 96, 7)
        )
    },
    "paged, few bits": ("paged", "gqa", {"block_size": 4, "format": "int8"}),
}
ARRANGED = ["as loaded, eager", "prepared, sdpa"]


def decoder(heads: str) -> Decoder:
    return random_decoder(tiny_config(vocab_size=64, **HEADS[heads])).double()


def stored(kv) -> list[torch.Tensor]:
    """All that it keeps from batch to batch."""
    held = [getattr(kv, name) for name in ("_keys", "_values", "_latents") if hasattr(kv, name)]
    held += [t for ring in getattr(kv, "_rings", ()) for t in (ring.keys, ring.values)]
    return held + [t for store in getattr(kv, "_stores", {}).values() for t in store.tensors]


def random_tree(count: int, rng: Random) -> list[int]:
    """Parents of so many nodes, the first a root. Now and then a second root, now and then a chain."""
    return [-1] + [rng.choice((i - 1, i - 1, rng.randint(-1, i - 1))) for i in range(1, count)]


def branch(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Trees:
    """Sends texts and trees through a kv as an engine does, and holds every row to the same text sent plainly."""

    def __init__(self, case: str, arranged: str = "prepared, sdpa", **given) -> None:
        self.kind, heads, settings = CASES[case]
        self.loaded = decoder(heads)
        eager = arranged == "as loaded, eager"
        self.model = self.loaded if eager else prepare(self.loaded)
        room = {} if self.kind == "recompute" else {"max_tokens": 96, "max_sequences": 6, "dtype": torch.float64}
        self.settings = {**room, **settings, **given, "attention": "eager" if eager else "sdpa"}
        self.kv, self.singly = self.fresh(), self.fresh()
        self.texts: dict[str, list[int]] = {}

    def fresh(self):
        return make_kv(self.kind, self.loaded.config, **self.settings)

    @torch.no_grad()
    def send(self, new: dict[str, list[int]], trees: dict[str, list[int]] | None = None) -> None:
        """New tokens of each sequence in one batch, some of them trees; every row of logits is checked."""
        trees = trees or {}
        first = [self.kv.lengths.get(name, 0) for name in new]
        unsent = [self.texts.get(name, [])[at:] for name, at in zip(new, first)]
        parents = [
            [*range(-1, len(u) - 1), *(len(u) + p for p in trees[name])] if name in trees else None
            for name, u in zip(new, unsent)
        ]
        batch = Batch.of(
            [u + tokens for u, tokens in zip(unsent, new.values())],
            first_positions=first,
            sequences=list(new),
            parents=parents,
            logits=[len(t) for t in new.values()],
        )
        logits = self.model(batch, self.kv)
        expected = torch.cat(
            [
                self.plain(
                    name,
                    [
                        [tokens[n] for n in branch(trees.get(name, range(-1, len(tokens))), node)]
                        for node in range(len(tokens))
                    ],
                )
                for name, tokens in new.items()
            ]
        )
        assert relative_difference(logits, expected) < EXACT
        for name, tokens in new.items():
            self.texts.setdefault(name, [])
            if name not in trees:
                self.texts[name] = self.texts[name] + tokens

    def plain(self, name: str, branches: list[list[int]]) -> torch.Tensor:
        """[branches, V] logits after the text of the sequence and each branch."""
        past = self.texts.get(name, [])
        if "format" in self.settings:
            return torch.cat([self.one_by_one(name, past, tokens) for tokens in branches])
        config, own = self.loaded.config, self.settings
        if "window" in own:
            config = replace(config, sliding_window=own["window"], attention_sinks=own["sinks"])
        batch = Batch.of([past + tokens for tokens in branches])
        return self.loaded(batch, Recompute(config, attention="eager"))

    def one_by_one(self, name: str, past: list[int], tokens: list[int]) -> torch.Tensor:
        """[1, V] logits after the last token. What came first was sent at once, and all else singly."""
        if not past:
            return self.loaded(Batch.of([tokens]), self.fresh())
        twin = self.singly
        while (at := twin.lengths.get(name, 0)) < len(past):
            new = past[at : at + 1] if at else past
            self.loaded(Batch.of([new], first_positions=[at], sequences=[name]), twin)
        twin.fork(name, "branch")
        for at, token in enumerate(tokens, len(past)):
            out = self.loaded(Batch.of([[token]], first_positions=[at], sequences=["branch"]), twin)
        twin.release("branch")
        return out

    def keep(self, name: str, tokens: list[int], parents: list[int], node: int) -> None:
        """One branch of the tree that came last, up to this node; −1 for none."""
        path, before = branch(parents, node), len(self.texts[name])
        if self.kv.lengths[name]:
            assert self.kv.lengths[name] == before + len(tokens)
            self.kv.keep(name, before, [before + n for n in path])
            assert self.kv.lengths[name] == before + len(path)
        self.texts[name] = self.texts[name] + [tokens[n] for n in path]


# -- what a node sees, and what stays ----------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "arranged"), [*zip(CASES, cycle(ARRANGED))])  # every kind of kv in both
def test_every_node_sees_its_own_branch_and_what_is_kept_goes_on_as_a_text(case, arranged):
    run, rng = Trees(case, arranged), Random(case)
    run.send({"a": text(11, 1), "b": text(11, 2)})
    for round_ in range(7):
        new, trees = {}, {}
        for name in "ab":
            count = 1 + min(rng.randint(1, 7), run.kv.draft_room(name))
            new[name], trees[name] = text(count, rng.randint(0, 999)), random_tree(count, rng)
        if round_ == 2:  # beside a prefill and, from then on, beside single tokens
            new = {"c": text(11, 3), **new}
        elif round_ > 2:
            new["c"] = text(1, round_)
        run.send(new, trees)
        for name, tree in trees.items():
            run.keep(name, new[name], tree, rng.randint(0, len(tree) - 1))
    assert len(run.texts["a"]) > W + 8
    run.send({name: text(1, seed) for seed, name in enumerate("cab")})
    run.send({name: text(2 if run.kv.draft_room(name) else 1, seed) for seed, name in enumerate("ab")})
    check_counts(run)


def check_counts(run: Trees) -> None:
    """Lengths and bytes are those of a kv that the texts were sent to and nothing else."""
    other = run.fresh()
    for name, ids in run.texts.items():
        run.loaded(Batch.of([ids], sequences=[name]), other)
    assert dict(run.kv.lengths) == dict(other.lengths)
    if isinstance(run.kv, Window):  # branches that were cut have taken the place of older tokens
        assert 0 < run.kv.bytes_in_use <= other.bytes_in_use
    else:
        assert run.kv.bytes_in_use == other.bytes_in_use


@pytest.mark.parametrize("case", ["contiguous, gqa", "latent, auto", "window, sinks", "quantized, gqa", "paged, gqa"])
def test_a_tree_may_be_the_first_that_comes_and_may_go_again_whole(case):
    run = Trees(case)
    tokens, tree = text(5), [-1, -1, 0, 1, 1]
    run.send({"a": tokens}, {"a": tree})
    run.kv.truncate("a", 0)
    assert run.kv.lengths["a"] == run.kv.bytes_in_use == 0
    run.send({"a": tokens}, {"a": tree})
    run.keep("a", tokens, tree, 4)
    run.send({"a": text(1, 3)})


@pytest.mark.parametrize("case", CASES)
def test_a_tree_that_was_interrupted_never_came(case):
    run = Trees(case, "as loaded, eager")
    run.send({"a": text(11, 1), "b": text(11, 2)})
    before = [t.clone() for t in stored(run.kv)], dict(run.kv.lengths), run.kv.bytes_in_use
    first = [run.kv.lengths[name] for name in "ab"]
    batch = Batch.of([text(4), text(3)], first_positions=first, sequences=["a", "b"], parents=[[-1, 0, 0, 1], None])
    run.kv.begin(batch)
    run.loaded.run_layer(0, *run.loaded.start(batch), batch, run.kv)
    run.kv.truncate("b", first[1])  # the next call of any kind undoes it
    assert dict(run.kv.lengths) == before[1] and run.kv.bytes_in_use == before[2]
    assert all(map(torch.equal, stored(run.kv), before[0]))
    run.send({"a": text(1, 3), "b": text(1, 4)})


# -- drafts leave no trace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["contiguous, gqa", "latent, auto", "window, windows", "quantized, windows"])
@torch.no_grad()
def test_a_chain_that_is_cut_again_never_was(case):
    run = Trees(case)
    drafted, singly = run.kv, run.fresh()
    for kv in (drafted, singly):
        run.model(Batch.of([text(11)]), kv)
    for at in range(11, 50):
        room = min(drafted.draft_room(0), 40)
        now = Batch.of([text(1 + room, at)], first_positions=[at], logits="all")
        mine = run.model(now, drafted)[:1]
        theirs = run.model(Batch.of([text(1 + room, at)[:1]], first_positions=[at]), singly)
        assert relative_difference(mine, theirs) < EXACT
        drafted.truncate(0, at + 1)
        assert drafted.lengths == singly.lengths
        if run.kind != "window":
            assert drafted.bytes_in_use == singly.bytes_in_use
            assert all(
                torch.allclose(a.double(), b.double(), atol=1e-9, rtol=0)
                for a, b in zip(stored(drafted), stored(singly))
            )


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] in ("quantized", "window")])
@torch.no_grad()
def test_greedy_tokens_with_drafts_are_those_without(case, trees):
    """Drafts of every length there is room for, each token right or wrong by a coin."""
    run, rng = Trees(case), Random(case)
    kv, plain = run.kv, text(11)
    single = run.fresh()
    last = run.model(Batch.of([plain]), single)
    for at in range(11, 75):
        plain = [*plain, int(last.argmax())]
        last = run.model(Batch.of([plain[-1:]], first_positions=[at]), single)
    run.model(Batch.of([plain[:11]]), kv)
    done = 11  # tokens that kv remembers; plain[done] is known and not yet sent
    while done < 70:
        depth = min(rng.choice((0, 1, 3, 30)), kv.draft_room(0), 72 - done)
        right = rng.randint(0, depth)
        tokens, wrong = plain[done : done + 1 + right], text(depth - right, done)
        parents = list(range(-1, depth))
        if trees:  # all wrong ones follow the first token, before the right one
            tokens[1:1] = wrong
            parents = [-1, *[0] * len(wrong), *(i and i + len(wrong) for i in range(right))]
        else:
            tokens += wrong
        batch = Batch.of([tokens], first_positions=[done], parents=[parents], logits="all")
        best = run.model(batch, kv).argmax(dim=-1).tolist()
        path, token = [0], best[0]
        while found := [n for n, p in enumerate(parents) if p == path[-1] and tokens[n] == token]:
            path.append(found[0])
            token = best[found[0]]
        assert [tokens[n] for n in path] + [token] == plain[done : done + len(path) + 1]
        kv.keep(0, done, [done + n for n in path])
        done += len(path)


def test_more_drafts_than_there_is_room_for_leave_a_trace_in_the_quantized_cache():
    run = Trees("quantized, gqa")
    for extra in (0, 1):
        drafted, never = run.fresh(), run.fresh()
        for kv in (drafted, never):
            run.loaded(Batch.of([text(11)]), kv)
        room = drafted.draft_room(0)
        assert room == 2 * INT8["group"] - 11 - 1
        for kv, count in ((drafted, 1 + room + extra), (never, 1)):
            run.loaded(Batch.of([text(count, 1)], first_positions=[11]), kv)
        drafted.truncate(0, 12)
        close = [torch.allclose(a, b, atol=1e-9) for a, b in zip(drafted.remembered(0, 0), never.remembered(0, 0))]
        assert all(close) == (extra == 0)


def test_how_much_room_each_kind_has_for_drafts():
    for case, room in (
        ("contiguous, gqa", 96 - 11 - 1),
        ("paged, gqa", 96 - 11 - 1),
        ("shared_layers", 96 - 11 - 1),
        ("latent, auto", 96 - 11 - 1),
        ("recompute, gqa", 256 - 1),
        ("quantized, gqa", 16 - 11 - 1),
        ("window, sinks", 5),  # 3 sinks, W − 1 = 7 and 5 more places are 15
        ("window, windows", 5),
    ):
        run = Trees(case)
        empty = {"contiguous": 95, "shared_layers": 95, "latent": 95, "recompute": 255, "quantized": 15, "paged": 95}
        places = {"window, sinks": 3 + 7 + 5, "window, windows": 7 + 5}.get(case, 0)
        assert run.kv.draft_room("new") == empty.get(run.kind, places - 1)
        run.send({"a": text(11)})
        assert run.kv.draft_room("a") == room, case
        assert run.kv.draft_room("new") == empty.get(run.kind, places - 1)


def test_a_full_slot_has_no_room_for_drafts_and_a_group_is_quantized_without_them():
    run = Trees("quantized, gqa", max_tokens=20)
    run.send({"a": text(11)})
    rooms = []
    while run.kv.lengths["a"] < 20:
        rooms.append(run.kv.draft_room("a"))
        run.model(Batch.of([[1]], first_positions=[run.kv.lengths["a"]], sequences=["a"]), run.kv)
    assert rooms == [4, 3, 2, 1, 0, 0, 2, 1, 0] and run.kv.draft_room("a") == 0


# -- refusals ------------------------------------------------------------------------------------------------------


def state(kv) -> tuple:
    return dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved, [t.clone() for t in stored(kv)]


def unchanged(kv, before: tuple) -> bool:
    now = state(kv)
    return now[:3] == before[:3] and all(map(torch.equal, now[3], before[3]))


TREE = [-1, 0, 0, 1]
OUT_OF_ORDER = {
    "more tokens": (
        lambda kv: kv.begin(Batch.of([[5]], first_positions=[15], sequences=["a"])),
        r"ends in a tree of 4 tokens, and before it can take the next batch .* truncate\(sequence, 11\) for none",
    ),
    "more tokens beside another": (
        lambda kv: kv.begin(Batch.of([[5], [6]], first_positions=[0, 15], sequences=["n", "a"])),
        "before it can take the next batch",
    ),
    "a fork": (lambda kv: kv.fork("a", "n"), "before it can be forked one branch has to be chosen"),
    "two branches": (lambda kv: kv.keep("a", 12, [12, 13]), "the token at place 13 follows the one at 11"),
    "a child without its parent": (lambda kv: kv.keep("a", 12, [14]), "at place 14 follows the one at 12"),
    "a cut among branches": (lambda kv: kv.truncate("a", 14), r"one branch, or cut it to 0 … 11 tokens"),
    "descending": (lambda kv: kv.keep("a", 11, [12, 11]), r"places 11 … 14, ascending, got \[12, 11\]"),
    "twice the same": (lambda kv: kv.keep("a", 11, [11, 11]), "ascending"),
    "below the length": (lambda kv: kv.keep("a", 11, [10]), "ascending"),
    "beyond the last": (lambda kv: kv.keep("a", 12, [15]), "ascending"),
    "a place that is no number": (lambda kv: kv.keep("a", 12, ["12"]), "ascending"),
    "a length beyond the last": (lambda kv: kv.keep("a", 16, []), r"can be cut to 0 … 15"),
    "a length that is no number": (lambda kv: kv.keep("a", True, []), "got True"),
    "a gap in the text before": (lambda kv: kv.keep("a", 5, [11]), "follows the one at 10, and .* at 4"),
    "an unknown name": (lambda kv: kv.keep("ghost", 0, []), "not live"),
}


@pytest.mark.slow
@pytest.mark.parametrize("misuse", OUT_OF_ORDER)
@pytest.mark.parametrize("case", ["contiguous, gqa", "latent, auto", "window, windows", "quantized, gqa"])
def test_a_tree_is_put_in_order_before_anything_else(case, misuse):
    run = Trees(case)
    call, message = OUT_OF_ORDER[misuse]
    run.send({"a": text(11), "b": text(3)})
    run.send({"a": text(4, 1)}, {"a": TREE})
    before = state(run.kv)
    with pytest.raises(WorkbenchError, match=message):
        call(run.kv)
    assert unchanged(run.kv, before)
    run.send({"b": text(1)})  # others go on
    run.keep("a", text(4, 1), TREE, 3)
    run.send({"a": text(1)})


def test_a_tree_can_be_released_and_its_name_used_again():
    run = Trees("contiguous, gqa")
    run.send({"a": text(4)}, {"a": TREE})
    run.kv.release("a")
    run.texts.clear()
    run.send({"a": text(4)})
    run.kv.fork("a", "b")


def test_what_stays_of_a_plain_chain_has_no_gaps():
    run = Trees("contiguous, gqa")
    run.send({"a": text(8)})
    with pytest.raises(WorkbenchError, match="place 6 follows the one at 5, and the one kept before it is at 4"):
        run.kv.keep("a", 5, [6])
    run.kv.keep("a", 5, [5, 6])
    run.texts["a"] = run.texts["a"][:7]
    run.send({"a": text(1)})


@pytest.mark.parametrize(
    ("case", "count", "message"),
    [
        ("quantized, gqa", 6, "a group of 8 would leave the recent part .* room for 5 tokens until then"),
        ("window, windows", 7, "this rolling buffer can take 5 of them beside the one that stays.*larger rewind"),
        ("contiguous, gqa", 86, "would grow to 97 tokens"),
    ],
)
def test_a_tree_beyond_the_room_is_refused_and_nothing_changes(case, count, message):
    run = Trees(case)
    run.send({"a": text(11)})
    before = state(run.kv)
    batch = Batch.of(
        [text(3), text(count)], first_positions=[0, 11], sequences=["n", "a"], parents=[None, [-1] + [0] * (count - 1)]
    )
    with pytest.raises(WorkbenchError, match=message):
        run.kv.begin(batch)
    assert unchanged(run.kv, before)


def test_recompute_has_nothing_to_keep():
    run = Trees("recompute, gqa")
    run.send({"a": text(4)}, {"a": TREE})
    run.kv.keep("a", 0, ())
    for call, message in (
        (lambda: run.kv.keep("a", 0, [0]), "remembers 0 tokens of sequence 'a', it cannot keep those at"),
        (lambda: run.kv.keep("a", 1, []), "cannot be cut to 1"),
        (lambda: run.kv.keep("ghost", 0, [0]), "not live"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            call()


@pytest.mark.parametrize(
    "case",
    [
        "recompute, gqa",
        "contiguous, gqa",
        "latent, auto",
        "shared_layers",
        "window, sinks",
        "quantized, gqa",
        "paged, gqa",
    ],
)
def test_every_kind_takes_drafts_and_trees(case):
    kv = Trees(case).kv
    assert isinstance(kv, DraftingKV) and kv.holds_trees
    assert {CASES[c][0] for c in CASES} == set(KINDS) - {"state"}, "a state follows one branch (test_kv_state.py)"


# -- batches and masks -----------------------------------------------------------------------------------------------


def test_siblings_share_a_position_and_places_are_counted():
    batch = Batch.of(
        [[8, 9, 2, 4, 6], [1, 2, 3], [7]],
        first_positions=[5, 2, 0],
        parents=[[-1, 0, 0, 1, 2], [-1, 0, 1], None],
        logits=[5, 0, 1],
    )
    assert batch.positions.tolist() == [5, 6, 6, 7, 7, 2, 3, 4, 0]
    assert batch.parents == ((-1, 0, 0, 1, 2), None, None)
    assert batch.lengths_after() == (10, 5, 1)
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 8]
    assert depths([-1, 0, -1, 2, 1]) == [0, 1, 0, 1, 2]


def test_a_tree_of_one_branch_is_a_text():
    assert Batch.of([[1, 2], [3]], parents=[[-1, 0], None]).parents is None
    assert Batch.of([[1, 2], [3]], parents=[None, [-1]]).parents is None
    assert Batch.of([[1, 2]], parents=[[-1, -1]]).parents == ((-1, -1),)


@pytest.mark.parametrize(
    ("rows", "expected"), [([1, 1], [2, 4]), ([3, 2], None), ([0, 2], [3, 4]), ("last", [2, 4]), ("all", None)]
)
def test_rows_with_logits_can_be_asked_for_a_sequence_each(rows, expected):
    found = Batch.of([[1, 2, 3], [4, 5]], logits=rows).logit_rows
    assert expected == (None if found is None else found.tolist())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parents": [[-1, 0, 1]]}, "2 token lists need as many lists of parents"),
        ({"parents": [[-1, 0], None]}, "a parent for each of its 3 tokens, got 2"),
        ({"parents": [[-1, 1, 0], None]}, "token 1 of a tree .* 0 … 0; got parent 1. Send parents before"),
        ({"parents": [[-1, 0, -2], None]}, "got parent -2"),
        ({"parents": [[-1, 0, False], None]}, "got parent False"),
        ({"parents": [[0, 0, 0], None]}, r"token 0 of a tree follows −1 \(what is remembered\)"),
        ({"logits": [1]}, "2 token lists need as many numbers of rows with logits, got 1"),
        ({"logits": [4, 1]}, "3 tokens in the batch has logits for its last 0 … 3 of them, got 4"),
        ({"logits": [-1, 1]}, "got -1"),
        ({"logits": [0, 0]}, "at least one row of logits"),
        ({"logits": "first"}, 'a number of rows for each sequence, or "last" or "all", got'),
        ({"logits": 3}, '"last" or "all", got 3'),
    ],
)
def test_what_is_no_tree_and_no_row_is_refused(given, message):
    with pytest.raises(WorkbenchError, match=message):
        Batch.of([[1, 2, 3], [4, 5]], **given)


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("sinks", [0, 2])
def test_the_mask_of_a_tree_is_that_of_each_branch(window, sinks):
    rng, past = Random(3), 5
    for _ in range(20):
        parents = random_tree(rng.randint(1, 9), rng)
        mask = tree_mask(parents, past + len(parents), window, "cpu", sinks)
        for node in range(len(parents)):
            path = branch(parents, node)
            expected = torch.zeros(past + len(parents), dtype=torch.bool)
            expected[[*range(past), *(past + n for n in path)]] = causal_mask(1, past + len(path), window, "cpu", sinks)
            assert torch.equal(mask[node], expected)
    chain = list(range(-1, 6))
    assert torch.equal(tree_mask(chain, 12, window, "cpu", sinks), causal_mask(7, 12, window, "cpu", sinks))


def test_both_attentions_give_the_same_for_a_tree():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, generator=generator) for n, h in ((6, 4), (13, 2), (13, 2)))
    look = {"scale": 0.3, "window": 4, "sinks": 1, "parents": (-1, 0, 0, 1, 1, -1)}
    assert torch.allclose(sdpa_attention(q, k, v, **look), eager_attention(q, k, v, **look), atol=1e-5)
