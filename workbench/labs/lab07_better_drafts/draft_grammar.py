"""drafts.draft_grammar: a text that a grammar guides, and how many of its tokens needed the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.decoding.guide import Guide
from workbench.decoding.loop import Generation
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, token_text, tokens_of
from workbench.generation import stream
from workbench.instruments.timing import exclusive

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

JUMPS = {
    "never": "asked for every token",
    "tokens": "jump where one token is legal",
    "text": "jump where one text is legal",
}
CHARACTER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "house": {"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        "age": {"type": "integer", "minimum": 11, "maximum": 99},
        "alive": {"type": "boolean"},
        "wand": {
            "type": "object",
            "properties": {
                "wood": {"enum": ["holly", "yew", "oak", "vine"]},
                "inches": {"type": "integer", "minimum": 9, "maximum": 15},
            },
            "required": ["wood", "inches"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "house", "age", "alive", "wand"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T[0-2][0-9]:[0-5][0-9]:00Z"
SOURCES = {"JSON schema": json.dumps(CHARACTER), "regex": DATE}
PROMPT = '"""A character of the story, as JSON."""\n'


def guide_of(grammar: str, source: str, tokenizer) -> Guide:
    """source "" is the example of its kind."""
    source = source.strip() or SOURCES[grammar]
    return (Guide.json_schema if grammar == "JSON schema" else Guide.regex)(source, tokenizer)


def run_grammar(
    bench: Bench,
    *,
    model,
    grammar: str,
    source: str,
    prompt: str,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    repeats: int,
) -> Iterator[Measurement]:
    """A Measurement (unit "s", of the whole request) for each way to jump. Settings hold the text as "pieces",
    [text, kind] each; counts say how many tokens needed the model."""
    target = bench.model(model, arrangement="fast")
    if target.tokenizer is None:
        raise WorkbenchError(f"a grammar is about text, and {target.name} has no tokenizer")
    bench.report("reading the grammar")
    guide = guide_of(grammar, source, target.tokenizer)
    prompt_ids = tokens_of(model, prompt)
    how: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed if temperature else None,
        "kv": "contiguous",
        "guide": guide,
    }
    settings: dict[str, Any] = {
        **plain({"model": model}),
        "grammar": grammar,
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "source": guide.source,
        "prompt": prompt,
        "asked": source.strip() or SOURCES[grammar],
    }
    seconds: dict[str, list[float]] = {jump: [] for jump in JUMPS}
    found: dict[str, Generation] = {}
    for turn in range(-1, repeats):
        for jump in JUMPS:
            bench.check_stop()
            bench.report(f"turn {max(turn, 0) + 1} of {repeats}: {JUMPS[jump]}")
            with exclusive(bench.check_stop):
                tokens = stream(target, prompt_ids, jump=jump, **how)
                for _ in tokens:
                    bench.check_stop()
                found[jump] = tokens.result()
            if turn >= 0:
                seconds[jump].append(found[jump].token_times_s[-1])
    for jump, result in found.items():
        jumped = result.kinds.count("jump")
        yield bench.measurement(
            name="drafts.draft_grammar",
            settings={
                **settings,
                "jump": jump,
                "pieces": [[token_text(target, t), kind] for t, kind in zip(result.tokens, result.kinds)],
            },
            samples=seconds[jump],
            unit="s",
            counts={
                "tokens": len(result.tokens),
                "jumped": jumped,
                "calls": result.model_calls,
                "rows": result.rows_processed,
            },
            check=_check(grammar, guide, result, found["never"], jump, temperature == 0),
        )


def _check(grammar: str, guide: Guide, result: Generation, never: Generation, jump: str, greedy: bool) -> str:
    """In words; a token that was jumped takes no draw, so beyond greedy decoding the draws are others. Raises
    WorkbenchError for a text that the grammar does not allow, or that an exact jump has changed."""
    if jump == "tokens" and greedy and result.tokens != never.tokens:
        raise WorkbenchError("jumping where one token is legal has changed the text, so it was thrown away")
    if result.finish_reason == "length":
        return "cut short: more tokens were needed"
    fits = re.fullmatch(guide.source, result.text) if grammar == "regex" else json.loads(result.text) is not None
    if not fits:
        raise WorkbenchError(f"the text does not fit the grammar: {result.text!r:.80}")
    if jump == "never":
        return "the text fits the grammar"
    if not greedy:
        return "the text fits the grammar; its draws are others than without a jump"
    same = "the same tokens as" if result.tokens == never.tokens else "other tokens than"
    return f"the text fits the grammar; {same} without a jump"


EXPERIMENT = Experiment(
    name="drafts.draft_grammar",
    lab=7,
    question="How many tokens of a guided text does the model have to be asked for?",
    how=(
        "the same request three times in turns: asked for every token; where only one token is legal it is appended"
        " without asking; where only one text is. The text is held to the grammar by another reader."
    ),
    settings=(
        MODEL,
        Setting("grammar", "JSON schema", "choice", choices=tuple(SOURCES), help="what the source is"),
        Setting("source", "", "text", help="a JSON schema or a regex; empty: the example"),
        Setting("prompt", PROMPT, "text", help="what the model goes on from"),
        Setting("temperature", 0.0, "float", 0.0, 2.0, step=0.1, help="0: greedy"),
        Setting("max_new_tokens", 128, "int", 8, 400, unit="tokens", help="at most"),
        Setting("seed", 0, "int", 0, 10_000, help="of the draws"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="turns"),
    ),
    run=run_grammar,
    predict=no_times,
    record={"cpu": tuple({"grammar": name} for name in SOURCES), "cuda": ()},
)
