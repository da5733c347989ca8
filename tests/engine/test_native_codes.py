"""Steps as one function in C++ over a cache in codes, against the eager decoder with the same cache: the same logits,
codes that are the kv's own, and nothing left of a batch that never came.

Keys that differ in their last bits can be rounded to different codes. So before each batch the eager side gets the
other one's cache as it stands: what is compared is then one batch, and codes are compared given equal keys."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config
from test_fast import needs_compiler, text
from test_native_steps import THREADS, native, threads  # noqa: F401
from test_parity import relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels.cpu import coded_attention
from workbench.kernels.cpu import step as loop
from workbench.kv import KV, Paged, Quantized, kv_for
from workbench.kv.paged_store import PAGED_FORMATS
from workbench.models import Batch, native_steps, prepare
from workbench.models.fast import FastDecoder
from workbench.models.placed import InCodes
from workbench.quantization.formats import Format, decode, encode, error_bound, fit
from workbench.serving import Engine, Request, SchedulerSettings

pytestmark = needs_compiler
NEAR = 2e-5
CODES = coded_attention.FORMATS
BLOCKS = {"block_size": 4, "format": "int8", "max_sequences": 4}
KVS: dict[str, Callable[..., KV]] = {
    "groups of 4": lambda config, **settings: Quantized(config, **{"group": 4, "max_sequences": 4, **settings}),
    "groups of 32": lambda config, **settings: Quantized(config, **{"group": 32, "max_sequences": 4, **settings}),
    "blocks": lambda config, **settings: Paged(
        config, **{"block_size": 4, "format": "int8", "max_sequences": 4, **settings}
    ),
}
LOOKS = {
    "MHA": {"num_kv_heads": 4},
    "GQA": {"num_kv_heads": 2},
    "MQA, a window": {"num_kv_heads": 1, "sliding_window": 9},
    "a window, three sinks": {"sliding_window": 9, "attention_sinks": 3},
    "windows on some layers, sinks": {
        "num_layers": 3,
        "sliding_window": 7,
        "global_layers": (1,),
        "attention_sinks": 2,
    },
    "shared keys, norms of q and k": {"num_layers": 4, "kv_sources": (0, 0, 2, 2), "qk_norm": True, "family": "qwen3"},
}


def shape(look: str = "GQA", **changes):
    return tiny_config(**{"vocab_size": 64, "head_dim": 16, "context_length": 1024, **LOOKS[look], **changes})


def tensors(kv: KV) -> list[torch.Tensor]:
    """All that is stored."""
    if isinstance(kv, Paged):
        return list(kv.store.tensors)
    assert isinstance(kv, Quantized)
    return [kv._keys, kv._values, *(t for store in kv._stores.values() for t in store.tensors)]


def stored(kv: KV) -> list[torch.Tensor]:
    return [t.view(torch.uint8).clone() for t in tensors(kv)]


def bring(one: KV, other: KV) -> None:
    """What `one` has stored to `other`, whose books are the same."""
    for source, target in zip(tensors(one), tensors(other)):
        target.view(torch.uint8).copy_(source.view(torch.uint8))


def same_batch(fast: FastDecoder, eager: FastDecoder, batch: Batch, mine: KV, plain: KV) -> torch.Tensor:
    """A batch through both from the same cache."""
    bring(mine, plain)
    got = fast(batch, mine)
    assert "one function" in fast.native_reason, fast.native_reason
    if isinstance(mine, Paged) and isinstance(plain, Paged):
        plain.store.write = following(mine, plain)  # type: ignore[method-assign]
    expected = eager(batch, plain)
    assert got.shape == expected.shape and relative_difference(got, expected) < NEAR
    assert dict(mine.lengths) == dict(plain.lengths) and mine.bytes_in_use == plain.bytes_in_use
    same_cache(mine, plain)
    return got


def same_cache(mine: KV, plain: KV) -> None:
    """Recent parts but for rounding; what codes stand for too, but for the few that fell to the next code."""
    if not isinstance(mine, Quantized) or not isinstance(plain, Quantized):
        return  # the eager side has followed
    assert mine._groups == plain._groups and mine._since == plain._since
    for one, other in ((mine._keys, plain._keys), (mine._values, plain._values)):
        for name, slot in mine._slots.items():
            recent = mine.lengths[name] - mine._groups[slot] * mine.group
            got, expected = one[:, slot, :, :recent], other[:, slot, :, :recent]
            assert recent == 0 or relative_difference(got, expected) < NEAR
    for store, its in zip(mine._stores.values(), plain._stores.values()):
        for got, expected in zip(store.tensors, its.tensors):
            assert int((got.float() != expected.float()).sum()) <= 4 + 0.01 * got.numel()


def following(mine: Paged, plain: Paged) -> Callable[..., None]:
    """In blocks new tokens are read as codes in the same batch. So the eager side writes the codes that the step has
    written, once it has seen that they are codes of its own keys and values: as near to them as the format allows."""

    def write(layer: int, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        half = len(mine.store.tensors) // 2
        for parts, new in ((slice(half), k), (slice(half, None), v)):
            written = []
            for source, target in zip(mine.store.tensors[parts], plain.store.tensors[parts]):
                bits = source[layer].view(torch.uint8)[at]
                target[layer].view(torch.uint8)[at] = bits
                written.append(bits.view(source.dtype))
            codes, scale, *zeros = written
            zero = zeros[0] if zeros else None
            read = decode(codes, scale, zero, kind_of(plain))
            allowed = error_bound(read, scale, zero, kind_of(plain)) * 1.001 + 1e-5 * new.abs().max()
            assert bool(((read - new).abs() <= allowed).all())

    return write


def kind_of(kv: Paged) -> Format:
    return PAGED_FORMATS[str(kv.format)]


def batches() -> list[Batch]:
    """Prompts, a chunk beside single rows, drafts; a group leaves the recent part, several do, and none does."""
    return [
        Batch.of([text(21), text(3, 1)], sequences=["a", "b"], logits="all"),
        Batch.of([text(1, 2), text(2, 3), text(6, 4)], first_positions=[21, 3, 0], sequences=["a", "b", "c"]),
        *(
            Batch.of([text(1, i), text(1, -i)], first_positions=[21 + i, 4 + i], sequences=["a", "b"])
            for i in range(1, 6)
        ),
        Batch.of([text(30, 5)], first_positions=[10], sequences=["b"], logits=[4]),
        Batch.of(
            [text(5, 6), text(1, 7), text(5, 8)], first_positions=[40, 27, 6], sequences=["b", "a", "c"], logits="all"
        ),
    ]


# -- the same logits, and the kv's own codes ---------------------------------------------------------------------------


@every_pair(format=CODES, kv=KVS, look=LOOKS, threads=THREADS, indirect=("threads",))
@torch.inference_mode()
def test_every_batch_gives_the_eager_logits_over_the_same_codes(format, kv, look, threads):  # noqa: F811
    model = random_decoder(shape(look))
    fast, eager = native(model), prepare(model)
    mine, plain = (KVS[kv](model.config, format=format, max_tokens=64) for _ in "ab")
    for batch in batches():
        same_batch(fast, eager, batch, mine, plain)


@every_pair(format=CODES, look=LOOKS, piece=[5, 64])
@torch.inference_mode()
def test_groups_are_quantized_by_the_kvs_own_rule(format, look, piece, monkeypatch):
    """The same keys handed to `put`, a layer at a time: bit for bit the same cache, whatever left the recent part."""
    model = random_decoder(shape(look))
    fast = native(model)
    mine, twin = (KVS["groups of 4"](model.config, format=format, max_tokens=64) for _ in "ab")

    def put(kv: Quantized, batch: Batch) -> None:
        assert isinstance(kv._where, InCodes)
        twin.begin(batch)
        for place, layer in enumerate(model.config.kv_layers):
            twin.put(layer, kv._where.keys[place], kv._where.values[place], batch)
        twin._enter(model.config.num_layers - 1, batch)

    monkeypatch.setattr(native_steps, "PIECE", piece)
    notes = Quantized.note_batch, Quantized.note_step
    monkeypatch.setattr(Quantized, "note_batch", lambda kv, batch: (put(kv, batch), notes[0](kv, batch)))
    monkeypatch.setattr(Quantized, "note_step", lambda kv, name: (put(kv, one_more(kv, name)), notes[1](kv, name)))
    for batch in batches():
        fast(batch, mine)
        assert all(map(torch.equal, stored(mine), stored(twin)))
    assert mine._groups[:3] == [5, 10, 1]
    steps = 0
    for name in mine.lengths:
        for _ in range(9):
            batch = one_more(mine, name)
            stepped = fast.step(0, batch.first_positions[0], name, mine)
            steps += stepped is not None
            if stepped is None:
                fast(batch, mine)
            assert all(map(torch.equal, stored(mine), stored(twin)))
    assert steps > 18 and mine._groups[:3] == [8, 12, 3]


def one_more(kv: KV, name: str) -> Batch:
    return Batch.of([[0]], first_positions=[kv.lengths[name]], sequences=[name])


EDGES = [0.0, 1.0, -1.0, 65504.0, 7e4, -7e4, 1e-8, 5.96e-8, 6.1e-5, -6.09e-5, 1e38, -3.4e38, float("inf")]
EDGES += [-float("inf"), float("nan"), 448.0, 2.0**-6, 2.0**-9, 1e-40]


@pytest.mark.parametrize("format", CODES)
@torch.inference_mode()
def test_a_token_in_blocks_is_quantized_to_the_very_codes(format):
    """Through the values of a cache: v = W·x with one input that is 1. Rows of any size, one of zeros, one of what no
    scale holds."""
    config = tiny_config(vocab_size=64, hidden_size=64, num_layers=1, num_kv_heads=4, head_dim=16, context_length=4096)
    model = random_decoder(config)
    model.layers[0].attention.v.weight.zero_()
    model.layers[0].attention_norm.weight.zero_()
    model.layers[0].attention_norm.weight[0] = 1 / 8  # the root mean square of a single 1 among 64
    model.layers[0].attention_norm.eps = 0.0
    model.embed.weight.copy_(torch.zeros_like(model.embed.weight))
    model.embed.weight[:, 0] = 1
    fast, kv, draw = native(model), Paged(config, format=format), torch.Generator().manual_seed(0)
    kind = kind_of(kv)
    for step in range(200):
        rows = torch.randn(4, 16, generator=draw) * 10.0 ** torch.randint(-9, 6, (4, 1), generator=draw)
        rows[0] += 10 * torch.randn(1, generator=draw)
        rows[1] = rows[1].abs() * (-1) ** step
        # halves of a step, as ties are
        rows[2] = torch.randint(0, int(2 * kind.highest) + 1, (16,), generator=draw) / 2
        rows[2, :2] = torch.tensor([0, kind.highest])
        rows[2] *= 2.0 ** (step % 17 - 8)
        rows[3, step % 16] = EDGES[step % len(EDGES)]
        rows[3, :12] = rows[3, :12] if step % 3 else 0
        model.layers[0].attention.v.weight[:, 0] = rows.flatten()
        rows += 0.0  # as sums they have no −0
        fast(Batch.of([[3]], first_positions=[step], sequences=["a"]), kv)
        assert "one function" in fast.native_reason
        scale, zero = fit(rows, kind, -1, torch.float16)
        half = len(kv.store.tensors) // 2
        codes, scales, *zeros = (t[0, step] for t in kv.store.tensors[half:])
        assert torch.equal(scales, scale) or torch.equal(scales.isnan(), scale.isnan())
        good = ~scale.isnan().flatten()
        assert torch.equal(scales[good], scale[good]), rows
        if zeros:
            assert zero is not None and torch.equal(zeros[0][good], zero[good]), rows
        expected = encode(rows, scale, zero, kind)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), (rows, codes, expected)
        assert decode(codes, scales, zeros[0] if zeros else None, kind)[good].isfinite().all()


@every_pair(kv=KVS, piece=[1, 5, 16], look=LOOKS, format=CODES)
@torch.inference_mode()
def test_many_rows_go_through_a_piece_at_a_time(kv, piece, look, format, monkeypatch):
    """New tokens of earlier pieces are seen as they came, or in blocks as codes, as in one piece."""
    model = random_decoder(shape(look))
    fast, eager = native(model), prepare(model)
    fast._native.max_rows = None
    monkeypatch.setattr(native_steps, "PIECE", piece)
    mine, plain = (KVS[kv](model.config, format=format, max_tokens=128) for _ in "ab")
    for batch in [*batches(), Batch.of([text(70, 9)], first_positions=[45], sequences=["b"], logits="all")]:
        same_batch(fast, eager, batch, mine, plain)


@every_pair(kv=KVS, format=CODES, window=[None, 300], threads=THREADS, indirect=("threads",))
@torch.inference_mode()
def test_threads_share_the_keys_of_a_long_text(kv, format, window, threads):  # noqa: F811
    """One key-value head and 700 tokens: five threads have a fifth of the groups, or of the tokens, each."""
    model = random_decoder(shape(num_kv_heads=1, sliding_window=window, attention_sinks=2 if window else 0))
    fast, eager = native(model), prepare(model)
    mine, plain = (KVS[kv](model.config, format=format, max_tokens=720) for _ in "ab")
    eager(Batch.of([text(700)], sequences=["a"]), mine)
    eager(Batch.of([text(700)], sequences=["a"]), plain)
    for at, rows in ((700, 1), (701, 5), (706, 1)):
        batch = Batch.of([text(rows, at)], first_positions=[at], sequences=["a"], logits="all")
        same_batch(fast, eager, batch, mine, plain)


@pytest.mark.parametrize("kind", ["quantized", "paged"])
def test_texts_are_the_eager_ones(kind):
    """In 8 bits, where another code of a key does not choose another token."""
    model = random_decoder(shape())
    fast, eager, prompt = native(model), prepare(model), text(17, 1)
    for settings in ({}, {"draft": "prompt_lookup"}, {"temperature": 0.8, "seed": 3}):
        texts = []
        for one in (fast, eager):
            kv = kv_for(kind, one, max_tokens=120, format="int8")
            texts.append(generate(one, prompt, max_new_tokens=50, kv=kv, **settings).tokens)
            assert one is eager or "one function" in fast.native_reason
        assert texts[0] == texts[1]


def test_an_engine_serves_from_blocks_of_codes():
    model = random_decoder(shape())
    fast, taken = native(model), list[bool]()
    rows = fast._native.rows
    fast._native.rows = lambda *given: (taken.append((logits := rows(*given)) is not None), logits)[1]
    served = {}
    for one in (fast, prepare(model)):
        engine = Engine(one, SchedulerSettings(max_running=4), num_blocks=64, block_size=4, format="int8")
        requests = [Request(index, tuple(text(3 + 5 * index, index)), 12 + index) for index in range(6)]
        served[one] = {done.request_id: tuple(done.token_ids) for done in engine.run(requests)}
    first, second = served.values()
    assert first == second and sum(taken) > 10


# -- any order of things -----------------------------------------------------------------------------------------------


class Scenario:
    """Sequences that come, grow, are cut, forked and released, in an order drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        look, format, kv = (draw.choice(list(one)) for one in (LOOKS, CODES, KVS))
        self.model = random_decoder(shape(look, head_dim=draw.choice([16, 32])))
        self.fast, self.eager = native(self.model), prepare(self.model)
        self.mine, self.plain = (KVS[kv](self.model.config, format=format, max_tokens=90) for _ in "ab")

    def both(self, name: str, *given) -> None:
        outcomes = []
        for kv in (self.mine, self.plain):
            try:
                outcomes.append(str(getattr(kv, name)(*given)))
            except WorkbenchError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

    def act(self) -> None:
        lengths, draw = dict(self.mine.lengths), self.draw
        choice = draw.random()
        if lengths and choice < 0.3:
            name = draw.choice(list(lengths))
            what = draw.choice(["truncate", "truncate", "truncate", "fork", "release"])
            cut = max(0, lengths[name] - draw.choice([1, 2, 5, 40]))
            self.both(
                what,
                *{
                    "truncate": (name, cut),
                    "fork": (name, next(new for new in range(100) if new not in lengths)),
                    "release": (name,),
                }[what],
            )
        elif lengths and choice < 0.5:
            self.step(draw.choice(list(lengths)))
        else:
            self.batch(lengths)

    def step(self, name) -> None:
        """One token without a batch, where that can be."""
        at, token = self.mine.lengths[name], self.draw.randrange(64)
        bring(self.mine, self.plain)
        stepped = self.fast.step(token, at, name, self.mine)
        if stepped is not None:
            expected = self.eager(Batch.of([[token]], first_positions=[at], sequences=[name]), self.plain)
            assert relative_difference(stepped[0], expected) < NEAR

    def batch(self, lengths: dict) -> None:
        names = self.draw.sample(list(lengths), self.draw.randint(0, len(lengths)))
        if not names or (len(lengths) < 4 and self.draw.random() < 0.4):
            names.append(next(name for name in range(100, 200) if name not in lengths))
        sizes, at = [], [lengths.get(name, 0) for name in names]
        for first in at:
            sizes.append(max(0, min(self.draw.choice([1, 1, 1, 2, 4, 9, 25]), 31 - sum(sizes), 90 - first)))
        kept = [index for index, size in enumerate(sizes) if size]
        if not kept or len(lengths.keys() | {names[i] for i in kept}) > 4:
            return
        rows = [[self.draw.randrange(64) for _ in range(sizes[i])] for i in kept]
        chosen = {"first_positions": [at[i] for i in kept], "sequences": [names[i] for i in kept]}
        same_batch(self.fast, self.eager, Batch.of(rows, **chosen, logits="all"), self.mine, self.plain)


