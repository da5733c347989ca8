"""Claims about the loop, its speed for a reader, and speculative sampling (labs 01 and 06)."""

from __future__ import annotations

import functools

from workbench.reading.claim import Claim
from workbench.speculation import theory

IN_PRINT = "a worked example in print, often repeated"
LEVIATHAN = "Leviathan et al., arXiv 2211.17192, equation 1"


def rows_without_cache(prompt: int, new: int) -> int:
    """Rows of all forwards that write `new` tokens, each over the whole text before it."""
    return sum(range(prompt, prompt + new))


def _expected(K: int, alpha: float, published: str, source: str) -> Claim:
    printed = "" if source == LEVIATHAN else ", as a table prints it"
    return Claim(
        f"tokens-a-round-{K}-{alpha:g}" + ("-printed" if printed else ""),
        6,
        f"Tokens of a round with {K} drafted ones, each accepted with probability {alpha:g}{printed}",
        source,
        published,
        "tokens",
        "(1 − α^(K+1)) / (1 − α)",
        functools.partial(theory.expected_tokens, alpha, K),
    )


RIGHT = {4: {0.5: "1.94", 0.7: "2.77", 0.8: "3.36", 0.9: "4.10", 0.95: "4.52"}}
RIGHT[8] = {0.5: "2.00", 0.7: "3.20", 0.8: "4.33", 0.9: "6.13", 0.95: "7.40"}
PRINTED = {4: {0.7: "2.53", 0.8: "3.00", 0.9: "3.69", 0.95: "4.24"}}
PRINTED[8] = {0.7: "2.79", 0.8: "3.57", 0.9: "5.70", 0.95: "7.30"}

CLAIMS = (
    Claim(
        "rows-100-after-10",
        1,
        "Without a cache, 100 tokens after a prompt of 10 take 5,950 rows",
        IN_PRINT,
        "5,950",
        "rows",
        "10 + 11 + … + 109",
        functools.partial(rows_without_cache, 10, 100),
    ),
    Claim(
        "rows-1000-after-2000",
        1,
        "Without a cache, 1,000 tokens after a prompt of 2,000 take 2,500,500 rows",
        IN_PRINT,
        "2,500,500",
        "rows",
        "2,000 + 2,001 + … + 2,999; the printed number is 2,001 + … + 3,000, other than in the example before",
        lambda: rows_without_cache(2000, 1000),
    ),
    Claim(
        "reading-speed",
        1,
        "People read five to six tokens a second",
        "Brysbaert 2019 (238 words per minute), at four tokens for three words",
        "5 to 6",
        "tokens/s",
        "238 · 4/3 / 60",
        lambda: 238 * 4 / 3 / 60,
    ),
    Claim(
        "accept-quick",
        6,
        "A drafted token with q = 0.6 and p = 0.7 is accepted with certainty",
        "the rule of arXiv 2211.17192 and 2302.01318",
        "1",
        "probability",
        "min(1, p/q)",
        lambda: min(1, 0.7 / 0.6),
    ),
    Claim(
        "accept-brown",
        6,
        "A drafted token with q = 0.8 and p = 0.4 is accepted with probability 0.5",
        "the rule of arXiv 2211.17192 and 2302.01318",
        "0.5",
        "probability",
        "min(1, p/q)",
        lambda: min(1, 0.4 / 0.8),
    ),
    *(_expected(K, alpha, said, LEVIATHAN) for K, line in RIGHT.items() for alpha, said in line.items()),
    *(_expected(K, alpha, said, IN_PRINT) for K, line in PRINTED.items() for alpha, said in line.items()),
    Claim(
        "best-length",
        6,
        "With α = 0.95 and a draft at 0.01 of the target's cost the best K is 40",
        LEVIATHAN + " and its speed-up",
        "40",
        "tokens",
        "the K of the largest (1 − α^(K+1)) / ((1 − α)(1 + K·c))",
        lambda: theory.best_length(0.95, 0.01),
    ),
    Claim(
        "best-speedup",
        6,
        "The best draft with α = 0.95 at 0.01 of the target's cost is 12.54 times as fast",
        LEVIATHAN + " and its speed-up",
        "12.54",
        "times",
        "the speed-up at that K",
        lambda: theory.speedup(0.95, theory.best_length(0.95, 0.01), 0.01),
    ),
)
