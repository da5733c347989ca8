"""The loop over a cache in codes: attention over the numbers that the codes stand for, every byte read once and no
other; and why it is not taken."""

from __future__ import annotations

import ctypes
import inspect
import math
import shutil
import subprocess
import textwrap

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.kernels.cpu import coded_attention
from workbench.kv import Quantized, make_kv
from workbench.kv.quantized_codes import CHOICES, FEW_TOKENS, choose_attention
from workbench.models import Batch, load, prepare
from workbench.native import build
from workbench.native import compiler as compilers

NEAR = 2e-5  # of the largest number: sums of a thousand products in another order
MISSING = coded_attention.why_not_here()
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"the loop over a cache in codes: {MISSING}")
FORMATS = coded_attention.FORMATS
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (7, 1), "many": (12, 12)}


def caches(format: str, *, group: int = 32, texts: int = 1, tokens: int = 1010, **shape) -> dict[str, Quantized]:
    """The same cache, attended over by the definition on dequantized numbers, and by the loop."""
    config = tiny_config(**{"num_layers": 1, "context_length": 4096, **shape})
    room = {"format": format, "group": group, "max_sequences": texts, "max_tokens": tokens}
    return {name: Quantized(config, attention=name, **room) for name in ("eager", "codes")}


def send(both: dict[str, Quantized], counts: list[int], seed: int = 0, parents=None) -> float:
    """New tokens to each text of all caches: how far the outputs are apart, of the largest number."""
    draw = torch.Generator().manual_seed(seed)
    c, total = both["eager"].config, sum(counts)
    rows = [torch.randn(total, heads, c.head_dim, generator=draw) for heads in (c.num_heads, *2 * [c.num_kv_heads])]
    rows[1] *= 1 + 9 * (torch.arange(c.head_dim) % 4 == 1) / c.head_dim**0.5  # as keys have it
    outs = []
    for kv in both.values():
        first = [kv.lengths.get(i, 0) for i in range(len(counts))]
        kv.begin(batch := Batch.of([[0] * n for n in counts], first_positions=first, parents=parents))
        given = [rows if c.kv_source(i) == i else [rows[0], None, None] for i in range(c.num_layers)]
        outs.append(torch.stack([kv.attend(i, *of_layer, batch) for i, of_layer in enumerate(given)]))
    expected, got = outs
    assert got.isfinite().all()
    return float((got - expected).abs().max() / expected.abs().max())


def cut(both: dict[str, Quantized], length: int, text: int = 0) -> None:
    for kv in both.values():
        kv.truncate(text, length)


# -- the same attention ------------------------------------------------------------------------------------------------


@needs_compiler
@every_pair(heads=HEADS, size=[2, 6, 8, 20, 64], format=FORMATS, group=[2, 6, 32, 100], window=[None, 1, 9, 70])
def test_texts_of_any_length_are_attended_as_over_the_numbers(heads, size, format, group, window):
    num_heads, num_kv_heads = HEADS[heads]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": size, "sliding_window": window}
    both = caches(format, group=group, **shape)
    for length in (1, 7, 64, 1000):
        if more := length - 1 - both["codes"].lengths.get(0, 0):
            send(both, [more], seed=length)
        assert send(both, [1], seed=length + 1) < NEAR, length
    assert both["codes"].lengths[0] == 1000 and both["codes"]._groups[0] == math.ceil(1000 / group) - 2


@needs_compiler
@every_pair(new=range(1, FEW_TOKENS + 1), sinks=[0, 1, 5, 40], window=[None, 1, 7, 33], format=FORMATS)
def test_a_few_new_tokens_see_each_other_in_order_and_what_their_windows_show(new, sinks, window, format):
    sinks = sinks if window else 0
    both = caches(format, group=6, num_kv_heads=2, sliding_window=window, attention_sinks=sinks, tokens=200)
    for past in (1, 10, 21, 100, 151):
        send(both, [past - both["codes"].lengths.get(0, 0)], seed=past)
        before = both["codes"].bytes_read
        assert send(both, [new], seed=past + 1) < NEAR, past
        assert both["codes"].bytes_read > before or window == 1, "the loop did not take it"


@needs_compiler
def test_texts_of_a_batch_are_each_as_alone_those_that_are_dequantized_too():
    both = caches("int8", group=4, texts=4, tokens=100, num_layers=3, kv_sources=(0, 1, 0))
    assert send(both, [40, 1, 9, 3]) < NEAR  # two of them are too many for the loop
    for seed in range(12):  # groups leave the recent parts on the way
        assert send(both, [1, 2, 8, 1], seed=seed) < NEAR
        cut(both, 9 + 3 * seed, text=2)
    tree = [None, None, (-1, 0, 0), None]
    assert send(both, [1, 1, 3, 1], parents=tree) < NEAR
    for kv in both.values():
        kv.keep(2, kv.lengths[2] - 2, [kv.lengths[2] - 1])
    assert send(both, [1, 9, 1, 1]) < NEAR