@pytest.mark.parametrize("seed", range(8))
@torch.inference_mode()
def test_sequences_come_grow_are_cut_forked_and_released(seed):
    one = Scenario(seed)
    for _ in range(40):
        one.act()


# -- a batch that never came -------------------------------------------------------------------------------------------


@every_pair(
    kv=KVS, look=["GQA", "windows on some layers, sinks"], when=["between pieces", "while groups are quantized"]
)
@torch.inference_mode()
def test_a_batch_that_was_interrupted_never_came(kv, look, when, monkeypatch):
    model = random_decoder(shape(look))
    fast, eager = native(model), prepare(model)
    fast._native.max_rows = None
    mine, plain = (KVS[kv](model.config, max_tokens=128) for _ in "ab")
    for one, its in ((fast, mine), (eager, plain)):
        one(Batch.of([text(30)], sequences=["a"]), its)
        one(Batch.of([text(9)], first_positions=[30], sequences=["a"]), its)
    before, groups = stored(mine), list(getattr(mine, "_groups", []))
    calls = []

    def interrupted(original):
        def call(*given):
            calls.append(original(*given))
            if len(calls) == 2:
                raise KeyboardInterrupt
            return calls[-1]

        return call

    monkeypatch.setattr(native_steps, "PIECE", 4)
    if when == "between pieces" or kv == "blocks":
        monkeypatch.setattr(loop, "run", interrupted(loop.run))
    else:
        monkeypatch.setattr(Quantized, "_add", interrupted(Quantized._add))
    never = Batch.of([text(60, 1), text(70, 2)], first_positions=[39, 0], sequences=["a", "b"])
    with pytest.raises(KeyboardInterrupt):
        fast(never, mine)
    monkeypatch.undo()
    mine._drop_unfinished()
    plain.begin(never)  # blocks are taken and freed in an order, and places have to be the same
    plain._drop_unfinished()
    if not isinstance(mine, Paged):  # there places past the end of a text are never read
        assert all(map(torch.equal, stored(mine), before)) and mine._groups == groups
    again = Batch.of([text(2, 3), text(4, 4)], first_positions=[39, 0], sequences=["a", "b"], logits="all")
    same_batch(fast, eager, again, mine, plain)
    assert dict(mine.lengths) == {"a": 41, "b": 4}


