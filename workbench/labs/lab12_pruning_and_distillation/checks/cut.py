"""Lab 12, a smaller model: cases and judges of pruning-cut.

What is right is a function: the logits of the full model with the parts that are cut set to zero. Nothing is cut to
work them out.
"""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import exactly, read
from workbench.labs.lab12_pruning_and_distillation.checks.probes import BIASES, block_inputs

CLOSE = 1e-5
EPS = 1e-6
ROPE_BASE = 100.0


# --- Cases ---


def cut_case(
    draw: random.Random,
    sizes: tuple[int, int, int, int, int],
    left: tuple[int, int, int],
    *,
    tied: bool = True,
    biases: tuple[str, ...] = (),
    head_norms: bool = False,
    dtype: str = "float64",
) -> dict:
    """sizes: D, F, H, K, d. left: how many channels, neurons and groups stay; which ones is drawn."""
    names = ("channels", "neurons", "heads", "kv_heads", "head_dim")
    case = {"seed": draw.randrange(10**6), "sizes": dict(zip(names, sizes)), "tied": tied, "biases": list(biases)}
    whole = (sizes[0], sizes[1], sizes[3])
    for name, count, of in zip(("channels", "neurons", "groups"), left, whole):
        case[name] = chosen(draw, count, of)
    return case | {"head_norms": head_norms, "dtype": dtype}


def chosen(draw: random.Random, count: int, of: int) -> list[int]:
    """So many indices in ascending order; not the first ones, where there is a choice."""
    while True:
        indices = sorted(draw.sample(range(of), count))
        if count == of or indices != list(range(count)):
            return indices


def neuron_cuts(draw: random.Random) -> list[dict]:
    """The neurons alone."""
    return [cut_case(draw, (4, 7, 2, 2, 2), (4, 4, 2)), cut_case(draw, (6, 6, 4, 2, 4), (6, 3, 2), tied=False)]


def channel_cuts(draw: random.Random) -> list[dict]:
    """The channels alone; the head is tied, and is not."""
    return [
        cut_case(draw, (8, 5, 2, 2, 2), (5, 5, 2)),
        cut_case(draw, (6, 6, 4, 2, 4), (4, 6, 2), tied=False),
        cut_case(draw, (7, 7, 2, 1, 2), (3, 7, 1)),
    ]


def group_cuts(draw: random.Random) -> list[dict]:
    """The groups alone: heads of their own, and shared ones."""
    return [
        cut_case(draw, (5, 6, 3, 3, 2), (5, 6, 2)),
        cut_case(draw, (6, 5, 6, 3, 4), (6, 5, 2)),
        cut_case(draw, (4, 4, 6, 2, 2), (4, 4, 1), tied=False),
    ]


def all_cuts(draw: random.Random) -> list[dict]:
    """Everything at once."""
    return [cut_case(draw, (8, 10, 4, 2, 4), (5, 6, 1)), cut_case(draw, (6, 9, 6, 3, 2), (3, 4, 2), tied=False)]


def bias_cuts(draw: random.Random) -> list[dict]:
    """Biases of some, of all; norms of heads."""
    return [
        cut_case(draw, (6, 7, 4, 2, 2), (4, 4, 1), biases=("q", "k", "v")),
        cut_case(draw, (5, 8, 4, 4, 2), (3, 5, 2), biases=BIASES, tied=False),
        cut_case(draw, (8, 6, 4, 2, 4), (4, 3, 1), head_norms=True),
        cut_case(draw, (4, 8, 4, 2, 4), (3, 5, 1), head_norms=True, biases=("o", "down")),
    ]


def whole_cuts(draw: random.Random) -> list[dict]:
    """Nothing is cut: copies. And one of each."""
    return [
        cut_case(draw, (4, 4, 4, 2, 2), (4, 4, 2), head_norms=True),
        cut_case(draw, (4, 6, 2, 2, 2), (4, 6, 2), tied=False, biases=("q", "down")),
        cut_case(draw, (5, 6, 4, 2, 2), (1, 1, 1)),
    ]


def dtype_cuts(draw: random.Random) -> list[dict]:
    """Matrices, biases and norms in each dtype."""
    return [
        cut_case(draw, (6, 7, 4, 2, 2), (4, 4, 1), biases=("q", "down"), dtype="float32"),
        cut_case(draw, (5, 6, 4, 2, 2), (3, 4, 1), head_norms=True, tied=False, dtype="bfloat16"),
        cut_case(draw, (4, 6, 2, 2, 2), (4, 5, 1), biases=("o",), dtype="float16"),
    ]


