"""Lab 13, load or compute: cases and judges of parallel-break-even.

What is right is the best of all plans, in fractions, token by token and block by block.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

from workbench.checks.tensors import missing_message

CLOSE = 1e-5  # float32 is enough
APART = 1e-3  # the best plan and the next differ by so much of its seconds, or are exactly equal


# --- Machines ---


def machine_of(draw: random.Random, **given: float) -> dict:
    """Numbers that floats have exactly: bytes per second and all seconds are multiples of powers of two.

    given: in place of what is drawn, host_blocks_per_s, disk_blocks_per_s, host_latency, disk_latency (s), token_s,
    pair_s.
    """
    size = draw.choice([4, 8, 16])
    shape = {"layers": draw.randint(2, 6), "kv_heads": draw.choice([1, 2, 4]), "head_dim": draw.choice([8, 16])}
    shape["element_bytes"] = draw.choice([1, 2, 4])
    per_block = size * 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * shape["element_bytes"]
    token_s = given.get("token_s", draw.randint(4, 12) / 1024)
    compute = token_s * size  # of a block, without attention
    speeds = {
        "host": given.get("host_blocks_per_s", draw.choice([4, 6, 8]) / compute),
        "disk": given.get("disk_blocks_per_s", draw.choice([1, 1.25, 1.5]) / compute),
    }
    latencies = {
        "host": given.get("host_latency", draw.randint(1, 8) / 1024),
        "disk": given.get("disk_latency", draw.randint(8, 40) / 1024),
    }
    tiers = {
        name: {"bytes_per_s": float(round(speeds[name] * per_block)), "latency_s": float(latencies[name])}
        for name in ("host", "disk")
    }
    pair_s = given.get("pair_s", draw.randint(1, 6) / 2**14)
    return {"block_size": size, **shape, "tiers": tiers, "token_s": float(token_s), "pair_s": float(pair_s)}


def renamed(case: dict) -> dict:
    """The same with other names of the tiers, in another order."""
    names = {"host": "peer", "disk": "network"}
    facts = case["machine"]["tiers"]
    machine = case["machine"] | {"tiers": {names[name]: facts[name] for name in sorted(facts)}}
    return case | {"machine": machine, "tiers": [names.get(tier, tier) for tier in case["tiers"]]}


def three_tiers(draw: random.Random) -> dict:
    """A machine with a tier more, faster to answer than the disk and slower than the host."""
    machine = machine_of(draw)
    host, disk = machine["tiers"]["host"], machine["tiers"]["disk"]
    network = {"bytes_per_s": (host["bytes_per_s"] + disk["bytes_per_s"]) / 2, "latency_s": host["latency_s"] + 1 / 256}
    return machine | {"tiers": {"host": host, "network": network, "disk": disk}}


def places(*runs: tuple[str | None, int]) -> list[str | None]:
    return [tier for tier, count in runs for _ in range(count)]


# --- Cases: seconds of a plan ---


def seconds_case(machine: dict, tiers: list, blocks: int, rest: int = 0) -> dict:
    """rest: tokens after the last block that is listed."""
    tokens = len(tiers) * machine["block_size"] + rest
    return {"machine": machine, "tokens": tokens, "tiers": tiers, "blocks": blocks}


def seconds_cases(draw: random.Random) -> list[dict]:
    """Blocks of one tier and of several; none; some of those that are there."""
    host, both = places(("host", 5)), places(("device", 2), ("host", 2), ("disk", 3))
    return [
        seconds_case(machine_of(draw), host, 3, 2),
        seconds_case(machine_of(draw), host, 0, 1),
        seconds_case(machine_of(draw), both, 4, 3),
        seconds_case(machine_of(draw), both, 7, 1),
        seconds_case(machine_of(draw), both, 2, 5),
        seconds_case(machine_of(draw), ["disk", "host", "disk", "device", "host", None], 5),
        renamed(seconds_case(machine_of(draw), both, 6, 2)),
        seconds_case(three_tiers(draw), places(("network", 2), ("host", 1), ("disk", 2), ("network", 2)), 6),
    ]


def other_seconds(draw: random.Random) -> list[dict]:
    cases = []
    for _ in range(8):
        tiers = [draw.choice(["device", "host", "disk"]) for _ in range(draw.randint(2, 9))]
        cases.append(seconds_case(machine_of(draw), tiers, draw.randint(0, len(tiers)), draw.randint(1, 6)))
    return [*cases[:-2], *map(renamed, cases[-2:])]


# --- Cases: plans ---


def plan_case(machine: dict, tiers: list, rest: int) -> dict:
    return {"machine": machine, "tokens": len(tiers) * machine["block_size"] + rest, "tiers": tiers}


def sought(
    draw: random.Random,
    tiers: Callable[[random.Random], list],
    such_that: Callable[[dict], bool],
    rest: int | None = None,
    **given: float,
) -> dict:
    """A case whose best plan is clearly the best."""
    while True:
        machine = machine_of(draw, **given)
        case = plan_case(machine, tiers(draw), draw.randint(1, machine["block_size"]) if rest is None else rest)
        if is_clear(case) and such_that(case):
            return case


def is_clear(case: dict) -> bool:
    ranked = sorted(total_s(case, blocks) for blocks in allowed(case))
    return len(ranked) < 2 or ranked[1] - ranked[0] > APART * ranked[0]


def loads_all(case: dict) -> bool:
    return best(case) == allowed(case)[-1] > 0


def loads_nothing(case: dict) -> bool:
    return best(case) == 0 < allowed(case)[-1]


def loads_some(case: dict) -> bool:
    return 0 < best(case) < allowed(case)[-1]


def first_does_not_pay(case: dict) -> bool:
    """All of it is loaded, and the first block alone would take longer than to compute it."""
    return loads_all(case) and total_s(case, 1) > total_s(case, 0)


def one_tier_cases(draw: random.Random) -> list[dict]:
    """From the host: all, nothing, and all where the first block alone would not pay."""

    def several(d: random.Random) -> list:
        return places(("host", d.randint(4, 7)))

    return [
        sought(draw, several, loads_all),
        sought(draw, several, loads_nothing, host_blocks_per_s=4.0, token_s=1 / 1024),
        sought(draw, several, first_does_not_pay, host_latency=0.5, token_s=1 / 32),
    ]


def tier_cases(draw: random.Random) -> list[dict]:
    """Several tiers: where the disk pays, where it does not, and where it pays, but its first block alone would not."""

    def mixture(d: random.Random) -> list:
        return places(("device", d.randint(1, 2)), ("host", d.randint(2, 4)), ("disk", d.randint(2, 5)))

    # A block from this disk takes longer than to compute it: it is loaded for what stands behind it, or not at all.
    def to_the_device(d: random.Random) -> list:
        return ["host", "disk", "host", "device", "disk"]

    return [
        sought(draw, mixture, loads_all),
        sought(draw, mixture, loads_some, disk_latency=0.75),
        sought(draw, mixture, loads_from_the_host, token_s=1 / 512),
        sought(draw, lambda d: ["disk", "host", "host", "disk", "host", "host"], first_does_not_pay),
        sought(draw, lambda d: ["host", "device", "host", "disk", "device", "disk", "device"], loads_all),
        sought(draw, to_the_device, loads_to_the_device, token_s=6 / 1024, disk_blocks_per_s=8.0, disk_latency=1 / 64),
        renamed(sought(draw, mixture, loads_all)),
    ]


def loads_from_the_host(case: dict) -> bool:
    """And not from the disk behind it."""
    return loads_some(case) and best(case) > case["tiers"].count("device")


def loads_to_the_device(case: dict) -> bool:
    """And not the disk's block behind it."""
    return case["tiers"][: best(case)][-1:] == ["device"]