@torch.inference_mode()
def test_what_is_refused_leaves_no_trace():
    model = random_decoder(shape())
    fast = native(model)
    for make in KVS.values():
        kv = make(model.config, max_tokens=20)
        fast(Batch.of([text(18)], sequences=["a"]), kv)
        before = stored(kv)
        for rows, at, error in ((3, 18, WorkbenchError), (1, 17, WorkbenchError), (0, 18, IndexError)):
            with pytest.raises(error):
                fast(Batch.of([text(rows) if rows else [64]], first_positions=[at], sequences=["a"]), kv)
        kv._drop_unfinished()
        assert all(map(torch.equal, stored(kv), before)) and dict(kv.lengths) == {"a": 18}


# -- steps of one token, and bytes -------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_step_without_a_batch_is_none_where_a_group_is_to_be_quantized():
    """Groups of 4: the recent part is full after 8 tokens, and then each time after 4."""
    model = random_decoder(shape())
    fast, kv = native(model), KVS["groups of 4"](model.config, max_tokens=21)
    assert fast.may_step(kv) and fast.step(1, 0, "a", kv) is None
    fast(Batch.of([text(3)], sequences=["a"]), kv)
    assert fast.step(1, 4, "a", kv) is None and fast.step(64, 3, "a", kv) is None  # another position, no such token
    in_batches = []
    for at in range(3, 21):
        if fast.step(1, at, "a", kv) is None:
            in_batches.append(at)
            fast(Batch.of([[1]], first_positions=[at], sequences=["a"]), kv)
    assert in_batches == [8, 12, 16, 20] and kv.lengths["a"] == 21
    assert fast.step(1, 21, "a", kv) is None  # no room
    other = native(random_decoder(shape("MHA")))
    assert not other.may_step(kv) and other.step(1, 21, "a", kv) is None


