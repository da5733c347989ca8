"""What the checks do with an answer, and what they see. Probes run beside the answer and hold no expected value.

Inputs are float64 (or complex128), the same for the same seed in every process.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import as_list, kind_of, missing, shown
from workbench.grading.check import describe_error
from workbench.models.mixers.hippo import legs


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)


def normal(seed: int, name: str, *sizes: int) -> torch.Tensor:
    """Normal draws in float64."""
    return drawn(seed, name, *sizes).double()


def changed_among(given: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not what they were."""
    return [name for name, was in before.items() if not torch.equal(given[name], was)]


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# --- beyond-discretize ---

# Δ·A where e^{ΔA} − 1 has lost its digits, and where there are none: 0
NEAR_ZERO = (0.0, -1e-13, -1e-11, 1e-10, -1e-8, -1e-6)


def system_inputs(seed: int, kind: str, channels: int, states: int, tokens: int) -> dict[str, torch.Tensor]:
    """a, b, step of a continuous system: a [E, N], of the kinds "matrix" and "legs" [E, N, N]; b [E, N]; step [E, 1].

    tokens > 0: a step and an input for each of so many tokens, step [T, E, 1] and b [T, 1, N].
    """
    b = normal(seed, "b", channels, states)
    step = 0.02 + 0.3 * normal(seed, "step", channels, 1).abs()
    a = -0.1 - 2 * normal(seed, "a", channels, states).abs()
    if kind == "complex":
        a = torch.complex(a, 5 * normal(seed, "turns", channels, states))
        b = torch.complex(b, normal(seed, "b turned", channels, states))
    elif kind == "matrix":
        a = 2 * normal(seed, "matrix", channels, states, states) / states**0.5
        a = a - 2 * torch.eye(states, dtype=torch.float64)
    elif kind == "legs":
        legendre, inputs = legs(states)
        a, b = legendre.repeat(channels, 1, 1), inputs.repeat(channels, 1) * (1 + b.abs())
    elif kind == "near zero":
        a = torch.tensor(NEAR_ZERO, dtype=torch.float64)[:states].repeat(channels, 1) * (1 + b.abs())
    elif kind == "near zero, complex":
        size = torch.tensor(NEAR_ZERO, dtype=torch.float64)[:states].repeat(channels, 1)
        a = torch.polar(size.abs(), normal(seed, "turns", channels, states))
    elif kind == "stiff":
        a = -(10 ** (4 * normal(seed, "a", channels, states).sigmoid()))
        a[:, 0] = -5000 / step[:, 0]
    else:
        assert kind == "real", kind
    if tokens:
        step = 0.02 + 0.3 * normal(seed, "steps", tokens, channels, 1).abs()
        b = normal(seed, "inputs", tokens, 1, states)
    return {"a": a, "b": b, "step": step}


def run_discretize(answer: Any, rule: str, **given: Any) -> dict:
    """Call the function named `rule` in a dict of functions: `rule(a, b, step)`."""
    if lacking := missing(answer, rule):
        return lacking
    inputs = system_inputs(**given)
    before = copied(inputs)
    pair = answer[rule](**inputs)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return {"returned": type(pair).__name__}
    a_bar, b_bar = pair
    return {"a_bar": shown(a_bar), "b_bar": shown(b_bar), "changed": changed_among(inputs, before)}


# --- beyond-convolution ---


def steps_inputs(seed: int, kind: str, channels: int, states: int) -> dict[str, torch.Tensor]:
    """a_bar, b_bar, c of a discrete system: a_bar [E, N], or [E, N, N] of the kind "matrix"; b_bar and c [E, N].

    "complex": conjugate pairs, all N. "slow": decays near 1.
    """
    b, c = normal(seed, "b", channels, states), normal(seed, "c", channels, states)
    a = 0.3 + 0.65 * normal(seed, "a", channels, states).sigmoid()
    if kind == "complex":
        assert states % 2 == 0, "eigenvalues in pairs"
        half = states // 2
        upper = torch.polar(a[:, :half], 2 * normal(seed, "turns", channels, half))
        b = torch.complex(b[:, :half], b[:, half:])
        c = torch.complex(c[:, :half], c[:, half:])
        a, b, c = (torch.cat((x, x.conj().resolve_conj()), dim=1) for x in (upper, b, c))
    elif kind == "matrix":
        a = 0.9 * torch.linalg.qr(normal(seed, "matrix", channels, states, states))[0]
        a = a + 0.3 * normal(seed, "upper", channels, states, states).triu(1)
    elif kind == "slow":
        a = 1 - 0.01 * a
    else:
        assert kind == "real", kind
    return {"a_bar": a, "b_bar": b, "c": c}


