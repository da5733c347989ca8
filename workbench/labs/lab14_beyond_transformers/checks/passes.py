"""Lab 14, what few passes are worth: cases and judges of beyond-passes.

What is right is worked out position by position: a set of the positions whose keys are kept, and those that a pass
sends. The contract is that of `workbench.diffusion.denoise`: blocks lie on multiples of the block size, whatever the
prompt is.
"""

from __future__ import annotations

import math
import random

from workbench.grading.check import brief

CLOSE = 1e-9
H100 = (989e12, 3.35e12)  # FLOP/s in bfloat16, bytes/s: NVIDIA's data sheet of the H100 SXM
A100 = (312e12, 2.039e12)


# --- Cases ---


def text_case(prompt: int, tokens: int, block_size: int, passes: int | list[int], cached: bool = True) -> dict:
    return {"prompt": prompt, "tokens": tokens, "block_size": block_size, "passes": passes, "cached": cached}


def even_texts(draw: random.Random, cached: bool) -> list[dict]:
    """Whole blocks behind a prompt of whole blocks, and behind none."""
    size = draw.choice([4, 8])
    some = [(size * draw.randint(0, 3), size * draw.randint(2, 5), size, draw.randint(2, 3)) for _ in range(2)]
    settings = [(8, 8, 4, 2), (0, 12, 4, 2), (16, 8, 8, 4), (4, 4, 4, 3), *some]
    return [text_case(*one, cached) for one in settings]


def cached_cases(draw: random.Random) -> list[dict]:
    return even_texts(draw, True)


def uncached_cases(draw: random.Random) -> list[dict]:
    return even_texts(draw, False)


def border_cases(draw: random.Random) -> list[dict]:
    """A prompt that ends within a block, a text that does, one block that both are in, and blocks of one token."""
    prompt = 8 * draw.randint(1, 3) + draw.randint(1, 7)
    cases = []
    for cached in (True, False):
        cases += [
            text_case(6, 4, 4, 2, cached),
            text_case(prompt, 16, 8, 3, cached),
            text_case(8, 13, 4, 2, cached),
            text_case(5, 2, 8, 2, cached),
            text_case(draw.randint(2, 5), 3, 1, 1, cached),
        ]
    return cases


def more_passes_cases(draw: random.Random) -> list[dict]:
    """More passes than a block has places to write: as many as it has."""
    return [
        text_case(8, 8, 4, draw.randint(6, 9)),
        text_case(7, 5, 4, 3),
        text_case(0, 9, 4, draw.randint(3, 4), False),
        text_case(3, 2, 8, 5),
    ]


def decided_cases(draw: random.Random) -> list[dict]:
    """A number of passes for each block, as an entropy bound decides."""
    several = [draw.randint(1, 4) for _ in range(4)]
    return [
        text_case(4, 12, 4, [1, 3, 2]),
        text_case(0, 16, 4, several),
        text_case(0, 16, 4, several, False),
        text_case(7, 6, 4, [1, 4, 1]),
        text_case(2, 3, 8, [2]),
    ]


def made_of(draw: random.Random, passes: int) -> list[list[int]]:
    """[rows, keys] of some passes."""
    made = []
    for _ in range(passes):
        rows = draw.randint(2, 40)
        made.append([rows, rows + draw.randint(1, 200)])
    return made


def totals_cases(draw: random.Random) -> list[dict]:
    """Passes of one size and of several; one pass; a shape the size of Llama-3.1-8B."""
    sizes = {"weights": draw.randint(10**5, 10**7), "pair_flops": 2 * draw.randint(10**3, 10**5)}
    several = draw.randint(4, 7)
    return [
        {"made": [[8, 8], [4, 8], [8, 12], [4, 12]], "tokens": 8, "weights": 1000, "pair_flops": 100},
        {"made": made_of(draw, several), "tokens": 2 * several + 1} | sizes,
        {"made": made_of(draw, 1), "tokens": draw.randint(2, 20)} | sizes,
        {"made": [[1000, 1000]] * 20, "tokens": 1000, "weights": 7_504_658_432, "pair_flops": 524_288},
    ]


