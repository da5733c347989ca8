"""What all tests share: no network, few threads, one tiny model."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterable
from itertools import combinations, product

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WORKBENCH_MEASURE"] = "off"  # forms by rule: no test depends on what a clock says

import pytest
import torch

from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder

torch.set_num_threads(1)  # tiny models: a second thread only waits, 40 times slower on a busy machine


LONGEST_FIRST = (  # a file runs in one process: one that takes half a minute must not be the last to begin
    "lab_05",
    "05_quantization",
    "lab_07",
    "07_better_drafts",
    "lab_04",
    "04_smaller_caches",
    "lab_11",
    "11_serving",
    "grading_hostile",
    "lab_08",
    "08_continuous_batching",
    "lab_02",
    "02_where_time_goes",
    "lab_06",
    "06_speculative_sampling",
    "lab",
    "lab_03",
    "03_kv_cache",
    "reachability",
    "lab_10",
    "10_kernels",
    "grading_nonroot",
    "release",
    "lab_09",
    "lab05",
    "lab11",
    "lab04",
    "exercises_lab04",
    "engine",
    "lab10",
    "exercises_lab10",
    "kv_smaller",
    "soak",
    "kernels_matvec",
    "lab03",
    "grading_class",
    "hostile_answers",
    "hints",
    "exercises_lab02",
    "lab02",
    "kv_quantized",
    "grading",
    "grading_speed",
    "unusual",
    "student_package",
    "panels",
    "kernels_quantized_kv",
    "kernels_attention",
    "graphs",
    "fused",
    "fast",
    "quantization_fast",
    "lecture_questions",
    "engine_drafts",
    "kernels_small",
    "paged_triton",
    "exercises_lab06",
    "lab06",
    "lab05_numbers",
    "quantization",
    "exercises_lab03",
    "recording",
    "costs_smaller",
    "bench_command",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if with_address := [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]", item.nodeid)]:
        raise pytest.UsageError(  # two processes of pytest-xdist would collect different tests
            f"A test's name must be the same in every process, and {with_address[0]} has the address of an object "
            f"({len(with_address)} such tests). Give it ids."
        )
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem.removeprefix("test_"), len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """`make test` sets WORKBENCH_BRIEF=1 for the notebooks, run alone or in the browser. Other tests choose their own
    settings."""
    with pytest.MonkeyPatch.context() as environment:
        if item.path.suffix != ".ipynb" and item.get_closest_marker("browser") is None:
            environment.delenv("WORKBENCH_BRIEF", raising=False)
        return (yield)


def cpu_s() -> float:
    """Of this process, and of children that ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    """What a test takes of the processor goes into a junit file, for `tests/tools/slowest.py`."""
    item.cpu_s_before = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", f"{cpu_s() - item.cpu_s_before:.3f}"))


@pytest.fixture(autouse=True)
def no_panel_left_open():
    """A panel has threads and comms; those that a test made go with it."""
    yield
    if "workbench.panels.base" in sys.modules:
        for panel in list(sys.modules["workbench.panels.base"].Panel.open_panels.values()):
            panel.close()


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so no collection of garbage looks at it again.

    One that does takes a quarter of a second, and counting memory begins with one every time.
    """
    gc.collect()
    gc.freeze()


def every_pair(indirect: tuple[str, ...] = (), **axes: Iterable) -> pytest.MarkDecorator:
    """Parametrize by few of all combinations of two axes or more: any two values of different axes meet in one of them.

    A bug is nearly always one of a value, or of two that do not go together. Where three may only fail together, use
    pytest.mark.parametrize for each. indirect: the names that are fixtures, as there.
    """
    values = [list(axis) for axis in axes.values()]
    everything = list(product(*(range(len(axis)) for axis in values)))
    missing = {pair for places in everything for pair in _pairs(places)}
    chosen = []
    while missing:
        best = max(everything, key=lambda places: len(missing & _pairs(places)))
        missing -= _pairs(best)
        chosen.append(best)
    cases = [[axis[place] for axis, place in zip(values, places)] for places in sorted(chosen)]
    return pytest.mark.parametrize(list(axes), cases, indirect=list(indirect))


def _pairs(places: tuple[int, ...]) -> set[tuple]:
    return set(combinations(enumerate(places), 2))


def tiny_config(**changes) -> ModelConfig:
    """Llama's block at d = 32, two layers, two query heads to a key-value head, the shipped vocabulary.

    Without an end-of-text token: random weights may write one at any place, another one on each machine.
    """
    shape = {
        "family": "llama",
        "vocab_size": 4096,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "context_length": 256,
        "tie_embeddings": True,
        "bos_token_id": 0,
        "eos_token_ids": (),
    }
    return ModelConfig(**(shape | changes))


def random_decoder(config: ModelConfig, *, seed: int = 0, tokenizer=None, name: str = "tiny") -> Decoder:
    """Every weight random, norms and biases too, large enough that the layers matter to the logits."""
    model = Decoder(config, tokenizer=tokenizer, name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and weight_name.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + is_norm)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """A random Llama-shaped Decoder with the shipped tokenizer. Shared by all tests: do not change it."""
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer())


@pytest.fixture(autouse=True)
def drawn_the_same_each_time(request):
    """Kernels are held to their definition within rounding on random numbers: the same ones in every run."""
    if "kernels" in request.node.path.parts:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def choices_of_a_gpu(request, monkeypatch):
    """In a rehearsal of the tests for a GPU, see `kernel_claims`."""
    if os.environ.get("WORKBENCH_GPU_REHEARSAL") == "1" and request.node.get_closest_marker("gpu"):
        from kernel_claims import choose_as_on_a_gpu

        choose_as_on_a_gpu(monkeypatch)


@pytest.fixture(scope="session")
def small_model():
    """The smallest shipped model, prepared: it writes text that ends, and knows its characters."""
    from workbench.models import load
    from workbench.models.fast import prepare

    return prepare(load("stdlib-1m"))


@pytest.fixture(scope="module")
def server(small_model):
    """A server for all tests of a file that do not break it; whatever they did, nothing is left at the end."""
    from serving_claims import engine_of, serving

    with serving(engine_of(small_model), name="stdlib-1m") as running:
        yield running
        running.wait_until_empty()
