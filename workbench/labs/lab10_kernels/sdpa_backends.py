"""kernels.sdpa_backends: which implementation torch's scaled_dot_product_attention chooses, and what each does when it
is forced.

Torch has four on the way to one function (torch.nn.attention.SDPBackend): FLASH_ATTENTION and EFFICIENT_ATTENTION keep
scores in tiles (the second is xFormers' kernel, with masks of any form), CUDNN_ATTENTION asks NVIDIA's library, and
MATH is the definition, operation by operation. A backend refuses what it was not written for; then the next is asked,
and MATH takes everything. On a CPU only a flash kernel and MATH exist (torch's sdp_utils_cpp.cpp).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.memory import peak_memory

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "kernels.sdpa_backends"
MATH = "MATH"
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", MATH)
OPERATIONS = {  # what torch starts, by a part of its name
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
CASES = ("causal", "a mask", "fewer key-value heads", "one query", "dropout", "values of another size", "no batch axis")
ROUNDING = 1e-4  # of the largest output, by which two may differ in float32

Call = dict[str, Any]


class _Seen(TorchDispatchMode):
    """The names of the operations that torch starts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def call_of(case: str, *, tokens: int, heads: int, head_dim: int, device: str, seed: int = 0) -> Call:
    """The arguments of scaled_dot_product_attention, in float32."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v = (random(1, heads, tokens, head_dim) for _ in "qkv")
    call: Call = {"query": q, "key": k, "value": v, "is_causal": True}
    if case == "a mask":
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        call |= {"is_causal": False, "attn_mask": seen}
    elif case == "fewer key-value heads":
        call |= {"key": k[:, : heads // 2], "value": v[:, : heads // 2], "enable_gqa": True}
    elif case == "one query":
        call |= {"query": q[:, :, -1:], "is_causal": False}
    elif case == "dropout":
        call |= {"dropout_p": 0.1}
    elif case == "values of another size":
        call |= {"value": random(1, heads, tokens, head_dim // 2)}
    elif case == "no batch axis":
        call |= {"query": q[0], "key": k[0], "value": v[0]}
    return call


def attend(call: Call) -> torch.Tensor:
    return F.scaled_dot_product_attention(**call)


def chosen(call: Call) -> str:
    """The backend that torch takes for this call, by the operations that it starts."""
    with _Seen() as seen:
        attend(call)
    names = [backend for part, backend in OPERATIONS.items() for name in seen.names if f"dot_product_{part}" in name]
    return names[0] if names else MATH


def only(backend: str | None) -> AbstractContextManager:
    """Inside, this backend or none. None: torch chooses."""
    return nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend))


def why_refused(call: Call, backend: str) -> str:
    """Torch's own words for why this backend does not take this call; "" where it does."""
    with warnings.catch_warnings(record=True) as said, only(backend):
        warnings.simplefilter("always")
        try:
            attend(call)
        except RuntimeError as error:
            reasons = [str(one.message).partition(" (Triggered")[0] for one in said]
            reasons = [one for one in reasons if "not used because" not in one]
            return reasons[0] if reasons else str(error).partition("\n")[0]
    return ""


@torch.no_grad()  # in inference mode the dispatcher shows the whole function as one operation
def run_sdpa_backends(bench: Bench, *, tokens: int, heads: int, head_dim: int, repeats: int) -> Iterator[Measurement]:
    """`measured` "chosen": for each case which backend torch takes (counts: 1 for it, and what flash says if it
    refuses, as the check). Then for the causal case each backend by force: "refused" with the reason, or "peak" (unit
    "bytes") and its time over MATH's, turn by turn (unit "ratio")."""
    sizes: dict[str, Any] = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
    for case in CASES:
        bench.check_stop()
        call = call_of(case, **sizes, device=bench.device)
        taken = chosen(call)
        refusal = why_refused(call, "FLASH_ATTENTION")
        yield bench.measurement(
            name=NAME,
            settings={**sizes, "measured": "chosen", "case": case, "backend": taken},
            samples=[float(taken != MATH)],
            unit="fused",
            check=f"flash refuses: {refusal}" if refusal else "flash takes it",
        )
    call = call_of(CASES[0], **sizes, device=bench.device)
    with only(MATH):
        truth = attend({**call, **{name: call[name].double() for name in ("query", "key", "value")}})
    for backend in BACKENDS:
        bench.check_stop()
        bench.report(backend)
        about = {**sizes, "backend": backend}
        refusal = why_refused(call, backend)
        if refusal:
            yield bench.measurement(
                name=NAME, settings={**about, "measured": "refused"}, samples=[0.0], unit="fused", check=refusal
            )
            continue

        def forced(backend: str = backend) -> torch.Tensor:
            with only(backend):
                return attend(call)

        check = _agrees(forced(), truth, backend)
        with peak_memory(bench.device) as peak:
            forced()
        yield bench.measurement(
            name=NAME,
            settings={**about, "measured": "peak"},
            samples=[peak.bytes],
            unit="bytes",
            counts={"bytes_of_scores": heads * tokens * tokens * 4},
            check=check,
        )
        if backend != MATH:
            yield _beside_math(bench, forced, partial(forced, MATH), about, repeats)


def _beside_math(
    bench: Bench, one: Callable[[], object], math: Callable[[], object], about: dict[str, Any], repeats: int
) -> Measurement:
    pair = bench.measure_pair(math, one, repeats=repeats, warmup=1)
    return bench.measurement(
        name=NAME,
        settings={**about, "measured": "MATH ÷ it"},
        samples=[a / b for a, b in zip(pair.a_s, pair.b_s)],
        unit="ratio",
        check="both timed in alternation, on the same inputs",
    )


def _agrees(output: torch.Tensor, truth: torch.Tensor, backend: str) -> str:
    apart = float((output.double() - truth).abs().max() / truth.abs().max())
    if not apart <= ROUNDING:
        raise WorkbenchError(f"{backend} differs from attention in float64 by {apart:.2g} of the largest output")
    return f"within {apart:.1g} of the largest output of attention in float64"


EXPERIMENT = Experiment(
    name=NAME,
    lab=10,
    question="Which of torch's attention backends is taken here, and what do the others say?",
    how=(
        "what torch starts is read from its dispatcher; each backend is forced with torch.nn.attention.sdpa_kernel, and"
        " its refusal is torch's own warning. Outputs are held to the definition in float64; allocations are counted in"
        " a run of their own; times are taken in alternation with MATH's."
    ),
    settings=(
        Setting("tokens", 1024, "choice", choices=(64, 256, 512, 1024, 2048), unit="tokens", help="S, of the text"),
        Setting("heads", 8, "choice", choices=(2, 4, 8, 16), help="H"),
        Setting("head_dim", 64, "choice", choices=(16, 32, 64, 128), help="D, of a head"),
        Setting("repeats", 7, "int", 1, 100, brief=2, help="timed pairs of each backend"),
    ),
    run=run_sdpa_backends,
    predict=no_times,
    record={"cpu": (), "cuda": ()},
)
