"""A recorded step gives what the step gives, whatever is in the buffers, and what cannot be recorded runs as it always
did."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from kernel_claims import GPU, GPU_ALONE
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.decoding import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.kv.paged import Paged
from workbench.kv.paged_static import StaticAttention, StaticPaged
from workbench.models import fast_layers, prepare
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape
from workbench.models.graphs import GraphedSteps, Recorded, TracedGraphs, bucket_sizes, recorder_for, why_no_graphs
from workbench.serving import Engine, Request, SchedulerSettings

V = 64
MODEL = prepare(random_decoder(tiny_config(vocab_size=V), seed=0).double())
ROOM = {"max_sequences": 8, "max_tokens": 48, "num_blocks": 64, "block_size": 4, "prefix": "hash"}
each_device = pytest.mark.parametrize("device", ["cpu", GPU])


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(count)]


def on(device: str, model=None, **changes):
    if model is None and device == "cpu" and not changes:
        return MODEL
    return prepare(random_decoder(tiny_config(vocab_size=V, **changes), seed=0).double().to(device))


def pools(model, **more) -> tuple[Paged, StaticPaged]:
    """Two caches of one size; the second can be recorded. Full of NaN: what lies beyond a text must not matter."""
    room = {**ROOM, "dtype": model.dtype, "device": model.device, **more}
    plain, static = Paged(model.config, **room), StaticPaged(model.config, **room)
    if more.get("format") is None:
        for kv in (plain, static):
            for tensor in kv.store.tensors:
                tensor.fill_(float("nan"))
    return plain, static


class Calls:
    """Counts how often the static attention's Python runs."""

    def __init__(self, monkeypatch) -> None:
        self.count, attend = 0, StaticAttention.attend

        def counting(this, *given, **more):
            self.count += 1
            return attend(this, *given, **more)

        monkeypatch.setattr(StaticAttention, "attend", counting)


# -- how many graphs -------------------------------------------------------------------------------------------------


def test_the_sizes_of_graphs():
    assert bucket_sizes(1) == [1] and bucket_sizes(3) == [1, 2, 3] and bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 33]


@given(st.integers(1, 2000), st.integers(4, 40))
def test_sizes_are_bounded_and_every_batch_has_one(largest, max_sizes):
    sizes = bucket_sizes(largest, max_sizes)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and sizes[0] == 1 and len(sizes) <= max_sizes


# -- recorded once, replayed with other contents -----------------------------------------------------------------------


def history(model, plain: Paged, steps: GraphedSteps, count: int, seed: int, largest: int = 5) -> Counter:
    """Texts come, grow, are forked, cut and leave at random, in both caches; every step's logits are compared."""
    rng, names, events = random.Random(seed), iter(range(1000 * seed, 10**6)), Counter()
    live: list[int] = []
    for _ in range(count):
        if live and rng.random() < 0.10:
            gone = live.pop(rng.randrange(len(live)))
            plain.release(gone), steps.kv.release(gone)
            events["left"] += 1
        if live and len(live) < largest and rng.random() < 0.05:
            name, source = next(names), rng.choice(live)
            plain.fork(source, name), steps.kv.fork(source, name)
            live.append(name)
            events["forked"] += 1
        if live and rng.random() < 0.05:
            name = rng.choice(live)
            length = rng.randint(1, plain.lengths[name])
            plain.truncate(name, length), steps.kv.truncate(name, length)
            events["cut"] += 1
        if not live or (len(live) < largest and rng.random() < 0.15):
            name, prompt = next(names), tokens(rng.randint(2, 9), rng.randrange(10**6))
            batch = Batch.of([prompt], sequences=[name], device=model.device)
            model(batch, plain), steps(batch, steps.kv)
            live.append(name)
        some = [name for name in live if plain.lengths[name] < 40 and rng.random() < 0.9]
        rng.shuffle(some)
        for name in [name for name in live if plain.lengths[name] >= 40]:
            plain.release(name), steps.kv.release(name)
            live.remove(name)
        if not some:
            continue
        batch = Batch.of(
            [[rng.randrange(V)] for _ in some],
            sequences=some,
            first_positions=[plain.lengths[name] for name in some],
            device=model.device,
        )
        expected, got = model(batch, plain), steps(batch, steps.kv)
        assert torch.isfinite(got).all() and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        steps.kv.tables.check()
        assert dict(plain.lengths) == dict(steps.kv.lengths)
        events["steps"] += 1
    return events


