"""Lab 04: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

All tensors are made from a seed and a name, the same in every process, so that a judge elsewhere can work out by itself
what a right answer gives. What an answer costs is counted, never clocked: the largest tensor it makes, and its FLOPs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from workbench.checks.inputs import drawn, random_model
from workbench.checks.tensors import as_tensor, kind_of
from workbench.errors import WorkbenchError
from workbench.grading.check import describe_error, refused_or_not
from workbench.kv import Recompute
from workbench.labs.lab04_smaller_caches.checks.parts import Design, rolling_cache
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder

# Functions of torch by which all numbers of a tensor leave torch, where nothing is counted.
TAKE_OUT = frozenset(("numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__"))


class _Names(TorchFunctionMode):
    """Which torch functions are called, as they are written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.now = ""
        self.called: set[str] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.now = getattr(function, "__name__", str(function))
        self.called.add(self.now)
        return function(*args, **(kwargs or {}))


class _Allocations(TorchDispatchMode):
    """The largest tensor that takes memory of its own: a view of one that was there takes none. And the elements of all
    that operations made: who computes elsewhere makes few."""

    def __init__(self, names: _Names, given: list[torch.Tensor]) -> None:
        super().__init__()
        self._names, self._known = names, {t.untyped_storage().data_ptr() for t in given}
        self.largest: dict = {"elements": 0, "shape": [], "by": ""}
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "attention" in str(function):  # one of torch's own, by whatever name it was called
            self._names.called.add(str(function))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self._known:
                self.made += made.numel()
                elements = made.untyped_storage().nbytes() // made.itemsize
                if elements > self.largest["elements"]:
                    by = self._names.now or str(function)
                    self.largest = {"elements": elements, "shape": list(made.shape), "by": by}
        return out


def watched(function: Any, *given: torch.Tensor, **named: Any) -> dict:
    """Call `function(*given, **named)` and count: the result, FLOPs of matrix products, the largest tensor made."""
    before = [t.clone() for t in given]
    names = _Names()
    allocations = _Allocations(names, list(given))
    with FlopCounterMode(display=False) as flops, allocations, names:
        out = function(*given, **named)
    seen: dict = {"flops": int(flops.get_total_flops()), "largest": allocations.largest}
    seen["made"] = allocations.made
    seen["called"] = sorted(names.called)
    seen["taken_out"] = sorted(TAKE_OUT & names.called)
    seen["changed"] = [i for i, (now, was) in enumerate(zip(given, before)) if not torch.equal(now, was)]
    if type(out) is not torch.Tensor:  # a class of its own could compute when it is read
        return seen | {"returned": type(out).__name__}
    return seen | {"shape": list(out.shape), "out": out}


# --- smaller-gqa ---


def attention_inputs(
    seed: int, n: int, tokens: int, heads: int, kv_heads: int, size: int, value_size: int
) -> tuple[torch.Tensor, ...]:
    """q [n, H_q, D], k [S, H_kv, D], v [S, H_kv, D_v]."""
    return (
        1.5 * drawn(seed, "q", n, heads, size),
        drawn(seed, "k", tokens, kv_heads, size),
        drawn(seed, "v", tokens, kv_heads, value_size),
    )


def run_attention(answer: Any, scale: float, **sizes: int) -> dict:
    """Call `grouped_attention(q, k, v, scale=…)`."""
    return watched(answer, *attention_inputs(**sizes), scale=scale)


# --- smaller-window ---


