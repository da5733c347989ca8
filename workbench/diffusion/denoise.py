"""`diffuse`: a prompt, a canvas of masks behind it, and passes that fill the masks in.

A pass is one forward over the rows of the block at hand, behind the finished tokens: the model gives a distribution for
every masked position, the sampler chooses positions, a token is drawn at each of them. When a block has no mask left
the next one is begun. With one block as long as the canvas that is masked diffusion (LLaDA), with shorter ones block
diffusion (BD3-LM).

    position    0 1 2 3 │ 4 5 6 7 │ 8 9          prompt of 6 tokens, blocks of 4
    canvas      p p p p │ p p ▒ ▒ │ ▒ ▒          the first block to write has two tokens already
    cached      ✓ ✓ ✓ ✓ │                        after the first pass: blocks before the one at hand

**The cache.** What a finished block leaves, keys and values that see no later block, does not change any more. It is
sent once more after its last token came, in front of the first pass over the next block (so it costs rows, and no
pass), and its keys stay. `cached=False` sends everything in every pass, with the same results: the oracle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.decoding.filters import SMALLEST_TEMPERATURE, apply_temperature, check_logits
from workbench.decoding.request_checks import check_seed
from workbench.diffusion.attention import CanvasKV
from workbench.diffusion.costs import pass_costs
from workbench.diffusion.model import DiffusionModel
from workbench.diffusion.objective import without_mask
from workbench.diffusion.samplers import Confidence, Sampler, View, check_choice
from workbench.errors import WorkbenchError, check_flag, check_whole, is_number, shown
from workbench.models.batch import Batch

SEQUENCE = "canvas"


@dataclass(frozen=True)
class CanvasStep:
    """The canvas after one pass, and what the pass did."""

    number: int  # of the pass, from 0
    block: tuple[int, int]  # positions of the block at hand, first and end
    token_ids: tuple[int, ...]  # [S] of the whole canvas; the mask token where nothing is written yet
    revealed: tuple[int, ...]  # positions that got a token in this pass
    probability: tuple[float, ...]  # of each of them, of the token that was drawn, by the model's own distribution
    remasked: tuple[int, ...]  # positions that are masked again
    rows: int  # rows of the forward
    cached: int  # positions before them, whose keys were cached
    logit_rows: int  # rows with logits: the masked ones
    seconds: float


@dataclass(frozen=True)
class Diffusion:
    """What `diffuse` wrote, how, and what it cost."""

    text: str
    token_ids: tuple[int, ...]  # new tokens, without the one that ends a text
    prompt_ids: tuple[int, ...]
    finish_reason: str  # "stop": a block ended with the token that ends a text; "length"
    history: tuple[CanvasStep, ...]
    tokens: int  # tokens that the passes wrote, those behind a stop among them
    flops: int  # of all passes, counted by `costs.pass_costs`
    block_size: int
    sampler: str
    seconds: float

    @property
    def passes(self) -> int:
        return len(self.history)

    @property
    def rows(self) -> int:
        """Rows of all passes together."""
        return sum(step.rows for step in self.history)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


def diffuse(
    model: DiffusionModel,
    prompt: str | list[int],
    *,
    max_tokens: int = 64,
    block_size: int | None = None,
    sampler: Sampler | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    cached: bool = True,
    watch: Callable[[CanvasStep], None] | None = None,
    check_stop: Callable[[], None] | None = None,
) -> Diffusion:
    """Write up to `max_tokens` tokens behind a prompt.

    block_size: of a model of kind "block", default its largest; a "masked" one has the whole canvas as its block.
    sampler: default `Confidence` with a pass for every two tokens of a block. temperature: 0 takes the most likely
    token; a sampler judges by the model's own distribution, whatever the temperature.
    watch: called with every step as it is done. A block whose tokens have the one that ends a text is the last.
    Raises WorkbenchError, before anything is computed, for a prompt or canvas longer than the context, blocks that the
    model was not trained for, and settings that are none; in a pass whose logits are no numbers.
    """
    if not isinstance(model, DiffusionModel):
        raise WorkbenchError(
            f"diffuse needs a diffusion model, got {type(model).__name__}; load one with "
            "workbench.diffusion.load_diffusion"
        )
    ids = _prompt_ids(model, prompt)
    check_whole("max_tokens", max_tokens, 1)
    check_seed(check_whole("seed", seed, 0))
    check_flag("cached", cached)
    if not is_number(temperature) or temperature < 0:
        raise WorkbenchError(f"temperature must be a number from 0, got {shown(temperature)}")
    end = len(ids) + max_tokens
    size = _block_size(model, block_size, end)
    _check_room(model, len(ids), max_tokens, size)
    sampler = sampler or Confidence(max(1, min(size, max_tokens) // 2))
    if not isinstance(sampler, Sampler):
        raise WorkbenchError(
            f"sampler must be one of workbench.diffusion.samplers (or make_sampler(name)), got {shown(sampler)}"
        )
    canvas = _Canvas(model, ids, end, size, sampler, float(temperature), seed, cached)
    started = time.perf_counter()
    history: list[CanvasStep] = []
    finish_reason = "length"
    for first in range(len(ids) // size * size, end, size):
        for step in canvas.block(first, min(first + size, end), len(history), check_stop):
            history.append(step)
            if watch is not None:
                watch(step)
        if canvas.ends_in(first):
            finish_reason = "stop"
            break
    new = canvas.new_tokens()
    flops = sum(pass_costs(model.config, rows=s.rows, cached=s.cached, logit_rows=s.logit_rows).flops for s in history)
    return Diffusion(
        text="" if model.tokenizer is None else model.tokenizer.decode(new),
        token_ids=tuple(new),
        prompt_ids=tuple(ids),
        finish_reason=finish_reason,
        history=tuple(history),
        tokens=canvas.num_written,
        flops=flops,
        block_size=size,
        sampler=sampler.words,
        seconds=time.perf_counter() - started,
    )


def _prompt_ids(model: DiffusionModel, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise WorkbenchError("this model has no tokenizer; give the prompt as token ids")
        return list(model.tokenizer.encode(prompt))
    if not isinstance(prompt, list | tuple):
        raise WorkbenchError(f"a prompt is a text or a list of token ids, got {shown(prompt)}")
    vocabulary = model.config.vocab_size
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocabulary or token == model.mask_token:
            raise WorkbenchError(
                f"a prompt's token ids are whole numbers from 0 to {vocabulary - 1}, and not the mask "
                f"{model.mask_token}; got {shown(token)}"
            )
    return list(prompt)


def _block_size(model: DiffusionModel, block_size: int | None, end: int) -> int:
    if model.kind == "masked":
        if block_size is not None and block_size != end:
            raise WorkbenchError(
                f"{model.name} denoises the whole canvas as one block (here {end} positions); leave block_size out, "
                "or take a model of kind 'block'"
            )
        return end
    largest = max(model.block_sizes)
    size = largest if block_size is None else check_whole("block_size", block_size, 1)
    if size > largest:
        raise WorkbenchError(
            f"{model.name} was trained on blocks of {', '.join(map(str, model.block_sizes))} tokens; blocks of {size} "
            f"are longer. Choose at most {largest}"
        )
    return size


def _check_room(model: DiffusionModel, prompt: int, max_tokens: int, size: int) -> None:
    context = model.config.context_length
    if prompt >= context:
        raise WorkbenchError(f"the prompt has {prompt:,} tokens; {model.name} has a context of {context:,}")
    if prompt + max_tokens > context:
        blocks = -(-(prompt + max_tokens) // size) - prompt // size
        raise WorkbenchError(
            f"a prompt of {prompt:,} tokens and {max_tokens:,} more ({blocks:,} blocks of {size}) are more than the "
            f"context of {context:,}; max_tokens may be {context - prompt:,} at most"
        )


class _Canvas:
    """The tokens, the cache, and the draws of one call of `diffuse`."""

    def __init__(
        self,
        model: DiffusionModel,
        prompt: list[int],
        end: int,
        block_size: int,
        sampler: Sampler,
        temperature: float,
        seed: int,
        cached: bool,
    ) -> None:
        self.model, self.sampler, self.temperature, self.cached = model, sampler, temperature, cached
        self.prompt, self.tokens = len(prompt), prompt + [model.mask_token] * (end - len(prompt))
        self.kv = CanvasKV(model.config, block_size, end, device=model.device, dtype=model.decoder.dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.num_written = 0

    def block(self, first: int, end: int, number: int, check_stop: Callable[[], None] | None):
        """Passes until positions first … end − 1 have no mask; yields a CanvasStep each."""
        mask = self.model.mask_token
        to_write = torch.tensor([self.tokens[first:end].count(mask)])
        written = torch.full((1, end - first), 2.0)
        within = 0
        while mask in self.tokens[first:end]:
            if check_stop is not None:
                check_stop()
            started = time.perf_counter()
            masked = torch.tensor([[token == mask for token in self.tokens[first:end]]])
            logits, rows, cached = self._forward(first, end, masked[0])
            log_p = logits.log_softmax(dim=-1)
            confidence, entropy = torch.zeros(masked.shape), torch.zeros(masked.shape)
            confidence[masked], entropy[masked] = confidence_and_entropy(log_p)
            view = View(within, masked, confidence, entropy, to_write, written, self.generator)
            revealed, remasked = self.sampler.reveal(view), self.sampler.remask(view)
            check_choice(self.sampler, view, revealed, remasked)
            chosen = revealed[masked]
            drawn = self._draw(logits[chosen])
            probability = log_p[chosen].gather(1, drawn[:, None])[:, 0].exp()
            new, again = ((one[0].nonzero()[:, 0] + first).tolist() for one in (revealed, remasked))
            for at, token in zip(new, drawn.tolist()):
                self.tokens[at] = token
            for at in again:
                self.tokens[at] = mask
            written[revealed] = probability
            written[remasked] = 2.0
            yield CanvasStep(
                number=number + within,
                block=(first, end),
                token_ids=tuple(self.tokens),
                revealed=tuple(new),
                probability=tuple(probability.tolist()),
                remasked=tuple(again),
                rows=rows,
                cached=cached,
                logit_rows=int(masked.sum()),
                seconds=time.perf_counter() - started,
            )
            within += 1
        self.num_written += int(to_write)

    @torch.inference_mode()
    def _forward(self, first: int, end: int, masked: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """(logits [masked, V] float32 on the CPU, rows sent, rows cached before)."""
        start = self.kv.lengths.get(SEQUENCE, 0)
        batch = Batch.of(
            [self.tokens[start:end]],
            first_positions=[start],
            sequences=[SEQUENCE],
            logits="all",
            device=self.model.device,
        )
        hidden = self.model.decoder.hidden(batch, self.kv)
        self.kv.truncate(SEQUENCE, first if self.cached else 0)
        wanted = (masked.nonzero()[:, 0] + (first - start)).to(hidden.device)
        logits = self.model.decoder.logits_of(hidden[wanted]).float().cpu()
        check_logits(logits, self.model.name)
        return without_mask(logits, self.model.mask_token), end - start, start

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """[n] a token for each row of logits [n, V]."""
        if self.temperature < SMALLEST_TEMPERATURE:
            return logits.argmax(dim=-1)
        p = apply_temperature(logits, self.temperature).softmax(dim=-1)
        return torch.multinomial(p, 1, generator=self.generator)[:, 0]

    def ends_in(self, first: int) -> bool:
        """Whether a text ends at a written position from `first` on."""
        end_of_text = self.model.config.eos_token_ids
        return any(token in end_of_text for token in self.tokens[max(first, self.prompt) :])

    def new_tokens(self) -> list[int]:
        """Written tokens, up to the one that ends the text."""
        new = self.tokens[self.prompt :]
        stops = {*self.model.config.eos_token_ids, self.model.mask_token}
        return new[: next((i for i, token in enumerate(new) if token in stops), len(new))]


def confidence_and_entropy(log_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([n] highest probability, [n] entropy in nats) of log-probabilities [n, V]; some may be −∞."""
    p = log_p.exp()
    return p.amax(dim=-1), -(p * log_p.masked_fill(p == 0, 0)).sum(dim=-1)
