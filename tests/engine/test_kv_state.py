"""The state cache: what it remembers is what a whole forward gives, it goes back as far as it says and no further.

Cells alone are held to a plain model of theirs at the end. The engine over it is in test_engine_state.py.
"""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config
from test_kv_contiguous import relative_difference, text
from test_mixers import SHAPES
from test_paged import alone, send

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments.costs import kv_bytes
from workbench.kv import Recompute, State, kv_for
from workbench.kv.blocks import NoRoom
from workbench.kv.state_cells import EMPTY, StateCells
from workbench.models import Batch
from workbench.models.decoder import Decoder

EXACT = 1e-9
KINDS = sorted(SHAPES)
LAYERS = {  # by the number of layers: which of them attend
    "alone": (False, False),
    "hybrid": (False, True, False),
}


def model_of(kind: str, layers: str = "hybrid", **changes) -> Decoder:
    attends = LAYERS[layers]
    shape = {"vocab_size": 64, "hidden_size": 12, "num_layers": len(attends), "num_heads": 2, "num_kv_heads": 1}
    shape |= {"head_dim": 6, "intermediate_size": 16, "context_length": 64, "state_shape": SHAPES[kind]}
    mixers = tuple("attention" if one else kind for one in attends)
    return random_decoder(tiny_config(**shape | {"mixers": mixers} | changes)).double()


@pytest.fixture(params=KINDS, scope="module")
def every_model(request) -> Decoder:
    """A hybrid of every kind."""
    return model_of(request.param)


@pytest.fixture(params=LAYERS, scope="module")
def model(request) -> Decoder:
    return model_of("linear_attention", request.param)


@pytest.fixture(scope="module")
def hybrid() -> Decoder:
    return model_of("linear_attention")


def states(model, **given) -> State:
    room = {"max_sequences": 4, "max_tokens": 64, "block_size": 4, "dtype": torch.float64, "rewind": 4}
    return State(model.config, **{**room, **given})


def exact(logits: torch.Tensor, model, *texts: list[int]) -> bool:
    return relative_difference(logits, alone(model, *texts)) < EXACT


def check(kv: State) -> None:
    kv.cells.check(kv.lengths)
    kv.tables.check()


# -- what is remembered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 8, 40])
def test_a_prompt_in_chunks_of_any_size_and_then_token_by_token_is_the_whole_forward(every_model, chunk):
    model, prompt = every_model, text(21)
    kv = states(model)
    for at in range(0, len(prompt), chunk):
        logits = send(model, kv, a=prompt[at : at + chunk])
    assert exact(logits, model, prompt)
    for turn in range(3):
        prompt = [*prompt, turn]
        assert exact(send(model, kv, a=prompt[-1:]), model, prompt)
    check(kv)


def test_decodes_drafts_chunks_and_new_prompts_of_one_batch_are_each_as_alone(every_model):
    model, kv = every_model, states(every_model, prefix="hash", edge_blocks=1)
    texts = {"a": text(5, seed=1), "b": text(9, seed=2), "c": text(3, seed=3), "d": []}
    send(model, kv, a=texts["a"], b=texts["b"], c=texts["c"])
    for turn in range(3):
        new = {"a": [turn], "b": text(4, seed=turn), "c": [9], "d": text(11, seed=10 + turn)}
        logits = send(model, kv, **new)
        texts = {name: [*texts[name], *new[name]] for name in texts}
        assert exact(logits, model, *texts.values())
        check(kv)


def test_every_row_of_a_batch_is_that_of_a_plain_forward(hybrid):
    kv, whole = states(hybrid), text(17)
    send(hybrid, kv, a=whole[:3])
    batch = Batch.of([whole[3:]], first_positions=[3], sequences=["a"], logits="all")
    plain = hybrid(Batch.of([whole], logits="all"), Recompute(hybrid.config))
    assert relative_difference(hybrid(batch, kv), plain[3:]) < EXACT