@pytest.mark.slow
@each_device
def test_hundreds_of_steps_on_graphs_recorded_once(device, monkeypatch):
    model, calls = on(device), Calls(monkeypatch)
    plain, static = pools(model)
    steps = GraphedSteps(model, static, largest=5)
    events = history(model, plain, steps, 300, seed=1)
    assert min(events[what] for what in ("left", "forked", "cut")) >= 5
    assert steps.replayed.total() == events["steps"] and not steps.failed
    assert set(steps.replayed) == {1, 2, 4, 5} == set(steps.recorded) and min(steps.replayed.values()) > 20
    layers, runs = model.config.num_layers, 2 if device == "cpu" else 4
    assert calls.count == runs * layers * 4, "a graph's Python runs to record it and to check its first replay"


SHAPES = {
    "windows and sinks": ({"sliding_window": 6, "attention_sinks": 2}, {}),
    "windows in some layers": ({"sliding_window": 6, "global_layers": (1,)}, {}),
    "shared layers": ({"kv_sources": (0, 0)}, {}),
    "latents": ({"num_kv_heads": 4, "head_dim": 12, "latent_attention": LatentAttentionShape(None, 16, 4, 8, 8)}, {}),
    "int8": ({}, {"format": "int8"}),
    "int4": ({}, {"format": "int4"}),
}


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_attention_and_store(shape, device):
    changes, kind = SHAPES[shape]
    model = on(device, **changes)
    plain, static = pools(model, **kind)
    steps = GraphedSteps(model, static, largest=2)
    events = history(model, plain, steps, 60, seed=2, largest=2)
    assert not steps.failed and steps.replayed.total() == events["steps"] and set(steps.recorded) == {1, 2}


@each_device
def test_a_replay_writes_where_its_texts_are_and_to_the_scratch_place(device):
    model = on(device)
    _, static = pools(model)
    steps = GraphedSteps(model, static, largest=4)
    for name in range(3):
        steps(Batch.of([tokens(5, name)], sequences=[name], device=device), static)
    for round in range(4):
        before = [t.clone() for t in static.store.tensors]
        firsts = [static.lengths[name] for name in range(3)]
        steps(Batch.of([[7]] * 3, sequences=range(3), first_positions=firsts, device=device), static)
        written = {int(static._places_of(name, first + 1)[-1]) for name, first in enumerate(firsts)}
        for old, new in zip(before, static.store.tensors):
            same = torch.eq(old, new) | (old.isnan() & new.isnan())
            changed = set((~same).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist())
            # the padding row's numbers are the same each time
            scratch = {static.scratch} if round == 0 else set()
            assert changed == written | scratch
    assert steps.replayed == {4: 4} and steps.padding_rows == 4


def test_positions_beyond_the_first_rotary_table(monkeypatch):
    """The table a graph reads is as long as the cache from the start, and stays where it is when another cache is
    longer."""
    monkeypatch.setattr(fast_layers, "FIRST_TABLE", 4)
    model = on("cpu", context_length=300)
    plain, static = pools(model)
    steps = GraphedSteps(model, static, largest=2)
    history(model, plain, steps, 20, seed=3, largest=2)
    far = Paged(model.config, max_tokens=300, dtype=model.dtype)
    model(Batch.of([tokens(299, 1)]), far)  # the model's table is made anew
    history(model, plain, steps, 20, seed=4, largest=1)
    assert not steps.failed and steps.replayed.total() > 20


def test_warm_up_records_all_and_only_once():
    recorded = []

    class Noting(TracedGraphs):
        def record(self, step, inputs) -> Recorded:
            recorded.append(inputs[0].shape[1])
            return super().record(step, inputs)

    _, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=3, recorder=Noting())
    assert steps.warm_up() == {} and recorded == [3, 2, 1] and set(steps.recorded) == {1, 2, 3}
    assert steps.warm_up() == {} and len(recorded) == 3
    assert min(steps.recorded.values()) > 100, "operations that one replay starts"


# -- what the host sends -----------------------------------------------------------------------------------------------


