"""Filters on logits: a bias, penalties, temperature, top-k, top-p and min-p, as pure functions.

Every filter takes logits and gives new logits of the same shape; a token that may not be chosen has −inf, and
the distribution of a stage is softmax(logits). No input is ever changed. The order is that of transformers:

    logit bias → repetition, presence, frequency penalty → temperature → top-k → top-p → min-p

and it matters: top-p and min-p look at probabilities, so what they keep depends on the temperature before them,
and top-p after top-k measures its mass within the k tokens that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch

from workbench.errors import WorkbenchError, is_number, is_whole, plain_number, shown, unknown
from workbench.models.transfers import sent

REMOVED = -math.inf
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # that float32 can divide by on every device; below it: greedy
LARGEST_TEMPERATURE = torch.finfo(torch.float32).max  # from there on every token that is left is equally probable
LARGEST_BIAS, MAX_BIASES = 100, 2**22  # the OpenAI API's limit; more are not even counted
LARGEST_PENALTY = 1e6  # no logits lie so far apart: a larger one would change nothing, but for what overflows


def finite_number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> float:
    """The value as a float. Raises unless it is a finite int or float (no bool) for which `holds`."""
    if not is_number(value) or not holds(plain_number(value)):
        raise WorkbenchError(f"{name} must be {expected}, got {shown(value)}")
    return float(plain_number(value))


def whole_number(name: str, value: object, *, at_least: int) -> None:
    """Raise unless `value` is an int (no bool, no float) of at least `at_least`."""
    if not is_whole(value) or not is_number(value) or value < at_least:
        raise WorkbenchError(f"{name} must be a whole number of at least {at_least}, got {shown(value)}")


# -- filters of every row alike: logits [..., V] -------------------------------------------------------


def checked_bias(given: object) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits, by id; None is nothing."""
    expected = f"logit_bias must be {{token id: number}}, each number from -{LARGEST_BIAS} to {LARGEST_BIAS}"
    pairs = given.items() if isinstance(given, Mapping) else () if given is None else given
    if not isinstance(pairs, Iterable) or (isinstance(pairs, str | bytes | set | frozenset) and pairs is given):
        raise WorkbenchError(f"{expected}, got {shown(given)}")
    bias: dict[int, float] = {}
    for pair in islice(pairs, MAX_BIASES + 1):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WorkbenchError(f"{expected}, got {shown(pair)}")
        token_id, number = pair
        if not is_whole(token_id) or token_id < 0 or token_id in bias or len(bias) == MAX_BIASES:
            raise WorkbenchError(f"{expected}, and each id of at least 0 once; got {shown(token_id)}")
        if not is_number(number) or not abs(plain_number(number)) <= LARGEST_BIAS:
            raise WorkbenchError(f"{expected}, got {shown(number)} for {shown(token_id)}")
        bias[token_id] = float(plain_number(number))
    return tuple(sorted(bias.items()))


