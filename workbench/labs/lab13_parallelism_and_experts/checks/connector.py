"""Lab 13, what arrives from a prefill engine: cases and judge of parallel-connector.

The judge keeps, for each request, its first blocks as they were shown, and the pieces that it still waits for.
Which of the free blocks are taken is free.
"""

from __future__ import annotations

import random

# --- Cases: scripts of [verb, request, …] ---


def connector_case(draw: random.Random, blocks: int, block_size: int, script: list[list]) -> dict:
    """Block numbers by chance, in any order; block 0 is one of them."""
    numbers = draw.sample(range(1, 100), max(0, blocks - 1)) + [0] * (blocks > 0)
    return {"blocks": draw.sample(numbers, blocks), "block_size": block_size, "script": script}


def reserve(request: str, tokens: int, layers: int = 2) -> list:
    return ["reserve", request, tokens, layers]


def asked(request: str) -> list:
    return ["arrived", request]


def drop(request: str) -> list:
    return ["drop", request]


def pieces(draw: random.Random, request: str, layers: int, blocks: int, *, ordered: bool = False) -> list[list]:
    """All of a request, in any order."""
    made = [["receive", request, layer, index] for layer in range(layers) for index in range(blocks)]
    if not ordered:
        draw.shuffle(made)
    return made


def watched(request: str, steps: list[list]) -> list[list]:
    """After each of these it is asked whether all is there."""
    return [one for step in steps for one in (step, asked(request))]


def reserve_cases(draw: random.Random) -> list[dict]:
    """Blocks rounded up; whole or not at all; the last one; others go on."""
    return [
        connector_case(draw, 5, 4, [reserve("a", 9), reserve("b", 9), reserve("c", 8), reserve("d", 1)]),
        connector_case(draw, 6, 16, [reserve("a", 32), reserve("b", 65), reserve("c", 64), reserve("d", 16)]),
        connector_case(draw, 3, 8, [reserve("a", 25), reserve("b", 24), reserve("c", 1)]),
        connector_case(draw, 4, 1, [reserve("a", 3), reserve("b", 2), reserve("c", 1)]),
        connector_case(draw, 7, 2, [reserve(name, 2 - number % 2) for number, name in enumerate("abcdefgh")]),
    ]


def order_cases(draw: random.Random) -> list[dict]:
    """Layers and blocks in order, and in any order; two requests side by side."""
    one = [asked("a"), *watched("a", pieces(draw, "a", 2, 3, ordered=True))]
    other = watched("a", [["receive", "a", 2, 1], ["receive", "a", 2, 0], *pieces(draw, "a", 2, 2)])
    both = [*pieces(draw, "a", 2, 2), *pieces(draw, "b", 3, 1)]
    draw.shuffle(both)
    return [
        connector_case(draw, 4, 4, [reserve("a", 10, 2), *one]),
        connector_case(draw, 3, 4, [reserve("a", 8, 3), *other]),
        connector_case(
            draw,
            5,
            4,
            [reserve("a", 7, 2), reserve("b", 4, 3), *[one for step in both for one in (step, asked("a"), asked("b"))]],
        ),
    ]


def twice_cases(draw: random.Random) -> list[dict]:
    """A piece twice, before and after all is there."""
    script = [
        ["receive", "a", 0, 0],
        ["receive", "a", 0, 0],
        asked("a"),
        ["receive", "a", 1, 1],
        ["receive", "a", 1, 1],
    ]
    script += watched("a", [["receive", "a", 0, 1], ["receive", "a", 1, 0], ["receive", "a", 0, 0]])
    again = [one for one in pieces(draw, "a", 3, 1) for _ in range(2)]
    return [
        connector_case(draw, 4, 4, [reserve("a", 6, 2), *script]),
        connector_case(draw, 3, 2, [reserve("a", 2, 3), *watched("a", again)]),
    ]


