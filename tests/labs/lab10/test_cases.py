"""Claims about what of a kernel's case is timed: the kernel's launches alone, and those that the engine makes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conftest import random_decoder, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.kernels import launch
from workbench.kv.paged import Paged
from workbench.labs.lab10_kernels import cases
from workbench.labs.lab10_kernels.cases import MAKERS, TINY, case
from workbench.models import linear, prepare
from workbench.models.batch import Batch
from workbench.quantization import quantize
from workbench.quantization.prepared import recipe_for
from workbench.quantization.triton_forms import triton_form
from workbench.recorder.step_launches import NOT_LAUNCHED

interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="a kernel's launches are looked at in the interpreter")


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NOT_LAUNCHED:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def launched(run) -> list[tuple]:
    """(kernel, its constants, the types of its arguments) of each launch; none is made."""
    seen = []

    def note(kernel, grid, arguments, options) -> None:
        types = [str(one.dtype) if isinstance(one, torch.Tensor) else type(one).__name__ for one in arguments]
        seen.append((getattr(kernel, "fn", kernel).__name__, dict(options), types))

    with launch.instead(note):
        run()
    return seen


# a sum of parts, and tallies that are set to zero
BESIDES = {"read_sum": {"sum"}, "sample": {"zeros"}}


@interpreted
@pytest.mark.parametrize("name", MAKERS)
def test_nothing_but_the_kernel_is_timed(name):
    """Of several outputs nothing is joined: they are compared as they come."""
    one = case(name)
    inputs = one.make(cases.Maker("cpu", torch.float32 if one.chosen else torch.float16, 5), one.sizes[TINY])
    with Operations() as operations:
        assert launched(lambda: one.run(inputs))
    assert operations.counted.keys() <= BESIDES.get(name, set())


def test_planted_an_output_that_is_joined_is_seen():
    with Operations() as operations:
        torch.stack((torch.ones(2), torch.ones(2)))
    assert operations.counted["stack"] == 1


def test_outputs_of_other_shapes_or_numbers_are_refused():
    one = case("rms_norm")
    inputs = one.make(cases.Maker("cpu", torch.float32, 5), one.sizes[TINY])
    normed, added = one.torch(inputs)
    assert cases.difference(one, inputs, (normed, added)) < 1e-5
    assert cases.difference(one, inputs, (normed, 2 * added)) == pytest.approx(1)
    with pytest.raises(WorkbenchError, match="where the definition gives"):
        cases.difference(one, inputs, (normed,))


# -- what is timed is what the engine runs -----------------------------------------------------------------------------


SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def at(name: str, rows: int, out: int, inside: int, dtype: torch.dtype) -> list[tuple]:
    """The launches of a case."""
    one = case(name)
    inputs = one.make(cases.Maker("cpu", dtype, 5), {"rows": rows, "out": out, "in": inside})
    return launched(lambda: one.run(inputs))


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantized_product_is_timed_as_prepare_arranges_it(weights, dtype, rows):
    """The same version, the same layout of codes, scales and zeros in the same types."""
    model = random_decoder(tiny_config(**SHAPE), seed=0).to(dtype)
    stored = quantize(model, recipe_for(model, weights)).layers[0].mlp.down.stored
    product, x = triton_form(stored, dtype), torch.ones(rows, stored.in_features, dtype=dtype)
    engine = launched(lambda: product(x))
    assert stored.group == 128 and engine == at(f"matvec_{weights}", rows, 128, 256, dtype)


@interpreted
@pytest.mark.parametrize("rows", [1, 8])
def test_a_product_of_16_bits_is_timed_as_prepare_arranges_it(rows):
    held, x = linear.TritonMatvec(torch.ones(64, 4096).half()), torch.ones(rows, 4096).half()
    engine = launched(lambda: held(x))
    assert len(engine) == 1 and engine == at("matvec", rows, 64, 4096, torch.float16)


@interpreted
def test_paged_decode_is_timed_as_the_cache_calls_it():
    """Its last program merges the splits: one launch a layer."""
    decoder = random_decoder(tiny_config(**SHAPE, context_length=512), seed=0).half()
    model = prepare(decoder, linear="plain", kernels="triton")
    room = {"max_sequences": 2, "max_tokens": 512, "block_size": 16, "dtype": torch.float16}
    kv = Paged(model.config, **room, num_blocks=64, attention="triton")
    launched(lambda: model(Batch.of([[1] * 499] * 2), kv))
    engine = launched(lambda: model(Batch.of([[1]] * 2, first_positions=[499] * 2), kv))
    engine = [one for one in engine if one[0].startswith("_paged_decode")]
    sizes = {"texts": 2, "tokens": 500, "heads": 4, "kv_heads": 2, "d": 32, "block": 16}
    one = case("paged_decode")
    inputs = one.make(cases.Maker("cpu", torch.float16, 5), sizes)
    timed = launched(lambda: one.run(inputs))
    assert len(timed) == 1 and engine == timed * model.config.num_layers
