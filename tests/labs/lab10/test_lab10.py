"""Lab 10: bytes and tiles are exact, kernels are held to float64 before anything else, no time comes out of the
interpreter, and what only a GPU can tell is called not yet measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs, on_model
from hypothesis import given as example
from hypothesis import settings as limits
from hypothesis import strategies as st
from panel_claims import PanelClaims, shown, times_predicted
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.kernels import launch, tuning
from workbench.labs.lab10_kernels import attention, attention_traffic, bounds, cases, crossover, graphs, matvec, tiles
from workbench.labs.lab10_kernels.attention_traffic import LEAST, STANDARD, TILES, Shape, passes, traffic
from workbench.labs.lab10_kernels.case import Maker
from workbench.labs.lab10_kernels.cases import FULL, HERE, MAKERS, TINY, case
from workbench.labs.lab10_kernels.panels.bounds import NOT_MEASURED
from workbench.models.attention import eager_attention
from workbench.models.checkpoints import shipped_tokenizer
from workbench.panels.base import Panel
from workbench.panels.plots import matching
from workbench.records import load_record

interpreted = pytest.mark.skipif(
    not launch.INTERPRETED, reason="this machine has a GPU: kernels are compiled, not interpreted"
)
SMALL = {
    "kernels.attention_traffic": {"largest": 256, "repeats": 2, "heads": 2, "kv_heads": 1, "head_dim": 32},
    "kernels.tiles": {"tokens": 64, "head_dim": 16, "shown_row": 40, "shown_step": 7},
    "kernels.bounds": {"kernels": "softmax", "repeats": 1},
    "kernels.matvec": {"formats": "int8"},
    "kernels.attention": {"kernels": "flash_decode"},
    "kernels.crossover": {"largest": "stdlib-1m", "repeats": 2, "context": 16},
    "kernels.graphs": {"context": 16, "formats": "int4"},
}
MOVED = {
    "attention_traffic": {"block_queries": 32},
    "tiles": {"shown_step": 9},
    "bounds": {"card": "h100-sxm"},
    "graphs": {"format": "int4"},
    "crossover": {"eager_launch_us": 20.0},
}
MINE = {
    "attention_traffic": "kernels.attention_traffic",
    "tiles": "kernels.tiles",
    "bounds": "kernels.bounds",
    "graphs": "kernels.graphs",
    "crossover": "kernels.crossover",
}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer())


def with_tiny(monkeypatch, size: str) -> None:
    """Every case is as small at this size as it is for the interpreter."""
    for name, make in list(MAKERS.items()):

        def made(make=make):
            one = make()
            return dataclasses.replace(one, sizes={**one.sizes, size: one.sizes[TINY]})

        monkeypatch.setitem(MAKERS, name, made)


@pytest.fixture(scope="module", autouse=True)
def few_inputs_for_torch():
    """What PyTorch is timed on is cut: here it only has to go through."""
    small = pytest.MonkeyPatch()
    with_tiny(small, HERE)
    yield
    small.undo()


@pytest.fixture(scope="module")
def runs(model, few_inputs_for_torch):
    return brief_runs(SMALL, model)


def run(name: str, model=None, bench=None, **more) -> list[Measurement]:
    return run_experiment(name, on_model(name, {**SMALL[name], **more}, model), bench or DataSheetBench())


@pytest.fixture
def make(model):
    def made(name: str, **more) -> Panel:
        return shown(name, **on_model(MINE[name], {**SMALL[MINE[name]], **more}, model))

    return made


class TestExperiments(ExperimentClaims):
    lab, small = 10, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED
    without_marks = ("graphs",)  # only steps on a GPU are timed


# -- all of them -------------------------------------------------------------------------------------------------


@interpreted
def test_no_time_comes_out_of_the_interpreter(runs):
    for m in itertools.chain(*runs.values()):
        interpreter = m.settings.get("ran") in ("interpreted", "in the interpreter") or m.settings.get("start")
        assert not (interpreter and m.unit in ("s", "ratio")), m.settings


# -- kernels.bounds ------------------------------------------------------------------------------------------------


def test_torch_is_timed_on_inputs_in_turns_so_that_no_cache_holds_them(monkeypatch):
    """On one set of inputs a product reached 164 % of its bound, and nobody could tell a cache from a low ceiling."""
    seen, one = [], case("read_sum")
    one_set = one.make(Maker("cpu", torch.float32, 1), one.sizes[HERE])
    monkeypatch.setattr(cases, "MIN_SETS_BYTES", 5 * one.work(one_set).bytes)
    spy = dataclasses.replace(one, torch=lambda inputs: (seen.append(id(inputs)), one.torch(inputs))[1])
    bench = DataSheetBench()
    m = cases._twin(bench, spy, one.sizes[HERE], "kernels.bounds", 5, {"kernel": "read_sum"})
    assert len(set(seen)) == 5 and "5 sets of inputs in turns" in m.check


def test_what_is_above_its_bound_is_told_with_both_rates(make, runs):
    panel = make("bounds")
    made = runs["kernels.bounds"]

    def of_bound(share):
        return [
            dataclasses.replace(m, samples=[m.predicted / share], counts={**m.counts, "share_of_bound": share})
            if m.settings["by"] == "torch" and m.predicted
            else m
            for m in made
        ]

    panel.measurements = of_bound(1.64)
    words = panel.view(panel.settings).words
    assert "Above the bound: " in words and "at 164%" in words and "where the ceiling says" in words
    panel.measurements = of_bound(0.9)
    assert "Above the bound" not in panel.view(panel.settings).words


def test_a_cache_is_ruled_out_only_where_it_is_too_small(make, runs):
    """Inputs go round over 256 MiB; a last cache of 384 MiB holds them all, and the words said that none does."""
    panel = make("bounds")
    for cache, said in ((32 << 20, "It is not the cache"), (384 << 20, "Or the cache holds"), (None, "is not known")):
        device = {"name": "a machine"} | ({"last_cache_bytes": cache} if cache else {})
        panel.measurements = [
            dataclasses.replace(m, device=device, counts={**m.counts, "share_of_bound": 1.5})
            for m in runs["kernels.bounds"]
        ]
        words = panel.view(panel.settings).words
        assert said in words and words.count("cache") == 1 + words.count("last cache")


def test_hollow_shares_say_whose_ceilings_they_are_of(make):
    """The archive's shares are of ceilings taken another way: its sum is at 115 % of them."""
    panel = make("bounds")
    assert "Hollow" not in panel.view(panel.settings).words
    panel.record = load_record("amd-epyc-lab10").of("kernels.bounds")
    words = panel.view(panel.settings).words
    assert "Hollow: shares of the ceilings of AMD EPYC as they were measured then, 29 GB/s of memory" in words
    assert "too low, since read_sum reached 33.5 GB/s." in words