def run_kernel(answer: Any, length: int, **given: Any) -> dict:
    """Call `kernel(a_bar, b_bar, c, length)` of a dict of functions."""
    if lacking := missing(answer, "kernel"):
        return lacking
    inputs = steps_inputs(**given)
    before = copied(inputs)
    kernel = answer["kernel"](**inputs, length=length)
    return {"kernel": shown(kernel), "changed": changed_among(inputs, before)}


def signal_inputs(seed: int, sequences: int, tokens: int, channels: int) -> dict[str, torch.Tensor]:
    """u [B, T, E] and skip [E]."""
    return {"u": normal(seed, "u", sequences, tokens, channels), "skip": normal(seed, "skip", channels)}


def kernel_input(seed: int, channels: int, length: int) -> torch.Tensor:
    """A kernel [E, L] that does not fade: what wraps around is seen."""
    return normal(seed, "kernel", channels, length)


def run_convolve(answer: Any, seed: int, length: int, channels: int, **sizes: int) -> dict:
    """Call `convolve(u, kernel, skip)` of a dict of functions, with a kernel of `length`."""
    if lacking := missing(answer, "convolve"):
        return lacking
    inputs = signal_inputs(seed, channels=channels, **sizes) | {"kernel": kernel_input(seed, channels, length)}
    before = copied(inputs)
    y = answer["convolve"](**inputs)
    return {"y": shown(y), "changed": changed_among(inputs, before)}


def run_layer(answer: Any, seed: int, kind: str, channels: int, states: int, sequences: int, tokens: int) -> dict:
    """The kernel of a system, as long as the text, and the convolution by it."""
    if lacking := missing(answer, "kernel", "convolve"):
        return lacking
    kernel = answer["kernel"](**steps_inputs(seed, kind, channels, states), length=tokens)
    return {"y": shown(answer["convolve"](**signal_inputs(seed, sequences, tokens, channels), kernel=kernel))}


# --- beyond-scan ---