def hole_cases(draw: random.Random) -> list[dict]:
    """A block that lies nowhere; what comes behind it is of no use."""

    def holes(d: random.Random) -> list:
        return [*places(("host", d.randint(1, 4))), None, *places(("host", 3), ("device", 2))]

    return [
        sought(draw, holes, loads_all),
        sought(draw, holes, loads_all),
        sought(draw, lambda d: [None, "host", "host", "device"], lambda case: True),
        sought(draw, lambda d: ["device", "host", None, "device", "device"], loads_all),
    ]


def whole_prompt_cases(draw: random.Random) -> list[dict]:
    """Blocks for the whole prompt: the last one is computed all the same."""
    return [
        sought(draw, lambda d: places(("host", d.randint(2, 5))), loads_all, rest=0),
        sought(draw, lambda d: places(("device", d.randint(2, 5))), loads_all, rest=0),
        sought(draw, lambda d: places(("device", 1)), lambda case: True, rest=0),
        sought(draw, lambda d: places(("host", d.randint(2, 5))), loads_all, rest=1),
    ]


def attention_cases(draw: random.Random) -> list[dict]:
    """Later tokens take longer: a disk that is slow for the first blocks pays for the last ones."""

    def long(d: random.Random) -> list:
        return places(("host", 6), ("disk", d.randint(4, 7)))

    def pays_by_attention(case: dict) -> bool:
        flat = case | {"machine": case["machine"] | {"pair_s": 0.0}}
        return loads_all(case) and best(flat) < best(case)

    return [sought(draw, long, pays_by_attention, pair_s=pair / 2**12, disk_latency=1 / 32) for pair in (1, 2)]