def test_what_eager_takes_beyond_its_prediction_is_stated_for_each_page(make, runs):
    """77 ms beside 18 predicted stood there without a number of what is missing."""
    panel = make("attention_traffic")
    for factor in (1, 4):
        panel.measurements = [times_predicted(m, factor) for m in runs["kernels.attention_traffic"]]
        words = panel.view(panel.settings).words
        assert ("of 4 KiB here, so at most" in words) == (factor == 4)


# -- kernels.tiles -------------------------------------------------------------------------------------------------


@limits(max_examples=20, deadline=None)
@example(
    tokens=st.sampled_from((32, 64, 128)),
    size=st.sampled_from((16, 32)),
    bq=st.sampled_from((16, 32)),
    bk=st.sampled_from((16, 32)),
    window=st.sampled_from((0, 1, 15, 16, 17, 24, 200)),
    seed=st.integers(0, 99),
)
def test_the_loop_gives_softmax_and_its_counts_are_those_of_the_formulas(tokens, size, bq, bk, window, seed):
    shape = {"tokens": tokens, "head_dim": size, "window": window, "seed": seed}
    blocks = {"block_queries": bq, "block_keys": bk}
    loop = tiles.loop(**shape, **blocks, shown_row=3)
    truth = tiles.reference(tokens, size, window, seed)
    assert (loop.output - truth).abs().max() < 1e-5
    assert len(loop.steps) == tiles.predicted_tiles(tokens, bq, bk, window)
    assert loop.bytes == tiles.predicted_bytes(tokens, size, bq, bk, window)