def other_cuts(draw: random.Random) -> list[dict]:
    """Sizes, biases and norms by chance."""
    cases = []
    for number in range(6):
        kv, shared, d, f = draw.randint(2, 4), draw.randint(1, 3), draw.randint(3, 9), draw.randint(3, 12)
        left = (draw.randint(1, d - 1), draw.randint(1, f - 1), draw.randint(1, kv - 1))
        biases = tuple(name for name in BIASES if draw.random() < 0.4)
        sizes = (d, f, kv * shared, kv, draw.choice([2, 4]))
        tied, dtype = number % 2 == 0, ("float64", "float32", "bfloat16")[number % 3]
        norms = draw.random() < 0.5
        cases.append(cut_case(draw, sizes, left, tied=tied, biases=biases, head_norms=norms, dtype=dtype))
    return cases


def square_cuts(draw: random.Random) -> list[dict]:
    """Matrices that are square, where a wrong side has the right shape."""
    return [
        cut_case(draw, (8, 8, 4, 4, 2), (4, 4, 2)),
        cut_case(draw, (6, 6, 3, 3, 2), (4, 4, 2), tied=False, biases=("o", "down", "gate")),
    ]


def single_groups(draw: random.Random) -> list[dict]:
    """One key-value head for all; many query heads for each."""
    return [
        cut_case(draw, (6, 8, 4, 1, 2), (3, 5, 1), biases=("k", "q")),
        cut_case(draw, (5, 6, 10, 2, 2), (4, 4, 1)),
        cut_case(draw, (4, 5, 8, 4, 2), (3, 4, 3), head_norms=True, tied=False),
    ]


# --- What is right ---


def rms_norm(x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """The mean over `count` channels, of which the others are 0."""
    return x / (x.square().sum(-1, keepdim=True) / count + EPS).sqrt() * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """RoPE of heads [T, H, d], in Llama's order: number j goes with number j + d/2."""
    tokens, _, d = x.shape
    angles = torch.arange(tokens).double()[:, None] * ROPE_BASE ** (-torch.arange(d // 2).double() / (d // 2))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def logits(
    block: dict[str, torch.Tensor], head_dim: int, ids: torch.Tensor, there: dict[str, torch.Tensor]
) -> torch.Tensor:
    """[T, V] of a model of one layer. there: 1 for what is there and 0 for what is set to zero where it is written, of
    channels [D], neurons [F] and query heads [H]."""
    count = int(there["channels"].sum())
    tokens = len(ids)

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ block[name].T
        return y + block[f"{name}_bias"] if f"{name}_bias" in block else y

    def heads(name: str, x: torch.Tensor) -> torch.Tensor:
        made = product(name, x).view(tokens, -1, head_dim)
        if f"{name}_norm" in block:
            made = rms_norm(made, block[f"{name}_norm"], head_dim)
        return made

    x = block["embedding"][ids] * there["channels"]
    normed = rms_norm(x, block["attention_norm"], count)
    q, k, v = rotated(heads("q", normed)), rotated(heads("k", normed)), heads("v", normed)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) / head_dim**0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v) * there["heads"][:, None]
    x = x + product("o", mixed.reshape(tokens, -1)) * there["channels"]
    normed = rms_norm(x, block["mlp_norm"], count)
    inner = torch.nn.functional.silu(product("gate", normed)) * product("up", normed) * there["neurons"]
    x = x + product("down", inner) * there["channels"]
    return rms_norm(x, block["final_norm"], count) @ block["head"].T


def marked(indices: list[int], count: int) -> torch.Tensor:
    there = torch.zeros(count, dtype=torch.float64)
    there[indices] = 1.0
    return there


def given_block(case: dict) -> dict[str, torch.Tensor]:
    return block_inputs(**{name: case[name] for name in ("seed", "sizes", "tied", "biases", "head_norms", "dtype")})


