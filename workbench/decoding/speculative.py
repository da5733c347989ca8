"""Generation by rounds of speculation, as the iterator of tokens that a `Stream` reads; and what became of the rounds."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workbench.decoding.law import SamplingLaw
from workbench.errors import WorkbenchError, unknown
from workbench.kv import KV
from workbench.models.decoder import Decoder
from workbench.speculation.drafts import draft_for
from workbench.speculation.draws import BestDraws, RandomDraws
from workbench.speculation.engine import Emitted, Forces, Round, Speculator, Writing
from workbench.speculation.lengths import LengthPolicy, length_policy

if TYPE_CHECKING:
    from workbench.decoding.guide import Guide


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did for one request."""

    rounds: int  # forwards of the target after the prompt's own
    plain_rounds: int  # of them without a draft
    # [depth] tokens proposed at each position of the first branch and deeper, by depth
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]  # [depth] of those rounds, how many accepted a token at this position
    reached: tuple[int, ...]  # [depth] how many rounds proposed a token there and accepted all before it
    tokens_per_round: tuple[int, ...]  # the histogram's raw numbers, one each round
    lengths: tuple[int, ...]  # depth of the proposal of each round
    rows_per_round: tuple[int, ...]  # that the target processed
    calls_saved: int  # tokens after the prompt's first, less target calls
    draft_calls: int
    draft_rows: int
    draft_s: float
    verify_s: float
    kinds: dict[str, int]  # tokens by kind: draft, correction, bonus, plain, jump

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the rounds that came to a position, the share that accepted there; as far as any came."""
        return tuple(a / r for a, r in zip(self.accepted, self.reached) if r)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over tried tokens, all positions; None when nothing was tried."""
        return sum(self.accepted) / sum(self.reached) if sum(self.reached) else None


@dataclass
class SpeculativeRunner:
    """Stands where a `ModelRunner` stands in a Stream: owns one sequence, counts, knows each token's log-probability."""

    speculator: Speculator
    writing: Writing
    rounds: list[Round] = field(default_factory=list)
    emitted: list[Emitted] = field(default_factory=list)

    def __post_init__(self) -> None:
        draft = self.speculator.draft
        self._calls_before = (draft.model_calls, draft.rows_processed) if draft is not None else (0, 0)

    @property
    def vocab_size(self) -> int:
        return self.speculator.model.config.vocab_size

    @property
    def rows_processed(self) -> int:
        return self.speculator.rows_processed

    @property
    def model_calls(self) -> int:
        return self.speculator.model_calls

    def tokens(self) -> Iterator[int]:
        """Token by token; a round is run when its first token is asked for."""
        while self.writing.wanted:
            [done] = self.speculator.round([self.writing])
            self.rounds.append(done)
            for token in done.emitted:
                self.emitted.append(token)
                yield token.token_id
                if token.token_id in self.writing.stop_token_ids:
                    return

    def log_prob(self, token_id: int) -> float | None:
        """Of the token that came last."""
        assert self.emitted[-1].token_id == token_id
        return self.emitted[-1].log_prob

    def origin(self) -> tuple[str, str]:
        """Who wrote the token that came last, and its kind."""
        return self.emitted[-1].origin, self.emitted[-1].kind

    def release(self) -> None:
        self.speculator.release(self.writing.sequence)

    def clock(self) -> float:
        """Seconds, when all work handed to the device so far is done."""
        if self.speculator.model.device.type == "cuda":
            torch.cuda.synchronize(self.speculator.model.device)
        return time.perf_counter()

    def stats(self) -> SpeculationStats:
        draft, (calls, rows) = self.speculator.draft, self._calls_before
        used = (0, 0) if draft is None else (draft.model_calls - calls, draft.rows_processed - rows)
        return stats_of(self.rounds[1:], self.emitted, *used)