@every_pair(
    format=CODES,
    look=["MHA", "GQA", "MQA, a window", "windows on some layers, sinks"],
    threads=[1, 5],
    indirect=("threads",),
)
@torch.inference_mode()
def test_each_byte_of_the_groups_is_read_once_as_by_the_loop_over_codes(format, look, threads):  # noqa: F811
    model = random_decoder(shape(look))
    fast, eager = native(model), prepare(model)
    mine, plain = (KVS["groups of 4"](model.config, format=format, max_tokens=400) for _ in "ab")
    for kv in (mine, plain):
        eager(Batch.of([text(300), text(50)], sequences=["a", "b"]), kv)
    for at in range(6):
        held, before = mine.bytes_in_use, mine.bytes_read
        batch = Batch.of([text(1), text(1)], first_positions=[300 + at, 50 + at], sequences=["a", "b"])
        same_batch(fast, eager, batch, mine, plain)
        assert mine.bytes_read == plain.bytes_read
        assert model.config.sliding_window or mine.bytes_read - before == held
    for at in range(6):
        if fast.step(1, 306 + at, "a", mine) is None:
            fast(Batch.of([[1]], first_positions=[306 + at], sequences=["a"]), mine)
        eager(Batch.of([[1]], first_positions=[306 + at], sequences=["a"]), plain)
    assert mine.bytes_read == plain.bytes_read