def what_stays(case: dict) -> dict[str, torch.Tensor]:
    sizes = case["sizes"]
    groups = marked(case["groups"], sizes["kv_heads"])
    return {
        "channels": marked(case["channels"], sizes["channels"]),
        "neurons": marked(case["neurons"], sizes["neurons"]),
        "heads": groups.repeat_interleave(sizes["heads"] // sizes["kv_heads"]),
    }


def smaller_shape(case: dict, name: str, shape: torch.Size) -> tuple[int, ...]:
    """The shape of a matrix after the cut."""
    sizes = case["sizes"]
    d, f, k = (len(case[part]) for part in ("channels", "neurons", "groups"))
    queries = k * sizes["heads"] // sizes["kv_heads"] * sizes["head_dim"]
    rows = {"q": queries, "k": k * sizes["head_dim"], "v": k * sizes["head_dim"], "gate": f, "up": f}
    if name in ("q_norm", "k_norm"):
        return tuple(shape)
    if len(shape) == 1:
        return (rows.get(name.removesuffix("_bias"), d),)
    outputs = shape[0] if name in ("embedding", "head") else rows.get(name, d)
    return (outputs, {"o": queries, "down": f}.get(name, d))


# --- Judging ---


def judge_cut(case: dict, seen: dict) -> str | None:
    sizes = case["sizes"]
    where = (
        f"D = {sizes['channels']}, F = {sizes['neurons']}, H = {sizes['heads']}, K = {sizes['kv_heads']}, d = "
        f"{sizes['head_dim']}; channels {case['channels']}, neurons {case['neurons']}, groups {case['groups']} stay: "
    )
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict of tensors was expected"
    block = given_block(case)
    if seen["changed"]:
        return f"{where}the call changed {seen['changed'][0]}, which it was given to read"
    if seen["names"] != sorted(block):
        odd = sorted(set(seen["names"]) ^ set(block))
        return (
            f"{where}the dict has the names {seen['names']}, expected those of the given one; the difference is {odd}"
        )
    small = {}
    for name, given in block.items():
        came = read(seen[f"matrix {name}"], f"`{name}`", smaller_shape(case, name, given.shape), case["dtype"])
        if isinstance(came, str):
            return where + came
        small[name] = came.double()
    block = {name: given.double() for name, given in block.items()}
    ids = torch.arange(len(block["embedding"])).flip(0)
    everything = {
        "channels": marked(list(range(len(case["channels"]))), len(case["channels"])),
        "neurons": marked(list(range(len(case["neurons"]))), len(case["neurons"])),
        "heads": torch.ones(small["q"].shape[0] // sizes["head_dim"], dtype=torch.float64),
    }
    came = logits(small, sizes["head_dim"], ids, everything)
    right = logits(block, sizes["head_dim"], ids, what_stays(case))
    far = ~((came - right).abs() <= CLOSE * right.abs().clamp(min=1.0))
    if far.any():
        at = tuple(far.nonzero()[0].tolist())
        return (
            f"{where}all shapes are right, but the smaller model gives other logits than the full one with the"
            " rest set "
            f"to zero: {exactly(came[at])[:9]} at position {at[0]}, token {at[1]}, expected {exactly(right[at])[:9]}. "
            f"First matrix whose numbers are not what is left of the given one: {first_odd(case, block, small)}"
        )
    if case["tied"] and not seen["tied"]:
        return f"{where}the head was the embedding's own tensor, and is another one now"
    if seen["views"]:
        return f"{where}`{seen['views'][0]}` lies in the memory of the matrices that were given; all of it stays there"
    for name, (kept, taken) in seen["slices"].items():
        return (
            f"{where}`{name}` keeps {kept} bytes in memory, and its numbers take {taken}: it is a slice of a larger"
            " tensor"
        )
    return None


def first_odd(case: dict, block: dict[str, torch.Tensor], small: dict[str, torch.Tensor]) -> str:
    """The first matrix that is not what is left when each row and column is kept or not, one by one."""
    sizes, d = case["sizes"], case["sizes"]["head_dim"]
    shared = sizes["heads"] // sizes["kv_heads"]
    queries = [i for i in range(sizes["heads"] * d) if i // d // shared in case["groups"]]
    keys = [i for i in range(sizes["kv_heads"] * d) if i // d in case["groups"]]
    rows = {"q": queries, "k": keys, "v": keys, "gate": case["neurons"], "up": case["neurons"]}
    columns = {"o": queries, "down": case["neurons"]}
    for name, whole in block.items():
        base = name.removesuffix("_bias")
        if name in ("q_norm", "k_norm"):
            right = whole
        elif whole.dim() == 1:
            right = torch.stack([whole[i] for i in rows.get(base, case["channels"])])
        else:
            outputs = range(len(whole)) if name in ("embedding", "head") else rows.get(name, case["channels"])
            right = torch.stack(
                [torch.stack([whole[i, j] for j in columns.get(name, case["channels"])]) for i in outputs]
            )
        if not torch.allclose(small[name], right, rtol=CLOSE, atol=CLOSE):
            return f"`{name}`"
    return "none; they stand in another order"
