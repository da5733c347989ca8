"""What a healed model learns: the text, its teacher's distribution, or both.

With logits z of the teacher and s of the student [N, V], temperature τ, p = softmax(z/τ) and q = softmax(s/τ),

    KL = τ² · mean over rows of Σ p·(log p − log q)                      (Hinton et al., arXiv 1503.02531)

The τ² keeps gradients as large as without a temperature. With `top_k` the teacher's k most likely tokens are kept apart
and all others are one outcome, in both distributions: an outcome that is a sum never says more than its parts, so this
is a lower bound of the whole KL, and is equal to it at k = V (log-sum inequality).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_above

OBJECTIVES = ("kl", "cross_entropy", "both")


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, *, temperature: float = 1.0, top_k: int | None = None
) -> torch.Tensor:
    """Forward KL(p‖q)·τ², the mean over rows of logits [N, V], in float32 (or wider); 0 of no rows.

    A token that the teacher gives −∞ has p = 0, and its term is 0.
    Raises WorkbenchError for shapes that differ, a temperature that is not above 0 and a top_k that is not from 1 to V.
    """
    if student.shape != teacher.shape or student.dim() != 2:
        raise WorkbenchError(
            f"logits of student and teacher must both be [N, V], got {list(student.shape)} and {list(teacher.shape)}"
        )
    check_above("temperature", temperature, 0)
    vocabulary = teacher.shape[1]
    if top_k is not None and (type(top_k) is not int or not 1 <= top_k <= vocabulary):
        raise WorkbenchError(f"top_k must be a whole number from 1 to {vocabulary}, the vocabulary; got {top_k!r}")
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = ((logits.to(wide) / temperature).log_softmax(-1) for logits in (teacher, student))
    if top_k is not None and top_k < vocabulary:
        kept = log_p.topk(top_k, dim=-1).indices
        log_p, log_q = _with_rest(log_p, kept), _with_rest(log_q, kept)
    never = log_p == -torch.inf
    terms = F.kl_div(log_q.masked_fill(never, 0), log_p.masked_fill(never, 0), reduction="none", log_target=True)
    return terms.masked_fill(never, 0).sum() / max(1, len(terms)) * temperature**2


def _with_rest(log_probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[N, k + 1] logarithms of the kept tokens' probabilities, and of the sum of all others."""
    others = log_probabilities.scatter(-1, kept, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((log_probabilities.gather(-1, kept), others), dim=-1)


def hidden_state_loss(student: torch.Tensor, teacher: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Mean square of what student hidden states [N, d'] lack of the teacher's [N, d] in the channels [d'] that they
    come from, over the mean square of these: 0 where they are equal, about 1 where they know nothing."""
    wanted = teacher.index_select(-1, channels)
    return F.mse_loss(student.float(), wanted.float()) / wanted.float().square().mean()


def objective_loss(
    objective: str,
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> torch.Tensor:
    """The loss of logits [N, V] whose next tokens were `tokens` [N]. "both": the mean of the two."""
    text = F.cross_entropy(student.float(), tokens) if objective != "kl" else None
    if objective == "cross_entropy":
        assert text is not None
        return text
    assert teacher is not None, "a teacher's logits"
    distilled = distillation_loss(student, teacher, temperature=temperature, top_k=top_k)
    return distilled if text is None else (distilled + text) / 2
