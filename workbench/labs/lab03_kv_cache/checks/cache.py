"""Lab 03, the caches: cases and judges of kv-append, kv-truncate and kv-bug."""

from __future__ import annotations

import random
from itertools import chain

import torch

from workbench.checks.arithmetic import shown
from workbench.checks.inputs import random_model
from workbench.checks.tensors import first_wrong, same
from workbench.kv import Recompute
from workbench.labs.lab03_kv_cache.checks.attention import attention
from workbench.labs.lab03_kv_cache.checks.probes import vectors
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
    """A case of one sequence, so many new tokens per step."""
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


def judge_cache(case: dict, seen: dict, chunks: bool = False) -> str | None:
    """At each step the outputs of attention over all tokens so far, the lengths, and the refusals that belong to it."""
    texts: dict[str, list[int]] = {}
    held = None  # the first time that a wrong number of bytes was held
    for number, step in enumerate(case["steps"], 1):
        now = seen.get(f"step {number}")
        if now is None:
            return f"the cache stopped after {number - 1} of {len(case['steps'])} steps"
        what = f"step {number} of {len(case['steps'])} ({described(step)})"
        if "error" in now:
            return held or f"{what}: {now['error']}"
        if "refused" in now:
            now = now | {"refused": seen["refusals"][f"step {number}"]}
        if message := _judge_step(case, step, now, texts):
            return f"{what}: {message}"
        if chunks and held is None and (message := _judge_bytes(case, texts, now)):
            held = f"{what}: {message}"
    return held


def _judge_step(case: dict, step: dict, now: dict, texts: dict[str, list[int]]) -> str | None:
    """None, or what was wrong in this step. texts: the tokens of every sequence, which are brought up to date."""
    if "send" in step:
        for name, _, tokens in step["send"]:
            texts.setdefault(name, []).extend(tokens)
        if message := _judge_outputs(case, step["send"], now["out"], texts):
            return message
    elif "release" in step:
        del texts[step["release"]]
    else:
        name, length = step["truncate"]
        if name in texts and 0 <= length <= len(texts[name]):
            if "refused" in now:
                return f"was refused, with {now['refused']!r}; 0 … {len(texts[name])} tokens are allowed"
            del texts[name][length:]
        elif "refused" not in now:
            allowed = f"a length of 0 … {len(texts[name])} is allowed" if name in texts else "there is no such sequence"
            return f"no error was raised, where WorkbenchError was expected: {allowed}"
    lengths = {name: len(text) for name, text in texts.items()}
    if now["lengths"] != sorted(map(list, lengths.items())):
        return f"lengths is {dict(now['lengths'])} afterwards, expected {lengths}"
    return None


def _judge_bytes(case: dict, texts: dict[str, list[int]], now: dict) -> str | None:
    c = case["config"]
    a_token = 2 * c["num_layers"] * c["num_kv_heads"] * c["head_dim"] * 4
    tokens = sum(map(len, texts.values()))
    if now["bytes_in_use"] == tokens * a_token:
        return None
    return (
        f"{now['bytes_in_use']} bytes of keys and values are held afterwards, those of "
        f"{now['bytes_in_use'] / a_token:g} tokens; expected {tokens * a_token}, for {tokens}: k and v of every layer "
        "keep the tokens that stay and no others"
    )


def attended(case: dict, layer: int, text: list[int], n: int) -> torch.Tensor:
    """[n, H_q, D] what a layer gives for the last n tokens of a text, without any cache, in float64."""
    c = case["config"]
    q, k, v = (
        vectors(case["salt"], kind, layer, text, 0, c[heads], c["head_dim"])
        for kind, heads in (("q", "num_heads"), ("k", "num_kv_heads"), ("v", "num_kv_heads"))
    )
    return attention(q[-n:], k, v, c["head_dim"] ** -0.5)


def _judge_outputs(case: dict, sent: list, out: list, texts: dict[str, list[int]]) -> str | None:
    """None, or the first output that is wrong."""
    c = case["config"]
    wanted = [sum(len(tokens) for _, _, tokens in sent), c["num_heads"], c["head_dim"]]
    for layer, output in enumerate(out):
        came = torch.tensor(output if isinstance(output, list) else [], dtype=torch.float64)
        if list(came.shape) != wanted:
            return f"attend returned a tensor of shape {list(came.shape)}, expected {wanted} [N, H_q, D]"
        parts = came.split([len(tokens) for _, _, tokens in sent])
        for (name, first, tokens), mine in zip(sent, parts):
            right = attended(case, layer, texts[name], len(tokens))
            if same(mine, right, TOLERANCE):
                continue
            i, head, _ = first_wrong(mine, right, TOLERANCE)
            return (
                f"layer {layer}, sequence {name!r}, the query at position {first + i}, head {head}: the output is"
                f" {shown(mine[i, head, :3].tolist())}…, expected {shown(right[i, head, :3].tolist())}…:"
                f" softmax(q·kᵀ·scale)·v over positions 0 … {first + i} of this sequence and layer"
            )
    return None


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
    right = reference_logits(case["config"], case["seed"], list(chain.from_iterable(case["steps"])))
    came = torch.tensor(seen["logits"])
    if came.shape != right.shape:
        return f"logits of shape {list(came.shape)} came, expected {list(right.shape)}"
    far = (came - right).abs().amax(dim=-1) / right.abs().max()
    wrong = [int(i) for i in (~(far < 1e-4)).nonzero()]
    if wrong:
        return (
            f"a decoder of {case['config']['num_layers']} layers, sent {[len(s) for s in case['steps']]} tokens per "
            f"step: the logits after position {wrong[0]} are not those without a cache"
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
        Script(draw).send(a=4).send(a=1).send(a=1).truncate("a", 5).send(a=3).truncate("a", 6).send(a=1).case(),
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
