"""How good a trained model is: its loss through any kv, what a pair agrees on, whether what it writes is Python."""

from __future__ import annotations

import ast
import codeop
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers
import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.corpus import SourceFile, held_out_files, token_stream
from workbench.models.decoder import Attends, Decoder
from workbench.models.tokenizer import Tokenizer
from workbench.models.training import TrainingAttention, rows_batch

# -- held-out loss through a kv --------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOutLoss:
    """How well a model predicted passages of held-out text, token by token."""

    losses: torch.Tensor  # [passages, context − 1] float32 nats; column i is the token at position i + 1
    token_bytes: torch.Tensor  # [passages] bytes of UTF-8 of the scored tokens

    @property
    def tokens(self) -> int:
        """Scored tokens: all but the first of each passage."""
        return self.losses.numel()

    @property
    def nats_per_token(self) -> float:
        return float(self.losses.double().mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        return float(self.losses.double().sum()) / math.log(2) / int(self.token_bytes.sum())

    def between(self, first: int, end: int) -> torch.Tensor:
        """[passages] mean nats of each over the tokens at positions first … end − 1 (position 0 is not scored)."""
        return self.losses[:, max(0, first - 1) : end - 1].double().mean(dim=1)


def held_out_passages(tokenizer: Tokenizer | None, context: int, count: int | None = None) -> torch.Tensor:
    """[count, context] int64: pieces of the held-out modules, spread evenly over them; None: all there are.

    The same for every model with this tokenizer, so that losses compare passage by passage. Raises WorkbenchError
    for a model without a tokenizer, and for more passages than the text has.
    """
    if tokenizer is None:
        raise WorkbenchError("held-out text needs a tokenizer, and this model has none (random weights?)")
    stream = held_out_stream(tokenizer)
    there = len(stream) // context
    count = there if count is None else count
    if not 1 <= count <= there:
        raise WorkbenchError(
            f"the held-out modules make {there:,} passages of {context:,} tokens, not {count:,}; choose fewer or"
            " shorter"
        )
    passages = stream[: there * context].view(there, context)
    return passages[[i * there // count for i in range(count)]]


class Remembers(Attends, Protocol):
    """What `loss_through` needs of a kv; the whole contract is `workbench.kv.contract.KV`."""

    @property
    def lengths(self) -> Mapping[Hashable, int]: ...

    def release(self, sequence: Hashable) -> None: ...


def held_out_stream(tokenizer: Tokenizer) -> torch.Tensor:
    """[T] int64: the tokens of all held-out modules, which take a third of a second to make. What comes is shared among
    all tokenizers that are equal, and never written to."""
    return _stream_of(tuple(held_out_files()), tokenizer.backend.to_str(), tokenizer.end_of_text)


@functools.lru_cache(maxsize=4)
def _stream_of(files: tuple[SourceFile, ...], backend: str, end_of_text: int | None) -> torch.Tensor:
    """token_stream of a tokenizer that is told by its JSON."""
    return token_stream(files, Tokenizer(tokenizers.Tokenizer.from_str(backend), end_of_text=end_of_text))


@torch.inference_mode()
def loss_through(
    model: Decoder,
    kv: Remembers,
    passages: torch.Tensor,
    *,
    chunk: int,
    side_by_side: int = 4,
    check_stop: Callable[[], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> HeldOutLoss:
    """The loss on passages [P, S] whose text goes through `kv` in chunks of `chunk` tokens.

    So all that stands before a chunk comes back from the kv: quantized, windowed, whatever it does to it. With
    chunk = 1 that is decode; with chunk = S nothing comes back.
    kv: with room for `side_by_side` sequences of S tokens. What it holds already stays; the passages' own sequences
    are released, also when `check_stop` raises.
    """
    if chunk < 1 or side_by_side < 1:
        raise WorkbenchError(f"chunk and side_by_side must be at least 1, got {chunk} and {side_by_side}")
    losses = []
    for start in range(0, len(passages), side_by_side):
        if report is not None:
            report(f"held-out passage {start + 1} of {len(passages)}")
        losses.append(_losses_of(model, kv, passages[start : start + side_by_side], chunk, check_stop))
    token_bytes = [len(model.tokenizer.decode(row[1:].tolist()).encode()) for row in passages]
    return HeldOutLoss(torch.cat(losses), torch.tensor(token_bytes))


def _losses_of(
    model: Decoder, kv: Remembers, rows: torch.Tensor, chunk: int, check_stop: Callable[[], None] | None
) -> torch.Tensor:
    """[B, S − 1] nats of rows [B, S], side by side."""
    count, length = rows.shape
    names = [("held out", i) for i in range(count)]
    found = []
    try:
        for first in range(0, length - 1, chunk):  # the last token has nothing to predict
            if check_stop is not None:
                check_stop()
            end = min(first + chunk, length - 1)
            batch = Batch.of(
                rows[:, first:end].tolist(),
                first_positions=[first] * count,
                sequences=names,
                logits="all",
                device=model.device,
            )
            logits = model(batch, kv).float()  # [B · (end − first), V]
            wanted = rows[:, first + 1 : end + 1].flatten().to(model.device)
            found.append(F.cross_entropy(logits, wanted, reduction="none").view(count, -1))
    finally:
        for name in names:
            if name in kv.lengths:
                kv.release(name)
    return torch.cat(found, dim=1).cpu()


# -- pairs of models, and what they write ----------------------------------------------------------------------


@torch.no_grad()
def acceptance_rate(
    target: Decoder,
    draft: Decoder,
    *,
    context: int = 512,
    max_tokens: int | None = None,
    check_stop: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """α = Σ_x min(p(x), q(x)) at temperature 1, the mean over every position of the held-out text.

    p is the target's next-token distribution and q the draft's; α = 1 − TV(p, q) is the probability that
    speculative sampling accepts a drafted token there (Leviathan et al., arXiv 2211.17192). The text is cut
    into windows of `context` tokens. Returns {"alpha", "agreement" (same most likely token), "positions"}.
    Raises WorkbenchError when the two do not share a vocabulary.
    """
    if target.config.vocab_size != draft.config.vocab_size:
        raise WorkbenchError(
            f"{target.name} has a vocabulary of {target.config.vocab_size} tokens, {draft.name} of "
            f"{draft.config.vocab_size}; a draft must share its target's"
        )
    stream = held_out_stream(target.tokenizer).to(target.device)
    windows = stream[: len(stream) // context * context].view(-1, context)
    if max_tokens is not None:
        windows = windows[: max(1, max_tokens // context)]
    overlap = agree = 0.0
    for rows in windows.split(4):
        if check_stop is not None:
            check_stop()
        batch = rows_batch(rows)
        p, q = (m(batch, TrainingAttention(m.config)).float().softmax(-1) for m in (target, draft))
        overlap += torch.minimum(p, q).sum().item()
        agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
    return {"alpha": overlap / windows.numel(), "agreement": agree / windows.numel(), "positions": windows.numel()}


def parses(text: str) -> bool:
    """Is this the beginning of a Python program? A last line cut short and open blocks or brackets are no fault."""
    whole_lines = text[: text.rfind("\n") + 1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codeop.compile_command(whole_lines, "<generated>", "exec")  # compiles, runs nothing
    except (SyntaxError, ValueError, OverflowError):
        return False
    return True


def held_out_headers(count: int) -> list[str]:
    """`count` function headers of the held-out modules ("def name(arguments):\\n"), spread over all of them."""
    headers = []
    for file in held_out_files():
        lines = file.text.splitlines()
        for node in ast.parse(file.text).body:
            if isinstance(node, ast.FunctionDef):
                first, last = node.lineno - 1, node.body[0].lineno - 1
                header = "\n".join(lines[first:last])
                if header.startswith("def ") and header.rstrip().endswith(":"):
                    headers.append(header.rstrip() + "\n")
    if not headers:
        raise WorkbenchError("the held-out modules of this Python hold no functions to begin from")
    step = max(1, len(headers) // count)
    return headers[::step][:count]