def speedup_case(made: list[list[int]], tokens: int, batch: int, card: tuple[float, float]) -> dict:
    return {"made": made, "tokens": tokens, "batch": batch, "flop_per_s": card[0], "bytes_per_s": card[1]}


def worth_cases(draw: random.Random) -> list[dict]:
    """1,000 tokens in 20 passes on an H100, by batch; small blocks and large ones; a batch beyond the ridge, where one
    token per pass is bound by compute, too; another card and other numbers."""
    canvas = [[1000, 1000]] * 20
    tokens, passes = 100 * draw.randint(6, 20), draw.randint(8, 30)
    card = (draw.randint(100, 900) * 1e12, draw.randint(10, 40) * 1e11)
    return [
        speedup_case(canvas, 1000, 1, H100),
        speedup_case(canvas, 1000, 4, H100),
        speedup_case(canvas, 1000, 64, H100),
        speedup_case([[8, 8], [4, 8], [8, 12], [4, 12]], 8, draw.randint(2, 16), H100),
        speedup_case([[500, 500], [500, 1000], [500, 1500]], 1500, 1, H100),
        speedup_case([[32, 32]] * 8, 32, draw.randint(400, 900), H100),
        speedup_case([[tokens, tokens]] * passes, tokens, draw.randint(1, 3), card),
    ]


def bound_cases(draw: random.Random) -> list[dict]:
    """Passes of which some are bound by compute and some are not; small passes whose batch is beyond the ridge or
    not."""
    mixed = [[draw.choice([4, 8, 16]), 600], [draw.randint(400, 600), 600], [16, 700], [draw.randint(700, 900), 900]]
    return [
        speedup_case([[16, 16]] * 4, 16, draw.randint(300, 600), H100),
        speedup_case(mixed, 600, 1, H100),
        speedup_case(mixed, 64, draw.randint(2, 4), A100),
        speedup_case([[16, 40], [8, 40], [16, 48], [8, 48]], 16, draw.randint(10, 30), A100),
    ]


def other_texts(draw: random.Random) -> list[dict]:
    """Prompts, lengths, blocks and passes by chance, with a cache and without."""
    cases = []
    for number in range(10):
        size = draw.choice([3, 4, 5, 8, 16])
        case = text_case(draw.randint(0, 40), draw.randint(1, 40), size, draw.randint(1, size + 2), number % 3 != 0)
        if number % 2:
            case["passes"] = [draw.randint(1, len(places)) for places in places_to_write(case)]
        cases.append(case)
    return cases


def other_cards(draw: random.Random) -> list[dict]:
    cases = []
    for _ in range(8):
        card = (draw.randint(50, 2000) * 1e12, draw.randint(5, 80) * 1e11)
        passes = draw.randint(2, 12)
        cases.append(
            speedup_case(made_of(draw, passes), passes * draw.randint(1, 8), draw.choice([1, 4, 32, 500]), card)
        )
    return cases


# --- What is right ---


