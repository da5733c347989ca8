"""Lab 11, server-sent events: cases and judges of server-events. What was written is read by a parser of its own.

By the HTML standard, section 9.2: a line ends with CR LF, LF or CR, an empty line ends an event, a colon begins a
comment.
"""

from __future__ import annotations

import json
import random
import re

TEXTS = (
    "a\nb\r\nc\rd",
    'she said "no" \\n',
    "data: [DONE]\n\ndata: x",
    "\u2028 and \u2029 and \x85",
    "é 日本 😀 \x00 \x1f",
    "{}: {'a'}",
)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
Call = list  # ["pieces", [[index, text, finish_reason], …]], ["end", usage], ["error", body]


def events_case(draw: random.Random, calls: list[Call], include_usage: bool = False) -> dict:
    head = {"id": f"chatcmpl-{draw.randrange(10**6)}", "created": draw.randrange(10**9), "model": "tiny"}
    return {"head": head | {"system_fingerprint": "fp_1"}, "include_usage": include_usage, "calls": calls}


def pieces(*given: tuple) -> Call:
    """Each (text, finish_reason), of choice 0, or (text, finish_reason, index)."""
    return ["pieces", [[*one[2:], 0][:1] + list(one[:2]) for one in given]]


def chunk_cases(draw: random.Random) -> list[dict]:
    """One choice: its role, its text, its end; in one call, and in several; a piece without text; a text of nothing."""
    word = draw.choice(("Hel", "Wor", "Tok"))
    return [
        events_case(draw, [pieces((word, None)), pieces(("lo", None)), pieces(("", "stop")), ["end", USAGE]]),
        events_case(draw, [pieces((word, None), (" ", None), ("!", "length")), ["end", USAGE]]),
        events_case(draw, [pieces(("", "stop")), ["end", USAGE]]),
        events_case(draw, [pieces(("", None)), pieces((word, None)), pieces(("x", "stop")), ["end", USAGE]]),
    ]


def line_cases(draw: random.Random) -> list[dict]:
    """Texts that break a line, and characters of several bytes."""
    order = draw.sample(TEXTS, len(TEXTS))
    return [
        events_case(draw, [pieces((order[0], None)), pieces((order[1], "stop")), ["end", USAGE]]),
        events_case(draw, [pieces(*((text, None) for text in order[2:])), pieces(("", "length")), ["end", USAGE]]),
    ]


def end_cases(draw: random.Random) -> list[dict]:
    """The usage, which changes every chunk; an error, after which nothing comes."""
    words = draw.choice(("the engine has stopped", "the text could not be completed:\nNaN"))
    body = {"error": {"message": words, "type": "server_error", "param": None, "code": None}}
    return [
        events_case(draw, [pieces(("a", None)), pieces(("b", "stop")), ["end", USAGE]], include_usage=True),
        events_case(draw, [pieces(("a", None)), ["error", body]]),
        events_case(draw, [pieces(("a", "stop")), ["end", USAGE]]),
        events_case(draw, [pieces(("a", None)), ["error", body]], include_usage=True),
    ]


def several_cases(draw: random.Random) -> list[dict]:
    """Choices that take turns, each with its role and its end."""
    n = draw.randint(3, 5)
    first = [pieces(*((f"c{index}", None, index) for index in range(n)))]
    rest = [pieces((f"t{at}", None, draw.randrange(n))) for at in range(6)]
    ends = [pieces((draw.choice(("", "z")), draw.choice(("stop", "length")), index)) for index in range(n)]
    return [
        events_case(draw, [*first, *rest, *ends, ["end", USAGE]], include_usage=True),
        events_case(draw, [pieces(("b", "stop", 1)), pieces(("a", None, 0)), pieces(("", "stop", 0)), ["end", USAGE]]),
    ]


def ping_cases(draw: random.Random) -> list[dict]:
    """Silence before the first piece, in between, and before the end."""
    word = draw.choice(("Hel", "Wor", "Tok"))
    silence = pieces()
    return [
        events_case(draw, [silence, pieces((word, None)), silence, silence, pieces(("", "stop")), ["end", USAGE]]),
        events_case(draw, [silence, ["error", {"error": {"message": word}}]]),
    ]


# --- Reading ---


def parsed(data: bytes) -> tuple[list[str], list[str], str]:
    """(the data of each event, comments, what was left without an empty line after it). Raises UnicodeDecodeError."""
    events, comments, lines = list[str](), list[str](), list[str]()
    *whole, rest = re.split(r"\r\n|\n|\r", data.decode("utf-8"))
    for line in whole:
        if not line:
            if lines:
                events.append("\n".join(lines))
            lines = []
        elif line.startswith(":"):
            comments.append(line[1:])
        else:
            name, _, value = line.partition(":")
            if name == "data":
                lines.append(value.removeprefix(" "))
    return events, comments, "\n".join([*lines, rest]).strip()