@every_pair(format=CODES, look=["MHA", "GQA", "MQA, a window", "a window, three sinks"], new=[1, 5])
@torch.inference_mode()
def test_each_byte_of_a_token_in_blocks_is_read_once_for_all_new_ones(format, look, new):
    """A window of 9, and three sinks: the first of the new tokens sees 8 before it."""
    model = random_decoder(shape(look))
    c, fast, kv = model.config, native(model), KVS["blocks"](model.config, format=format, max_tokens=64)
    fast(Batch.of([text(30)], sequences=["a"]), kv)
    before = kv.bytes_read
    fast(Batch.of([text(new)], first_positions=[30], sequences=["a"]), kv)
    tokens = 30 + new if c.sliding_window is None else 8 + c.attention_sinks + new
    assert kv.bytes_read - before == tokens * kv.bytes_per_token


# -- what it does not take ---------------------------------------------------------------------------------------------


class Watching(Quantized):
    def attend(self, *given):
        return super().attend(*given)


NOT_TAKEN = {
    "dequantized: as asked": (lambda config: Quantized(config, attention="sdpa"), {}, torch.float32),
    "keeps it in float16": (Quantized, {}, torch.float16),
    "a Watching may attend in another way": (Watching, {}, torch.float32),
    "multiple of 16 values; these have 8": (
        lambda c, **s: Paged(c, format="int4", **s),
        {"head_dim": 8},
        torch.float32,
    ),
}