def drop_cases(draw: random.Random) -> list[dict]:
    """Blocks come back once, and are taken again; of those that were dropped before and after they arrived."""
    return [
        connector_case(draw, 4, 4, [reserve("a", 12), drop("a"), reserve("b", 16), drop("b"), reserve("c", 4)]),
        connector_case(
            draw, 3, 4, [reserve("a", 8), reserve("b", 5), drop("a"), reserve("b", 5), reserve("c", 12), asked("b")]
        ),
        connector_case(
            draw,
            4,
            4,
            [reserve("a", 4, 1), *watched("a", pieces(draw, "a", 1, 1)), drop("a"), asked("a"), reserve("c", 16)],
        ),
    ]


def drop_twice_cases(draw: random.Random) -> list[dict]:
    return [
        connector_case(draw, 4, 4, [reserve("a", 8), drop("a"), drop("a"), reserve("b", 16), reserve("c", 1)]),
        connector_case(draw, 3, 4, [drop("x"), reserve("a", 12), drop("x"), reserve("b", 4), drop("a"), drop("b")]),
    ]


def ignored_cases(draw: random.Random) -> list[dict]:
    """Of a request that was never there, was refused, or was dropped; of a layer or block that it does not have."""
    known = pieces(draw, "a", 2, 2)
    foreign = [["receive", "a", layer, index] for layer in range(5) for index in range(5) if max(layer, index) > 1]
    lacking = []
    for last in known:
        before = [one for one in known if one != last]
        lacking.append(
            connector_case(draw, 2, 4, [reserve("a", 8, 2), *before, *foreign, asked("a"), last, asked("a")])
        )
    return [
        *lacking,
        connector_case(draw, 3, 4, [["receive", "x", 0, 0], asked("x"), reserve("x", 4, 1), asked("x")]),
        connector_case(
            draw, 2, 4, [reserve("b", 12, 1), ["receive", "b", 0, 0], asked("b"), reserve("a", 4, 1), asked("a")]
        ),
        connector_case(draw, 3, 4, [reserve("a", 8, 2), *known[:3], drop("a"), known[3], asked("a"), reserve("b", 12)]),
        connector_case(
            draw,
            3,
            4,
            [
                reserve("a", 8, 2),
                *known[:2],
                *watched("a", [["receive", "a", 2, 0], ["receive", "a", 0, 2], ["receive", "a", 5, 7]]),
                *watched("a", known[2:]),
            ],
        ),
    ]


def again_cases(draw: random.Random) -> list[dict]:
    """An id that comes again after it was dropped starts from nothing; one that is offered again keeps its blocks."""
    known = pieces(draw, "a", 2, 2)
    return [
        connector_case(
            draw, 3, 4, [reserve("a", 8, 2), *known, asked("a"), drop("a"), reserve("a", 8, 2), *watched("a", known)]
        ),
        connector_case(draw, 5, 4, [reserve("a", 8, 2), *known[:3], reserve("a", 8, 2), known[3], asked("a")]),
        connector_case(draw, 2, 4, [reserve("a", 8, 2), reserve("a", 8, 2), *watched("a", known)]),
    ]


