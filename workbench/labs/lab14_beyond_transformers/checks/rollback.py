"""Lab 14, serving a state: cases and judge of beyond-rollback.

A right answer is known by its text: what a layer gives for a token is a sum over all tokens before it, so the judge
keeps tokens and no state.
"""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import first_wrong, numbers, read, same
from workbench.labs.lab14_beyond_transformers.checks.probes import first_state, mixer_weights, sent

TOLERANCE = 1e-9
SLACK_BYTES = 64  # a counter that somebody keeps as a tensor


# --- Cases: scripts of {"on": name, …} ---


def script_case(draw: random.Random, rewind: int, *steps: int, window: int = 4, started: bool = False) -> dict:
    """Of "a" alone: a positive step sends so many tokens, a negative one takes so many back, 0 takes none back."""
    script, length = [], 0
    for step in steps:
        length += step
        script.append({"on": "a", "send": step} if step > 0 else {"on": "a", "truncate": length})
    sizes = {"width": 3, "states": 2, "window": window}
    return {"seed": draw.randrange(10**6), **sizes, "rewind": rewind, "started": started, "script": script}


def with_steps(case: dict, *steps: dict) -> dict:
    return case | {"script": [*case["script"], *steps]}


def send(count: int, on: str = "a") -> dict:
    return {"on": on, "send": count}


def cut(length: int, on: str = "a") -> dict:
    return {"on": on, "truncate": length}


def fork(on: str, new: str) -> dict:
    return {"on": on, "fork": new}


def advance_cases(draw: random.Random) -> list[dict]:
    return [script_case(draw, 2, 1, 1, 3), script_case(draw, 3, 6, 2, started=True)]