@pytest.mark.parametrize(("kind", "layers"), [*((kind, "alone") for kind in KINDS), ("linear_attention", "hybrid")])
def test_greedy_tokens_in_float32_are_those_of_recompute(kind, layers):
    model = model_of(kind, layers).float()
    asked = {"max_new_tokens": 12, "temperature": 0.0, "stop_token_ids": ()}
    assert generate(model, text(9), kv="state", **asked).tokens == generate(model, text(9), **asked).tokens


def test_layers_with_a_window_stand_beside_states():
    model, prompt = model_of("linear_attention", sliding_window=5), text(17)
    kv = states(model)
    send(model, kv, a=prompt)
    assert exact(send(model, kv, a=[1]), model, [*prompt, 1])


def test_keys_in_few_bits_stand_beside_states_that_stay_whole(hybrid):
    kv = states(hybrid, format="int8")
    send(hybrid, kv, a=text(9))
    assert 0 < relative_difference(send(hybrid, kv, a=[1]), alone(hybrid, [*text(9), 1])) < 0.1
    with pytest.raises(WorkbenchError, match="this model has none"):
        states(model_of("linear_attention", "alone"), format="int8")


# -- back to an earlier length -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 3])
def test_rejected_drafts_leave_nothing_behind(every_model, accepted):
    model, prompt = every_model, text(9)
    kv = states(model)
    send(model, kv, a=prompt)
    send(model, kv, a=[1, 2, 3, 4, 5], b=[7])
    kv.truncate("a", 10 + accepted)
    kept = [*prompt, *[1, 2, 3, 4, 5][: 1 + accepted]]
    logits = send(model, kv, a=[8, 8], b=[6])
    assert exact(logits, model, [*kept, 8, 8], [7, 6])
    check(kv)


def test_drafted_token_by_token_it_goes_back_as_far(hybrid):
    """The way of a model that drafts: one token a batch, and then several are cut at once."""
    kv, prompt = states(hybrid), text(9)
    send(hybrid, kv, a=prompt)
    for token in (1, 2, 3, 4):
        send(hybrid, kv, a=[token])
    kv.truncate("a", 9)
    assert exact(send(hybrid, kv, a=[5]), hybrid, [*prompt, 5])
    check(kv)


def test_before_its_last_batch_it_can_always_go_however_long_that_was(hybrid):
    kv, prompt = states(hybrid), text(30)
    send(hybrid, kv, a=prompt[:9])
    send(hybrid, kv, a=prompt[9:])
    kv.truncate("a", 9)
    assert exact(send(hybrid, kv, a=[5]), hybrid, [*prompt[:9], 5])


def test_where_no_state_was_kept_it_says_where_it_can_go_and_stays_as_it_was(hybrid):
    kv, prompt = states(hybrid), text(30)
    send(hybrid, kv, a=prompt[:9])
    send(hybrid, kv, a=prompt[9:21])
    for token in prompt[21:24]:
        send(hybrid, kv, a=[token])
    before = kv.bytes_in_use
    with pytest.raises(WorkbenchError, match=r"state cannot be cut.*0, 21 … 24, got 15.*larger rewind \(now 4\)"):
        kv.truncate("a", 15)
    assert kv.lengths["a"] == 24 and kv.bytes_in_use == before
    assert exact(send(hybrid, kv, a=[5]), hybrid, [*prompt[:24], 5])


def test_drafts_have_as_much_room_as_can_be_cut_again(hybrid):
    kv = states(hybrid)
    send(hybrid, kv, a=text(9))
    assert kv.draft_room("a") == kv.draft_room("new") == 4
    assert states(hybrid, rewind=0).draft_room("new") == 0
    send(hybrid, kv, a=text(52))
    assert kv.draft_room("a") == 64 - 61 - 1