def pair_inputs(seed: int, count: int, channels: int, states: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Steps (a, b), each of two tensors [E, N]: h becomes a·h + b."""
    sizes = (channels, states)
    return [(normal(seed, f"a{i}", *sizes).sigmoid(), normal(seed, f"b{i}", *sizes)) for i in range(count)]


def joined(combine: Any, pairs: list, tree: str) -> Any:
    """All steps as one, neighbours joined in the order of the tree: "left", "right" or "halves"."""
    if len(pairs) == 1:
        return pairs[0]
    cut = {"left": len(pairs) - 1, "right": 1, "halves": len(pairs) // 2}[tree]
    return combine(joined(combine, pairs[:cut], tree), joined(combine, pairs[cut:], tree))


def run_combine(answer: Any, seed: int, count: int, channels: int, states: int, tree: str) -> dict:
    """Join so many steps by `combine(first, second)` of a dict of functions."""
    if lacking := missing(answer, "combine"):
        return lacking
    pairs = pair_inputs(seed, count, channels, states)
    pair = joined(answer["combine"], pairs, tree)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return {"returned": type(pair).__name__}
    fresh = pair_inputs(seed, count, channels, states)
    same = all(torch.equal(x, y) for one, other in zip(pairs, fresh) for x, y in zip(one, other))
    return {"a": shown(pair[0]), "b": shown(pair[1]), "changed": [] if same else ["first or second"]}


def selection_inputs(
    seed: int, kind: str, sequences: int, tokens: int, channels: int, states: int, started: bool
) -> dict[str, torch.Tensor]:
    """u, step [B, T, E], a [E, N], b, c [B, T, N], h [B, E, N], zeros where not started.

    "strong": decays so strong that their product over a few dozen tokens is no number above 0 any more.
    """
    a = -0.1 - normal(seed, "a", channels, states).abs()
    if kind == "strong":
        a = 40 * a
    else:
        assert kind == "mild", kind
    h = normal(seed, "h", sequences, channels, states)
    return {
        "u": normal(seed, "u", sequences, tokens, channels),
        "step": 0.05 + normal(seed, "step", sequences, tokens, channels).abs(),
        "a": a,
        "b": normal(seed, "b", sequences, tokens, states),
        "c": normal(seed, "c", sequences, tokens, states),
        "h": h if started else torch.zeros_like(h),
    }


def run_scan(answer: Any, chunks: list[int], **given: Any) -> dict:
    """Call `selective_scan(u, step, a, b, c, h)` of a dict of functions, chunk after chunk of a text."""
    if lacking := missing(answer, "selective_scan"):
        return lacking
    whole = selection_inputs(**given, tokens=sum(chunks))
    h, start, parts, changed = whole["h"], 0, [], []
    for size in chunks:
        cut = {name: whole[name][:, start : start + size].clone() for name in ("u", "step", "b", "c")}
        inputs = cut | {"a": whole["a"], "h": h}
        before = copied(inputs)
        pair = answer["selective_scan"](**inputs)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return {"returned": type(pair).__name__}
        changed += changed_among(inputs, before)
        parts.append(shown(pair[0]))
        h, start = pair[1], start + size
        if not isinstance(h, torch.Tensor):
            break
    return {"y": parts, "h": shown(h), "changed": sorted(set(changed))}


# --- beyond-rollback ---


def mixer_weights(seed: int, width: int, states: int, window: int) -> dict[str, torch.Tensor]:
    """conv [W, d], decay, inner and outer [d, N]."""
    return {
        "conv": normal(seed, "conv", window, width),
        "decay": 0.5 + 0.5 * normal(seed, "decay", width, states).sigmoid(),
        "inner": normal(seed, "inner", width, states),
        "outer": normal(seed, "outer", width, states),
    }


def first_state(seed: int, width: int, states: int, window: int, started: bool) -> dict[str, torch.Tensor]:
    """The last W − 1 inputs "conv" [W − 1, d], and "ssm" [d, N]; zeros where not started."""
    state = {"conv": normal(seed, "before", window - 1, width), "ssm": normal(seed, "ssm", width, states)}
    return state if started else {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def sent(seed: int, number: int, count: int, width: int) -> torch.Tensor:
    """The tokens of a script's step, [n, d]."""
    return normal(seed, f"x{number}", count, width)


class Mixer:
    """A layer like Mamba's, of one sequence: `step(x [d], state) -> y [d]` writes the next state into `state`."""

    def __init__(self, seed: int, width: int, states: int, window: int) -> None:
        self.weights, self.calls = mixer_weights(seed, width, states, window), 0

    def step(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        inputs = torch.cat((state["conv"], x[None]))
        state["conv"].copy_(inputs[1:])
        u = (inputs * self.weights["conv"]).sum(0)
        state["ssm"].mul_(self.weights["decay"]).add_(u[:, None] * self.weights["inner"])
        return (state["ssm"] * self.weights["outer"]).sum(1)


def tensor_bytes(holder: Any) -> int:
    """Bytes of the tensors that an object leads to by its attributes and in lists, dicts and the like; each once."""
    storages: dict[int, int] = {}
    visited: set[int] = set()
    waiting = [holder]
    while waiting:
        one = waiting.pop()
        if id(one) in visited or isinstance(one, Mixer | type):
            continue
        visited.add(id(one))
        if isinstance(one, torch.Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | deque):
            waiting += one
        elif hasattr(one, "__dict__") and not callable(one):
            waiting += vars(one).values()
    return sum(storages.values())


def run_script(
    answer: Any, seed: int, width: int, states: int, window: int, rewind: int, started: bool, script: list[dict]
) -> dict:
    """Make `answer(step, state, rewind)`, named "a", take it and its forks through the script, and see after each step
    how long all are and what they hold. Ends at an error.

    A step of the script has "on", a name, and {"send": n} or {"truncate": length} or {"fork": new name}; what truncate
    refuses with a ValueError is refused.
    """
    mixer = Mixer(seed, width, states, window)
    given = first_state(seed, width, states, window, started)
    before = copied(given)
    live = {"a": answer(mixer.step, given, rewind)}
    seen: dict = {name: [] for name in ("y", "refused", "calls", "lengths", "bytes", "held")}
    seen["stopped"] = ""
    for number, step in enumerate(script):
        one, calls, y, refused = live[step["on"]], mixer.calls, None, False
        try:
            if "send" in step:
                y = shown(one.advance(sent(seed, number, step["send"], width)))
                y = y if "returned" in y else y | {"data": y["data"].tolist()}
            elif "fork" in step:
                live[step["fork"]] = one.fork()
            else:
                one.truncate(step["truncate"])
        except NotImplementedError:
            raise
        except Exception as error:
            refused = isinstance(error, ValueError) and "truncate" in step
            if not refused:
                return seen | {"stopped": describe_error(error), "changed": changed_among(given, before)}
        seen["y"].append(y)
        seen["refused"].append(refused)
        seen["calls"].append(mixer.calls - calls)
        seen["lengths"].append({name: int(each.length) for name, each in live.items()})
        seen["bytes"].append({name: int(each.bytes_in_use) for name, each in live.items()})
        seen["held"].append({name: tensor_bytes(each) for name, each in live.items()})
    return seen | {"changed": changed_among(given, before)}


# --- beyond-unmask ---


def _whole(value: Any) -> list[int] | None:
    """A list of whole numbers; None of anything else."""
    items = as_list(value)
    if items is None or any(kind_of(one) != "int" for one in items):
        return None
    return [int(one) for one in items]


def run_unmask(
    answer: Any, tokens: list, logits: list, passes: int, mask_token: int, noise: list | None = None
) -> dict:
    """The places and ids of one pass, and what of the arguments it has changed."""
    given: dict[str, Any] = {"tokens": list(tokens), "logits": torch.tensor(logits)}
    given["noise"] = None if noise is None else torch.tensor(noise)
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    before["tokens"] = list(tokens)
    gave = answer(given["tokens"], given["logits"], passes, mask_token, given["noise"])
    if not isinstance(gave, tuple | list) or len(gave) != 2:
        return {"returned": f"a {type(gave).__name__}"}
    places, ids = map(_whole, gave)
    if places is None or ids is None:
        return {"returned": f"({', '.join(type(one).__name__ for one in gave)}), not all of whole numbers"}
    return {"places": places, "ids": ids, "changed": _changed(given, before)}


def _changed(given: dict, before: dict) -> str:
    """The first argument that is not what it was, or ""."""
    for name, was in before.items():
        now = given[name]
        same = torch.equal(now, was) if isinstance(was, torch.Tensor) else now == was
        if not same:
            return name
    return ""


def run_unmask_block(answer: Any, tokens: list, logits: list, mask_token: int, noise: list) -> dict:
    """All passes over a canvas, with what each has seen; it ends where one writes what cannot be written."""
    canvas, steps = list(tokens), []
    for number, table in enumerate(logits):
        one = run_unmask(answer, canvas, table, len(logits) - number, mask_token, noise[number])
        one["refused"] = "" if "returned" in one else _write(canvas, one, mask_token, len(table[0]))
        steps.append(one)
        if one["refused"] or "returned" in one:
            break
    return {"steps": steps}


def _write(canvas: list, one: dict, mask_token: int, vocabulary: int) -> str:
    """Write what a pass gave, or say why that cannot be."""
    places, ids = one["places"], one["ids"]
    if len(places) != len(ids):
        return f"{len(places)} places and {len(ids)} ids"
    for place, token in zip(places, ids):
        if not 0 <= place < len(canvas) or canvas[place] != mask_token:
            return f"to place {place}, which is not masked"
        if not 0 <= token < vocabulary or token == mask_token:
            return f"token {token}, where the ids are 0 to {vocabulary - 1} and {mask_token} is the mask"
        canvas[place] = token
    return ""


def run_unmask_counts(answer: Any, places: int, passes: int, seed: int) -> dict:
    """The same over a canvas of masks, with logits by chance."""
    tables = [drawn(seed, f"pass {number}", places, 6).tolist() for number in range(passes)]
    return run_unmask_block(answer, [5] * places, tables, 5, [None] * passes)


# --- beyond-passes ---

PARTS = ("passes_of", "totals", "speedup")


def run_passes_of(answer: Any, prompt: int, tokens: int, block_size: int, passes: int | list, cached: bool) -> dict:
    """passes_of(prompt, tokens, block_size, passes, cached)."""
    if lacking := missing(answer, *PARTS):
        return lacking
    given = list(passes) if isinstance(passes, list) else passes
    gave = as_list(answer["passes_of"](prompt, tokens, block_size, given, cached))
    pairs = None if gave is None else [_whole(pair) for pair in gave]
    if pairs is None or any(pair is None or len(pair) != 2 for pair in pairs):
        return {"returned": "something else"}
    return {"made": pairs, "changed": given != passes}


def run_totals(answer: Any, made: list, tokens: int, weights: int, pair_flops: int) -> dict:
    """totals(made, tokens, weights, pair_flops)."""
    if lacking := missing(answer, *PARTS):
        return lacking
    given = [tuple(pair) for pair in made]
    gave = answer["totals"](given, tokens, weights, pair_flops)
    if not isinstance(gave, dict):
        return {"returned": type(gave).__name__}
    return {"changed": given != [tuple(pair) for pair in made]} | {f"total {name}": one for name, one in gave.items()}


def run_speedup(answer: Any, made: list, tokens: int, batch: int, flop_per_s: float, bytes_per_s: float) -> dict:
    """speedup(made, tokens, batch, flop_per_s, bytes_per_s)."""
    if lacking := missing(answer, *PARTS):
        return lacking
    given = [tuple(pair) for pair in made]
    gave = answer["speedup"](given, tokens, batch, flop_per_s, bytes_per_s)
    if kind_of(gave) not in ("int", "float"):
        return {"returned": type(gave).__name__}
    return {"value": float(gave), "changed": given != [tuple(pair) for pair in made]}