def add_bias(logits: torch.Tensor, bias: object) -> torch.Tensor:
    """Add to each token's logit its bias, −100 … 100 (the OpenAI API's logit_bias). A token that was removed stays so.

    bias: a mapping of token id to number, or pairs of these.
    """
    if not (pairs := checked_bias(bias)):
        return logits.clone()
    ids, numbers = zip(*pairs)
    if ids[-1] >= logits.shape[-1]:
        raise WorkbenchError(f"token ids of logit_bias must lie in 0 … {logits.shape[-1] - 1}, got {ids[-1]}")
    at, more = sent([ids, numbers], dtype=torch.float64, device=logits.device)
    return logits.index_add(-1, at.long(), more.to(logits.dtype).expand(*logits.shape[:-1], -1))


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide by the temperature: below 1 sharper, above 1 flatter. It never changes the order of tokens.

    0 is the limit T → 0, greedy: only the best token is left (of equals, the one with the smallest id). So is what
    lies below the smallest normal float32, 1.2e-38. From there on equal best tokens have equal shares, as in softmax.
    What lies above the largest float32 counts as that: all tokens are equally probable, and those removed stay so.
    """
    temperature = finite_number("temperature", temperature, "0 (greedy) or a positive number", lambda t: t >= 0)
    temperature = min(temperature, LARGEST_TEMPERATURE)
    best = logits.amax(dim=-1, keepdim=True)
    if temperature < SMALLEST_TEMPERATURE:
        first = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, REMOVED).scatter(-1, first, best)
    overflows = (best / temperature).isinf() & best.isfinite()
    if logits.device.type == "cpu" and not overflows.any():
        return logits / temperature
    # a tiny temperature overflowed; with the best token at 0 the softmax is the same. A GPU is not asked: it computes
    # both, and nobody waits for its answer
    return torch.where(overflows, logits - best, logits) / temperature


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k best tokens, and all that equal the k-th. k ≥ V keeps everything."""
    whole_number("top_k", k, at_least=1)
    kth_best = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth_best, REMOVED)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of best tokens whose probability reaches p (the nucleus, arXiv 1904.09751).

    A token stays while the tokens better than it hold less than p together, so the best always stays; of equal
    tokens at the edge, smaller ids stay first. p = 1 keeps everything.
    """
    p = finite_number("top_p", p, "above 0 and at most 1 (1 keeps every token)", lambda p: 0 < p <= 1)
    if p == 1:
        return logits.clone()
    best_first, order = logits.sort(dim=-1, descending=True, stable=True)
    reached = _wide(best_first).softmax(dim=-1).cumsum(dim=-1)
    best = torch.zeros_like(reached[..., :1], dtype=torch.bool)  # stays, where p is so small that float32 has 0 for it
    removed = torch.empty_like(order, dtype=torch.bool).scatter(
        -1, order, torch.cat((best, reached[..., :-1] >= p), dim=-1)
    )
    return logits.masked_fill(removed, REMOVED)


def keep_min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep tokens at least p times as probable as the best one (arXiv 2407.01082). p = 0 keeps everything.

    In logits the ratio of two probabilities is a difference, so no softmax is needed.
    """
    p = finite_number("min_p", p, "from 0 to 1 (0 keeps every token)", lambda p: 0 <= p <= 1)
    if p == 0:
        return logits.clone()
    threshold = logits.amax(dim=-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < threshold, REMOVED)


# -- penalties: logits [V], and what has been said so far ----------------------------------------------


def penalize_repetition(logits: torch.Tensor, token_ids: Sequence[int], penalty: float) -> torch.Tensor:
    """Divide positive logits of the tokens seen by the penalty and multiply negative ones (arXiv 1909.05858).

    token_ids: prompt and generated so far; how often a token was seen makes no difference. Above 1 discourages.
    """
    expected = "a number from 1e-6 to 1e6 (1 changes nothing)"
    penalty = finite_number(
        "repetition_penalty", penalty, expected, lambda x: 1 / LARGEST_PENALTY <= x <= LARGEST_PENALTY
    )
    seen = _counts(logits, token_ids) > 0
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalize_presence(logits: torch.Tensor, generated_ids: Sequence[int], penalty: float) -> torch.Tensor:
    """Subtract the penalty once from each token that was generated (the OpenAI API's definition)."""
    penalty = _subtracted("presence_penalty", penalty)
    return logits - penalty * _counts(logits, generated_ids).clamp(max=1)


def penalize_frequency(logits: torch.Tensor, generated_ids: Sequence[int], penalty: float) -> torch.Tensor:
    """Subtract the penalty once for every time a token was generated (the OpenAI API's definition)."""
    penalty = _subtracted("frequency_penalty", penalty)
    return logits - penalty * _counts(logits, generated_ids)


def _subtracted(name: str, penalty: float) -> float:
    expected = "a number from -1e6 to 1e6 (0 changes nothing)"
    return finite_number(name, penalty, expected, lambda x: abs(x) <= LARGEST_PENALTY)


