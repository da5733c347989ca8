"""Lab 12, a plan for a budget: cases and judges of pruning-plan.

What is right is the best of all plans, counted in fractions; a plan is made layer by layer, so none has to be refused.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Callable
from fractions import Fraction

from workbench.checks.tensors import missing_message
from workbench.grading.check import brief

CLOSE = 1e-9
PARTS = ("parameters", "launches", "step_s", "loss")
# units that floats have exactly: bytes per second and seconds per launch are powers of two
BYTES_PER_S = 2.0**30
LAUNCH_S = 2.0**-17
FAST = 2.0**40  # bytes per second: a parameter takes some picoseconds
SLIGHTLY = 2.0**-14  # a loss that is there, and less than 1e-4


# --- Tables ---


def piece(kind: str, layer: int, parameters: int, launches: int, loss: float) -> dict:
    return {"kind": kind, "layer": layer, "parameters": parameters, "launches": launches, "loss": loss}


def table_of(
    draw: random.Random,
    layers: int,
    neurons: int,
    groups: int,
    *,
    launch_s: float = LAUNCH_S,
    low: int = 1,
    mixed: bool = False,
    bytes_per_s: float = BYTES_PER_S,
    experts: int = 0,
    first: int = 0,
) -> dict:
    """A model with so many layers, with pieces of neurons and key-value groups in each. Losses are multiples of 1/64
    from low/64. mixed: the pieces come in any order. experts: so many pieces of a third kind in each layer, which have
    launches. first: the number of the first layer; then the numbers have gaps, too."""
    pieces, total, launches = [], 1024 * draw.randint(100, 300), 3
    for layer in range(first, first + layers * (2 if first else 1), 2 if first else 1):
        inner, taken, own_launches = [], 0, 0
        for kind, count in (("neurons", neurons), ("kv_group", groups), ("expert", experts)):
            if not count:
                continue
            size, each = 1024 * draw.randint(20, 60), draw.randint(1, 3) if kind == "expert" else 0
            taken, own_launches = taken + size * count, own_launches + each * count
            inner += [piece(kind, layer, size, each, draw.randint(low, 20) / 64) for _ in range(count)]
        own = taken + 1024 * draw.randint(10, 80)
        per_layer = draw.randint(8, 13) + own_launches
        pieces += [piece("layer", layer, own, per_layer, draw.randint(max(low, 12), 48) / 64), *inner]
        total, launches = total + own, launches + per_layer
    if mixed:
        draw.shuffle(pieces)
    return {
        "parameters": total,
        "launches": launches,
        "element_bytes": draw.choice([2, 4]),
        "bytes_per_s": bytes_per_s,
        "launch_s": launch_s,
        "pieces": pieces,
    }


# --- Cases: what a cut costs ---


def of_kind(table: dict, *kinds: str) -> list[int]:
    return [i for i, one in enumerate(table["pieces"]) if one["kind"] in kinds]


def cost_cases(draw: random.Random) -> list[dict]:
    """Nothing; pieces; layers; pieces of one layer beside another one."""
    cases = []
    for number in range(4):
        table = table_of(draw, 2, 2, 2)
        layers, inner = of_kind(table, "layer"), of_kind(table, "neurons", "kv_group")
        beside = [i for i in inner if table["pieces"][i]["layer"] == 1]
        cut = ([], sorted(draw.sample(inner, 3)), [layers[1]], [layers[0], *draw.sample(beside, 2)])[number]
        cases.append({"table": table, "cut": cut})
    table = table_of(draw, 2, 1, 2, experts=2, first=draw.randint(2, 5))
    experts = of_kind(table, "expert")
    cases.append({"table": table, "cut": [*draw.sample(of_kind(table, "neurons", "kv_group"), 2), experts[1]]})
    return [*cases, {"table": table, "cut": [of_kind(table, "layer")[0], experts[-1]]}]


def coupled_cases(draw: random.Random) -> list[dict]:
    """A layer and pieces of it, the layer named first or last; all of both layers."""
    cases = []
    for number in range(4):
        table = table_of(draw, 2, 2, 2, mixed=number == 2)
        layer = of_kind(table, "layer")[number % 2]
        of_it = [i for i, one in enumerate(table["pieces"]) if one["layer"] == table["pieces"][layer]["layer"]]
        of_it.remove(layer)
        beside = [i for i in of_kind(table, "neurons", "kv_group") if i not in of_it]
        some = draw.sample(of_it, 2)
        cut = (
            [layer, *some],
            [*some, *draw.sample(beside, 1), layer],
            [*draw.sample(beside, 2), layer, *of_it],
            list(range(len(table["pieces"]))),
        )[number]
        cases.append({"table": table, "cut": cut})
    return cases


def other_costs(draw: random.Random) -> list[dict]:
    """Cuts by chance, of mixed tables."""
    cases = []
    for number in range(8):
        sizes = (draw.randint(2, 3), 2, draw.randint(1, 2))
        more = {"experts": number % 3, "first": number % 2 * 3}
        table = table_of(draw, *sizes, launch_s=draw.uniform(1, 9) * 1e-6, mixed=True, **more)
        pieces = range(len(table["pieces"]))
        cases.append({"table": table, "cut": draw.sample(pieces, draw.randint(1, len(pieces) - 1))})
    return cases


# --- Cases: plans ---


def plan_case(table: dict, max_parameters: int, max_step_s: float) -> dict:
    return {"table": table, "max_parameters": max_parameters, "max_step_s": max_step_s}


def sought(
    draw: random.Random,
    sizes: tuple[int, int, int],
    budget: str,
    such_that: Callable[[dict], bool] = lambda case: True,
    **settings,
) -> dict:
    """A case whose budget lies between those of two plans, so that nothing hangs on rounding.

    budget: what binds, "parameters", "time" or "both"; the other one is met by the whole model.
    """
    while True:
        table = table_of(draw, *sizes, **settings)
        plans = all_plans(table)
        whole = plans[0]
        parameters, step_s = whole["parameters"], 2 * float(whole["step_s"])
        if budget in ("parameters", "both"):
            parameters = between(draw, sorted({p["parameters"] for p in plans}))
        if budget in ("time", "both"):
            step_s = float(between(draw, sorted({p["step_s"] for p in plans})))
        case = plan_case(table, math.ceil(parameters), step_s)
        best = exact_plan(case)
        if best and such_that(case):
            return case


def between(draw: random.Random, values: list) -> Fraction:
    """In the middle of two neighbours of the lower half."""
    at = draw.randint(len(values) // 6, len(values) // 2)
    return Fraction(values[at] + values[at + 1]) / 2


def is_not_greedy(case: dict) -> bool:
    """Whether cutting the least loss first, or the least loss per parameter, until it fits, is another plan."""
    right = exact_plan(case)
    pieces = case["table"]["pieces"]
    orders = (
        lambda i: (pieces[i]["loss"], i),
        lambda i: (pieces[i]["loss"] / pieces[i]["parameters"], i),
        lambda i: (-pieces[i]["parameters"], i),
    )
    for order in orders:
        cut: list[int] = []
        for i in sorted(range(len(pieces)), key=order):
            costs = exact_cost(case["table"], cut)
            if fits(case, costs):
                break
            cut.append(i)
        if sorted(cut) == right:
            return False
    return True


def has_layer(case: dict) -> bool:
    """Whether the best plan cuts a layer."""
    pieces = case["table"]["pieces"]
    return any(pieces[i]["kind"] == "layer" for i in exact_plan(case) or [])


def is_wide(case: dict) -> bool:
    """Whether the best plan cuts pieces of layers and no layer."""
    return bool(exact_plan(case)) and not has_layer(case)


def both(*conditions: Callable[[dict], bool]) -> Callable[[dict], bool]:
    return lambda case: all(one(case) for one in conditions)


def parameter_cases(draw: random.Random) -> list[dict]:
    """The parameters bind: within layers, and a whole layer."""
    return [
        sought(draw, (2, 2, 2), "parameters", both(is_not_greedy, is_wide)),
        sought(draw, (2, 2, 2), "parameters", both(is_not_greedy, has_layer)),
        sought(draw, (3, 2, 1), "parameters", is_not_greedy),
    ]


def time_cases(draw: random.Random) -> list[dict]:
    """The step binds: where bytes take most of it, where launches do, and with parameters that bind, too."""

    def both_bind(case: dict) -> bool:
        right, table = exact_plan(case), case["table"]
        freed = [case | {"max_parameters": table["parameters"]}, case | {"max_step_s": 10.0}]
        return all(exact_plan(one) != right for one in freed)

    return [
        sought(draw, (2, 2, 2), "time", is_wide, launch_s=2.0**-24),
        sought(draw, (2, 2, 2), "time", has_layer, launch_s=2.0**-12),
        sought(draw, (2, 2, 2), "both", both_bind, launch_s=2.0**-15),
        sought(draw, (3, 1, 2), "both", both_bind, launch_s=2.0**-15),
    ]


def none_cases(draw: random.Random) -> list[dict]:
    """The smallest plan does not fit, by one parameter or by its launches; it just fits; the whole model does."""
    table, cases = table_of(draw, 2, 2, 2), []
    plans = all_plans(table)
    smallest = min(p["parameters"] for p in plans)
    shortest = min(p["step_s"] for p in plans)
    long = 2 * float(plans[0]["step_s"])
    cases.append(plan_case(table, smallest - 1, long))
    cases.append(plan_case(table, smallest, long))
    cases.append(plan_case(table, table["parameters"], float(shortest * Fraction(31, 32))))
    cases.append(plan_case(table, table["parameters"], long))
    return cases


def exact_cases(draw: random.Random) -> list[dict]:
    """Both budgets are those of a plan, to the last digit; and one of them less by a parameter or by its time."""
    cases: list[dict] = []
    while len(cases) < 3:
        table = table_of(draw, 2, 2, 1 + len(cases) % 2)
        plans = all_plans(table)
        aim = draw.choice(plans[1:])
        case = plan_case(table, aim["parameters"], float(aim["step_s"]))
        if exact_plan(case) == aim["cut"] and Fraction(case["max_step_s"]) == aim["step_s"]:
            cases.append(case)
    return [*cases, *just_below(draw)]


def just_below(draw: random.Random) -> list[dict]:
    """The best plan of a budget, and the budget less by one parameter; the same of the step; nothing that fits."""
    while True:
        table = table_of(draw, 2, 2, 1, bytes_per_s=FAST)
        plans = all_plans(table)
        unit = Fraction(table["element_bytes"]) / Fraction(FAST)
        long, all_of_it = 2 * float(plans[0]["step_s"]), table["parameters"]
        aim = draw.choice(plans[1:])
        few, short = aim["parameters"], aim["step_s"]
        at = (plan_case(table, few, long), plan_case(table, all_of_it, float(short)))
        below = (plan_case(table, few - 1, long), plan_case(table, all_of_it, float(short - unit)))
        if all(exact_plan(case) == aim["cut"] for case in at) and all(exact_plan(case) for case in below):
            break
    shortest = min(p["step_s"] for p in plans)
    return [*at, *below, plan_case(table, all_of_it, float(shortest - unit))]


def tie_cases(draw: random.Random) -> list[dict]:
    """Plans of the same loss: fewer parameters; and where those are the same, the first list."""

    def is_tied(case: dict) -> bool:
        """The same loss, and the list that comes first has more parameters."""
        fitting = [p for p in all_plans(case["table"]) if fits(case, p)]
        first = min(fitting, key=lambda p: (p["loss"], p["cut"]))
        return first["parameters"] > min(p["parameters"] for p in fitting if p["loss"] == first["loss"])

    def is_twice(case: dict) -> bool:
        """The same loss and parameters, and not the shorter list first."""
        fitting = [p for p in all_plans(case["table"]) if fits(case, p)]
        best = min((p["loss"], p["parameters"]) for p in fitting)
        cuts = [p["cut"] for p in fitting if (p["loss"], p["parameters"]) == best]
        return len(cuts) > 1

    return [
        sought(draw, (2, 2, 2), "parameters", is_tied),
        sought(draw, (2, 2, 2), "parameters", is_tied, mixed=True),
        sought(draw, (2, 2, 2), "parameters", is_twice),
        alike_case(draw),
        alike_case(draw, more_parameters=1024, more_loss=SLIGHTLY),
        alike_case(draw, more_parameters=-1024, more_loss=-SLIGHTLY),
    ]


def alike_case(draw: random.Random, more_parameters: int = 0, more_loss: float = 0.0) -> dict:
    """Two pieces together are as good as a larger one, which comes later: the shorter list is not the first. Or the
    larger one has a little more of both, or less."""
    size, loss = 1024 * draw.randint(30, 50), draw.randint(3, 5) / 64
    pieces = [
        piece("layer", 0, 6 * size, 10, 60 / 64),
        piece("neurons", 0, size, 0, loss),
        piece("neurons", 0, size, 0, loss),
        piece("neurons", 0, size, 0, 30 / 64),
        piece("layer", 1, 6 * size, 10, 60 / 64),
        piece("kv_group", 1, 2 * size + more_parameters, 0, 2 * loss + more_loss),
        piece("kv_group", 1, 2 * size, 0, 30 / 64),
    ]
    table = {"parameters": 16 * size, "launches": 23, "element_bytes": 2, "bytes_per_s": BYTES_PER_S}
    return plan_case(table | {"launch_s": LAUNCH_S, "pieces": pieces}, 14 * size - min(0, more_parameters), 10.0)


def rule_cases(draw: random.Random) -> list[dict]:
    """What is no plan would be better: all pieces of a kind, all layers."""
    cases = []
    for low, sizes in ((1, (2, 2, 2)), (1, (2, 1, 1)), (1, (2, 2, 1))):
        table = table_of(draw, *sizes, low=low)
        for i in of_kind(table, "kv_group", "neurons"):
            table["pieces"][i]["loss"] = draw.randint(1, 4) / 64
        plans = all_plans(table)
        aim = sorted(p["parameters"] for p in plans)[len(plans) // 4]
        cases.append(plan_case(table, aim, 10.0))
    smallest = min(p["parameters"] for p in all_plans(cases[0]["table"]))
    cases.append(plan_case(cases[0]["table"], smallest - 1, 10.0))
    return [*cases, *third_kind(draw), numbered_case(draw)]


def third_kind(draw: random.Random) -> list[dict]:
    """Pieces of a third kind, without which the loss is lowest, in all layers and in one alone."""
    cases = []
    for number in range(2):
        table = table_of(draw, 2, 1, 1, experts=2)
        for i in of_kind(table, "expert"):
            table["pieces"][i]["loss"] = draw.randint(1, 3) / 64
        if number:  # the other layer has none
            gone = {i for i in of_kind(table, "expert") if table["pieces"][i]["layer"] == 1}
            table["pieces"] = [one for i, one in enumerate(table["pieces"]) if i not in gone]
        experts = [table["pieces"][i] for i in of_kind(table, "expert")]
        cases.append(plan_case(table, table["parameters"] - sum(one["parameters"] for one in experts), 10.0))
    return cases


def numbered_case(draw: random.Random) -> dict:
    """Layers whose numbers begin late and have gaps, and fewer parameters than one layer has."""
    table = table_of(draw, 2, 1, 2, first=draw.randint(2, 5))
    smallest = min(p["parameters"] for p in all_plans(table))
    return plan_case(table, smallest - 1, 10.0)


def negative_cases(draw: random.Random) -> list[dict]:
    """Losses below 0: pieces without which the model is better, though everything fits, or beside what must go."""
    cases = []
    for number in range(3):
        while True:
            table = table_of(draw, 2, 2, 2, mixed=number == 1)
            for i in draw.sample(of_kind(table, "neurons", "kv_group"), 3):
                table["pieces"][i]["loss"] = -draw.randint(1, 9) / 64
            if number == 2:
                table["pieces"][of_kind(table, "layer")[0]]["loss"] = -draw.randint(10, 20) / 64
            plans = all_plans(table)
            aim = table["parameters"]
            if number == 1:
                aim = math.ceil(between(draw, sorted({p["parameters"] for p in plans})))
            case = plan_case(table, aim, 10.0)
            if exact_plan(case):
                cases.append(case)
                break
    return cases


def other_plans(draw: random.Random) -> list[dict]:
    """Tables and budgets by chance."""
    settings = ((2, 3, 2), (3, 2, 1), (3, 1, 1), (2, 2, 3), (4, 1, 1))
    cases = [
        sought(draw, sizes, budget, mixed=number % 2 == 1, launch_s=draw.choice([2.0**-14, 2.0**-18, 2.0**-22]))
        for number, (sizes, budget) in enumerate(zip(settings, ("both", "parameters", "time", "both", "parameters")))
    ]
    first = draw.randint(2, 9)
    largest = sought(draw, (2, 2, 2), "time", experts=2, first=first, mixed=True, launch_s=2.0**-14)  # 14 pieces
    return [*cases, largest, sought(draw, (2, 1, 0), "both", mixed=True, first=1)]


def edge_plans(draw: random.Random) -> list[dict]:
    """Budgets that are met exactly, that nothing meets, equal plans, losses below 0; one layer alone."""
    one = table_of(draw, 1, 3, 2)
    plans = sorted(p["parameters"] for p in all_plans(one))
    cases = [exact_cases(draw)[0], none_cases(draw)[0], tie_cases(draw)[1], negative_cases(draw)[1]]
    cases += [*just_below(draw), tie_cases(draw)[-1], *third_kind(draw), numbered_case(draw)]
    return [*cases, plan_case(one, plans[len(plans) // 3], 10.0), plan_case(one, plans[0] - 1, 10.0)]


# --- What is right ---


def exact_cost(table: dict, cut: list[int]) -> dict:
    """Piece by piece; a piece counts if it is a layer, or if its layer is not cut."""
    costs = {"parameters": table["parameters"], "launches": table["launches"], "loss": Fraction(0)}
    pieces = table["pieces"]
    for i in cut:
        one = pieces[i]
        if one["kind"] != "layer" and any(
            pieces[j]["kind"] == "layer" and pieces[j]["layer"] == one["layer"] for j in cut
        ):
            continue
        costs["parameters"] -= one["parameters"]
        costs["launches"] -= one["launches"]
        costs["loss"] += Fraction(one["loss"])
    reading = Fraction(costs["parameters"] * table["element_bytes"]) / Fraction(table["bytes_per_s"])
    return costs | {"step_s": reading + costs["launches"] * Fraction(table["launch_s"])}


def all_plans(table: dict) -> list[dict]:
    """Every plan with its costs, the whole model first."""
    return _all_plans(json.dumps(table, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _all_plans(text: str) -> list[dict]:
    table = json.loads(text)
    choices = [options(table, layer) for layer in sorted({one["layer"] for one in table["pieces"]})]
    plans = []
    for each in itertools.product(*choices):
        if all(gone for gone, _ in each):
            continue  # no layer stays
        cut = sorted(i for _, indices in each for i in indices)
        plans.append(exact_cost(table, cut) | {"cut": cut})
    return plans


def options(table: dict, layer: int) -> list[tuple[bool, tuple[int, ...]]]:
    """(whether the layer goes, indices) of all that may be done to one layer; nothing comes first."""
    of_kinds: dict[str, list[int]] = {}
    for i, one in enumerate(table["pieces"]):
        if one["layer"] == layer:
            of_kinds.setdefault(one["kind"], []).append(i)
    [whole] = of_kinds.pop("layer")
    subsets = [
        [some for count in range(len(indices)) for some in itertools.combinations(indices, count)]
        for indices in of_kinds.values()
    ]
    kept = [(False, tuple(itertools.chain(*each))) for each in itertools.product(*subsets)]
    return [*kept, (True, (whole,))]


def fits(case: dict, costs: dict) -> bool:
    return costs["parameters"] <= case["max_parameters"] and costs["step_s"] <= Fraction(case["max_step_s"])


def exact_plan(case: dict) -> list[int] | None:
    fitting = [p for p in all_plans(case["table"]) if fits(case, p)]
    return min(fitting, key=lambda p: (p["loss"], p["parameters"], p["cut"]))["cut"] if fitting else None


# --- Judging ---


def named(table: dict, cut: list[int]) -> str:
    """A cut in words, with its indices."""
    pieces = table["pieces"]
    return "[" + ", ".join(f"{i}: {pieces[i]['kind']} of {pieces[i]['layer']}" for i in cut) + "]"


def judge_cost(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    table, right = case["table"], exact_cost(case["table"], case["cut"])
    where = f"cost of {named(table, case['cut'])} in a table of {len(table['pieces'])} pieces: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict was expected"
    if seen["changed"]:
        return f"{where}what was given was changed"
    for part in PARTS:
        value = seen.get(f"cost {part}")
        if value is None:
            return f"{where}the dict has no {part!r}"
        if isinstance(value, str):
            return f"{where}{part} is a {value}, where a number was expected"
        if not abs(value - right[part]) <= CLOSE * abs(right[part]):
            return f"{where}{part} is {value:,.9g}, expected {float(right[part]):,.9g}"
    return None


def judge_plan(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    table, right = case["table"], exact_plan(case)
    where = (
        f"plan for {case['max_parameters']:,} of {table['parameters']:,} parameters and a step of "
        f"{case['max_step_s'] * 1e6:,.6g} µs, {len(table['pieces'])} pieces: "
    )
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a list of whole numbers or None was expected"
    if seen["changed"]:
        return f"{where}the table was changed"
    came = seen["plan"]
    if came == right:
        return None
    expected = "None: no plan fits" if right is None else f"{named(table, right)}, {costs_of(table, right)}"
    if came is None:
        return f"{where}None came back, expected {expected}"
    odd = [i for i in came if not 0 <= i < len(table["pieces"])]
    if odd or came != sorted(set(came)):
        return f"{where}{brief(came, 90)} came back, which are no ascending indices of pieces; expected {expected}"
    costs = exact_cost(table, came)
    said = f"{named(table, came)} came back, {costs_of(table, came)}"
    if broken := broken_rule(table, came):
        said += f"; {broken}"
    elif not fits(case, costs):
        many = costs["parameters"] - case["max_parameters"]
        long = float(costs["step_s"] - Fraction(case["max_step_s"]))
        said += f"; {many:,} parameters" if many > 0 else f"; the step is {long:.3g} s"
        said += " above the budget"
    return f"{where}{said}. Expected {expected}"


def costs_of(table: dict, cut: list[int]) -> str:
    costs = exact_cost(table, cut)
    return (
        f"loss {float(costs['loss']):+.6g}, {costs['parameters']:,} parameters, {float(costs['step_s']) * 1e6:,.6g} µs"
    )


def broken_rule(table: dict, cut: list[int]) -> str:
    """Which rule of plans this cut breaks, or ""."""
    pieces = table["pieces"]
    gone = {pieces[i]["layer"] for i in cut if pieces[i]["kind"] == "layer"}
    if any(pieces[i]["kind"] != "layer" and pieces[i]["layer"] in gone for i in cut):
        return "it names a piece of a layer that it cuts"
    if gone == {one["layer"] for one in pieces}:
        return "no layer stays"
    for layer, kind in sorted({(one["layer"], one["kind"]) for one in pieces}):
        left = [i for i, one in enumerate(pieces) if (one["layer"], one["kind"]) == (layer, kind) and i not in cut]
        if layer not in gone and kind != "layer" and not left:
            return f"layer {layer} stays and has no {kind} left"
    return ""
