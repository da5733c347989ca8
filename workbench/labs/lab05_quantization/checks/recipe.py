"""Lab 05, a recipe for a budget: cases and judges of quant-recipe. Whole numbers and one division."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from fractions import Fraction

from workbench.checks.tensors import missing_message
from workbench.labs.lab05_quantization.checks.parts import Machine, Stored, Weights, weights_of
from workbench.models.shapes import public_shape


def exact_step_bytes(w: Weights, s: Stored) -> int:
    scales = Fraction(w.linears * s.scale_bits, s.group) if s.group else 0
    return math.ceil((w.linears * Fraction(str(s.bits)) + scales) / 8) + 2 * (w.norms + w.embedding)


def exact_model_bytes(w: Weights, s: Stored) -> int:
    return exact_step_bytes(w, s) + (0 if w.tied else 2 * w.embedding)


def exact_speed_up(w: Weights, s: Stored) -> float:
    return 2 * (w.linears + w.norms + w.embedding) / exact_step_bytes(w, s)


def reading_seconds(w: Weights, s: Stored, m: Machine) -> float:
    return exact_step_bytes(w, s) / m.bytes_per_s


def exact_seconds(w: Weights, s: Stored, tokens: int, m: Machine) -> float:
    rate = m.int8_per_s if s.input_bits == 8 else m.flops_per_s
    return max(reading_seconds(w, s, m), 2 * tokens * (w.linears / rate + w.embedding / m.flops_per_s))


# --- Cases ---


def made_up(draw: random.Random, tied: bool = False) -> Weights:
    return Weights(
        linears=draw.randrange(200, 900) * 4096,
        norms=draw.randrange(5, 40) * 64,
        embedding=draw.randrange(30, 200) * 4096,
        tied=tied,
    )


LLAMA = weights_of(public_shape("llama-3-8b"))
INT4 = Stored("int4", 4, 128, 32)


def bytes_case(part: str, w: Weights, s: Stored) -> dict:
    return {"part": part, "weights": asdict(w), "stored": asdict(s)}


def bytes_cases(draw: random.Random) -> list[dict]:
    """Both counts, with and without scales, tied and not."""
    formats = (
        Stored("16 bits", 16),
        Stored("int8", 8, 64, 16),
        Stored("int3", 3, draw.choice((32, 64)), 32),
        Stored("levels", 3.5),
    )
    return [
        bytes_case(part, made_up(draw, tied), s)
        for part in ("model_bytes", "step_bytes")
        for tied, s in zip((False, False, False, False), formats)
    ]


def tied_cases(draw: random.Random) -> list[dict]:
    w = made_up(draw, tied=True)
    return [bytes_case(part, w, s) for part in ("model_bytes", "step_bytes") for s in (INT4, Stored("16 bits", 16))]


def odd_cases(draw: random.Random) -> list[dict]:
    """A part of a byte is left over."""
    odd = Weights(linears=4096 * draw.randrange(11, 99) + 24, norms=64, embedding=4096, tied=False)
    return [bytes_case(part, odd, Stored("int3", 3, 96, 12)) for part in ("model_bytes", "step_bytes")] + [
        bytes_case("model_bytes", Weights(13, 2, 8, False), Stored("int3", 3))
    ]


def speed_cases(draw: random.Random) -> list[dict]:
    """Llama 3 8B at 4 bits: not 4 times. Then two made up, and 16 bits: once."""
    formats = (INT4, Stored("int8", 8, 128, 16), Stored("16 bits", 16))
    found = [bytes_case("speed_up", LLAMA, INT4), bytes_case("speed_up", made_up(draw, True), INT4)]
    return found + [bytes_case("speed_up", made_up(draw), s) for s in formats]


def machine_of(draw: random.Random) -> Machine:
    return Machine(draw.randrange(50, 900) * 1e9, draw.randrange(2, 90) * 1e12, draw.randrange(100, 300) * 1e12)


def time_cases(draw: random.Random) -> list[dict]:
    """One token and many, 16-bit inputs and int8 ones."""
    both = Stored("int8, inputs too", 8, 4096, 32, input_bits=8)
    settings = ((1, INT4), (4096, INT4), (4096, both), (1, both), (2048, Stored("int8", 8, 128, 32)))
    w, m = made_up(draw), machine_of(draw)
    return [
        {"part": "step_seconds", "weights": asdict(w), "stored": asdict(s), "tokens": n, "machine": asdict(m)}
        for n, s in settings
    ]


def recipes_of(draw: random.Random) -> list[Stored]:
    """Fewer bits, more nats; one with int8 inputs; one that is worse than another of its size."""
    u = draw.uniform(0.8, 1.2)
    found = [
        Stored("16 bits", 16),
        Stored("int8", 8, 128, 32, excess_nats=0.001 * u),
        Stored("int8, inputs too", 8, 4096, 32, 8, 0.012 * u),
        Stored("RTN 4", 4, 128, 32, excess_nats=0.05 * u),
        Stored("GPTQ 4", 4, 128, 32, excess_nats=0.02 * u),
        Stored("AWQ 3", 3, 64, 32, excess_nats=0.09 * u),
        Stored("QuIP 2", 2, excess_nats=0.3 * u),
    ]
    draw.shuffle(found)
    return found


def choice_case(w: Weights, recipes: list[Stored], tokens: int, m: Machine, budget: int, most: float) -> dict:
    return {
        "part": "choose",
        "weights": asdict(w),
        "recipes": [asdict(s) for s in recipes],
        "tokens": tokens,
        "machine": asdict(m),
        "budget": budget,
        "max_excess": most,
    }


MACHINE = Machine(400e9, 60e12, 240e12)


def choice_cases(draw: random.Random) -> list[dict]:
    """Quality binds, bytes bind, and with many tokens the multiplications do."""
    w, recipes = made_up(draw), recipes_of(draw)
    size = {s.name: exact_model_bytes(w, s) for s in recipes}
    return [
        choice_case(w, recipes, 1, MACHINE, size["16 bits"], 0.03),
        choice_case(w, recipes, 1, MACHINE, size["16 bits"], 1.0),
        choice_case(w, recipes, 1, MACHINE, size["AWQ 3"], 0.15),
        choice_case(w, recipes, 4096, MACHINE, size["16 bits"], 0.03),
        choice_case(w, recipes, 4096, MACHINE, size["GPTQ 4"], 0.03),
        choice_case(w, recipes, 4096, MACHINE, size["16 bits"], 0.005),
    ]


def tie_cases(draw: random.Random) -> list[dict]:
    """Equal times: where multiplying binds, quality decides; and where that is equal too, bytes."""
    w, recipes = made_up(draw), recipes_of(draw)
    fewer = [s for s in recipes if s.input_bits == 16 and s.name != "16 bits"]
    same_size = [Stored("RTN 4", 4, 128, 32, excess_nats=0.05), Stored("GPTQ 4", 4, 128, 32, excess_nats=0.02)]
    alike = [Stored("groups of 32", 4, 32, 32, excess_nats=0.02), Stored("groups of 128", 4, 128, 32, excess_nats=0.02)]
    size = exact_model_bytes(w, Stored("16 bits", 16))
    return [
        choice_case(w, fewer, 8192, MACHINE, size, 1.0),
        choice_case(w, same_size, 1, MACHINE, size, 1.0),
        choice_case(w, alike, 8192, MACHINE, size, 1.0),
    ]


def nothing_fits_cases(draw: random.Random) -> list[dict]:
    """Just not and just; too strict; none at all. A bound that is met exactly is met."""
    w, recipes = made_up(draw), recipes_of(draw)
    least = min(exact_model_bytes(w, s) for s in recipes)
    gptq = next(s for s in recipes if s.name == "GPTQ 4")
    return [
        choice_case(w, recipes, 1, MACHINE, least - 1, 1.0),
        choice_case(w, recipes, 1, MACHINE, least, 1.0),
        choice_case(w, [s for s in recipes if s.excess_nats > 0], 1, MACHINE, 10**12, 0.0),
        choice_case(w, [], 1, MACHINE, 10**12, 1.0),
        choice_case(w, recipes, 1, MACHINE, exact_model_bytes(w, gptq), gptq.excess_nats),
    ]


# --- Judging ---


def exact_choice(case: dict) -> str | None:
    w, m = Weights(**case["weights"]), Machine(**case["machine"])
    fitting = []
    for given in case["recipes"]:
        s = Stored(**given)
        size = exact_model_bytes(w, s)
        if size <= case["budget"] and s.excess_nats <= case["max_excess"]:
            fitting.append((exact_seconds(w, s, case["tokens"], m), s.excess_nats, size, s.name))
    return min(fitting)[3] if fitting else None


def judge_recipe(case: dict, seen: dict) -> str | None:
    """The exact number, or the right choice."""
    if lacking := missing_message(seen):
        return lacking
    part = case["part"]
    if part == "choose":
        return _judge_choice(case, seen["value"])
    w, s = Weights(**case["weights"]), Stored(**case["stored"])
    given = f"{part} of {w.linears:,} in linears, {w.norms:,} in norms, {w.embedding:,} in the embedding" + (
        ", tied" if w.tied else ""
    )
    given += f", {s.bits:g} bits" + (f", groups of {s.group} with {s.scale_bits} bits" if s.group else "")
    value = seen["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{given} gave a {seen['returned']}, where a number was expected"
    if part == "step_seconds":
        return _judge_seconds(case, w, s, given, value)
    if part == "speed_up":
        right = exact_speed_up(w, s)
        if abs(value - right) <= 1e-6 * right:
            return None
        return f"{given} gave {value:.6g}, expected bytes of a step in 16 bits over those as stored, {right:.6g}"
    exact = exact_model_bytes if part == "model_bytes" else exact_step_bytes
    right = exact(w, s)
    if value == right:
        return (
            None
            if seen["returned"] == "int"
            else f"{given} gave {value:,}, but as a {seen['returned']}: bytes are whole, an int"
        )
    return f"{given} gave {value:,}, expected {right:,}: linears as stored with their scales, all else 2 bytes a number"


def _judge_seconds(case: dict, w: Weights, s: Stored, given: str, value: float) -> str | None:
    m, tokens = Machine(**case["machine"]), case["tokens"]
    right = exact_seconds(w, s, tokens, m)
    if abs(value - right) <= 1e-6 * right:
        return None
    given += f", inputs of {s.input_bits} bits, {tokens:,} token{'s' * (tokens > 1)}"
    return (
        f"{given} gave {value:.6g}, expected {right:.6g}: the longer of reading, {reading_seconds(w, s, m):.4g}, and"
        " the operations at their rates"
    )


def _judge_choice(case: dict, value: object) -> str | None:
    right = exact_choice(case)
    names = [s["name"] for s in case["recipes"]]
    given = (
        f"choose of {names} for {case['budget']:,} bytes, {case['max_excess']:g} nats, {case['tokens']:,} "
        f"token{'s' * (case['tokens'] > 1)}"
    )
    if value == right:
        return None
    if right is None:
        return f"{given} gave {value!r}, expected None: nothing fits and is good enough"
    if value is None:
        return f"{given} gave None, expected {right!r}: it fits, and its excess is not above the bound"
    if value not in names:
        return f"{given} gave {value!r}, expected {right!r}: the name of a recipe, or None"
    w, m = Weights(**case["weights"]), Machine(**case["machine"])
    came, best = (Stored(**next(s for s in case["recipes"] if s["name"] == name)) for name in (value, right))
    size = exact_model_bytes(w, came)
    if size > case["budget"]:
        return f"{given} gave {value!r}, expected {right!r}: {value} takes {size:,} bytes"
    if came.excess_nats > case["max_excess"]:
        return f"{given} gave {value!r}, expected {right!r}: {value} has {came.excess_nats:.4g} nats"
    times = [exact_seconds(w, s, case["tokens"], m) for s in (came, best)]
    if times[0] > times[1]:
        return (
            f"{given} gave {value!r}, expected {right!r}: its step takes {times[1]:.4g} s, that of {value}"
            f" {times[0]:.4g} s"
        )
    if came.excess_nats > best.excess_nats:
        return (
            f"{given} gave {value!r}, expected {right!r}: both take {times[0]:.4g} s, and its excess is lower "
            f"({best.excess_nats:.4g} against {came.excess_nats:.4g})"
        )
    return f"{given} gave {value!r}, expected {right!r}: times and nats are equal, and it takes fewer bytes"
