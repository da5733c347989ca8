"""Lab 03: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

The keys, values and queries in here are made up from a salt, a layer, a token and its position, the same in every
process, so that a judge elsewhere can work out by itself what attention over them gives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from workbench.checks.inputs import random_model
from workbench.checks.tensors import as_tensor, kind_of
from workbench.errors import WorkbenchError
from workbench.grading.check import describe_error
from workbench.kv import Contiguous
from workbench.labs.lab01_naive_generation.checks.probes import Runaway
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder

SHARPNESS = {"q": 1.5, "k": 1.0, "v": 1.0}  # queries long enough that attention differs from an average


@lru_cache(maxsize=50_000)
def vector(salt: str, kind: str, layer: int, token: int, position: int, size: int) -> tuple[float, ...]:
    """`size` made-up values of a token's q, k or v (`kind`), over all of its heads."""
    draw = random.Random(f"{salt}/{kind}/{layer}/{token}/{position}")
    return tuple(round(draw.gauss(0.0, SHARPNESS[kind]), 3) for _ in range(size))


def vectors(salt: str, kind: str, layer: int, tokens: list[int], first: int, heads: int, size: int) -> torch.Tensor:
    """[n, heads, size] of the tokens at positions first, first + 1, …"""
    rows = [vector(salt, kind, layer, t, first + i, heads * size) for i, t in enumerate(tokens)]
    return torch.tensor(rows).reshape(len(tokens), heads, size)


def run_cache(answer: Any, config: dict, steps: list[dict], salt: str) -> dict:
    """Make a cache, `answer(config)`, take it through the steps and see what it gives at each. Ends at an error.

    A step is one of {"send": [[sequence, first position, [token, …]], …]}, {"truncate": [sequence, length]} and
    {"release": sequence}. A send gives the outputs of all layers, [L][N, H_q, D]. What truncate refuses with a
    WorkbenchError is "refused", its words are among the "refusals", and the steps go on. What is seen of step i is the
    entry "step i": a mistake shows in each by itself.
    """
    shape = ModelConfig.from_dict(config)
    kv = answer(shape)
    seen: dict[str, dict] = {}
    refusals: dict[str, str] = {}
    for number, step in enumerate(steps, 1):
        now = seen[f"step {number}"] = {}
        try:
            if "send" in step:
                now["out"] = _send(kv, shape, step["send"], salt)
            elif "truncate" in step:
                kv.truncate(*step["truncate"])
            else:
                kv.release(step["release"])
        except WorkbenchError as error:
            if "truncate" not in step:
                now["error"] = describe_error(error)
                break
            now["refused"] = True
            refusals[f"step {number}"] = str(error)
        except NotImplementedError:
            raise
        except Exception as error:
            now["error"] = describe_error(error)
            break
        now["lengths"] = sorted([str(name), int(length)] for name, length in dict(kv.lengths).items())
        now["bytes_in_use"] = int(kv.bytes_in_use)
    return seen | {"refusals": refusals}


def _send(kv: Any, shape: ModelConfig, sent: list, salt: str) -> list:
    names, firsts, tokens = zip(*sent)
    batch = Batch.of(tokens, first_positions=firsts, sequences=names)
    kv.begin(batch)
    outputs = []
    for layer in range(shape.num_layers):
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        q, k, v = (
            torch.cat([vectors(salt, kind, layer, t, f, h, shape.head_dim) for f, t in zip(firsts, tokens)])
            for kind, h in heads.items()
        )
        outputs.append(kv.attend(layer, q, k, v, batch))
    return outputs


def run_model(answer: Any, config: dict, seed: int, steps: list[list[int]]) -> dict:
    """Send one text through a real decoder over the cache `answer(config)`, so many tokens per step; logits [S, V]."""
    model = random_model(config, seed)
    kv, first, logits = answer(model.config), 0, []
    for tokens in steps:
        logits.append(model(Batch.of([tokens], first_positions=[first], logits="all"), kv))
        first += len(tokens)
    return {"logits": torch.cat(logits)}


def watched(model: Decoder, max_calls: int) -> tuple[Any, list[dict]]:
    """(a decoder that notes the batch of every call, what it has noted): the notes are not among its attributes."""
    calls: list[dict] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(model, name)

        def __call__(self, batch: Batch, kv: Any) -> torch.Tensor:
            if len(calls) >= max_calls:
                raise Runaway(f"the model was called more than {max_calls} times")
            calls.append(
                {
                    "tokens": batch.token_ids,
                    "positions": batch.positions,
                    "sequences": [str(name) for name in batch.sequences],
                    "logit_rows": batch.num_tokens if batch.logit_rows is None else len(batch.logit_rows),
                }
            )
            return model(batch, kv)

        forward = __call__

    return Watched(), calls


def run_prefill(
    answer: Any,
    config: dict,
    seed: int,
    prompt_ids: list[int],
    chunk_size: int,
    sequence: str | int = 0,
    remembered: Sequence[int] = (),
) -> dict:
    """Call `prefill(model, kv, prompt_ids, chunk_size, sequence)` on a small decoder and a Contiguous cache.

    remembered: tokens of the sequence that the cache holds already.
    """
    model = random_model(config, seed)
    kv, prompt = Contiguous(model.config, max_sequences=2), list(prompt_ids)
    if remembered:
        model(Batch.of([remembered], sequences=[sequence]), kv)
    seen_model, calls = watched(model, len(prompt_ids) + 4)
    try:
        logits = answer(seen_model, kv, prompt, chunk_size, sequence)
    except NotImplementedError:
        raise
    except Exception as error:
        return {"error": describe_error(error), "calls": calls}
    seen = {
        "calls": calls,
        "lengths": sorted([str(name), length] for name, length in kv.lengths.items()),
        "prompt_after": prompt,
    }
    logits = as_tensor(logits)
    if not isinstance(logits, torch.Tensor):
        return seen | {"returned": type(logits).__name__}
    return seen | {"shape": list(logits.shape), "logits": logits}


def run_calculator(answer: Any, part: str, config: dict | None = None, **given: Any) -> dict:
    """Call the function named `part` of a dict of functions, with the shape `config` first where there is one."""
    if not hasattr(answer, "keys") or part not in answer:
        return {"missing": part, "returned": type(answer).__name__}
    shape = [] if config is None else [ModelConfig.from_dict(config)]
    value = answer[part](*shape, **given)
    return {"value": value, "returned": kind_of(value)}


def run_work(answer: Any, prompt_tokens: int, new_tokens: int, cached: bool) -> dict:
    """Call `count_work(prompt_tokens, new_tokens, cached)`."""
    made = answer(prompt_tokens, new_tokens, cached)
    if not isinstance(made, tuple | list) or len(made) != 2:
        return {"returned": type(made).__name__}
    return {"rows": made[0], "pairs": made[1], "types": [kind_of(number) for number in made]}


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