def blocks_of(case: dict) -> list[list[int]]:
    """Positions of the text, block by block."""
    blocks: dict[int, list[int]] = {}
    for position in range(case["prompt"] + case["tokens"]):
        blocks.setdefault(position // case["block_size"], []).append(position)
    return list(blocks.values())


def places_to_write(case: dict) -> list[list[int]]:
    """The positions that are written, of each block that has any."""
    wanted = [[p for p in block if p >= case["prompt"]] for block in blocks_of(case)]
    return [places for places in wanted if places]


def exact_passes(case: dict) -> list[list[int]]:
    """[rows, keys] of each pass: what has to be sent are all positions up to the block's end whose keys are not kept;
    kept are, after a pass, those before the block, which will not change any more."""
    kept: set[int] = set()
    passes, made = case["passes"], []
    decided = iter(passes) if isinstance(passes, list) else None
    for block in blocks_of(case):
        left = [p for p in block if p >= case["prompt"]]
        if not left:
            continue
        number = next(decided) if decided is not None else passes
        for _ in range(min(number, len(left))):
            seen = set(range(block[-1] + 1))
            made.append([len(seen - kept), len(seen)])
            if case["cached"]:
                kept = {p for p in seen if p < block[0]}
    return made


def exact_totals(case: dict) -> dict:
    """The FLOPs row by row."""
    flops = 0
    for rows, keys in case["made"]:
        for _ in range(rows):
            flops += 2 * case["weights"] + case["pair_flops"] * keys
    made = case["made"]
    return {
        "passes": len(made),
        "rows": sum(rows for rows, _ in made),
        "flops": flops,
        "tokens_per_pass": case["tokens"] / len(made),
    }


def exact_speedup(case: dict) -> float:
    """Seconds for each weight of a model: 2 bytes are read, and 2 FLOPs computed for every row of every text."""

    def seconds(rows: int) -> float:
        return max(2 / case["bytes_per_s"], 2 * rows * case["batch"] / case["flop_per_s"])

    one_by_one = math.fsum(seconds(1) for _ in range(case["tokens"]))
    return one_by_one / math.fsum(seconds(rows) for rows, _ in case["made"])


# --- Judging ---


def lacks(seen: dict) -> str | None:
    if "missing" not in seen:
        return None
    return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"


def judge_passes(case: dict, seen: dict) -> str | None:
    """passes_of: rows and keys of each pass."""
    if lacking := lacks(seen):
        return lacking
    where = f"passes_of({', '.join(f'{name}={value}' for name, value in case.items())}): "
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where a list of pairs (rows, keys) of whole numbers was expected"
    if seen["changed"]:
        return f"{where}the list of passes was changed; it belongs to the caller"
    came, right = seen["made"], exact_passes(case)
    for number, (one, other) in enumerate(zip(came, right)):
        if one != other:
            return (
                f"{where}pass {number} has {one[0]} rows and {one[1]} keys, expected {other[0]} and {other[1]}; all "
                f"came as {brief(came, 120)}"
            )
    if len(came) != len(right):
        return f"{where}{len(came)} passes came back, expected {len(right)}: {brief(right, 120)}"
    return None


def judge_totals(case: dict, seen: dict) -> str | None:
    """totals: all four."""
    if lacking := lacks(seen):
        return lacking
    where = f"totals of {len(case['made'])} passes {brief(case['made'], 60)}, {case['tokens']:,} tokens, "
    where += f"{case['weights']:,} weights, {case['pair_flops']:,} FLOPs per pair: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict was expected"
    if seen["changed"]:
        return f"{where}the list of passes was changed; it belongs to the caller"
    came = {name.removeprefix("total "): value for name, value in seen.items() if name.startswith("total ")}
    for part, right in exact_totals(case).items():
        if part not in came:
            return f"{where}the dict has no {part!r}; it has {brief(sorted(came))}"
        value = came[part]
        if not is_number(value):
            return f"{where}{part} is a {type(value).__name__}, where a number was expected"
        if value != right and not (part == "tokens_per_pass" and math.isclose(value, right, rel_tol=CLOSE)):
            return f"{where}{part} is {value:,}, expected {right:,}"
    return None


def judge_speedup(case: dict, seen: dict) -> str | None:
    """speedup: one number."""
    if lacking := lacks(seen):
        return lacking
    ridge = case["flop_per_s"] / case["bytes_per_s"]
    where = f"speedup of {len(case['made'])} passes {brief(case['made'], 60)}, {case['tokens']:,} tokens, batch "
    where += f"{case['batch']}, R = {ridge:.1f}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a number was expected"
    if seen["changed"]:
        return f"{where}the list of passes was changed; it belongs to the caller"
    value, right = seen["value"], exact_speedup(case)
    if math.isclose(value, right, rel_tol=CLOSE):
        return None
    return f"{where}{value:.6g}, expected {right:.6g}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