def test_trees_are_refused_by_name(hybrid):
    kv = states(hybrid)
    assert not kv.holds_trees
    with pytest.raises(WorkbenchError, match=r"'a' cannot take a tree: kv 'state'.*send a chain"):
        kv.begin(Batch.of([[1, 2, 3]], sequences=["a"], parents=[[-1, 0, 0]]))
    assert not kv.lengths


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_a_fork_copies_no_state_and_the_two_are_apart(model):
    kv, start = states(model), text(10)
    send(model, kv, a=start)
    before = kv.bytes_in_use
    kv.fork("a", "b")
    assert kv.bytes_in_use == before
    logits = send(model, kv, a=[1], b=[2])
    assert exact(logits, model, [*start, 1], [*start, 2])
    kv.release("a")
    assert exact(send(model, kv, b=[3]), model, [*start, 2, 3])
    check(kv)


def test_a_fork_while_a_step_is_under_way_is_refused_and_the_step_goes_on(hybrid):
    kv, start = states(hybrid), text(7)
    send(hybrid, kv, a=start)
    batch = Batch.of([[5]], first_positions=[7], sequences=["a"])
    kv.begin(batch)
    x, turns = hybrid.start(batch)
    x = hybrid.run_layer(0, x, turns, batch, kv)
    with pytest.raises(WorkbenchError, match=r"cannot be forked while a step is under way.*1 of 3 layers"):
        kv.fork("a", "b")
    for layer in (1, 2):
        x = hybrid.run_layer(layer, x, turns, batch, kv)
    assert exact(hybrid.logits_of(hybrid.norm(x)), hybrid, [*start, 5])
    kv.fork("a", "b")
    check(kv)


@pytest.mark.parametrize("prefix", ["hash", "radix"])
def test_equal_beginnings_are_found_up_to_the_last_edge_with_a_state(model, prefix):
    kv, start = states(model, prefix=prefix, edge_blocks=2), text(29)
    assert kv.open("a", start) == 0
    send(model, kv, a=start[:14])  # edges at 8 and, the last of the batch, 12
    send(model, kv, a=start[14:])  # and at 16, 24 and 28
    kv.remember("a", start)
    kv.release("a")
    for shared, hit in ((29, 28), (27, 24), (23, 16), (15, 12), (11, 8), (7, 0), (12, 12)):
        prompt = [*start[:shared], 63, 63]
        assert kv.open("b", prompt) == hit == kv.lengths["b"]
        assert exact(send(model, kv, b=prompt[hit:]), model, prompt)
        kv.release("b")
    assert kv.open("c", start, "another tenant") == 0
    check(kv)


def test_states_at_the_edges_of_what_is_generated_are_found_too(hybrid):
    kv, whole = states(hybrid, prefix="hash", rewind=1), text(14)
    kv.open("a", whole)
    send(hybrid, kv, a=whole[:3])
    for at in range(3, 14):
        send(hybrid, kv, a=whole[at : at + 1])
        kv.remember("a", whole[: at + 1])
    assert kv.open("b", [*whole, 1]) == 12
    assert exact(send(hybrid, kv, b=[*whole[12:], 1]), hybrid, [*whole, 1])
    check(kv)


def test_who_computed_a_known_prefix_again_gives_its_states_to_the_blocks_that_are_known(hybrid):
    """The first text left no state at the edge where the second one leaves."""
    kv, start = states(hybrid, prefix="hash", edge_blocks=9), text(20)
    for name, prompt in (("a", start), ("b", [*start[:10], 1])):
        assert kv.open(name, prompt) == 0
        send(hybrid, kv, **{name: prompt})
        kv.remember(name, prompt)
    assert kv.open("c", [*start[:10], 2]) == 8
    assert exact(send(hybrid, kv, c=[*start[8:10], 2]), hybrid, [*start[:10], 2])
    check(kv)