@pytest.mark.parametrize("window", [0, 1, 20, 33])
def test_a_tile_is_skipped_full_or_masked_as_its_pairs_say(window):
    at = torch.arange(64)
    allowed = at[None] <= at[:, None]
    if window:
        allowed &= at[None] > at[:, None] - window
    for i in range(64 // 16):
        for j in range(64 // 32):
            tile = allowed[16 * i : 16 * i + 16, 32 * j : 32 * j + 32]
            wanted = "skipped" if not tile.any() else "full" if tile.all() else "masked"
            assert tiles.kind_of(i, j, 16, 32, window) == wanted


def test_the_followed_row_is_that_of_the_run():
    loop = tiles.loop(tokens=64, head_dim=16, block_queries=16, block_keys=16, window=0, seed=3, shown_row=40)
    q, k, v = tiles.inputs(64, 16, 3)
    scores = (q[40] @ k[:41].T) / 4
    rows = [s.row for s in loop.steps if s.query_block == 2]
    assert [len(row.seen) for row in rows] == [16, 16, 9]
    assert rows[-1].maximum == pytest.approx(float(scores.max()), rel=1e-5)
    assert rows[-1].sum == pytest.approx(float((scores - scores.max()).exp().sum()), rel=1e-5)
    assert torch.allclose(torch.tensor(rows[-1].output), scores.softmax(0) @ v[:41], atol=1e-5)
    assert float(loop.lse[40]) == pytest.approx(float(scores.logsumexp(0)), rel=1e-5)


def test_a_loop_that_forgets_to_rescale_is_found_out(monkeypatch):
    real = tiles.loop

    def wrong(**given):
        loop = real(**given)
        return dataclasses.replace(loop, output=loop.output * 1.001)

    monkeypatch.setattr(tiles, "loop", wrong)
    with pytest.raises(WorkbenchError, match="differs from softmax"):
        run("kernels.tiles")


@interpreted
def test_the_kernel_is_held_to_the_loop(runs, monkeypatch):
    from workbench.kernels import flash_attention

    [kernel] = matching(runs["kernels.tiles"], counted="kernel")
    assert kernel.counts["launches"] == 1 and kernel.median < 2e-3
    real = flash_attention.flash_attention

    def wrong(*args, **more):
        out, lse = real(*args, **more)
        return out, lse + 0.5

    monkeypatch.setattr(flash_attention, "flash_attention", wrong)
    with pytest.raises(WorkbenchError, match="log-sum-exp"):
        run("kernels.tiles")


# -- kernels.traffic -----------------------------------------------------------------------------------------------


def test_traffic_by_hand():
    """4 tokens, 2 heads over 1, 8 numbers per head, float32: q 256 B, k 128 B, 32 scores."""
    s = Shape(4, 2, 1, 8, 4)
    assert (s.queries, s.keys, s.square) == (256, 128, 32)
    assert traffic(LEAST, s) == 256 + 2 * 128 + 256
    assert traffic(TILES, s, 2) == 256 + 2 * (2 + 4) * 2 * 8 * 4 + 256 + 4 * 2 * 4
    copied, product, scaled, masked, softmax, mixed = passes(STANDARD, s)
    assert (copied.bytes_read, copied.bytes_written) == (256, 512)
    assert (product.bytes_read, product.bytes_written, product.flops) == (512, 128, 2 * 32 * 8)
    assert scaled.bytes == softmax.bytes == 256 and masked.bytes == 256 + 16
    assert (mixed.bytes_read, mixed.bytes_written) == (128 + 256, 256)
    assert passes(LEAST, s)[0].flops == 4 * 2 * 8 * 10  # ten pairs of a query and a key that it sees


class Squares(TorchDispatchMode):
    """Numbers that operations on whole score matrices read and write."""

    def __init__(self, square: int) -> None:
        super().__init__()
        self.square, self.moved = square, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = str(function)
        if not any(
            view in name for view in ("view", "permute", "transpose", "unsqueeze", "expand", "_unsafe", "alias")
        ):
            for tensor in (*args, out):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() == self.square:
                    self.moved += tensor.numel()
        return out


def test_eager_attention_goes_over_its_scores_as_often_as_counted():
    tokens, heads, size = 24, 3, 5
    q, k, v = (torch.randn(tokens, heads, size) for _ in "qkv")
    s = Shape(tokens, heads, heads, size, 4)
    with Squares(s.square) as squares:
        eager_attention(q, k, v, scale=0.5)
    of_scores = sum(p.bytes for p in passes(STANDARD, s)) - 4 * s.queries - 2 * s.queries - tokens**2 + 2 * s.queries
    assert squares.moved * 4 == of_scores == 8 * 4 * s.square


def test_twice_the_text_is_four_times_the_scores_and_tiles_stay_below():
    for tokens in (512, 1024):
        a, b = (Shape(n, 8, 8, 64, 2) for n in (tokens, 2 * tokens))
        assert 3.5 < traffic(STANDARD, b) / traffic(STANDARD, a) < 4
        assert traffic(LEAST, a) < traffic(TILES, a, 128) < traffic(TILES, a, 16) < traffic(STANDARD, a)


def test_the_peak_of_eager_attention_is_near_two_matrices_of_scores(runs):
    for tokens in (128, 256):
        peaks = {
            m.settings["by"]: m for m in matching(runs["kernels.attention_traffic"], measured="peak", tokens=tokens)
        }
        assert peaks["eager"].predicted <= peaks["eager"].median < 2 * peaks["eager"].predicted
        assert peaks["sdpa"].median < peaks["eager"].median


def test_a_function_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(attention_traffic, "sdpa_attention", lambda q, k, v, *, scale: q)
    with pytest.raises(WorkbenchError, match="sdpa differs"):
        run("kernels.attention_traffic")


# -- cases -------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("name", MAKERS)
def test_every_kernel_has_a_case_that_is_held_to_float64(name):
    one = case(name)
    dtype = torch.float32 if one.chosen else torch.float16
    inputs = one.make(cases.Maker("cpu", dtype, 5), one.sizes[TINY])
    apart, launches = cases.verified(one, inputs, dtype)
    assert apart < 4e-3 and launches == one.work(inputs).launches
    wrong = dataclasses.replace(one, run=lambda i: tuple(2 * part + 1 for part in cases.parts(one.run(i))))
    with pytest.raises(WorkbenchError, match=f"{name} differs"):
        cases.verified(wrong, inputs, dtype)


@interpreted
@pytest.mark.parametrize("name", [name for name in MAKERS if not case(name).chosen])
def test_what_torch_does_beside_a_kernel_is_the_same_operation(name):
    """But where it is not quantized: there it is another matrix of the same size."""
    one = case(name)
    inputs = one.make(cases.Maker("cpu", torch.float32, 6), one.sizes[TINY])
    for beside, truth in zip(cases.parts(one.torch(inputs)), cases.parts(one.truth(cases.wide(inputs))), strict=True):
        if "dense" in inputs:
            assert beside.shape == truth.shape
            continue
        if beside.shape != truth.shape:  # [B, H, n, D] for [B·n, H, D]
            beside = beside.transpose(1, 2).reshape(truth.shape)
        apart = float((beside.double() - truth).abs().max() / truth.abs().max())
        assert apart <= 1e-4


@pytest.mark.parametrize("name", MAKERS)
def test_work_is_counted_without_memory_and_sizes_for_a_gpu_are_beyond_its_cache(name):
    one = case(name)
    work = cases.work_of(one, one.sizes[FULL], torch.bfloat16)
    assert work.bytes >= 250e6 and one.words(one.sizes[FULL])
    seconds, limit = cases.bound(work, PUBLISHED["h200"], "bfloat16")
    assert seconds == max(work.bytes / 4.8e12, work.flops / 989e12, work.launches * 1.3e-6) and limit != "launch"
    assert set(one.sizes) == {TINY, HERE, FULL}


def test_a_copy_is_not_faster_than_its_bound_where_memory_moves_more_both_ways_than_it_reads():
    """A CPU's copy ran at 116 % of a bound that took all bytes at the rate of a read."""
    ceilings = dataclasses.replace(PUBLISHED["h200"], read_bytes_per_s=10e9, copy_bytes_per_s=16e9, launch_s=1e-9)
    gigabyte = 10**9
    assert cases.bound(launch.Work(gigabyte, gigabyte, 0), ceilings, "float32") == (2 / 16, "bandwidth")
    assert cases.bound(launch.Work(gigabyte, 0, 0), ceilings, "float32") == (1 / 10, "bandwidth")
    slower = dataclasses.replace(ceilings, copy_bytes_per_s=8e9)  # a copy that is not at its best
    assert cases.bound(launch.Work(gigabyte, gigabyte, 0), slower, "float32") == (2 / 10, "bandwidth")


def test_decode_kernels_have_half_a_gigabyte_of_keys_and_values():
    for name in attention.DECODES:
        for sizes in attention.grid(name):
            assert cases.work_of(case(name), sizes, torch.bfloat16).bytes >= 0.5e9, (name, sizes)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The path of a GPU, dry: compiled is what is interpreted, and all sizes are tiny."""
    for module in (cases, attention, matvec):
        monkeypatch.setattr(module, "compiles", lambda device: True)
    with_tiny(monkeypatch, FULL)
    monkeypatch.setattr(cases, "MIN_SETS_BYTES", 0)
    monkeypatch.setattr(cases, "CALLS", 2)
    monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphs, "STEPS", 2)


@interpreted
@pytest.mark.parametrize("name", ["read_sum", "argmax", "matvec_int4", "paged_decode_quantized"])
def test_on_a_gpu_kernel_and_torch_are_timed_in_turns_after_a_check(as_on_a_gpu, name):
    made = run("kernels.bounds", kernels=name, repeats=2)
    assert [m.settings["by"] for m in made] == ["kernel", "torch", "torch ÷ kernel"]
    kernel, beside, ratio = made
    assert len(kernel.samples) == len(ratio.samples) == 2 and "before it was timed" in kernel.check
    assert ratio.samples[0] == pytest.approx(beside.samples[0] / kernel.samples[0])
    assert kernel.counts["share_of_bound"] == pytest.approx(kernel.predicted / kernel.median)


@interpreted
def test_on_a_gpu_attention_is_measured_over_its_grid_and_paged_beside_contiguous(as_on_a_gpu, monkeypatch):
    few = [{**case("paged_decode").sizes[TINY], "texts": n} for n in (1, 2)]
    monkeypatch.setattr(attention, "grid", lambda kernel: few)
    monkeypatch.setattr(attention, "type_of", lambda one: "float16")
    made = run("kernels.attention", kernels="paged_decode", repeats=1)
    assert len(made) == 2 * 3 + 2
    assert len(matching(made, by="contiguous ÷ paged")) == 2 and all(m.samples[0] > 0 for m in made)


@interpreted
def test_on_a_gpu_products_are_measured_over_rows(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(matvec, "MATRICES", {"large": (24, 256)})
    made = matching(run("kernels.matvec", formats="int4", repeats=1), by="kernel")
    assert [m.settings["rows"] for m in made] == list(matvec.ROWS)


# -- bounds, crossover, decode ---------------------------------------------------------------------------------------


def test_the_bound_of_attention_is_arithmetic_and_of_decode_memory():
    binds = {name: bounds.on_card(name, "h200")[3] for name in MAKERS}
    assert binds["flash_attention"] == "compute" and binds["flash_decode"] == binds["matvec_int4"] == "bandwidth"


def test_a_graph_moves_the_crossing_to_smaller_models():
    lines = {way.name: crossover.line("h200", way, batch=1, context=64) for way in crossover.ways("h200", 5.0)}
    eager, fewer, graph, free = lines.values()
    crossings = [crossover.crossing(points) for points in (eager, fewer, graph)]
    assert crossings[0] > crossings[1] > crossings[2] > 1e8
    for a, b, c, d in zip(eager, fewer, graph, free):
        assert a.seconds > b.seconds > c.seconds > d.seconds and a.launches > b.launches == c.launches


def test_the_crossing_is_where_both_terms_are_equal():
    point = functools.partial(crossover.Point, "x", seconds=1.0, launches=1, launch_s=1.0)
    assert crossover.crossing(
        [point(parameters=100, work_s=0.1), point(parameters=10_000, work_s=10.0)]
    ) == pytest.approx(1000)
    assert crossover.crossing([point(parameters=100, work_s=2.0), point(parameters=200, work_s=3.0)]) is None


def test_plain_and_prepared_steps_are_timed_in_pairs(runs):
    made = runs["kernels.crossover"]
    plain, fast, ratio = made
    assert plain.counts["launches"] == ratio.counts["plain"] > fast.counts["launches"] == ratio.counts["fast"]
    assert ratio.samples == pytest.approx([a / b for a, b in zip(plain.samples, fast.samples)])


def test_fewer_bytes_make_starting_weigh_more():
    gains = []
    for format in graphs.STORED:
        steps = graphs.on_card("h200", "llama-3.1-8b", format, context=512, eager_launch_us=10.0)
        gains.append(steps["eager"][0][1] / steps["graph"][0][1])
    assert gains == sorted(gains) and gains[0] > 1.2, "of 204 launches; arranged for a CPU it would be 777"


def test_a_step_is_replayed_and_held_to_its_oracle_without_a_gpu(runs):
    [m] = runs["kernels.graphs"]
    assert m.unit == "operations" and m.median > m.counts["launches"] and m.settings["format"] == "int4"
    assert "plain model without a cache" in m.check and "its time means nothing" in m.check


def test_a_replay_that_differs_is_found_out(model, monkeypatch):
    real = graphs._Work.logits
    monkeypatch.setattr(
        graphs._Work, "logits", lambda self, start: real(self, start) * (1.2 if start == "graph" else 1)
    )
    with pytest.raises(WorkbenchError, match="differs from an eager one"):
        run("kernels.graphs", model)


def test_on_a_gpu_steps_are_timed_eager_and_replayed_and_beside_transformers(as_on_a_gpu, model, monkeypatch):
    monkeypatch.setattr(
        graphs, "generating", lambda *args, compiled, real=graphs.generating: real(*args, compiled=False)
    )
    made = run("kernels.graphs", model, formats="int4", peer=True, repeats=1, batch=2)
    assert [m.settings["start"] for m in made] == ["eager", "graph", "eager ÷ graph", graphs.PEER]
    assert [m.settings["format"] for m in made[2:]] == ["int4", "float32"]
    assert all(m.median > 0 for m in made[:-1]) and "times_as_long_as_our_graph" in made[-1].counts


# -- the panels --------------------------------------------------------------------------------------------------


def test_play_goes_through_the_tiles_and_the_table_has_the_rows_of_the_run(make):
    panel = make("tiles")
    seen = []
    for step in (0, 5, 9):
        panel.play.value = step
        assert panel.wait(30)
        seen.append(panel.snapshot().data)
    assert len(set(seen)) == 3 and panel.settings["shown_step"] == 9
    panel.configure(shown_step=5)
    rows = panel.view(panel.settings).rows
    loop = tiles.loop(tokens=64, head_dim=16, block_queries=16, block_keys=16, window=0, seed=0, shown_row=40)
    row = [s.row for s in loop.steps[:6] if s.query_block == 2]
    assert [r[4] for r in rows] == [f"{one.maximum:.3f}" for one in row] and len(rows) == 3


@interpreted
@pytest.mark.parametrize("name", ["bounds", "graphs", "crossover", "attention_traffic"])
def test_what_only_a_gpu_can_tell_is_called_not_yet_measured(make, name, runs):
    panel = make(name)
    panel.measurements = runs[MINE[name]]
    assert NOT_MEASURED in panel.view({**panel.settings}).words


def test_a_record_of_a_gpu_is_drawn_hollow_and_named(make, as_on_a_gpu, runs, model, monkeypatch):
    made = run("kernels.graphs", model, formats="bfloat16", repeats=1)
    elsewhere = [
        Measurement.from_dict(
            {
                **m.to_dict(),
                "settings": {**m.settings, "model": "llama-3.1-8b", "format": "bfloat16"},
                "device": {"name": "A far card"},
                "date": "2030-01-02T00:00:00",
            }
        )
        for m in made
    ]
    panel = make("graphs", record=elsewhere)
    view = panel.view(panel.settings)
    hollow = [line for line in view.figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert len(hollow) == 2 and "A far card" in view.words and "recorded on A far card, 2030-01-02" in panel.said
    assert NOT_MEASURED not in view.words


def test_block_sizes_are_measured_by_name_and_kept_for_the_device(monkeypatch, tmp_path):
    """On a GPU before a kernel is timed; here through the interpreter, whose times mean nothing: the way is the
    same."""
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    monkeypatch.setattr("workbench.labs.lab10_kernels.case.TUNING_S", 0.01)
    tuned = [one for one in map(case, MAKERS) if one.tune is not None]
    assert len(tuned) >= 14
    for one in tuned:
        inputs = one.make(Maker("cpu", torch.float16, 0), one.sizes[TINY])
        config = one.tune(inputs)
        assert config in tuning.table_for("cpu").configs.values()
    kept = tuning.Table.read(tuning.table_for("cpu").path)
    assert len(kept.configs) == len(tuned)