def stats_of(
    rounds: Sequence[Round], emitted: Sequence[Emitted], draft_calls: int, draft_rows: int
) -> SpeculationStats:
    """rounds: without the prompt's own."""
    deepest = max((one.proposal.depth for one in rounds), default=0)
    drafted, accepted, reached = ([0] * deepest for _ in range(3))
    for one in rounds:
        for depth in one.proposal.depths:
            drafted[depth - 1] += 1
        for at in range(min(one.accepted + 1, one.proposal.depth)):
            reached[at] += 1
            accepted[at] += at < one.accepted
    tokens = tuple(len(one.emitted) for one in rounds)
    return SpeculationStats(
        rounds=len(rounds),
        plain_rounds=sum(not len(one.proposal) for one in rounds),
        drafted=tuple(drafted),
        accepted=tuple(accepted),
        reached=tuple(reached),
        tokens_per_round=tokens,
        lengths=tuple(one.proposal.depth for one in rounds),
        rows_per_round=tuple(one.rows for one in rounds),
        calls_saved=sum(tokens) - len(rounds),
        draft_calls=draft_calls,
        draft_rows=draft_rows,
        draft_s=sum(one.draft_s for one in rounds),
        verify_s=sum(one.verify_s for one in rounds),
        kinds=dict(Counter(token.kind for token in emitted)),
    )


def speculative_runner(
    model: Decoder,
    make_kv: Callable[[], KV],
    prompt_ids: Sequence[int],
    law: SamplingLaw,
    generator: torch.Generator | None,
    *,
    draft: object,
    draft_length: int | str | LengthPolicy,
    guide: Forces | None,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
) -> SpeculativeRunner:
    """Ready to run. Raises WorkbenchError for a draft that does not fit the target, before anything is changed."""
    made = None if draft is None else draft_for(draft, model)
    lengths = length_policy(draft_length)
    limit = model.config.context_length - 1
    fixed = getattr(lengths, "K", None)
    if fixed is not None and made is not None and fixed > limit:
        raise WorkbenchError(
            f"draft_length={fixed} is beyond the context of model {model.name!r}, {limit + 1} tokens; a round drafts a "
            "few tokens, 2 to 16"
        )
    writing = Writing(
        sequence=f"request-{secrets.token_hex(4)}",  # one draft may serve several requests and caches
        token_ids=list(prompt_ids),
        law=law,
        draws=BestDraws() if generator is None else RandomDraws(generator),
        lengths=lengths,
        wanted=max_new_tokens,
        stop_token_ids=stop_token_ids,
        guide=guide,
        prompt_tokens=len(prompt_ids),
    )
    return SpeculativeRunner(Speculator(model, make_kv(), made), writing)


JUMPS = ("tokens", "text", "never")


class GuidedText:
    """A grammar's state of one request, and how far it may jump. See `generate`'s guide and jump."""

    def __init__(self, guide: Guide, model: Decoder, jump: str) -> None:
        if jump not in JUMPS:
            raise unknown("jump", jump, JUMPS)
        if not hasattr(guide, "begin"):
            raise WorkbenchError(f"guide takes a workbench.decoding.Guide, got {type(guide).__name__}")
        self._state, self._jump = guide.begin(), jump
        self.end_token_ids = (model.tokenizer.end_of_text,)
        if len(self._state.allowed([])) != model.config.vocab_size:
            raise WorkbenchError(
                f"the guide speaks of {len(self._state.allowed([])):,} tokens, model {model.name!r} has "
                f"{model.config.vocab_size:,}; make it with the model's tokenizer"
            )

    def allowed(self, generated_ids: Sequence[int]) -> torch.Tensor:
        return self._state.allowed(generated_ids)

    def forced(self, generated_ids: Sequence[int]) -> list[int]:
        if self._jump == "never":
            return []
        return self._state.forced(generated_ids, exact=self._jump == "tokens")


def begin_guide(guide: Guide | None, model: Decoder, jump: str) -> GuidedText | None:
    """Raises WorkbenchError for a model without a tokenizer, and for what is no guide."""
    if guide is None:
        return None
    if model.tokenizer is None or model.tokenizer.end_of_text is None:
        raise WorkbenchError(
            f"a grammar is about text and its end, and model {model.name!r} has no tokenizer with an end of text"
        )
    return GuidedText(guide, model, jump)