def test_a_state_leaves_with_its_block_and_the_longest_unused_is_given_up_for_a_new_one(hybrid):
    kv = states(hybrid, prefix="hash", edge_blocks=1, max_checkpoints=3, num_blocks=20)
    texts = [text(9, seed=seed) for seed in range(3)]
    for prompt in texts[:2]:
        kv.open("a", prompt)
        send(hybrid, kv, a=prompt)
        kv.remember("a", prompt)
        kv.release("a")
    assert kv.cells.num_checkpoints == 3
    assert [kv.open(str(n), [*prompt, 1]) for n, prompt in enumerate(texts)] == [8, 8, 0]
    check(kv)
    for n in range(3):
        kv.release(str(n))
    kv.forget_prefix(texts[1])
    assert kv.open("x", [*texts[1], 1]) == 0 and kv.cells.num_checkpoints == 1
    check(kv)


def test_a_block_that_is_written_again_takes_no_state_of_what_it_held(hybrid):
    kv, start = states(hybrid, prefix="hash", edge_blocks=1, num_blocks=4), text(12)
    kv.open("a", start)
    send(hybrid, kv, a=start)
    kv.remember("a", start)
    kv.truncate("a", 0)
    other = [*start[:4], 7, 7, 7, 7, 7]
    send(hybrid, kv, a=other)
    kv.remember("a", other)
    kv.release("a")
    for prompt, hit in (([*other, 1], 8), ([*start, 1], 4)):
        assert kv.open("b", prompt) == hit
        assert exact(send(hybrid, kv, b=prompt[kv.lengths["b"] :]), hybrid, prompt)
        kv.release("b")
    check(kv)


# -- to the host and back ----------------------------------------------------------------------------------------------


def test_swapped_out_and_in_again_it_goes_on_from_its_state(model):
    kv = states(model, num_blocks=12)
    texts = {"a": text(11, seed=1), "b": text(6, seed=2)}
    send(model, kv, **texts)
    moved = kv.swap_out("a")
    assert moved == 11 * kv.bytes_per_token + kv.bytes_per_state and "a" not in kv.lengths
    send(model, kv, c=text(9, seed=3))
    assert kv.swap_in("a") == moved and kv.lengths["a"] == 11
    logits = send(model, kv, a=[1], b=[2])
    assert exact(logits, model, [*texts["a"], 1], [*texts["b"], 2])
    kv.swap_out("b")
    kv.release("b")
    assert not kv._swapped_states
    check(kv)


def test_what_does_not_fit_does_not_come_back_and_nothing_changes(hybrid):
    kv = states(hybrid, num_blocks=4, max_sequences=3)
    send(hybrid, kv, a=text(9))
    kv.swap_out("a")
    send(hybrid, kv, b=text(8))
    with pytest.raises(NoRoom):
        kv.swap_in("a")
    check(kv)
    kv.release("b")
    kv.swap_in("a")
    assert exact(send(hybrid, kv, a=[5]), hybrid, [*text(9), 5])


# -- a step that does not end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_layer", [0, 1, 2])
@pytest.mark.parametrize("new", [[1], [1, 2, 3], text(9, seed=9)], ids=["token", "drafts", "chunk"])
def test_a_layer_that_raises_leaves_states_and_lengths_as_they_were(hybrid, at_layer, new, monkeypatch):
    kv, texts = states(hybrid), {"a": text(7), "b": text(6, seed=1)}
    send(hybrid, kv, **texts)
    before = dict(kv.lengths), kv.bytes_in_use
    layer = hybrid.layers[at_layer]
    with monkeypatch.context() as patched:
        for part, name in (
            [(layer.attention.o, "forward")] if at_layer == 1 else [(layer.mixer, "step"), (layer.mixer, "chunk")]
        ):
            patched.setattr(part, name, _raises)
        with pytest.raises(KeyboardInterrupt):
            send(hybrid, kv, a=new, b=[3], c=[4, 5])
    kv.truncate("a", 7)  # what an engine does with every sequence of the batch
    assert (dict(kv.lengths), kv.bytes_in_use) == before
    check(kv)
    assert exact(send(hybrid, kv, a=[6], b=[6]), hybrid, [*texts["a"], 6], [*texts["b"], 6])