class Outside(TorchDispatchMode):
    """The operations that are started beside the replays, with what they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, int | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            first = args[0].data_ptr() if args and isinstance(args[0], torch.Tensor) else None
            self.started.append((func.overloadpacket.__name__, first))
        return func(*args, **(kwargs or {}))


class Unseen(TracedGraphs):
    """Replays that `Outside` does not look into."""

    def record(self, step, inputs) -> Recorded:
        traced = super().record(step, inputs)

        def replay():
            with _disable_current_modes():
                return traced.replay()

        return Recorded(replay, traced.operations)


def test_a_steady_decode_copies_nothing_from_the_host():
    """The same texts, each with room in its last block: numbers and tokens are where the step before left them."""
    plain, static = pools(MODEL, block_size=16)
    steps = GraphedSteps(MODEL, static, largest=4, recorder=Unseen())
    names, outside = range(3), Outside()
    for name in names:
        batch = Batch.of([tokens(2, name)], sequences=[name])
        MODEL(batch, plain), steps(batch, static)
    best = tokens(3, 7)
    for at in range(2, 16):
        batch = Batch.of([[token] for token in best], sequences=names, first_positions=[at] * 3)
        expected = MODEL(batch, plain)
        outside.started.clear()
        with outside:
            got = steps(batch, static)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        best = got.argmax(dim=-1).tolist()
        with outside:
            steps.note_best(best)
        if at == 2:  # the texts came, and the first replay was compared
            assert steps.sent == {"numbers": 1, "tables": 1}
        if at > 3:  # the second step reads its tokens from where they are: that is news once
            assert outside.started == [("copy_", steps.previous.data_ptr())], "from the device to the device"
    assert steps.sent == {"numbers": 2, "tables": 1} and steps.replayed == {4: 14}
    other = Batch.of([[1], [2], [3]], sequences=names, first_positions=[16] * 3)
    torch.testing.assert_close(steps(other, static), MODEL(other, plain), rtol=1e-9, atol=1e-9)
    assert steps.sent == {"numbers": 3, "tables": 2}, "other tokens, and a block more for each"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_an_engine_sends_numbers_when_a_text_or_a_block_begins(asynchronous, drawn):
    """3 texts of 2 + 40 tokens in blocks of 4: 11 blocks each. Drawn tokens of a step that waits for them are the
    host's to send."""
    sampling = SamplingSettings(temperature=0.8) if drawn else None
    requests = [Request(i, (1 + i, 2), 40, sampling=sampling, seed=i, stop_token_ids=()) for i in range(3)]
    expected = texts(engine(graphs=False, num_blocks=64).run(requests))
    it = engine(num_blocks=64, asynchronous=asynchronous)
    assert texts(it.run(requests)) == expected
    sent, steps = it.graphs.sent, it.graphs.replayed.total()
    assert steps >= 39 and sent["tables"] <= 11 + 2
    assert sent["numbers"] == steps if drawn and not asynchronous else sent["numbers"] <= 11 + 4


@pytest.mark.parametrize("fails", ["before", "after"])
def test_after_a_replay_that_fails_the_device_is_told_everything_again(fails):
    """What it holds then is not known: the step before, or the next one's numbers."""

    class Fails(TracedGraphs):
        at = 0

        def record(self, step, inputs) -> Recorded:
            traced = super().record(step, inputs)

            def replay():
                self.at += 1
                if self.at == 6 and fails == "before":
                    raise RuntimeError("out of memory")
                outputs = traced.replay()
                if self.at == 6:
                    raise RuntimeError("out of memory")
                return outputs

            return Recorded(replay, traced.operations)

    plain, static = pools(MODEL, block_size=16)
    steps, failed = GraphedSteps(MODEL, static, largest=2, recorder=Fails()), 0
    for name in range(2):
        batch = Batch.of([tokens(2, name)], sequences=[name])
        MODEL(batch, plain), steps(batch, static)
    best = tokens(2, 7)
    for at in range(2, 14):
        batch = Batch.of([[token] for token in best], sequences=range(2), first_positions=[at] * 2)
        expected = MODEL(batch, plain)
        steps.previous[:2] = torch.tensor(best)
        assert not steps.why_eager(batch)
        try:
            got = steps.prepare(batch, [0, 1])().logits
        except RuntimeError:
            failed += 1
            for name in range(2):
                static.truncate(name, at)
            got = steps.prepare(batch, [0, 1])().logits
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        best = got.argmax(dim=-1).tolist()
    assert failed == 1 and steps.sent == {"numbers": 2, "tables": 2}, "at the beginning, and after the failure"