def ring_inputs(seed: int, step: int, n: int, heads: int, kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    """q [n, H_q, D] and k, v [n, H_kv, D] of the n new tokens of a step."""
    return (
        1.5 * drawn(seed, f"q{step}", n, heads, size),
        drawn(seed, f"k{step}", n, kv_heads, size),
        drawn(seed, f"v{step}", n, kv_heads, size),
    )


def _kept(out: Any) -> Any:
    """What came back, as numbers: it may be a view of what the next step changes."""
    out = as_tensor(out)
    return out.tolist() if isinstance(out, torch.Tensor) else {"returned": type(out).__name__}


def run_ring(
    answer: Any, window: int, places: int, steps: list[dict], seed: int, heads: int, kv_heads: int, size: int
) -> dict:
    """Make a ring, take it through the steps, see what each gives and what the ring holds then. Ends at an error.

    A step is {"send": n} or {"truncate": length}; what truncate refuses with a WorkbenchError is "refused".
    """
    _, k, v = ring_inputs(seed, 0, 1, heads, kv_heads, size)
    ring = answer(window, places, k, v, size**-0.5)
    seen: list[dict] = []
    for number, step in enumerate(steps):
        now: dict = {}
        try:
            if "send" in step:
                q, k, v = ring_inputs(seed, number, step["send"], heads, kv_heads, size)
                now["out"] = _kept(ring.append_and_attend(q, k, v))
            else:
                ring.truncate(step["truncate"])
        except NotImplementedError:
            raise
        except Exception as error:
            if not (isinstance(error, WorkbenchError) and "truncate" in step):
                return {"steps": [*seen, {"error": describe_error(error)}]}
            now["refused"] = str(error)
        now |= {"length": int(ring.length), "oldest": int(ring.oldest)}
        now |= {"places": len(ring.keys)}
        now |= {"keys": ring.keys[:, 0, 0].tolist(), "values": ring.values[:, 0, 0].tolist()}
        seen.append(now)
    return {"steps": seen}


def run_windowed_model(
    answer: Any, config: dict, seed: int, rewind: int, steps: list[list[int]], cut: list[int]
) -> dict:
    """Send two texts through a windowed decoder, each step's tokens to both; logits [2, S, V] of what is left.

    cut: after each step, how many tokens are taken back.
    """
    model = random_model(config, seed)
    kv = rolling_cache(answer, rewind=rewind)(model.config)
    rows: list[list] = [[], []]
    for tokens, back in zip(steps, cut):
        first = len(rows[0])
        both = [tokens, tokens[::-1]]
        logits = model(Batch.of(both, first_positions=[first] * 2, logits="all"), kv)
        for sequence in (0, 1):
            rows[sequence] += logits.unflatten(0, (2, -1))[sequence].tolist()
            if back:
                kv.truncate(sequence, first + len(tokens) - back)
                del rows[sequence][-back:]
    return {"logits": rows}


# --- smaller-latent ---


def latent_inputs(
    seed: int, n: int, tokens: int, heads: int, content: int, rotary: int, value: int, rank: int
) -> tuple[torch.Tensor, ...]:
    """q [n, H, content + rotary], latents [S, rank + rotary], k_up [H, content, rank], v_up [H, value, rank]."""
    return (
        1.5 * drawn(seed, "q", n, heads, content + rotary),
        drawn(seed, "latents", tokens, rank + rotary),
        drawn(seed, "k_up", heads, content, rank) / rank**0.5,
        drawn(seed, "v_up", heads, value, rank) / rank**0.5,
    )


def run_latent(answer: Any, forms: list[str], **sizes: int) -> dict:
    """Call the functions of these names in a dict of functions: `form(q, latents, k_up, v_up)`."""
    missing = [form for form in forms if not hasattr(answer, "keys") or form not in answer]
    if missing:
        return {"missing": missing[0], "returned": type(answer).__name__}
    return {form: watched(answer[form], *latent_inputs(**sizes)) for form in forms}


def step_inputs(step: int, *memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a step of the race: all numbers have moved on since the last, so nothing that was kept is of use."""
    return tuple(torch.roll(one, step, dims=-1) for one in memory)


def run_latent_steps(answer: Any, steps: int, **sizes: int) -> dict:
    """Absorbed, so many steps of decode, each a query over latents and weights of its own; of step i head i mod H:
    [steps, value]."""
    if not hasattr(answer, "keys") or "absorbed" not in answer:
        return {"missing": "absorbed", "returned": type(answer).__name__}
    q, *remembered = latent_inputs(**(sizes | {"n": steps}))
    outputs = [answer["absorbed"](one[None], *step_inputs(step, *remembered)) for step, one in enumerate(q)]
    if not all(isinstance(out, torch.Tensor) and out.dim() == 3 and out.numel() for out in outputs):
        return {"returned": type(outputs[0]).__name__}
    return {"out": torch.stack([out[0, step % out.shape[1]] for step, out in enumerate(outputs)])}


# --- smaller-int8 ---


def made(kind: str, seed: int, tokens: int, heads: int, size: int) -> torch.Tensor:
    """[tokens, heads, size] of one of the kinds that quantization finds hard."""
    x = drawn(seed, kind, tokens, heads, size)
    if kind == "outlier channel":
        x[:, :, 1] = 60.0 + 4.0 * x[:, :, 1]
    elif kind == "outlier token":
        x[2] *= 50.0
    elif kind == "constant channel":
        x[:, :, 0] = 3.7
        x[:, :, 2] = 0.0
    elif kind == "constant token":
        x[1] = -2.3
        x[0] = 0.0
    elif kind == "tiny range":
        x = 1e-6 * x
    elif kind == "negative only":
        x = -5.0 - x.abs()
    elif kind == "positive only":
        x = 40.0 + x
    else:
        assert kind == "normal", kind
    return x


def run_int8(answer: Any, part: str, kind: str, seed: int, tokens: int, heads: int, size: int, dim: int = 0) -> dict:
    """part "tensor": quantize(x, dim) and dequantize; part "kv": quantize_kv(k, v), keys and values of that kind."""
    names = ("quantize", "dequantize", "quantize_kv")
    missing = [name for name in names if not hasattr(answer, "keys") or name not in answer]
    if missing:
        return {"missing": missing[0], "returned": type(answer).__name__}
    x = made(kind, seed, tokens, heads, size)
    if part == "tensor":
        return {"x": _round_trip(answer, answer["quantize"](x, dim), x, made(kind, seed, tokens, heads, size))}
    v = made(kind, seed + 1, tokens, heads, size)
    pair = answer["quantize_kv"](x, v)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return {"returned": type(pair).__name__}
    again = [made(kind, seed + i, tokens, heads, size) for i in (0, 1)]
    return {n: _round_trip(answer, *more) for n, *more in zip(("k", "v"), pair, (x, v), again)}


def _round_trip(answer: Any, parts: Any, x: torch.Tensor, as_given: torch.Tensor) -> dict:
    parts = [as_tensor(part) for part in parts] if isinstance(parts, tuple | list) else parts
    if not isinstance(parts, tuple | list) or not all(isinstance(p, torch.Tensor) for p in parts) or len(parts) != 3:
        return {"returned": type(parts).__name__}
    codes, scale, low = parts
    back = as_tensor(answer["dequantize"](codes, scale, low))
    if not isinstance(back, torch.Tensor):
        return {"returned": f"{type(back).__name__} from dequantize"}
    return {
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in (codes, scale, low, back)],
        "shapes": [list(t.shape) for t in (codes, scale, low, back)],
        "codes": codes,
        "scale": scale,
        "low": low,
        "back": back,
        "changed": not torch.equal(x, as_given),
    }


# --- smaller-convert ---


def original(config: dict, seed: int, equal_to: int | None) -> Decoder:
    """A small random decoder; with equal_to, the key-value heads that would share one of so many are equal already."""
    model = random_model(config, seed)
    if equal_to is not None:
        c = model.config
        for layer in model.layers:
            for linear in (cast(nn.Linear, layer.attention.k), cast(nn.Linear, layer.attention.v)):
                for parameter in (linear.weight, linear.bias):
                    if parameter is not None:
                        heads = parameter.data.unflatten(0, (equal_to, c.num_kv_heads // equal_to, c.head_dim))
                        heads.copy_(heads[:, :1].expand_as(heads).clone())
    return model


def run_conversion(answer: Any, config: dict, seed: int, num_kv_heads: int, equal: bool, tokens: list[int]) -> dict:
    """Call `to_gqa(weights, config, num_kv_heads)` on a decoder's state_dict, and run the model of the new weights."""
    model = original(config, seed, num_kv_heads if equal else None)
    weights = dict(model.state_dict())
    before = {name: tensor.clone() for name, tensor in weights.items()}
    try:
        new = answer(weights, model.config, num_kv_heads)
    except WorkbenchError as error:
        return {"refused": str(error)}
    if hasattr(new, "items"):
        new = {name: as_tensor(tensor) for name, tensor in new.items()}
    if not hasattr(new, "items") or not all(isinstance(t, torch.Tensor) for t in new.values()):
        return {"returned": type(new).__name__}
    kept = weights.keys() == before.keys() and all(torch.equal(weights[n], before[n]) for n in before)
    seen: dict = {"changed_input": not kept}
    seen["shapes"] = {name: list(tensor.shape) for name, tensor in new.items()}
    seen["pooled"] = {n: t for n, t in new.items() if ".attention.k." in n or ".attention.v." in n}
    seen["others_changed"] = [
        n for n, t in new.items() if n not in seen["pooled"] and n in before and not torch.equal(t, before[n])
    ]
    smaller = Decoder(ModelConfig.from_dict(config | {"num_kv_heads": num_kv_heads}))
    try:
        smaller.load_state_dict(dict(new))
    except RuntimeError as error:
        return seen | {"not_loaded": str(error)}
    with torch.no_grad():
        seen["logits"] = smaller(Batch.of([tokens]), Recompute(smaller.config))
    return seen


def run_refused_conversion(answer: Any, config: dict, seed: int, num_kv_heads: int, **_: Any) -> dict:
    """The same where the heads do not divide: what is raised, or what comes back."""
    model = original(config, seed, None)
    return refused_or_not(lambda: answer(dict(model.state_dict()), model.config, num_kv_heads))


# --- smaller-budget ---


def run_budget(answer: Any, part: str, **given: Any) -> dict:
    """Call the function named `part` in a dict of functions; shapes and designs are made of their dicts."""
    if not hasattr(answer, "keys") or part not in answer:
        return {"missing": part, "returned": type(answer).__name__}
    if "config" in given:
        given["config"] = ModelConfig.from_dict(given["config"])
    if "designs" in given:
        given["designs"] = [
            Design(**(design | {"config": ModelConfig.from_dict(design["config"])})) for design in given["designs"]
        ]
    value = answer[part](**given)
    return {"value": value, "returned": kind_of(value)}


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
