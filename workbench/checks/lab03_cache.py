"""Lab 03, the caches: cases and judges of kv-append, kv-truncate and kv-bug."""

from __future__ import annotations

import math
import random
from itertools import chain

import torch

from workbench.checks.arithmetic import close, shown
from workbench.checks.lab03_attention import FORGETTING, REST, RIGHT, SEEING, STORING, Fault, Simulated
from workbench.checks.probes_lab03 import random_model
from workbench.kv import Recompute
from workbench.models.batch import Batch

VOCABULARY = 50
TOLERANCE = 2e-5  # float32 attention over a dozen keys: rounding stays below, one key more or less does not


def shape(heads: int = 2, kv_heads: int = 2, layers: int = 1, size: int = 4, context: int = 32) -> dict:
    """A ModelConfig as data, small enough that every number of a case can be worked out in loops."""
    return {
        "family": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": heads * size,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": 12,
        "context_length": context,
    }


# --- Cases: a text, sent in steps ---


class Script:
    """The steps of one case, written down with the positions that belong to them."""

    def __init__(self, draw: random.Random, **sizes: int) -> None:
        self.draw, self.config = draw, shape(**sizes)
        self.steps: list[dict] = []
        self.lengths: dict[str, int] = {}

    def send(self, **new: int) -> Script:
        """So many new tokens of each of these sequences, in one batch."""
        sent = []
        for name, count in new.items():
            first = self.lengths.get(name, 0)
            sent.append([name, first, [self.draw.randrange(VOCABULARY) for _ in range(count)]])
            self.lengths[name] = first + count
        self.steps.append({"send": sent})
        return self

    def truncate(self, name: str, length: int, refused: bool = False) -> Script:
        self.steps.append({"truncate": [name, length]})
        if not refused:
            self.lengths[name] = length
        return self

    def release(self, name: str) -> Script:
        self.steps.append({"release": name})
        del self.lengths[name]
        return self

    def case(self) -> dict:
        return {"config": self.config, "steps": self.steps, "salt": f"kv{self.draw.randrange(10**6)}"}


def scripted(draw: random.Random, *steps: int, **sizes: int) -> dict:
    """A case of one sequence, so many new tokens a step."""
    script = Script(draw, **sizes)
    for count in steps:
        script.send(a=count)
    return script.case()


def one_shot_cases(draw: random.Random) -> list[dict]:
    return [scripted(draw, 5), scripted(draw, 1), scripted(draw, 8)]


def decode_cases(draw: random.Random) -> list[dict]:
    return [scripted(draw, 4, 1, 1, 1), scripted(draw, 1, 1, 1)]


def chunk_cases(draw: random.Random) -> list[dict]:
    return [scripted(draw, 3, 3, 2), scripted(draw, 1, 4, 1, 2)]


def grouped_cases(draw: random.Random) -> list[dict]:
    """Four query heads to two key-value heads; six to three."""
    return [scripted(draw, 4, 2, 1, heads=4, kv_heads=2), scripted(draw, 3, 1, heads=6, kv_heads=3)]


def multi_query_cases(draw: random.Random) -> list[dict]:
    return [scripted(draw, 4, 2, 1, heads=4, kv_heads=1), scripted(draw, 2, 1, heads=3, kv_heads=1, layers=2)]


def layer_cases(draw: random.Random) -> list[dict]:
    return [scripted(draw, 3, 1, 2, layers=3), scripted(draw, 4, 1, 1, layers=2, heads=4)]


def ragged_script(draw: random.Random, **sizes: int) -> Script:
    """Three sequences that come, grow by different steps in one batch, and go; a name that comes back is new."""
    script = Script(draw, layers=2, **sizes).send(a=3, b=1)
    script.send(b=2, c=4, a=1).send(a=1, b=1, c=1).release("b")
    return script.send(c=2, b=3, a=1).send(b=1, c=1)


def ragged_cases(draw: random.Random) -> list[dict]:
    return [ragged_script(draw).case(), ragged_script(draw, heads=4, kv_heads=2).case()]


def rewound_cases(draw: random.Random) -> list[dict]:
    """Cut and go on with fewer tokens than were cut, so that stale keys lie behind the end."""
    return [
        Script(draw).send(a=6).truncate("a", 3).send(a=1).send(a=1).case(),
        Script(draw, heads=4, kv_heads=2).send(a=4).send(a=3).truncate("a", 5).send(a=2).case(),
    ]


