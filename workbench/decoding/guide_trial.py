"""A grammar is tried out in a process of its own before this one touches it: `python -P guide_trial.py`, a request in.

A few characters can ask a grammar library for minutes of work and gigabytes: a{1,1000} nested, hundreds of patterns
that must all hold. The library's own limits do not count all of that work, and work inside it cannot be interrupted.
A process can be ended. So the file is also a program: it compiles the grammar, writes a few random texts under it, and
says what went wrong; when its processor time is used up the system ends it. It imports nothing of this package.
"""

from __future__ import annotations

import io
import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

CPU_SECONDS = 0.5  # of processor time, once the tokenizer is read: a busy machine is slower by this clock, too
FIRST_WALK_SECONDS = 0.25  # of it, after which the first text is not gone on with: a busy machine still ends it
WALKING_SECONDS = 0.06  # of it, after which no further text is tried
WALKS, WALK_TOKENS = 8, 48
WALL_SECONDS = 5.0  # the last resort; the only limit where processor time cannot be limited (Windows)
MEMORY_BYTES = 2 << 30


def make_tokenizer(llguidance: ModuleType, tokenizer_json: str, ends: Sequence[int]) -> Any:
    return llguidance.LLTokenizer(tokenizer_json, eos_token=list(ends))


def make_matcher(llguidance: ModuleType, tokenizer: Any, lark: str) -> Any:
    """A matcher at the start of the text. The library raises nothing: ask is_error."""
    limits = llguidance.LLParserLimits(verbose_errors=False, precompute_large_lexemes=False)
    return llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def may_follow(matcher: Any) -> list[int]:
    """Token ids that the matcher allows next."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def trouble(llguidance: ModuleType, request: dict[str, Any], seconds: Callable[[], float]) -> str | None:
    """What is wrong with the request's two forms of a grammar, {"plain": lark, "forcing": lark}, or None.

    seconds() is the processor time used so far.
    """
    tokenizer = make_tokenizer(llguidance, request["tokenizer"], request["ends"])
    limit_this_process()
    began = seconds()
    matchers = [make_matcher(llguidance, tokenizer, request[form]) for form in ("plain", "forcing")]
    chance = random.Random(0)
    for walk in range(WALKS):
        last = began + (WALKING_SECONDS if walk else FIRST_WALK_SECONDS)
        text: list[int] = []
        while True:
            tokens = [token for token in may_follow(matchers[0]) if token not in request["ends"]]
            matchers[1].compute_ff_tokens()
            for matcher in matchers:
                if matcher.is_error():
                    return matcher.get_error()
            if not tokens and not matchers[0].is_accepting():
                after = f"after {tokenizer.decode_str(text)!r:.40} " if text else ""
                return f"{after}no token of the vocabulary is allowed, and the text may not end there"
            if seconds() > last:
                return None
            if not tokens or len(text) == WALK_TOKENS:
                break
            text.append(chance.choice(tokens))
            for matcher in matchers:
                matcher.consume_token(text[-1])
        for matcher in matchers:
            matcher.reset()
    return None


def limit_this_process() -> None:
    """From here on CPU_SECONDS and MEMORY_BYTES; the system ends the process that wants more."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF, which nothing here handles
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def try_out(tokenizer_json: str, ends: Sequence[int], plain: str, forcing: str) -> str | None:
    """Run this file on the grammars: what is wrong with them, or None. Called in the process that wants the guide."""
    import subprocess

    request = {"tokenizer": tokenizer_json, "ends": list(ends), "plain": plain, "forcing": forcing}
    too_much = "it takes more work than a grammar may: shorten it, or lower its repetitions and alternatives"
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return too_much
    if done.returncode == 0:
        return json.loads(done.stdout)
    if done.returncode < 0:  # ended by the system: its time, or its memory
        return too_much
    return f"the grammar library failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1][-200:]}"


def main() -> None:
    import time

    import llguidance

    print(json.dumps(trouble(llguidance, json.load(sys.stdin), time.process_time)))


if __name__ == "__main__":
    assert isinstance(sys.stdin, io.TextIOWrapper)
    sys.stdin.reconfigure(encoding="utf-8")
    main()