def truncate_cases(draw: random.Random) -> list[dict]:
    """Back by one, by some, by as many as there may be, by none, and on with other tokens."""
    return [
        script_case(draw, 3, 1, 1, 1, 1, -1, 2),
        script_case(draw, 4, 6, -3, 1, 1),
        script_case(draw, 3, 5, 0, 1, -3, 2, started=True),
        script_case(draw, 5, 3, -3, 2),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """One too far, much too far, beyond the text, below nothing; then on, as if nothing had been asked."""
    return [
        with_steps(script_case(draw, 3, 7), cut(3), send(1), cut(5), send(2)),
        with_steps(script_case(draw, 2, 4, 1, started=True), cut(0), cut(6), send(1), cut(4), send(1)),
        with_steps(script_case(draw, 4, 2), cut(-1), cut(3), send(2)),
    ]


def fork_cases(draw: random.Random) -> list[dict]:
    """Two that go on differently, and go back."""
    return [
        with_steps(script_case(draw, 3, 4), fork("a", "b"), send(1), send(2, "b"), send(1)),
        with_steps(script_case(draw, 3, 5, started=True), fork("a", "b"), cut(3), send(2), cut(3, "b"), send(1, "b")),
        with_steps(script_case(draw, 2, 3), fork("a", "b"), send(2, "b"), cut(1), send(1), cut(3, "b"), send(1, "b")),
    ]


def bytes_cases(draw: random.Random) -> list[dict]:
    return [script_case(draw, 3, 1, 1, 9, 4, -2, 1), script_case(draw, 1, 5, 1, window=2)]


def twice_cases(draw: random.Random) -> list[dict]:
    """One cut after the other: what was dropped does not come back with the length."""
    return [
        with_steps(script_case(draw, 4, 8), cut(6), cut(4), send(1), cut(4), send(2)),
        with_steps(script_case(draw, 3, 8), cut(6), cut(4), cut(5), send(1), cut(4), send(1)),
    ]


def no_rewind_cases(draw: random.Random) -> list[dict]:
    """A rewind of 0: the newest state alone."""
    return [with_steps(script_case(draw, 0, 3, 1), cut(3), cut(4), send(1))]


def round_cases(draw: random.Random) -> list[dict]:
    """Rounds of speculation: drafted tokens are verified in one go, and some taken back."""
    cases = []
    for drafted in (3, 5):
        steps = [draw.randint(4, 9)]
        for _ in range(5):
            steps += [drafted + 1, -draw.randint(0, drafted)]
        cases.append(script_case(draw, drafted, *steps, started=drafted == 5))
    return cases


def family_cases(draw: random.Random) -> list[dict]:
    """Forks of forks; two that go back to the same length and on with other tokens."""
    one = script_case(draw, 4, 6, started=True)
    steps = [fork("a", "b"), cut(3), send(2), cut(3, "b"), send(1, "b"), fork("b", "c"), cut(3, "b"), send(3, "b")]
    two = script_case(draw, 3, 2, window=3)
    return [
        with_steps(one, *steps, cut(4, "c"), send(1, "c"), cut(4), send(1)),
        with_steps(two, fork("a", "b"), fork("a", "c"), cut(0), cut(0, "b"), send(2), send(1, "b"), cut(1), send(1)),
    ]


# --- A right one, by its text ---


class Text:
    """The tokens so far, and the shortest length that it can be cut to."""

    def __init__(self, case: dict, rows: tuple[torch.Tensor, ...] = (), low: int = 0) -> None:
        self.case, self.rows, self.low = case, list(rows), low

    def send(self, x: torch.Tensor) -> None:
        self.rows += x
        self.low = max(self.low, len(self.rows) - self.case["rewind"])

    def fork(self) -> Text:
        return Text(self.case, tuple(self.rows), self.low)

    def outputs(self, count: int) -> torch.Tensor:
        """y of the last so many tokens, [n, d]: each a sum over the text."""
        case = self.case
        sizes = {name: case[name] for name in ("seed", "width", "states", "window")}
        weights, state = mixer_weights(**sizes), first_state(**sizes, started=case["started"])
        rows = [*state["conv"], *self.rows]
        filtered = [
            torch.stack([w * rows[t + i] for i, w in enumerate(weights["conv"])]).sum(0) for t in range(len(self.rows))
        ]
        decay, outputs = weights["decay"], []
        for t in range(len(self.rows) - count, len(self.rows)):
            past = torch.arange(t, -1, -1)[:, None, None]  # tokens since each of them
            arrived = torch.stack(filtered[: t + 1])[:, :, None] * weights["inner"]
            remembered = decay ** (t + 1) * state["ssm"] + (decay**past * arrived).sum(0)
            outputs.append((remembered * weights["outer"]).sum(1))
        return torch.stack(outputs)


def state_bytes(case: dict) -> int:
    """Of one state in float64: W − 1 inputs and N numbers for each of d channels."""
    return 8 * case["width"] * (case["window"] - 1 + case["states"])


# --- Judge ---


def judge_script(case: dict, seen: dict) -> str | None:
    """Outputs, lengths, refusals, and what was computed for them."""
    return _judge(case, seen, with_bytes=False)


def judge_bytes(case: dict, seen: dict) -> str | None:
    """These, and the bytes that are held."""
    return _judge(case, seen, with_bytes=True)


def _judge(case: dict, seen: dict, with_bytes: bool) -> str | None:
    texts, done = {"a": Text(case)}, ""
    for number, step in enumerate(case["script"]):
        name = step["on"]
        text = texts[name]
        verb = next(verb for verb in ("send", "truncate", "fork") if verb in step)
        done += f"{', ' if done else ''}{name}: {verb} {step[verb]}"
        described = f"rewind {case['rewind']}; {done}"
        refuses = verb == "truncate" and not text.low <= step["truncate"] <= len(text.rows)
        allowed = f"{name} has {len(text.rows)} tokens, and can be cut to {text.low} … {len(text.rows)}"
        if number >= len(seen["refused"]):
            wanted = "; a ValueError was expected" if refuses else ""
            return f"{described}: {seen['stopped']} was raised{wanted} ({allowed})"
        if seen["refused"][number] != refuses:
            came, wanted = ("refused", "cut") if seen["refused"][number] else ("not refused", "a ValueError")
            return f"{described}: {came}, expected {wanted}: {allowed}"
        if verb == "send":
            text.send(sent(case["seed"], number, step["send"], case["width"]))
            if message := _judge_y(text, step["send"], seen["y"][number]):
                return f"{described}: {message}"
        elif verb == "fork":
            texts[step["fork"]] = text.fork()
        elif not refuses:
            del text.rows[step["truncate"] :]
        if message := _judge_calls(verb, step, seen["calls"][number]):
            return f"{described}: {message}"
        for other, one in texts.items():
            length, came = len(one.rows), seen["lengths"][number][other]
            if came != length:
                return f"{described}: {other}: length is {came}, expected {length}"
            sizes = [seen[key][number][other] for key in ("bytes", "held")]
            if with_bytes and (message := _judge_sizes(case, one, *sizes)):
                return f"{described}: {other}: {message}"
    if seen["changed"]:
        return (
            f"rewind {case['rewind']}; {done}: {seen['changed'][0]!r} of the state that was handed over has changed: it"
            " belongs to the caller, and step writes where it is pointed"
        )
    return None


def _judge_y(text: Text, count: int, y: dict) -> str | None:
    right = text.outputs(count)
    came = read(y, "advance's y", right.shape, "float64", "[n, d]")
    if isinstance(came, str):
        return came
    if same(came, right, TOLERANCE):
        return None
    at = first_wrong(came, right, TOLERANCE)
    position = len(text.rows) - count + at[0]
    return (
        f"y of the token at position {position} is {numbers(came[at[0]])}, expected {numbers(right[at[0]])}: what the"
        " layer gives after exactly the tokens that were not taken back"
    )


def _judge_calls(verb: str, step: dict, calls: int) -> str | None:
    wanted = step["send"] if verb == "send" else 0
    if calls == wanted:
        return None
    why = "once per token" if verb == "send" else "a state that is kept is copied, and nothing is computed again"
    return f"step was called {calls} times, expected {wanted}: {why}"


def _judge_sizes(case: dict, text: Text, in_use: int, held: int) -> str | None:
    one, length = state_bytes(case), len(text.rows)
    states = length - text.low + 1
    if in_use != states * one:
        return (
            f"bytes_in_use is {in_use:,}, expected {states * one:,}: the states after {text.low} … {length} tokens, of"
            f" {one} bytes each"
        )
    if held > (case["rewind"] + 1) * one + SLACK_BYTES:
        return (
            f"its tensors take {held:,} bytes, {(case['rewind'] + 1) * one:,} are allowed: the newest state"
            f" and {case['rewind']} before it, of {one} bytes each"
        )
    return None