# --- Judging the outputs ---


def described(step: dict) -> str:
    """What a step does, in words."""
    if "truncate" in step:
        return "truncate({!r}, {})".format(*step["truncate"])
    if "release" in step:
        return f"release({step['release']!r})"
    parts = [
        f"{len(tokens)} new token{'s' * (len(tokens) != 1)} of {name!r} after {first}"
        for name, first, tokens in step["send"]
    ]
    return "; ".join(parts)


def same(came: list[float], right: list[float]) -> bool:
    return all(
        (math.isnan(a) and math.isnan(b)) or (not math.isnan(a) and close(a, b, TOLERANCE))
        for a, b in zip(came, right)
    )


def play(case: dict, until: int, fault: Fault = RIGHT, chunks: bool = False) -> tuple[Simulated, list]:
    """The simulated cache after step number `until`, and the outputs of every step so far (None where none is sent)."""
    cache, outputs = Simulated(case["config"], case["salt"], fault, chunks), []
    for step, refused in zip(case["steps"][: until + 1], case["refusals"]):
        outputs.append(cache.send(step["send"]) if "send" in step else None)
        if "truncate" in step and not refused:
            cache.truncate(*step["truncate"])
        elif "release" in step:
            cache.release(step["release"])
    return cache, outputs


def was_right(outputs: list, right: list) -> bool:
    """Whether a cache gave right outputs in all these steps."""
    return all(
        same(_flat(mine), _flat(good))
        for step, expected in zip(outputs, right)
        if step is not None
        for layer, good_layer in zip(step, expected)
        for part, good_part in zip(layer, good_layer)
        for mine, good in zip(part, good_part)
    )


def must_refuse(case: dict) -> list[bool]:
    """Of each step, whether a right cache refuses it: a truncate of what is not there."""
    lengths: dict[str, int] = {}
    refused = []
    for step in case["steps"]:
        no = False
        if "send" in step:
            lengths |= {name: first + len(tokens) for name, first, tokens in step["send"]}
        elif "release" in step:
            lengths.pop(step["release"])
        else:
            name, length = step["truncate"]
            no = not 0 <= length <= lengths.get(name, -1)
            if not no:
                lengths[name] = length
        refused.append(no)
    return refused


def judge_cache(case: dict, seen: dict, chunks: bool = False) -> str | None:
    """At each step the outputs of attention over all tokens so far, the lengths, and the refusals that belong to it."""
    case = case | {"refusals": must_refuse(case)}
    lengths: dict[str, int] = {}
    held = None  # the first time that a wrong number of bytes was held
    for number, (step, now) in enumerate(zip(case["steps"], seen["steps"])):
        what = f"step {number + 1} of {len(case['steps'])} ({described(step)})"
        if "error" in now:
            return held or f"{what}: {now['error']}"
        if message := _judge_refusal(case, number, now):
            return f"{what}: {message}"
        if "send" in step:
            if message := _judge_outputs(case, number, now["out"], chunks):
                return f"{what}: {message}"
            lengths |= {name: first + len(tokens) for name, first, tokens in step["send"]}
        elif "release" in step:
            lengths.pop(step["release"])
        elif not case["refusals"][number]:
            lengths[step["truncate"][0]] = step["truncate"][1]
        if now["lengths"] != sorted([name, length] for name, length in lengths.items()):
            return f"{what}: lengths is {dict(now['lengths'])} afterwards, expected {lengths}" + _length_hint(
                case, number
            )
        if chunks and held is None and (message := _judge_bytes(case, lengths, now)):
            held = f"{what}: {message}"
    if len(seen["steps"]) < len(case["steps"]):
        return f"the cache stopped after {len(seen['steps'])} of {len(case['steps'])} steps"
    return held


def _judge_refusal(case: dict, number: int, now: dict) -> str | None:
    step, must = case["steps"][number], case["refusals"][number]
    if must and "refused" not in now:
        name, length = step["truncate"]
        return (
            f"no error was raised; a sequence can be cut to 0 … its present length, and {length} is outside. Raise "
            "WorkbenchError before anything changes"
            if name in dict(now["lengths"])
            else f"no error was raised, and there is no sequence {name!r}: raise WorkbenchError"
        )
    if "refused" in now and not must:
        return f"was refused, with {now['refused']!r}; it is allowed"
    return None