def test_what_was_noted_counts_for_the_next_call_only():
    """Whoever runs a step otherwise may write to `previous` meanwhile, as a step ahead does."""
    plain, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=1)
    for batch in (Batch.of([[1, 2]]), Batch.of([[3]], first_positions=[2])):
        MODEL(batch, plain), steps(batch, static)
    steps.note_best([4])
    between = Batch.of([[5, 6]], sequences=["other"])
    MODEL(between, plain), steps(between, static)
    steps.previous.fill_(7)
    batch = Batch.of([[4]], first_positions=[3])
    torch.testing.assert_close(steps(batch, static), MODEL(batch, plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("line", ["position", "place", "length"])
def test_planted_a_replay_that_leaves_a_number_as_it_was(line):
    """What the host does not send, the step before has to have written."""
    stays = {"position": 1, "place": 2, "length": 3}[line]

    class Stays(TracedGraphs):
        def record(self, step, inputs) -> Recorded:
            traced = super().record(step, inputs)

            def replay():
                before = inputs[0][stays].clone()
                outputs = traced.replay()
                inputs[0][stays].copy_(before)
                return outputs

            return Recorded(replay, traced.operations)

    requests = [Request(i, tuple(tokens(6, i)), 16) for i in range(3)]
    it = engine(num_blocks=64)
    it.graphs.recorder = Stays()
    assert texts(it.run(requests)) != texts(engine(graphs=False, num_blocks=64).run(requests))


# -- the engine ------------------------------------------------------------------------------------------------------


def ragged(count: int, seed: int) -> list[Request]:
    """Half with the same beginning; some drawn, some with stop tokens, one in six for two texts."""
    rng, shared = random.Random(seed), tokens(9, 99)
    warm = SamplingSettings(temperature=0.8, top_p=0.9)
    return [
        Request(
            i,
            tuple((shared if i % 2 else []) + tokens(rng.randint(1, 12), i)),
            rng.randint(1, 16),
            sampling=warm if i % 3 == 0 else None,
            seed=i,
            n=2 if i % 6 == 5 else 1,
            stop_token_ids=tuple(tokens(9, i)) if i % 4 == 1 else (),
        )
        for i in range(count)
    ]


def engine(model=MODEL, graphs=True, **given) -> Engine:
    own = {name: given.pop(name) for name in ("prefix", "format", "asynchronous") if name in given}
    blocks = given.pop("num_blocks", 14)
    settings = SchedulerSettings(**{"max_running": 3, "token_budget": 30} | given)
    return Engine(model, settings, num_blocks=blocks, block_size=4, graphs=graphs, **own)


def texts(found) -> dict:
    return {(f.request_id, f.sample): (f.token_ids, f.finish_reason) for f in found}


@each_device
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_engine_with_graphs_writes_the_same_texts(preemption, device):
    model, requests = on(device), ragged(30, seed=1)
    plain, graphed = engine(model, False, preemption=preemption), engine(model, True, preemption=preemption)
    assert plain.graphs is None and plain.why_no_graphs == "graphs=False" and not graphed.why_no_graphs
    expected = texts(plain.run(requests))
    assert texts(graphed.run(requests)) == expected and {r for _, r in expected.values()} == {"stop", "length"}
    graphs = graphed.graphs
    assert graphs.padding_rows == 0, "three texts at most, and a graph for each number"
    assert graphed.scheduler.preemptions == plain.scheduler.preemptions > 0
    assert graphs.replayed.total() > 60 and set(graphs.replayed) == {1, 2, 3} and not graphs.failed
    assert graphs.eager.keys() == {"more than one token of a text"}
    assert graphs.replayed.total() + graphs.eager.total() == graphed._step.model_calls
    assert graphed.kv.tables.num_available == graphed.kv.num_blocks and not graphed.kv.lengths


def test_a_part_of_a_prompt_may_be_one_token_without_logits():
    requests = ragged(8, seed=2)
    plain, graphed = (engine(graphs=which, chunk=1, num_blocks=40) for which in (False, True))
    assert texts(graphed.run(requests)) == texts(plain.run(requests)) and not graphed.graphs.eager


# -- what cannot be recorded -----------------------------------------------------------------------------------------


class Looks:
    """A model that looks at a number: nothing that could be replayed."""

    def __init__(self, model) -> None:
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, batch, kv):
        logits = self._model(batch, kv)
        return logits if logits.sum().item() > 0 else logits + 0


def test_what_looks_at_a_number_runs_eagerly_and_is_counted():
    requests = ragged(6, seed=3)
    it = engine(Looks(MODEL))
    assert texts(it.run(requests)) == texts(engine(graphs=False).run(requests))
    assert not it.graphs.replayed and set(it.graphs.failed) <= {1, 2, 3}
    assert any(reason.startswith("not recorded: ") for reason in it.graphs.eager)


def test_trees_features_and_large_batches_run_eagerly():
    plain, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=1)
    batch = Batch.of([[1, 2, 3]], parents=[[-1, 0, 0]], logits="all")
    torch.testing.assert_close(steps(batch, static), MODEL(batch, plain))
    static.truncate(0, 1), plain.truncate(0, 1)
    batch = Batch.of([[4], [5]], sequences=[0, 1], first_positions=[1, 0])
    torch.testing.assert_close(steps(batch, static), MODEL(batch, plain))
    batch = Batch.of([[4]], first_positions=[2])
    torch.testing.assert_close(steps.hidden(batch, static), MODEL.hidden(batch, plain))
    assert steps.eager == {"a tree": 1, "more than 1 texts": 1, "hidden states are wanted": 1} and not steps.replayed