def _counts(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """[V] how often each token stands in token_ids, in the dtype of the logits."""
    if logits.dim() != 1:
        raise WorkbenchError(f"penalties take the logits of one text, [V], got {list(logits.shape)}")
    ids, vocabulary = torch.as_tensor(list(token_ids), dtype=torch.int64), logits.shape[0]
    if ids.numel() and not (ids.min() >= 0 and ids.max() < vocabulary):
        raise WorkbenchError(f"token ids must lie in 0 … {vocabulary - 1}, got {ids.min()} … {ids.max()}")
    return torch.bincount(ids, minlength=vocabulary).to(logits)  # its dtype and device


FILTERS: dict[str, Callable[..., torch.Tensor]] = {  # in the order in which they are applied
    "logit_bias": add_bias,
    "repetition_penalty": penalize_repetition,
    "presence_penalty": penalize_presence,
    "frequency_penalty": penalize_frequency,
    "temperature": apply_temperature,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}


class Settings(Protocol):
    """`sampling.SamplingSettings`: a value for each filter, and which of them change anything."""

    @property
    def greedy(self) -> bool: ...
    def active(self) -> list[str]: ...


def filter_stages(
    settings: Settings,
    logits: torch.Tensor,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    replace: Mapping[str, Callable[..., torch.Tensor]] | None = None,
) -> list[tuple[str, torch.Tensor]]:
    """[(stage, logits [V])]: "model" first, then after each active filter; the last is what is drawn from.

    replace: other functions for named filters, with the same arguments. One is called when its filter is
    active (the temperature not at 0, which is the argmax and no division), on a copy it may change.
    Raises WorkbenchError for NaN, for +inf, for no token left, and for a replacement that returns no [V].
    """
    replace = replace or {}
    check_filter_names(replace)
    if logits.dim() != 1:
        raise not_one_row(logits)
    check_logits(logits, "the model")
    stages = [("model", logits)]
    for name in settings.active():
        arguments: list[Any] = [getattr(settings, name)]
        if name == "repetition_penalty":
            arguments.insert(0, [*prompt_ids, *generated_ids])
        elif name.endswith("penalty"):
            arguments.insert(0, list(generated_ids))
        if name in replace and not (name == "temperature" and settings.greedy):
            changed = replace[name](logits.clone(), *arguments)
            if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
                came = list(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
                raise WorkbenchError(f"filter {name!r} must return logits of shape {list(logits.shape)}, got {came}")
        else:
            changed = FILTERS[name](logits, *arguments)
        check_logits(changed, f"filter {name!r}")
        logits = changed
        stages.append((name, logits))
    return stages


def filter_rows(logits: torch.Tensor, settings: Settings, *, check: bool = False) -> torch.Tensor:
    """[n, V] after all active filters; none of them is a penalty.

    check: raise for a row that is no distribution then. Without it no value is looked at, so no device is waited for.
    """
    for name in settings.active():
        logits = FILTERS[name](logits, getattr(settings, name))
    if check:
        check_filtered(logits, settings)
    return logits


def check_filtered(logits: torch.Tensor, settings: Settings) -> None:
    """Raise where the active filters left no distribution in a row of [n, V]."""
    check_logits(logits[0] if len(logits) == 1 else logits, f"the filters ({', '.join(settings.active())})")


def check_filter_names(names: Iterable[str]) -> None:
    """Raise for a name that is no filter."""
    for name in names:
        if name not in FILTERS:
            raise unknown("filter", name, FILTERS)


def check_logits(logits: torch.Tensor, source: str) -> None:
    """Raise when a row of [..., V] is no distribution: a NaN, a +inf, or every token removed."""
    best = logits.amax(dim=-1)  # NaN wins in amax, so one number a row tells all three
    if math.isfinite(best.item()) if best.dim() == 0 else torch.isfinite(best).all():
        return
    if best.isnan().any():
        raise WorkbenchError(
            f"{source} gave NaN logits, so there is nothing to choose from; look for 0/0, "
            "inf − inf, weights that overflowed, or a kv in few bits whose float16 scales did (keys or values beyond "
            "±65,504: keep those as they came, without format)"
        )
    if (best == math.inf).any():
        raise WorkbenchError(f"{source} gave a logit of +inf; use finite logits, and −inf to remove a token")
    raise WorkbenchError(f"{source} removed every token (all logits are −inf); at least one must be left")


def not_one_row(logits: torch.Tensor) -> WorkbenchError:
    return WorkbenchError(
        f"choosing takes the logits of one next token, [V], got {list(logits.shape)}; use the last row, logits[-1]"
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32: sums of bfloat16 probabilities would not reach 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