@pytest.mark.parametrize("words", NOT_TAKEN)
@torch.inference_mode()
def test_other_caches_in_codes_run_as_they_did_and_say_why(words):
    make, changes, dtype = NOT_TAKEN[words]
    model = random_decoder(shape(**changes)).to(dtype)
    fast, eager = native(model), prepare(model)
    given = {} if dtype == torch.float32 else {"dtype": dtype}
    mine, plain = make(model.config, **given), make(model.config, **given)
    for at, rows in ((0, 9), (9, 1)):
        batch = Batch.of([text(rows)], first_positions=[at], sequences=["a"])
        assert torch.equal(fast(batch, mine), eager(batch, plain)) and words in fast.native_reason
    assert fast.step(1, 10, "a", mine) is None


@pytest.mark.parametrize("kv", KVS)
@torch.inference_mode()
def test_a_tree_over_codes_runs_as_it_is_and_the_branch_that_is_kept_goes_on(kv):
    model = random_decoder(shape())
    fast, eager = native(model), prepare(model)
    mine, plain = (KVS[kv](model.config, max_tokens=64) for _ in "ab")
    same_batch(fast, eager, Batch.of([text(9)], sequences=["a"]), mine, plain)
    tree = Batch.of([[5, 6, 7]], first_positions=[9], sequences=["a"], parents=[[-1, 0, 0]], logits="all")
    bring(mine, plain)
    assert relative_difference(fast(tree, mine), eager(tree, plain)) < NEAR and "tree" in fast.native_reason
    assert mine.why_not_placed(tree) and mine.place_batch(tree) is None
    assert fast.step(1, 12, "a", mine) is None
    for one in (mine, plain):
        one.keep("a", 10, [11])
    same_batch(fast, eager, Batch.of([[4]], first_positions=[11], sequences=["a"]), mine, plain)


@torch.inference_mode()
def test_a_model_in_16_bits_reads_blocks_of_codes_in_float32():
    """Closer to the model in float32 than torch's numbers of 16 bits are."""
    wide = random_decoder(shape())
    model = random_decoder(shape()).to(torch.float16)
    fast, eager, exact = native(model), prepare(model), prepare(wide.to(torch.float16).float())
    caches = [
        Paged(model.config, format="int8", dtype=dtype) for dtype in (torch.float16, torch.float16, torch.float32)
    ]
    batch = Batch.of([text(24)], sequences=["a"], logits="all")
    got, rounded, expected = (one(batch, kv).float() for one, kv in zip((fast, eager, exact), caches))
    assert "one function" in fast.native_reason
    assert relative_difference(got, expected) < relative_difference(rounded, expected) < 0.1
