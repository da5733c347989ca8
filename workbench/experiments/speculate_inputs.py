"""What the experiments of speculation share: a pair of models, sets of held-out prompts, and a text that is written."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from workbench.decoding.law import SamplingLaw
from workbench.decoding.sampling import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.experiments.cache_steps import same_token
from workbench.experiments.contract import Setting
from workbench.experiments.inputs import next_logits
from workbench.kv import kv_for
from workbench.models.corpus import held_out_files
from workbench.models.decoder import Decoder
from workbench.models.evaluation import held_out_passages
from workbench.models.tokenizer import Tokenizer
from workbench.speculation import Fixed, LengthPolicy, RandomDraws, Speculator, Writing
from workbench.speculation.drafts.contract import check_vocabulary
from workbench.speculation.draws import BestDraws

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench

DRAFT = Setting(
    "draft", "stdlib-1m", "model", help="the smaller model that guesses; it needs the target's vocabulary"
)
PROMPT_TOKENS = 96  # of a prompt of running code


def pair_of(bench: Bench, model: str | Decoder, draft: str | Decoder) -> tuple[Decoder, Decoder]:
    """(target, draft), arranged for inference. Raises WorkbenchError where token ids mean different things to them."""
    target, guesses = (bench.model(one, arrangement="fast") for one in (model, draft))
    check_vocabulary(target, guesses.name, guesses.config.vocab_size, guesses.tokenizer)
    return target, guesses


def law_for(
    prompt_ids: Sequence[int], *, temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> SamplingLaw:
    """One law for target and draft: the same filters for both."""
    return SamplingLaw(SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p), prompt_ids)


def writing_of(
    sequence: object,
    prompt_ids: Sequence[int],
    *,
    law: SamplingLaw,
    lengths: LengthPolicy | int,
    wanted: int,
    seed: int = 0,
) -> Writing:
    """A text to be written by `Speculator.round`, with random numbers of its own."""
    return Writing(
        sequence=sequence,
        token_ids=list(prompt_ids),
        law=law,
        draws=BestDraws() if law.greedy else RandomDraws(torch.Generator().manual_seed(seed)),
        lengths=Fixed(lengths) if isinstance(lengths, int) else lengths,
        wanted=wanted,
        prompt_tokens=len(prompt_ids),
    )


def speculator_for(target: Decoder, draft, *, texts: int, tokens: int, **how) -> Speculator:
    """With a contiguous cache that has room for so many texts of so many tokens, and K more for a proposal."""
    room = min(tokens + 32, target.config.context_length)
    if tokens > room:
        raise WorkbenchError(
            f"prompt and new tokens are {tokens:,} and {target.name} reads {room:,}; ask for fewer"
        )
    return Speculator(
        target, kv_for("contiguous", target, max_sequences=texts, max_tokens=room), draft, **how
    )


# -- prompts ---------------------------------------------------------------------------------------------------


def _code(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    return held_out_passages(tokenizer, PROMPT_TOKENS, count).tolist()


def _comments(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    texts = _docstrings()
    step = max(1, len(texts) // count)
    return [tokenizer.encode(f'"""{text[: len(text) // 2]}') for text in texts[::step][:count]]


def _copying(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """A function, and the beginning of the same function."""
    texts = _functions()
    step = max(1, len(texts) // count)
    return [
        tokenizer.encode(f"{text}\n\n\n# The same function once more:\n{text.splitlines()[0]}\n")
        for text in texts[::step][:count]
    ]


def _digits(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    digits = pi_digits(60 * count + 60)
    return [tokenizer.encode(f"PI = '{digits[60 * i : 60 * i + 60]}") for i in range(count)]


PROMPT_SETS: dict[str, Callable[[Tokenizer, int], list[list[int]]]] = {
    "code": _code,
    "comments": _comments,
    "copying": _copying,
    "digits": _digits,
}


def prompts_of(name: str, decoder: Decoder, count: int) -> list[list[int]]:
    """[count] prompts of held-out text, as token ids, the same every time.

    Raises WorkbenchError for a model without a tokenizer, and where there is not so much text.
    """
    if decoder.tokenizer is None:
        raise WorkbenchError("held-out prompts need a tokenizer, and this model has none (random weights?)")
    found = PROMPT_SETS[name](decoder.tokenizer, count)
    if len(found) < count:
        raise WorkbenchError(f"there are {len(found)} prompts of {name}, not {count}; ask for fewer")
    return found


@functools.cache
def _docstrings() -> list[str]:
    """Of the held-out classes and functions, the long ones."""
    found = []
    for file in held_out_files():
        for node in ast.walk(ast.parse(file.text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
    return [text for text in found if len(text) > 240]


@functools.cache
def _functions() -> list[str]:
    """Of the held-out modules, functions of a few lines."""
    found = []
    for file in held_out_files():
        lines = file.text.splitlines()
        for node in ast.parse(file.text).body:
            if isinstance(node, ast.FunctionDef):
                found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return [text for text in found if 300 < len(text) < 700]


def pi_digits(count: int) -> str:
    """The first digits of π, without its point: text that nobody can guess (Gibbons' spigot)."""
    q, r, t, k, n, m = 1, 0, 1, 1, 3, 3
    found: list[str] = []
    while len(found) < count:
        if 4 * q + r - t < n * t:
            found.append(str(n))
            q, r, n = 10 * q, 10 * (r - n * t), 10 * (3 * q + r) // t - 10 * n
        else:
            q, r, t, k, n, m = (
                q * k,
                (2 * q + r) * m,
                t * m,
                k + 1,
                (q * (7 * k + 2) + r * m) // (t * m),
                m + 2,
            )
    return "".join(found)


# -- tokens --------------------------------------------------------------------------------------------------------


def parts_at_a_tie(oracle: Decoder, prompt: list[int], made: list[int], plain: list[int]) -> bool:
    """Whether greedy tokens leave those of plain decoding, as far as both go, at a tie within rounding.

    Raises WorkbenchError where they leave them and it is none: a time is worth nothing when the output is wrong.
    """
    for at, (token, wanted) in enumerate(zip(made, plain)):
        if token != wanted:
            logits = next_logits(oracle, [*prompt, *made[:at]])
            for written in (token, wanted):
                same_token(logits, written, oracle.dtype, f"token {at}, with a draft {token},")
            return True
    return False
