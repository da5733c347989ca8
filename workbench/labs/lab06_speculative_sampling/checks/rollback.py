"""Lab 06, rollback: cases and judge of spec-rollback. What the models have to say comes from the same ones without a
cache."""

from __future__ import annotations

import random
from functools import lru_cache

import torch

from workbench.checks.tensors import missing_message, numbers, read
from workbench.kv import Recompute
from workbench.labs.lab06_speculative_sampling.checks.probes import CONFIG, small_model
from workbench.models.batch import Batch


def rollback_case(
    draw: random.Random, text: int, K: int, accepted: int, saw: int | None = None, others: bool = False
) -> dict:
    """saw: tokens of the whole that the draft's cache holds; as a model draft leaves it: all but the last."""
    tokens = draw.sample(range(CONFIG["vocab_size"]), text + K + 1)
    return {
        "seed": draw.randrange(4),
        "text": tokens[:text],
        "drafted": tokens[text : text + K],
        "accepted": accepted,
        "token": tokens[-1],
        "draft_saw": text + K - 1 if saw is None else saw,
        "others": others,
    }


def some_cases(draw: random.Random) -> list[dict]:
    """Nothing accepted, one, all but one."""
    n, K = draw.randint(4, 7), draw.randint(3, 5)
    return [rollback_case(draw, n, K, accepted) for accepted in (0, 1, K - 1)]


def all_cases(draw: random.Random) -> list[dict]:
    """All accepted: the draft has not seen the last token it drafted."""
    return [rollback_case(draw, draw.randint(4, 7), K, K) for K in (draw.randint(3, 5), 2, 1)]


def short_cases(draw: random.Random) -> list[dict]:
    """The draft holds less: it stopped early, was behind, or was never asked; or it was sent its last token, too."""
    n, K = draw.randint(5, 8), 3
    return [
        rollback_case(draw, n, K, 3, saw=n - 2),
        rollback_case(draw, n, K, 1, saw=n),
        rollback_case(draw, n, K, 3, saw=n + K),
        rollback_case(draw, n, K, 0, saw=n + K),
        rollback_case(draw, n, 0, 0, saw=n - 1),
    ]


def beside_cases(draw: random.Random) -> list[dict]:
    """Another text lies in both caches."""
    n = draw.randint(4, 6)
    return [rollback_case(draw, n, 3, accepted, others=True) for accepted in (0, 2, 3)]


# --- Judging ---


def right_lengths(case: dict) -> tuple[int, int]:
    """What the target's cache and the draft's hold after the round."""
    certain = len(case["text"]) + case["accepted"]
    return certain, min(certain, case["draft_saw"])


def judge_rollback(case: dict, seen: dict) -> str | None:
    """The text, both lengths, the tokens to be sent next, and what the models say after them."""
    if lacking := missing_message(seen):
        return lacking
    text, drafted, accepted = case["text"], case["drafted"], case["accepted"]
    where = f"{len(text)} tokens, {len(drafted)} drafted, {accepted} accepted: "
    if "returned" in seen:
        function = "next_tokens" if "next_is" in seen else "roll_back"
        return f"{where}{function} gave a {seen['returned']}, where a list of tokens was expected"
    if "refused" in seen:
        return (
            f"{where}roll_back ended with “{seen['refused']}”; the target's cache held {len(text) + len(drafted)}"
            f" tokens, the draft's {case['draft_saw']}"
        )
    if seen["given"] != text:
        return f"{where}the text that was given was changed; make a new list"
    after = [*text, *drafted[:accepted], case["token"]]
    if seen["text"] != after:
        return (
            f"{where}roll_back gave the text {seen['text']}, expected {after}: text, accepted tokens, the target's own"
        )
    target, draft = right_lengths(case)
    for whose, came, right in zip(("target", "draft"), seen["lengths"], (target, draft)):
        if came != right:
            return (
                f"{where}your {whose}'s cache holds {came} tokens, {right} are right: what it read of the text and of"
                " the accepted tokens stays, and nothing else"
            )
    if seen["others"] != [len(text) + len(drafted)] * 2 and case["others"]:
        return (
            f"{where}the caches hold another text of {len(text) + len(drafted)} tokens, and now {seen['others']} of it;"
            " cut this one alone"
        )
    for index, (whose, held) in enumerate(zip(("target", "draft"), (target, draft))):
        following, unsent = seen["next"][index], after[held:]
        if following != unsent:
            return (
                f"{where}next_tokens of the {whose}, whose cache holds {held} of {len(after)}, gave {following},"
                f" expected {unsent}: all of the text that the cache does not hold"
            )
        row = read(seen["logits"][index], f"the {whose}'s logits", [CONFIG["vocab_size"]], "float32")
        exact = _last_row(case["seed"] + index, tuple(after))
        if isinstance(row, str) or not torch.allclose(row, exact.double(), atol=1e-3):
            shown = row if isinstance(row, str) else numbers(row)
            return (
                f"{where}after next_tokens the {whose} says {shown}, without a cache it says {numbers(exact)}: the"
                " cache holds other tokens than the text"
            )
    return None


@lru_cache(maxsize=512)
def _last_row(seed: int, text: tuple[int, ...]) -> torch.Tensor:
    model = small_model(seed)
    with torch.inference_mode():
        return model(Batch.of([list(text)]), Recompute(model.config))[-1]