def tie_case(draw: random.Random, tiers: list, *, host_s: float, disk_s: float, computed_s: float) -> dict:
    """Seconds of a block, exact: to load it from a tier, and to compute it; no latency and no attention part."""
    shape = {"block_size": 4, "layers": 2, "kv_heads": 2, "head_dim": 16, "element_bytes": 4}
    nbytes = 4 * 2 * 2 * 2 * 16 * 4
    speeds = {"host": nbytes / host_s, "disk": nbytes / disk_s}
    machine = {
        **shape,
        "tiers": {name: {"bytes_per_s": one, "latency_s": 0.0} for name, one in speeds.items()},
        "token_s": computed_s / 4,
        "pair_s": 0.0,
    }
    return plan_case(machine, tiers, draw.randint(1, 4))


def tie_cases(draw: random.Random) -> list[dict]:
    """Blocks that take as long to load as to compute."""
    return [
        tie_case(draw, ["host"] * draw.randint(2, 5), host_s=0.5, disk_s=1.0, computed_s=0.5),
        tie_case(draw, ["host", "host", "disk", "disk"], host_s=0.25, disk_s=0.5, computed_s=0.5),
        tie_case(draw, ["device", *["disk"] * draw.randint(1, 4)], host_s=0.25, disk_s=0.25, computed_s=0.25),
    ]


def nothing_cases(draw: random.Random) -> list[dict]:
    """A prompt shorter than a block, and one without any that is there."""
    machine = machine_of(draw)
    return [
        plan_case(machine, [], draw.randint(1, machine["block_size"] - 1)),
        plan_case(machine_of(draw), [None] * draw.randint(1, 4), 1),
        plan_case(machine_of(draw), ["device", "device"], 1),
    ]


def other_plans(draw: random.Random) -> list[dict]:
    def anywhere(d: random.Random) -> list:
        return [d.choice(["device", "host", "host", "disk", "disk"]) for _ in range(d.randint(3, 9))]

    kinds = (loads_all, loads_some, loads_some, lambda case: best(case) > 0, lambda case: True)
    latencies = (1 / 128, 0.25, 0.5, 0.125, 0.125)
    cases = [sought(draw, anywhere, kind, disk_latency=late) for kind, late in zip(kinds, latencies)]
    return [*cases, renamed(sought(draw, anywhere, loads_some, disk_latency=0.5))]


def edge_plans(draw: random.Random) -> list[dict]:
    return [*hole_cases(draw)[1:], *whole_prompt_cases(draw)[:2], *tie_cases(draw), *nothing_cases(draw)[:2]]


# --- What is right ---


def block_bytes(machine: dict) -> int:
    per_token = sum(2 * machine["kv_heads"] * machine["head_dim"] for _ in range(machine["layers"]))
    return machine["block_size"] * per_token * machine["element_bytes"]