def long_script(draw: random.Random, block_size: int, blocks: int, steps: int) -> dict:
    """Requests that come, arrive in any order, are dropped, and come again; some pieces twice, late or of nobody."""
    script: list[list] = []
    known: dict[str, tuple[int, int]] = {}
    for _ in range(steps):
        request = draw.choice("abcd")
        kind = draw.random()
        if request not in known or kind < 0.05:
            tokens, layers = draw.randint(1, block_size * 4), draw.randint(1, 2)
            if request in known:
                layers, count = known[request]
                tokens = count * block_size
            known[request] = (layers, -(-tokens // block_size))
            script.append(reserve(request, tokens, layers))
        elif kind < 0.2:
            script.append(drop(request))
            if draw.random() < 0.7:
                del known[request]
        else:
            layers, count = known[request]
            script += [["receive", request, draw.randrange(layers), draw.randrange(count)], asked(request)]
    return connector_case(draw, blocks, block_size, script)


def long_scripts(draw: random.Random) -> list[dict]:
    return [long_script(draw, size, blocks, 60) for size, blocks in ((4, 7), (16, 5), (1, 9))]


def side_by_side(draw: random.Random) -> list[dict]:
    """Several at once, piece by piece; one is dropped in between."""
    cases = []
    for _ in range(3):
        sizes = {"a": (2, 2), "b": (3, 1), "c": (1, 3)}
        script = [reserve(name, 4 * count - draw.randint(0, 3), layers) for name, (layers, count) in sizes.items()]
        steps = [piece for name, (layers, count) in sizes.items() for piece in pieces(draw, name, layers, count)]
        draw.shuffle(steps)
        middle = draw.randint(4, 9)
        steps[middle:middle] = [drop("b"), reserve("d", 4, 1)]
        script += [one for step in steps for one in (step, asked("a"), asked("c"))]
        cases.append(connector_case(draw, 6, 4, [*script, asked("b"), asked("d"), drop("a"), drop("c")]))
    return cases


def full_pools(draw: random.Random) -> list[dict]:
    """Pools of one block, and of none; offers that just fit, or just do not."""
    return [
        connector_case(draw, 1, 4, [reserve("a", 5), reserve("b", 4), reserve("a", 1), drop("b"), reserve("a", 1)]),
        connector_case(draw, 0, 4, [reserve("a", 1), asked("a"), drop("a")]),
        connector_case(draw, 4, 8, [reserve("a", 33), reserve("a", 32), reserve("b", 1), drop("a"), reserve("b", 33)]),
    ]


# --- What is right ---


class Held:
    """A request that has blocks: which, and what it waits for."""

    def __init__(self, layers: int, table: list[int]) -> None:
        self.table = table
        self.waits = {(layer, index) for layer in range(layers) for index in range(len(table))}


def judge_connector(case: dict, seen: dict) -> str | None:
    """Step by step, against the requests that hold blocks."""
    pool, size = set(case["blocks"]), case["block_size"]
    requests = sorted({step[1] for step in case["script"]})
    held: dict[str, Held] = {}
    for number, (verb, request, *rest) in enumerate(case["script"]):
        done = ", ".join(_call(step) for step in case["script"][max(0, number - 5) : number + 1])
        where = f"{len(pool)} blocks of {size} tokens; {'…, ' if number > 5 else ''}{done}: "
        tables = dict(zip(requests, seen["tables"][number]))
        free = len(pool) - sum(len(one.table) for one in held.values())
        expected = None
        if verb == "reserve":
            tokens, layers = rest
            needed = len(range(0, tokens, size))
            expected = request in held or needed <= free
            if expected and request not in held:
                table = tables[request]
                if table is None or len(table) != needed:
                    came = "no list of whole numbers" if table is None else f"{len(table)} blocks"
                    gave = seen["returned"][number]
                    return f"{where}{came} in its table, expected {needed} of {free} free ones; it returned {gave}"
                taken = {block for one in held.values() for block in one.table}
                if len(set(table)) < needed or not set(table) <= pool - taken:
                    return f"{where}the table {table} is not of {needed} different blocks that were free"
                held[request] = Held(layers, table)
        elif verb == "receive" and request in held:
            held[request].waits.discard(tuple(rest))
        elif verb == "arrived":
            expected = request in held and not held[request].waits
        elif verb == "drop":
            held.pop(request, None)
        came = seen["returned"][number]
        if came != expected or type(came) is not type(expected):
            waits = f", {len(held[request].waits)} pieces are missing" if verb == "arrived" and request in held else ""
            left = f", {free} blocks were free" if verb == "reserve" else waits
            return f"{where}{came} was returned, expected {expected}{left}"
        right = len(pool) - sum(len(one.table) for one in held.values())
        if seen["free"][number] != right:
            return f"{where}{seen['free'][number]} blocks are free, expected {right}"
        for name, table in tables.items():
            own = held[name].table if name in held else []
            if table != own:
                return f"{where}the table of {name!r} is {table}, expected {own}"
    return "the list of blocks that was given was changed" if seen["changed"] else None


def _call(step: list) -> str:
    verb, *arguments = step
    return f"{verb}({', '.join(map(repr, arguments))})"