@needs_compiler
def test_a_long_text_is_put_together_from_its_pieces_whatever_the_threads():
    both = caches("int8", tokens=3500, num_heads=4, num_kv_heads=2)
    send(both, [3333])
    kv, before, given = both["codes"], torch.get_num_threads(), {}
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randn(1, heads, 8, generator=draw) for heads in (4, 2, 2)]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert send(both, [1], seed=5) < NEAR
            cut(both, 3333)
            kv.begin(batch := Batch.of([[0]], first_positions=[3333]))
            given[threads] = kv.attend(0, *rows, batch)
            cut(both, 3333)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(given[1], given[2]) and torch.equal(given[1], given[3])


@needs_compiler
@pytest.mark.parametrize("format", FORMATS)
def test_scores_of_hundreds_and_of_nothing_at_all_are_no_trouble(format):
    """The weights of one token are then all there is, and exponentials of the others are 0."""
    both = caches(format, group=4, tokens=100, num_kv_heads=2)
    kv = both["codes"]
    c = kv.config
    k, v = 40 * torch.randn(60, 2, 8, generator=torch.Generator().manual_seed(0)), torch.randn(60, 2, 8)
    for size in (0.0, 1e-30, 10.0, 1e3):
        outs = []
        for one in both.values():
            one.begin(batch := Batch.of([[0] * 60]))
            one.put(0, k, v, batch)
            one.begin(batch := Batch.of([[0]], first_positions=[60]))
            outs.append(one.attend(0, size * torch.ones(1, c.num_heads, 8), k[:1], v[:1], batch))
            one.release(0)
        assert outs[1].isfinite().all() and (outs[0] - outs[1]).abs().max() < 2e-4 * max(1, size), size


@needs_compiler
def test_the_same_greedy_tokens_as_over_dequantized_numbers():
    """After each token of a real text, so that one other choice does not change all after it, and then freely."""
    model = prepare(load("stdlib-3m-gqa"))
    text = model.tokenizer.encode_prompt(inspect.getsource(textwrap))[100:350]
    written = {}
    for attention in ("sdpa", "codes"):
        kv = Quantized(model.config, attention=attention, group=16)
        chosen = []
        with torch.inference_mode():
            for at in range(320):
                token = text[at] if at < len(text) else chosen[-1]
                logits = model(Batch.of([[token]], first_positions=[at]), kv)
                chosen.append(int(logits[-1].argmax()))
        assert kv._groups[0] == 18
        written[attention] = chosen
    assert written["codes"] == written["sdpa"] and len(set(written["codes"])) > 60


@needs_compiler
def test_what_is_no_number_stays_none_where_it_is_seen_and_nowhere_else():
    both = caches("int8", group=4, tokens=100, texts=2, num_kv_heads=2, sliding_window=9)
    send(both, [50, 50])
    store = both["codes"]._stores[9]
    for scale in store._scales:
        scale[:, 0] = math.nan
    kv = both["codes"]
    kv.begin(batch := Batch.of([[0], [0]], first_positions=[50, 50]))
    out = kv.attend(0, torch.ones(2, 4, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 8), batch)
    assert out[0].isnan().all() and out[1].isfinite().all()


# -- bytes -------------------------------------------------------------------------------------------------------------


@needs_compiler
@every_pair(format=FORMATS, group=[2, 6, 32], heads=HEADS, new=[1, 3, 8])
def test_each_byte_of_the_cache_is_read_once(format, group, heads, new):
    """For all query heads and all new tokens together: codes, scales, zeros, and the recent part in float32."""
    num_heads, num_kv_heads = HEADS[heads]
    both = caches(format, group=group, num_heads=num_heads, num_kv_heads=num_kv_heads, num_layers=2, tokens=200)
    kv = both["codes"]
    for past in (0, 1, 5, 64, 131):
        if more := past - kv.lengths.get(0, 0):
            send(both, [more])
        held, before = kv.bytes_in_use, kv.bytes_read
        send(both, [new])
        assert kv.bytes_read - before == held, past
        cut(both, past)