def exact_load(machine: dict, tiers: list, blocks: int) -> Fraction:
    seconds, met = Fraction(0), set()
    for tier in tiers[:blocks]:
        if tier == "device":
            continue
        facts = machine["tiers"][tier]
        if tier not in met:
            seconds += Fraction(facts["latency_s"])
            met.add(tier)
        seconds += block_bytes(machine) / Fraction(facts["bytes_per_s"])
    return seconds


def exact_compute(machine: dict, tokens: int, begin: int) -> Fraction:
    token_s, pair_s = Fraction(machine["token_s"]), Fraction(machine["pair_s"])
    return sum((token_s + pair_s * (position + 1) for position in range(begin, tokens)), Fraction(0))


def allowed(case: dict) -> list[int]:
    """Numbers of leading blocks that a plan may use."""
    size, numbers = case["machine"]["block_size"], [0]
    for place, tier in enumerate(case["tiers"], 1):
        if tier is None or place * size >= case["tokens"]:
            break
        numbers.append(place)
    return numbers


def total_s(case: dict, blocks: int) -> Fraction:
    machine = case["machine"]
    computed = exact_compute(machine, case["tokens"], blocks * machine["block_size"])
    return exact_load(machine, case["tiers"], blocks) + computed


def best(case: dict) -> int:
    """Leading blocks of the best plan: of equal ones the one that loads less."""

    def key(blocks: int) -> tuple[Fraction, int]:
        return total_s(case, blocks), sum(tier != "device" for tier in case["tiers"][:blocks])

    return min(allowed(case), key=key)


# --- Judging ---


def of_machine(case: dict) -> str:
    machine = case["machine"]
    tiers = "; ".join(f"{n}: {t['bytes_per_s']:g} B/s, {t['latency_s']:g} s" for n, t in machine["tiers"].items())
    names = ("block_size", "layers", "kv_heads", "head_dim", "element_bytes", "token_s", "pair_s")
    facts = ", ".join(f"{name} {machine[name]:g}" for name in names)
    return f"{case['tokens']} tokens, blocks at {case['tiers']}; {facts}; {tiers}: "


def differ(came: float, right: Fraction) -> bool:
    return not abs(came - right) <= CLOSE * (1 + right)


def judge_seconds(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    machine, blocks = case["machine"], case["blocks"]
    begin = blocks * machine["block_size"]
    right = {
        "load_s": exact_load(machine, case["tiers"], blocks),
        "compute_s": exact_compute(machine, case["tokens"], begin),
    }
    asked = {"load_s": f"of {blocks} blocks", "compute_s": f"from token {begin}"}
    for name, expected in right.items():
        came = seen[name]
        if isinstance(came, str):
            return f"{of_machine(case)}{name} {asked[name]} is a {came}, expected a number"
        if differ(came, expected):
            return f"{of_machine(case)}{name} {asked[name]}: {came:.9g}, expected {float(expected):.9g}"
    return f"{of_machine(case)}what was given was changed" if seen["changed"] else None


def judge_plan(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    where, size = of_machine(case), case["machine"]["block_size"]
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, expected a dict"
    for name in ("begin", "load", "seconds"):
        if name not in seen:
            return f"{where}the plan has no {name!r}"
    blocks = best(case)
    seconds = total_s(case, blocks)
    begin, load = blocks * size, [i for i, tier in enumerate(case["tiers"][:blocks]) if tier != "device"]
    if seen["begin"] != begin:
        known = {number * size: number for number in allowed(case)}
        price = f", which takes {float(total_s(case, known[seen['begin']])):.6g} s" if seen["begin"] in known else ""
        expected = f"expected {begin}, which takes {float(seconds):.6g} s"
        return f"{where}computing begins at token {seen['begin']}{price}; {expected}"
    if seen["load"] != load:
        return f"{where}the blocks {seen['load']} are loaded, expected {load}"
    if isinstance(seen["seconds"], str) or differ(seen["seconds"], seconds):
        came = seen["seconds"] if isinstance(seen["seconds"], str) else f"{seen['seconds']:.9g}"
        return f"{where}seconds {came}, expected {float(seconds):.9g}"
    return f"{where}what was given was changed" if seen["changed"] else None