def test_kernels_in_the_interpreter_are_not_recorded():
    """torch.fx would keep the empty output and nothing that fills it."""
    from workbench.kernels import launch
    from workbench.kernels.norm import rms_norm

    if not launch.INTERPRETED:
        pytest.skip("this machine compiles kernels: nothing is interpreted")
    weight = torch.ones(8)
    with pytest.raises(WorkbenchError, match="does not see what Triton's kernels do, and this step launches"):
        TracedGraphs().record(lambda x: (rms_norm(x, weight, 1e-5),), (torch.randn(2, 8),))


def test_a_model_arranged_with_kernels_runs_eagerly_in_the_interpreter():
    from workbench.kernels import launch

    if not launch.INTERPRETED:
        pytest.skip("this machine compiles kernels: nothing is interpreted")
    model = prepare(random_decoder(tiny_config(vocab_size=V), seed=0), kernels="triton")
    requests = [Request(i, (1, 2, 3 + i), 4) for i in range(2)]
    it = engine(model)
    assert texts(it.run(requests)) == texts(engine(model, False).run(requests))
    assert not it.graphs.replayed and any("Triton's kernels" in reason for reason in it.graphs.eager)


def test_recorded_in_inference_mode_and_replayed_outside():
    plain, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=1)
    with torch.inference_mode():
        steps(Batch.of([[1, 2]]), static), steps(Batch.of([[3]], first_positions=[2]), static)
    MODEL(Batch.of([[1, 2]]), plain), MODEL(Batch.of([[3]], first_positions=[2]), plain)
    batch = Batch.of([[4]], first_positions=[3])
    torch.testing.assert_close(steps(batch, static), MODEL(batch, plain))
    assert steps.replayed == {1: 2} and not steps.failed


def test_a_refused_batch_leaves_everything_as_it_was():
    _, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=2)
    steps(Batch.of([[1, 2, 3]]), static)
    for wrong in ({"first_positions": [7]}, {"first_positions": [3], "sequences": ["new"]}):
        with pytest.raises(WorkbenchError, match="remembered"):
            steps(Batch.of([[4]], **wrong), static)
    assert dict(static.lengths) == {0: 3} and not steps.replayed
    steps(Batch.of([[4]], first_positions=[3]), static)
    assert dict(static.lengths) == {0: 4} and steps.replayed == {1: 1}


# -- choices ---------------------------------------------------------------------------------------------------------


def test_graphs_and_compile_exclude_each_other():
    decoder = random_decoder(tiny_config(vocab_size=V))
    compiled = prepare(decoder, compile=True)
    for refused in (lambda: engine(compiled), lambda: prepare(decoder, compile=True, graphs=True)):
        with pytest.raises(WorkbenchError, match=r"graphs=True and compile=True exclude each other.*graphs=False"):
            refused()
    assert engine(prepare(decoder, graphs=True), None).graphs is not None
    assert engine(prepare(decoder, graphs=True), False).why_no_graphs == "graphs=False"
    assert "compile=True" in engine(compiled, graphs="auto").why_no_graphs
    assert engine(compiled, graphs=False).graphs is None


def test_auto_is_for_a_gpu_and_says_so():
    assert "on cpu nothing is gained" in why_no_graphs("auto", on("cpu"))
    assert "prepare(model)" in why_no_graphs("auto", random_decoder(tiny_config(vocab_size=V)))
    assert engine(graphs=None).graphs is None and type(engine(graphs=None).kv) is Paged
    assert isinstance(recorder_for("cpu"), TracedGraphs)
    with pytest.raises(WorkbenchError, match="True, False or \"auto\", got 'yes'"):
        engine(graphs="yes")
    with pytest.raises(WorkbenchError, match="attention='eager' cannot be recorded"):
        StaticPaged(MODEL.config, attention="eager")