def _length_hint(case: dict, number: int) -> str:
    if case["refusals"][number]:
        return ": a refused truncate changes nothing"
    return (
        ": truncate sets lengths[sequence] to the new length" if "truncate" in case["steps"][number] else ""
    )


def _judge_bytes(case: dict, lengths: dict[str, int], now: dict) -> str | None:
    c = case["config"]
    a_token = 2 * c["num_layers"] * c["num_kv_heads"] * c["head_dim"] * 4
    tokens = sum(lengths.values())
    if now["bytes_in_use"] == tokens * a_token:
        return None
    return (
        f"{now['bytes_in_use']} bytes of keys and values are held afterwards, those of "
        f"{now['bytes_in_use'] / a_token:g} tokens; expected {tokens * a_token}, for {tokens}: k and v of every layer "
        "keep the tokens that stay and no others"
    )


def _judge_outputs(case: dict, number: int, out: list, chunks: bool) -> str | None:
    """None, or the first query that is wrong, with the fault that explains it."""
    c, sent = case["config"], case["steps"][number]["send"]
    rows = sum(len(tokens) for _, _, tokens in sent)
    for came in out:
        wanted = [rows, c["num_heads"], c["head_dim"]]
        if not isinstance(came, list) or _shape(came) != wanted:
            return f"attend gave back a tensor of shape {_shape(came)}, expected {wanted} [N, H_q, D]"
    _, all_right = play(case, number, chunks=chunks)
    right = all_right[-1]
    for layer in range(c["num_layers"]):
        start = 0
        for at, (name, first, tokens) in enumerate(sent):
            mine = [_flat(row) for row in out[layer][start : start + len(tokens)]]
            good = [_flat(row) for row in right[layer][at]]
            start += len(tokens)
            wrong = [i for i in range(len(tokens)) if not same(mine[i], good[i])]
            if wrong:
                place = {"layer": layer, "sequence": name, "first": first, "n": len(tokens), "i": wrong[0]}
                return _diagnosis(case, number, at, place, mine, all_right, chunks)
    return None


def _flat(rows: list[list]) -> list:
    return list(chain.from_iterable(rows))


def _shape(values: object) -> list[int]:
    return [len(values), *_shape(values[0])] if isinstance(values, list) and values else []


def _diagnosis(case: dict, number: int, at: int, place: dict, mine: list, right: list, chunks: bool) -> str:
    """The fault that gives just these outputs of one sequence and layer, in words; else what was expected.

    A fault that would have shown in an earlier step, all of which were right, is named only where no other fits.
    """
    c, first, layer = case["config"], place["first"], place["layer"]
    good = [_flat(row) for row in right[-1][layer][at]]
    late: str | None = None
    for fault in FORGETTING if chunks else (*STORING, *SEEING, *REST):
        cache, outputs = play(case, number, fault, chunks)
        rows = [_flat(row) for row in outputs[-1][layer][at]]
        certain = [i for i in range(len(rows)) if not math.isnan(rows[i][0])]
        wrong = [i for i in certain if not same(rows[i], good[i])]
        if not wrong or not all(same(mine[i], rows[i]) for i in certain):
            continue
        i = wrong[0]
        words = place | {"i": i, "at": first + i, "at_plus": first + i + 1, "at_minus": first + i - 1}
        words |= {"length": first + place["n"], "first_plus": first + 1, "first_minus": first - 1}
        words |= {"H_q": c["num_heads"], "H_kv": c["num_kv_heads"]}
        words |= {"group": c["num_heads"] // c["num_kv_heads"]}
        words |= {"cut": cache.cut_to, "last": max(cache.cut_to - 1, 0)}
        told = _where(place, i, mine, good) + fault.told.format(**words)
        if was_right(outputs[:-1], right[:-1]):
            return told
        late = late or told
    if late:
        return late
    i = place["i"]
    if any(math.isnan(x) for x in mine[i]):
        told = f"nan comes of a query that sees no key at all; it sees positions 0 … {first + i}"
    else:
        told = f"it is softmax(q·kᵀ·scale)·v over the keys and values of positions 0 … {first + i} of this sequence and layer"
    return _where(place, i, mine, good) + told


def _where(place: dict, i: int, mine: list, good: list) -> str:
    return (
        f"layer {place['layer']}, sequence {place['sequence']!r}, the query at position {place['first'] + i}: the output is "
        f"{shown(mine[i][:3])}…, expected {shown(good[i][:3])}…: "
    )


# --- On a real decoder ---


def model_cases(draw: random.Random) -> list[dict]:
    """Prompt, single tokens, a chunk, on two layers with grouped heads and rotary positions."""
    config = shape(heads=4, kv_heads=2, layers=2, size=8)
    cases = []
    for sizes in ((6, 1, 1, 1, 3), (4, 4, 4)):
        steps = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in sizes]
        cases.append({"config": config, "seed": draw.randrange(10**6), "steps": steps})
    return cases