def _raises(*_given, **_named):
    raise KeyboardInterrupt


def test_the_next_batch_finds_an_interrupted_one_gone(hybrid, monkeypatch):
    kv, prompt = states(hybrid), text(7)
    send(hybrid, kv, a=prompt)
    with monkeypatch.context() as patched:
        patched.setattr(hybrid.layers[2].mixer, "step", _raises)
        with pytest.raises(KeyboardInterrupt):
            send(hybrid, kv, a=[1])
    with pytest.raises(WorkbenchError, match="reached 2 of the 3 layers"):
        send(hybrid, kv, a=[2])
    assert exact(send(hybrid, kv, a=[2]), hybrid, [*prompt, 2])
    check(kv)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_tensors_and_states_are_float32(model, dtype):
    kv = states(model, dtype=dtype, prefix="hash", max_checkpoints=5, rewind=3)
    shapes = [model.config.state_shapes(layer) for layer in model.config.state_layers]
    assert kv.bytes_per_state == 4 * sum(prod(s) for one in shapes for s in one.values())
    tensors = [t for layer in kv.states.values() for t in layer.values()]
    assert {t.dtype for t in tensors} == {torch.float32}
    held = sum(t.nbytes for t in [*tensors, *kv.store.tensors])
    assert kv.bytes_reserved == held
    room = {"max_sequences": 4, "max_tokens": 64, "block_size": 4, "rewind": 3, "max_checkpoints": 5}
    assert State.reserved_bytes_for(model.config, dtype=kv.dtype, **room) == held


def test_a_text_costs_its_keys_and_a_state_for_each_length_it_can_go_back_to(model):
    kv = states(model, rewind=2, dtype=torch.float32)
    send(model, kv, a=text(20))
    assert kv.bytes_in_use == 20 * kv.bytes_per_token + kv.bytes_per_state
    assert kv.bytes_in_use == kv_bytes(model.config, 20, 4, kv="state")
    for count in (2, 3, 3, 3):
        send(model, kv, a=[1])
        assert kv.bytes_in_use == kv.lengths["a"] * kv.bytes_per_token + count * kv.bytes_per_state
    assert kv.cells.lengths_kept("a") == [0, 22, 23, 24]
    kv.release("a")
    assert kv.bytes_in_use == 0