# -- seen to fail ----------------------------------------------------------------------------------------------------


def baked(what: str):
    """`StaticAttention.__init__` with a number in it that Python read when the step was recorded."""
    right = StaticAttention.__init__

    def wrong(self, kv, write_at, tables, lengths):
        longest = max(kv.lengths.values(), default=1)
        if what == "lengths":
            lengths = torch.full_like(lengths, longest).where(lengths > 0, lengths)
        elif what == "width":
            tables = tables[:, : -(-longest // kv.block_size)]
        elif what == "place":
            at = kv._places_of(next(iter(kv.lengths)), longest)[-1] if kv.lengths else torch.tensor(kv.scratch)
            write_at = torch.where(write_at == kv.scratch, write_at, int(at))
        right(self, kv, write_at, tables, lengths)

    return wrong


@pytest.mark.parametrize("what", ["lengths", "width", "place"])
def test_planted_a_number_that_was_baked_in_is_caught(what, monkeypatch):
    monkeypatch.setattr(StaticAttention, "__init__", baked(what))
    plain, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=2)
    try:
        history(MODEL, plain, steps, 60, seed=5, largest=2)
        caught = bool(steps.failed)  # by the check of the first replay
    except (AssertionError, IndexError):
        caught = True
    assert caught


def test_a_graph_that_does_not_give_what_the_step_gives_is_not_used():
    """The first replay of each is held against the step, and the step's own numbers are what the caller gets."""

    class Wrong(TracedGraphs):
        def record(self, step, inputs) -> Recorded:
            found = super().record(step, inputs)
            return Recorded(lambda: tuple(output + 1 for output in found.replay()), found.operations)

    plain, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=2, recorder=Wrong())
    history(MODEL, plain, steps, 20, seed=6, largest=2)
    assert set(steps.failed.values()) == {"the recorded step gave other logits than the step itself"}
    assert steps.replayed.total() == len(steps.failed) and not steps.recorded


def test_planted_a_step_that_is_checked_again_and_again(monkeypatch):
    """A width that was enough at first, and is cut off later: check_every finds it."""
    monkeypatch.setattr(StaticAttention, "__init__", baked("width"))
    plain, static = pools(MODEL)
    steps = GraphedSteps(MODEL, static, largest=1, check_every=1)
    for kv, run in ((plain, MODEL), (static, steps)):
        run(Batch.of([[1, 2]]), kv)
    for at in range(2, 20):
        batch = Batch.of([[at]], first_positions=[at])
        torch.testing.assert_close(steps(batch, static), MODEL(batch, plain), rtol=1e-9, atol=1e-9)
    assert steps.failed == {1: "the recorded step gave other logits than the step itself"}
    assert 1 < steps.replayed[1] < 18 and steps.eager.total() > 2


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [GPU_ALONE])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_through_both_kinds_of_attention(device, attention, dtype):
    """Replays against the same kernels run eagerly on the same buffers, at every step."""
    model = wider(device, dtype)
    _, static = pools(model, attention=attention)
    steps = GraphedSteps(model, static, largest=5, check_every=1)
    assert steps.warm_up() == {} and steps.recorder.name == "CUDA graphs"
    firsts = dict.fromkeys(range(5), 3)
    for name in firsts:
        steps(Batch.of([tokens(3, name)], sequences=[name], device=device), static)
    for at in range(40):
        some = list(firsts)[: 1 + at % 5]
        some = [name for name in some if firsts[name] < 47]
        batch = Batch.of(
            [[at]] * len(some), sequences=some, first_positions=[firsts[name] for name in some], device=device
        )
        assert torch.isfinite(steps(batch, static)).all()
        firsts.update({name: firsts[name] + 1 for name in some})
    assert not steps.failed and steps.replayed.total() == 40


@pytest.mark.parametrize("device", [GPU_ALONE])
def test_auto_on_a_gpu_records_where_kernels_attend(device):
    it = engine(wider(device, torch.bfloat16), graphs=None)
    assert it.graphs is not None and it.why_no_graphs == ""
    it.run(ragged(6, seed=1))
    assert it.graphs.replayed.total() > 5 and not it.graphs.failed
    it = engine(on(device), graphs=None)  # float64, which the kernels do not have
    assert it.graphs is None and it.why_no_graphs.startswith("without kernels")


def wider(device: str, dtype: torch.dtype):
    decoder = random_decoder(tiny_config(vocab_size=V, hidden_size=128, head_dim=32), seed=0)
    return prepare(decoder.to(device, dtype))
