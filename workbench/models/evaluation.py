"""How good a trained model is: what a pair agrees on, and whether what it writes is Python."""

from __future__ import annotations

import ast
import codeop
import warnings

import torch

from workbench.errors import WorkbenchError
from workbench.models.corpus import held_out_files, token_stream
from workbench.models.decoder import Decoder
from workbench.models.recipes import TrainingAttention, rows_batch


@torch.no_grad()
def acceptance_rate(
    target: Decoder, draft: Decoder, *, context: int = 512, max_tokens: int | None = None, check_stop=None
) -> dict:
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
    stream = token_stream(held_out_files(), target.tokenizer).to(target.device)
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
    return {
        "alpha": overlap / windows.numel(),
        "agreement": agree / windows.numel(),
        "positions": windows.numel(),
    }


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