def test_a_pure_state_model_costs_the_same_at_any_length():
    model = model_of("linear_attention", "alone")
    kv, used = states(model, rewind=0), set()
    for _ in range(5):
        send(model, kv, a=text(9))
        used.add(kv.bytes_in_use)
    assert used == {kv.bytes_per_state, 2 * kv.bytes_per_state} and kv.bytes_per_token == 0


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_a_model_without_states_and_settings_that_make_no_sense_are_refused(hybrid, monkeypatch):
    with pytest.raises(WorkbenchError, match=r"is for models with state layers.*'paged'"):
        State(tiny_config())
    for given, message in (
        ({"rewind": -1}, "rewind"),
        ({"edge_blocks": 0}, "edge_blocks"),
        ({"max_checkpoints": 3}, "there is none"),
        ({"max_checkpoints": 1.5, "prefix": "hash"}, "max_checkpoints"),
        ({"prefix": "x"}, "prefix"),
        ({"rewnd": 3}, "rewind"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            kv_for("state", hybrid, **given)
    monkeypatch.setattr("workbench.instruments.memory.available_bytes", lambda device: 1000)
    with pytest.raises(WorkbenchError, match=r"states of .* bytes"):
        states(hybrid)


def test_states_of_another_size_are_refused_and_nothing_changes(hybrid):
    other = model_of("linear_attention", state_shape=SHAPES["linear_attention"].__class__(12, 6, 3, conv_width=3))
    kv = states(hybrid)
    send(hybrid, kv, a=text(3))
    with pytest.raises(WorkbenchError, match="another model's config"):
        send(other, kv, a=[1], b=[2])
    with pytest.raises(WorkbenchError, match="here it is an attention layer"):
        kv.begin(batch := Batch.of([[1]], first_positions=[3], sequences=["a"]))
        kv.advance(1, hybrid.layers[0].mixer, torch.zeros(1, 12), batch)
    assert dict(kv.lengths) == {"a": 3}
    assert exact(send(hybrid, kv, a=[1]), hybrid, [*text(3), 1])


# -- cells alone -------------------------------------------------------------------------------------------------------


@every_pair(rewind=[0, 1, 3], max_checkpoints=[0, 1, 6], seed=range(3))
def test_after_any_calls_every_cell_says_what_was_written_to_it(rewind, max_checkpoints, seed):
    """A cell is given the tokens before it as its content; whoever reads it must find its own."""
    rng, cells = random.Random(seed), StateCells(4, rewind, max_checkpoints)
    texts: dict[str, tuple[int, ...]] = {}
    content: dict[int, tuple[int, ...]] = {EMPTY: ()}
    known: dict[int, tuple[int, ...]] = {}  # blocks of 4 tokens, by number
    for turn in range(250):
        name = rng.choice("abcd")
        call = rng.choice(("grow",) * 4 + ("cut", "fork", "release", "remember", "forget", "open"))
        if call == "grow":
            batch = {n: rng.choice((1, 1, 2, 4, 9)) for n in rng.sample("abcd", 2) if n in texts or n == name}
            spans = {n: (len(texts.get(n, ())), len(texts.get(n, ())) + count) for n, count in batch.items()}
            edges = {n: [e for e in range(a + 1, b + 1) if e % 4 == 0] for n, (a, b) in spans.items()}
            if (first := texts.get(name, ())) and name in spans:
                assert content[cells.cell_at(name, len(first))] == first
            plan = cells.grow(spans, edges)
            for n, pieces in plan.items():
                texts[n] = texts.get(n, ()) + tuple(rng.randrange(9) for _ in range(batch[n]))
                assert pieces[-1].end == len(texts[n])
                for end, cell in pieces:
                    content[cell] = texts[n][:end]
                least = len(texts[n]) - (batch[n] - 1 if batch[n] <= rewind + 1 else 0)
                assert set(range(least, len(texts[n]) + 1)) | {spans[n][0]} <= set(cells.lengths_kept(n))
        elif call == "open" and name not in texts:
            hit = [block for block in known if cells.of_block(block) is not None]
            block = rng.choice(hit) if hit else None
            texts[name] = known[block] if block is not None else ()
            cells.open(name, len(texts[name]), block)
        elif call == "forget" and known:
            block = rng.choice(list(known))
            cells.forget(block)
            del known[block]
        elif name in texts:
            if call == "cut":
                length = rng.choice(cells.lengths_kept(name))
                cells.cut(name, length)
                texts[name] = texts[name][:length]
            elif call == "fork" and (free := [n for n in "abcd" if n not in texts]):
                cells.fork(name, free[0])
                texts[free[0]] = texts[name]
            elif call == "release":
                cells.release(name)
                del texts[name]
            elif call == "remember":
                blocks = {end: turn * 100 + end for end in range(4, len(texts[name]) + 1, 4)}
                cells.remember(name, blocks)
                known |= {block: texts[name][:end] for end, block in blocks.items() if cells.of_block(block)}
        cells.check({n: len(t) for n, t in texts.items()})
        for n, t in texts.items():
            assert all(content[cells.cell_at(n, length)] == t[:length] for length in cells.lengths_kept(n))
        of_blocks = {block: cells.of_block(block) for block in known}
        assert all(cell is None or content[cell] == known[block] for block, cell in of_blocks.items())