# --- Judging ---


def _chunk(case: dict, choices: list, usage: dict | None = None) -> dict:
    more = {"usage": usage} if case["include_usage"] else {}
    return {**case["head"], "object": "chat.completion.chunk", "choices": choices, **more}


def _choice(index: int, delta: dict, finish_reason: str | None = None) -> dict:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def exact(case: dict, begun: set[int], call: Call) -> list:
    """The events of a call: what each JSON object says, or "[DONE]"."""
    what, given = call
    if what == "error":
        return [given]
    if what == "end":
        return [*([_chunk(case, [], given)] if case["include_usage"] else []), "[DONE]"]
    events = []
    for index, text, finish_reason in given:
        if index not in begun:
            begun.add(index)
            events.append(_chunk(case, [_choice(index, {"role": "assistant", "content": ""})]))
        if text:
            events.append(_chunk(case, [_choice(index, {"content": text})]))
        if finish_reason is not None:
            events.append(_chunk(case, [_choice(index, {}, finish_reason)]))
    return events


def _shown(call: Call) -> str:
    what, given = call
    if what != "pieces":
        return what
    shown = [f"{text!r}{f' ({reason})' if reason else ''} of choice {index}" for index, text, reason in given]
    return f"pieces {', '.join(shown)}" if shown else "no pieces"


def judge_events(case: dict, seen: dict) -> str | None:
    if "returned" in seen:
        return f"{seen['call']} gave a {seen['returned']}, where bytes were expected"
    begun: set[int] = set()
    for number, (call, came) in enumerate(zip(case["calls"], seen["written"]), 1):
        where = f"call {number}, {_shown(call)}{', include_usage' if case['include_usage'] else ''}: "
        data = came.encode("latin-1")
        try:
            events, comments, rest = parsed(data)
        except UnicodeDecodeError as error:
            return f"{where}{data[:80]!r} is not UTF-8: {error.reason}"
        if rest:
            return f"{where}{rest[:80]!r} is no whole event: an event ends with an empty line"
        right = exact(case, begun, call)
        if call == ["pieces", []] and (not comments or events):
            return f"{where}{data[:80]!r} came, where a comment was expected: a line that begins with a colon"
        if fault := _judge_each(events, right):
            return where + fault
    return None


def _judge_each(events: list[str], right: list) -> str | None:
    for event, expected in zip(events, right):
        if expected == "[DONE]":
            if event != expected:
                return f"{event[:160]} came, where [DONE] was expected"
            continue
        if event == "[DONE]":
            return f"[DONE] came, where {_brief(expected)} was expected"
        try:
            value = json.loads(event)
        except ValueError as error:
            return f"{event[:80]!r} is no JSON ({error}): one object in each event, in one line"
        if value != expected and _without_refusal(value) != expected:
            return _difference(value, expected)
    if len(events) != len(right):
        what = "[DONE]" if events[len(right) :] == ["[DONE]"] else f"{(events[len(right) :] or [''])[0][:120]!r}"
        more = f"; {what} is too much" if len(events) > len(right) else f"; after them {_brief(right[len(events)])}"
        return f"{len(events)} events came, expected {len(right)}{more}"
    return None


def _without_refusal(value: object) -> object:
    """OpenAI's first delta may have "refusal": null, too."""
    text = json.dumps(value)
    return json.loads(text.replace(', "refusal": null', "")) if '"role"' in text else value


def _brief(value: object) -> str:
    """Of a chunk its choice, where it has one."""
    if isinstance(value, dict) and isinstance(value.get("choices"), list) and len(value["choices"]) == 1:
        return json.dumps(value["choices"][0], ensure_ascii=False)[:160]
    return json.dumps(value, ensure_ascii=False)[:160]


def _difference(value: object, expected: dict) -> str:
    if not isinstance(value, dict):
        return f"{_brief(value)} came, expected {_brief(expected)}"
    for key in expected:
        if key not in value:
            return f"{_brief(value)} lacks {key!r}, expected {json.dumps(expected[key])[:80]}"
    for key in value:
        if key not in expected:
            return f"{_brief(value)} has {key!r}, which does not belong there"
        if value[key] != expected[key]:
            shown = [json.dumps(one[key], ensure_ascii=False)[:160] for one in (value, expected)]
            return f"{key} is {shown[0]}, expected {shown[1]}"
    return f"{_brief(value)} came, expected {_brief(expected)}"