@torch.no_grad()
def reference_logits(config: dict, seed: int, text: list[int]) -> torch.Tensor:
    """[S, V] of the whole text at once, with no cache and attention as it is defined."""
    model = random_model(config, seed)
    return model(Batch.of([text], logits="all"), Recompute(model.config, attention="eager"))


def judge_model(case: dict, seen: dict) -> str | None:
    """The same logits as without a cache, row by row."""
    right = reference_logits(case["config"], case["seed"], _flat(case["steps"]))
    came = torch.tensor(seen["logits"])
    if came.shape != right.shape:
        return f"logits of shape {list(came.shape)} came, expected {list(right.shape)}"
    far = (came - right).abs().amax(dim=-1) / right.abs().max()
    wrong = [int(i) for i in (~(far < 1e-4)).nonzero()]
    if wrong:
        return (
            f"a decoder of {case['config']['num_layers']} layers, sent {[len(s) for s in case['steps']]} tokens a step: "
            f"the logits after position {wrong[0]} are not those without a cache"
        )
    return None


# --- kv-truncate ---


def judge_chunks(case: dict, seen: dict) -> str | None:
    return judge_cache(case, seen, chunks=True)


def cut_cases(draw: random.Random) -> list[dict]:
    """Inside a chunk, at the border of one, and across several; one token more shows what is left."""
    return [
        Script(draw).send(a=5).send(a=1).send(a=4).truncate("a", 8).send(a=1).case(),
        Script(draw).send(a=4).send(a=3).truncate("a", 4).send(a=1).case(),
        Script(draw).send(a=6).send(a=1).send(a=1).truncate("a", 2).send(a=1).case(),
    ]


def go_on_cases(draw: random.Random) -> list[dict]:
    return [
        Script(draw).send(a=5).send(a=4).truncate("a", 7).send(a=1).send(a=2).case(),
        Script(draw)
        .send(a=4)
        .send(a=1)
        .send(a=1)
        .truncate("a", 5)
        .send(a=3)
        .truncate("a", 6)
        .send(a=1)
        .case(),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """Beyond the length and below zero; then on, as if nothing had been asked. To the very length is allowed."""
    return [
        Script(draw).send(a=4).send(a=2).truncate("a", 7, refused=True).send(a=1).case(),
        Script(draw).send(a=5).truncate("a", -1, refused=True).send(a=1).case(),
        Script(draw).send(a=3).send(a=2).truncate("a", 5).send(a=1).case(),
    ]


def every_layer_cases(draw: random.Random) -> list[dict]:
    return [
        Script(draw, layers=3, heads=4, kv_heads=2).send(a=4).send(a=3).truncate("a", 5).send(a=2).case(),
        Script(draw, layers=2, heads=4, kv_heads=1).send(a=2).send(a=5).truncate("a", 3).send(a=1).case(),
    ]


def to_nothing_cases(draw: random.Random) -> list[dict]:
    """To 0 the sequence still lives, with no tokens; then on from position 0."""
    return [Script(draw, layers=2).send(a=3).send(a=2).truncate("a", 0).send(a=2).send(a=1).case()]


def several_cases(draw: random.Random) -> list[dict]:
    script = Script(draw, layers=2).send(a=4, b=3).send(b=2, a=1).truncate("b", 4)
    script.send(a=2, b=1).truncate("c", 0, refused=True)
    return [script.send(b=1, a=1).truncate("a", 2).send(a=1, b=1).case()]


# --- kv-bug ---


def draft_cases(draw: random.Random) -> list[dict]:
    """A prompt of one token, and several tokens at once in the middle of decoding, as when drafts are verified."""
    return [scripted(draw, 1, 1, 1, 3), scripted(draw, 4, 1, 3, 1, 4, layers=2)]
