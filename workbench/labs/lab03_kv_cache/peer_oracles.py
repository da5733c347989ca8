"""What the tokens of cache.peers are held against: a plain Decoder with the very numbers that an engine's weights are.

Some engines round the inputs of their products to 8 bits, 32 of them with one scale: llama.cpp where weights are in few
bits, ours with inputs="q8". How far that moves logits depends on the model, so it is measured: the oracle reads the
same text once more with its own inputs rounded. Say its logits move by at most m of a row's largest. The best token of
logits that moved by m lies at most 2·m behind the oracle's best. An engine adds up in another order, so a few of its
inputs are rounded the other way: it is granted 2·m where the oracle moved by m, and its tokens may lie 4·m behind,
beside what its type of number is granted in any case (`greedy.ROUNDING`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from workbench.experiments.greedy import ROUNDING, Tokens, check_greedy
from workbench.kv import make_kv
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.quantization.linear import QuantizedLinear
from workbench.quantization.pipeline import copy_of

BLOCK = 32  # inputs that are rounded with one scale


class Oracle:
    """The plain Decoder of some weights. What it once found of a text is not computed again."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._checks: dict[tuple, str] = {}
        self._moved: dict[tuple, float] = {}

    def check(
        self, prompt: Tokens, tokens: Tokens, wanted: int, dtype: torch.dtype, rounded: str, about: Mapping[str, Any]
    ) -> str:
        """`check_greedy` in words, with what was granted for rounded inputs. Raises WorkbenchError beyond it.

        rounded: the products whose inputs the engine rounds: "" (none), "layers", or "all" (the head's too).
        """
        granted, why = ROUNDING[dtype], ""
        if rounded:
            moved = self.moved(prompt, tokens, rounded)
            granted += 4 * moved
            why = f"; {granted:.1g} is granted, because inputs in 8 bits move the oracle's own logits by {moved:.1g}"
        key = (tuple(prompt), tuple(tokens), wanted, granted, about.get("exact", True))
        if key not in self._checks:
            self._checks[key] = check_greedy(self.decoder, prompt, tokens, wanted, granted, about)
        return self._checks[key] + why

    @torch.inference_mode()
    def moved(self, prompt: Tokens, tokens: Tokens, rounded: str) -> float:
        """By how much of a row's largest logit its logits move at most when inputs are rounded, over the whole text."""
        text = (*prompt, *tokens[:-1])
        if (text, rounded) not in self._moved:
            exact = self._logits(text)
            with rounded_inputs(self.decoder, head=rounded == "all"):
                apart = (self._logits(text) - exact).abs().amax(-1)
            self._moved[text, rounded] = float((apart / exact.abs().amax(-1)).max())
        return self._moved[text, rounded]

    def _logits(self, text: tuple[int, ...]) -> torch.Tensor:
        batch = Batch.of([list(text)], logits="all")
        return self.decoder(batch, make_kv("recompute", self.decoder.config)).float()


@contextlib.contextmanager
def rounded_inputs(decoder: Decoder, *, head: bool) -> Iterator[None]:
    """Inside, the linears of the layers (and the head) multiply inputs that were rounded to 8 bits."""
    linears = [one for layer in decoder.layers for one in layer.modules() if isinstance(one, nn.Linear)]
    hooks = [
        one.register_forward_pre_hook(lambda _, given: (in_8_bits(given[0]),))
        for one in [*linears, *([decoder.head] if head else [])]
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """x [N, in] -> the nearest of −127 … 127 times a scale, which BLOCK inputs share; BLOCK divides in."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale.where(scale > 0, 1)).round() * scale).flatten(-2)


def dequantized(quantized: Decoder, model: Decoder) -> Decoder:
    """The plain Decoder in float32 with the numbers that the codes of a quantized model stand for. model: what was
    quantized, in float32; it stays as it was."""
    new, stored = copy_of(model), dict(quantized.named_modules())
    for name, module in new.named_modules():
        held = stored[name]
        for key, _ in list(module.named_parameters(recurse=False)):
            coded = isinstance(held, QuantizedLinear) and key == "weight"
            number = held.dequantized_weight() if coded else getattr(held, key).detach().float()
            setattr(module, key, nn.Parameter(number, requires_grad=False))
    new.name = f"{quantized.name}, dequantized"
    return new