@needs_compiler
def test_of_a_window_and_its_sinks_only_their_own_tokens_are_read():
    """W 9, 3 sinks, groups of 4, H_kv 2, D 8: after 50 tokens the first that is seen is 42; 11 groups are codes."""
    both = caches("int8", group=4, num_heads=4, num_kv_heads=2, sliding_window=9, attention_sinks=3, tokens=100)
    kv = both["codes"]
    send(both, [50])
    before = kv.bytes_read
    assert send(both, [1]) < NEAR
    of_keys, of_token = 2 * 2 * 8, 2 * 8 + 2 * 2  # scales and zeros of a group's channels; codes, and a value's own two
    in_codes = (of_keys + 3 * of_token) + (of_keys + 2 * of_token)  # 0, 1, 2 and 42, 43
    assert kv.bytes_read - before == 2 * (in_codes + 6 * 2 * 8 * 4)  # 44 … 49 are recent


@needs_compiler
def test_two_tokens_of_a_byte_are_one_byte():
    """int4 in groups of 8, H_kv 1, D 8: token t lies with t + 4."""
    both = caches("int4", group=8, num_heads=2, num_kv_heads=1, sliding_window=23, tokens=100)
    kv = both["codes"]
    send(both, [40])  # three groups are codes; 18 … 39 are seen, and of the third group 18 … 23
    before = kv.bytes_read
    assert send(both, [1]) < NEAR
    rows = 4  # 20 … 23 lie with 16 … 19
    assert kv.bytes_read - before == rows * 2 * 8 + 4 * 8 + 6 * 4 + 16 * 2 * 8 * 4


# -- why not -----------------------------------------------------------------------------------------------------------


def test_by_itself_a_cache_is_attended_as_codes_where_that_runs_and_says_why_not_elsewhere():
    auto = make_kv("quantized", tiny_config())
    if MISSING:
        assert (auto.attention, auto.attention_reason) == ("sdpa", MISSING)
    else:
        assert auto.attention == "codes" and auto.attention_reason.startswith("a CPU, where the loop reads codes")
    for name in ("eager", "sdpa"):
        asked = Quantized(tiny_config(), attention=name)
        assert (asked.attention, asked.attention_reason) == (name, "as asked")
    reasons = {
        "keeps it in float16": {"dtype": torch.float16, "device": "cpu"},
        "keeps it in float64": {"dtype": torch.float64, "device": "cpu"},
        "for CPUs, and this cache is on cuda": {"dtype": torch.float32, "device": "cuda"},
    }
    for words, given in reasons.items():
        chosen, reason = choose_attention("auto", **given)
        assert chosen == "sdpa" and words in reason
        with pytest.raises(WorkbenchError, match=f"attention='codes' here: .*{words}.*attention='sdpa'"):
            choose_attention("codes", **given)
    with pytest.raises(WorkbenchError, match="did you mean 'codes'"):
        Quantized(tiny_config(), attention="code")
    assert CHOICES == ("eager", "sdpa", "codes", "auto")


def test_without_a_compiler_it_is_dequantized_and_the_reason_is_told(monkeypatch):
    for one in (build.library, coded_attention.why_not_here):
        one.cache_clear()
    monkeypatch.setenv(compilers.OFF, "1")
    try:
        kv = Quantized(tiny_config())
        assert (kv.attention, kv.attention_reason) == ("sdpa", f"{compilers.OFF} is set")
        with pytest.raises(WorkbenchError, match=f"attention='codes' here: {compilers.OFF} is set"):
            Quantized(tiny_config(), attention="codes")
        with torch.no_grad():
            random_decoder(tiny_config())(Batch.of([[1, 2, 3]]), kv)
        assert kv.bytes_read == 0 and kv.lengths[0] == 3
    finally:
        for one in (build.library, coded_attention.why_not_here):
            one.cache_clear()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("flags", [[], ["-mavx2", "-mfma", "-mf16c"]], ids=["plain C++", "AVX2"])
def test_other_processors_give_the_same(flags, monkeypatch, tmp_path):
    if flags and "avx2" not in compilers.processor():
        pytest.skip("this processor has no AVX2")
    made = tmp_path / "coded_attention.so"
    compiler = next(c for c in compilers.COMPILERS if shutil.which(c))
    usual = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-O"))]
    subprocess.run([compiler, *usual, "-O1", *flags, "-w", str(coded_attention.SOURCE), "-o", str(made)], check=True)
    other = coded_attention.opened(ctypes.CDLL(str(made)))
    monkeypatch.setattr(coded_attention, "_functions", lambda: other)
    for format in FORMATS:
        for size in (6, 24):
            both = caches(format, num_heads=6, num_kv_heads=2, head_dim=size, tokens=300)
            send(both, [250])
            assert send(both, [1]) < NEAR and send(both, [4]) < NEAR
