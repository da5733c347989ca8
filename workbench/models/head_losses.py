"""What draft heads learn, and how often they are right.

A step reads the hidden states of whole rows of the target and asks the heads for the hidden states, and so the
distributions, of tokens further on. What is learned is the target's distribution there, not the one token that came: a
draft is accepted as often as the two distributions overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.models.autocast import training_products
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.head_recipes import HeadRecipe
from workbench.models.heads import RANKS, EagleHead, MedusaHeads
from workbench.models.latent import UpProjections
from workbench.models.training import TrainingAttention, rows_batch

CHUNK = 512  # rows whose distributions over the vocabulary are there at one time

# -- the loss ------------------------------------------------------------------------------------------------------


class _DistributionLoss(torch.autograd.Function):
    """Cross-entropies of distributions over the vocabulary, without ever holding them all: chunk by chunk, and the
    gradient, (q − p)·E, at once."""

    @staticmethod
    def forward(
        ctx: Any,
        guesses: torch.Tensor,
        hidden_states: torch.Tensor,
        head: torch.Tensor,
        tokens: torch.Tensor,
        text_share: float,
    ) -> torch.Tensor:
        """guesses [K, n, d], hidden_states [n, d], head [V, d], tokens [n] -> [K] nats, means over n."""
        head = head.bfloat16()
        count, rows, _ = guesses.shape
        losses, gradient = guesses.new_zeros(count), torch.empty_like(guesses)
        for a in range(0, rows, CHUNK):
            p = (hidden_states[a : a + CHUNK].bfloat16() @ head.T).float().softmax(dim=-1)
            if text_share:
                p.mul_(1 - text_share)
                p.scatter_add_(1, tokens[a : a + CHUNK, None], p.new_full((len(p), 1), text_share))
            for k in range(count):
                z = (guesses[k, a : a + CHUNK].bfloat16() @ head.T).float()
                total = z.logsumexp(dim=-1, keepdim=True)
                losses[k] += total.sum() - torch.dot(p.view(-1), z.view(-1))
                q = z.sub_(total).exp_()
                gradient[k, a : a + CHUNK] = (q.sub_(p).bfloat16() @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient.div_(rows))
        return losses / rows

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None, None], None, None, None, None


def output_matrix(target: Decoder) -> torch.Tensor:
    """[V, d], what the target's head multiplies with; of a quantized head the numbers that its codes stand for."""
    head: Any = target.head
    return head.dequantized_weight() if hasattr(head, "dequantized_weight") else head.weight


def distribution_loss(
    guesses: torch.Tensor,
    hidden_states: torch.Tensor,
    head: torch.Tensor,
    tokens: torch.Tensor,
    text_share: float = 0.0,
) -> torch.Tensor:
    """[K] mean cross-entropy in nats of the distributions of guesses [K, n, d] under the distributions of
    hidden_states [n, d].

    head [V, d] makes distributions of both and gets no gradient. tokens [n]: what came, with `text_share` of the
    distribution learned. The products are in bfloat16.
    """
    return _DistributionLoss.apply(  # type: ignore[no-untyped-call]
        guesses.float(), hidden_states, head.detach(), tokens, text_share
    )


def medusa_loss(
    heads: MedusaHeads, rows: torch.Tensor, hidden_states: torch.Tensor, target: Decoder, recipe: HeadRecipe
) -> torch.Tensor:
    """Mean over heads, rows [B, T] and all hidden states that every head has a guess of. hidden_states [B, T, d].

    The last hidden state is left out: the token after it is not in the row.
    """
    count, length = heads.config.num_heads, rows.shape[1]
    with training_products(rows.device.type):
        guesses = heads(hidden_states.flatten(0, 1)).unflatten(1, rows.shape)  # [K, B, T, d]
    # of hidden states count … T − 2
    aligned = [guesses[k, :, count - 1 - k : length - 2 - k] for k in range(count)]
    wanted, came = hidden_states[:, count : length - 1], rows[:, count + 1 :]
    return distribution_loss(
        torch.stack(aligned).flatten(1, 2),
        wanted.flatten(0, 1),
        output_matrix(target),
        came.flatten(),
        recipe.text_share,
    ).mean()


class UnrolledAttention(TrainingAttention):
    """Rows guessed from guesses, as they come in drafting: step s sees true rows up to s − 1 before it, then one of
    each step between, then itself.

        step 1, row i: true rows … i             step 2: true rows … i − 1, itself
        step 3, row i: true rows … i − 2, row i − 1 of step 2, itself
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None, "one layer, with keys of its own"
        group, count = q.shape[1] // k.shape[1], len(batch.sequences)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        q4, k4, v4 = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
        self._steps.append((k4, v4))
        if len(self._steps) == 1:
            mixed = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=self.scale)
        else:
            keys, values = (torch.cat(of_steps, dim=2) for of_steps in zip(*self._steps))
            mask = unrolled_mask(q4.shape[2], len(self._steps), q4.device)
            mixed = F.scaled_dot_product_attention(q4, keys, values, attn_mask=mask, scale=self.scale)
        return mixed.transpose(1, 2).flatten(0, 1)


def unrolled_mask(length: int, step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[S, step·S] True where row i of this step sees row j of step 1, 2, … (each its own S columns).

    The first rows of a step, fewer than step − 1 from the start, have no guess to stand on and see themselves alone.
    """
    row, column = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None, :]
    seen = [column <= row - (step - 1)]
    seen += [column == row - (step - other) for other in range(2, step + 1)]
    return torch.cat(seen, dim=1)


def eagle_guesses(
    head: EagleHead, rows: torch.Tensor, hidden_states: torch.Tensor, target: Decoder, steps: int, noise: float = 0.0
) -> torch.Tensor:
    """[steps, B, T − 1, d]: guess of hidden state i + 1 at place i, by a draft that is so many steps from a true
    hidden state.

    Step s is right from place s − 1 on; before that there is no hidden state to start from.
    """
    batch, kv = rows_batch(rows[:, 1:]), UnrolledAttention(head.config)
    read = hidden_states[:, :-1]
    if noise:
        read = read + (torch.rand_like(read) * 2 - 1) * noise
    embeddings = target.embed.weight.detach()[rows[:, 1:]].flatten(0, 1)
    found = []
    for _ in range(steps):
        guess = head(embeddings, read.flatten(0, 1), batch, kv).unflatten(0, read.shape[:2])
        found.append(guess)
        read = torch.cat((read[:, :1], guess[:, :-1]), dim=1)  # the guess of hidden state i stands at place i − 1
    return torch.stack(found)


def eagle_loss(
    head: EagleHead, rows: torch.Tensor, hidden_states: torch.Tensor, target: Decoder, recipe: HeadRecipe
) -> torch.Tensor:
    """Mean over steps of cross-entropy + hidden_state_loss · smooth L1 (arXiv 2401.15077, whose weights are 0.1 and 1).

    More than one step from its own guesses: harmonized training, HASS, arXiv 2408.15766.
    """
    first, length = recipe.unrolled - 1, rows.shape[1]
    with training_products(rows.device.type):
        guesses = eagle_guesses(head, rows, hidden_states, target, recipe.unrolled, recipe.hidden_state_noise)
    # without the last: the token after it is not in the row
    guesses = guesses[:, :, first : length - 2].float().flatten(1, 2)
    wanted, came = hidden_states[:, first + 1 : length - 1].flatten(0, 1), rows[:, first + 2 :].flatten()
    loss = distribution_loss(guesses, wanted, output_matrix(target), came, recipe.text_share).mean()
    if recipe.hidden_state_loss:
        loss = loss + recipe.hidden_state_loss * F.smooth_l1_loss(guesses, wanted.expand_as(guesses))
    return loss


LOSSES: dict[str, Callable[..., torch.Tensor]] = {"medusa": medusa_loss, "eagle": eagle_loss}


# -- how often they are right --------------------------------------------------------------------------------------


@torch.no_grad()
def guesses_by_depth(
    heads: MedusaHeads | EagleHead, rows: torch.Tensor, hidden_states: torch.Tensor, target: Decoder, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[depth, B, T − depth, d] guesses of one and the same hidden_states [B, T − depth, d], those at places `depth` and
    on."""
    if isinstance(heads, MedusaHeads):
        if depth > heads.config.num_heads:
            raise WorkbenchError(f"{heads.name} has {heads.config.num_heads} heads, it cannot guess {depth} deep")
        every = heads(hidden_states.flatten(0, 1)).unflatten(1, rows.shape)  # [K, B, T, d]
        length = rows.shape[1]
        found = [every[k, :, depth - 1 - k : length - 1 - k] for k in range(depth)]
        return torch.stack(found), hidden_states[:, depth:]
    every = eagle_guesses(heads, rows, hidden_states, target, depth)
    return every[:, :, depth - 1 :], hidden_states[:, depth:]


@torch.no_grad()
def acceptance_by_depth(
    heads: MedusaHeads | EagleHead, target: Decoder, rows: torch.Tensor, depth: int = 4
) -> dict[str, Any]:
    """How often a chain of `depth` tokens along rows [B, T] agrees with the target, token by token.

    Each draft starts from a true hidden state and is given the tokens of the text, so that depth i is judged where all
    before it were accepted. {"overlap": [depth] Σ min(p, q), the acceptance rate at temperature 1, "agreement":
    [depth] same best token, "positions"}.
    """
    heads.check_target(target)
    overlap, agree, positions = torch.zeros(depth), torch.zeros(depth), 0
    for some in rows.split(4):
        hidden_states = target.hidden(rows_batch(some), TrainingAttention(target.config)).unflatten(0, some.shape)
        guesses, wanted = guesses_by_depth(heads, some, hidden_states, target, depth)
        for piece, true in zip(guesses.flatten(1, 2).split(CHUNK, dim=1), wanted.flatten(0, 1).split(CHUNK)):
            p = target.head(true).softmax(dim=-1)
            for i in range(depth):
                q = target.head(piece[i]).softmax(dim=-1)
                overlap[i] += torch.minimum(p, q).sum()
                agree[i] += (p.argmax(-1) == q.argmax(-1)).sum()
            positions += len(true)
    return {
        "overlap": (overlap / positions).tolist(),
        "agreement": (agree / positions).tolist(),
        "positions": positions,
    }


@torch.no_grad()
def rank_shares(heads: MedusaHeads, target: Decoder, rows: torch.Tensor) -> list[list[float]]:
    """[num_heads][RANKS]: how often each head's best token, second best, … is the target's best, along rows [B, T]."""
    depth, right, positions = heads.config.num_heads, torch.zeros(heads.config.num_heads, RANKS), 0
    for some in rows.split(4):
        hidden_states = target.hidden(rows_batch(some), TrainingAttention(target.config)).unflatten(0, some.shape)
        guesses, wanted = guesses_by_depth(heads, some, hidden_states, target, depth)
        best = target.head(wanted.flatten(0, 1)).argmax(dim=-1)
        for k in range(depth):
            ranked = target.head(guesses[k].flatten(0, 1)).topk(RANKS, dim=-1).indices
            right[k] += (ranked == best[:, None]).sum(dim=0).cpu()
        positions += len(best)
    return (right / positions).tolist()
