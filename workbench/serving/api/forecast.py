"""When will a request that comes now have its first token? From the step-time model and who is before it.

The time of a step is `serving.step_time`'s, calibrated to the steps that this engine has run lately, corrected by how
long the very last ones took, with the time between them: load comes sooner than a new fit. From there it is a
simulation of plans: decodes take a row each, waiting prompts the rest of the budget in their order, a place is free
when a running text ends. With drafts a text takes a row more for each drafted token, and needs fewer steps by those
that are accepted. How long texts become is bounded by max_tokens, and learned from those that have ended. Mooncake
rejects early by the same estimate (Qin et al., arXiv 2407.00079 §5).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from workbench.serving.api.link import StepNews
from workbench.serving.step_time import Calibration, StepShape

KEPT, FIT_EVERY, FIRST_FIT = 256, 64, 16  # steps
FIT_AGAIN, MISFIT = 8, 1.5  # steps after which a fit is made anew that the last steps contradict by this factor
MAX_STEPS = 4_000  # of a simulation; beyond it the wait is at least so long
RECENT = 32  # steps whose measured time corrects the calibrated one
LEARNING = 0.05  # weight of the newest text in the mean
DRAFTS = 0.1  # weight of the newest step in the mean of drafted and accepted tokens


StepSeconds = Callable[[int, int, int], float]
"""Seconds of a step of so many rows, texts that get a token, and tokens in the kv before it."""
Queue = Sequence[tuple[int, int]]
FirstToken = Callable[[Queue, Queue, StepSeconds, int, int], float]  # as `first_token_s`


class Forecast:
    """counted_s: seconds of a step by the cost model; None: the calibration's other terms alone. simulate: in place of
    `first_token_s`."""

    def __init__(
        self,
        max_running: int,
        token_budget: int,
        counted_s: Callable[[StepShape], float] | None = None,
        simulate: FirstToken | None = None,
    ) -> None:
        self._max_running, self._budget = max_running, token_budget
        self._first_token_s = first_token_s if simulate is None else simulate
        self._counted_s = counted_s
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=KEPT)
        self._recent: deque[tuple[StepShape, float, float]] = deque(maxlen=RECENT)  # with the time since the one before
        self._ended_s: float | None = None  # the last step, if there was more to do
        self._since_fit, self._running = 0, tuple[tuple[int, int], ...]()
        self.calibration: Calibration | None = None
        self._drafted = self._accepted = 0.0  # tokens of a text in a step, the mean of the last ones
        self.share_written = 1.0
        """Mean of generated ÷ asked tokens of texts that ended."""

    def note(self, news: StepNews) -> None:
        """A step that was run."""
        self._running = news.running
        between_s = 0.0 if self._ended_s is None else max(0.0, news.at_s - self._ended_s)
        self._ended_s = news.at_s + news.seconds if news.running or news.waiting else None
        if not news.new_tokens:
            return
        seconds = news.seconds - news.load_s  # of the model: how long loads take does not depend on its rows
        if news.decodes:
            drafted, accepted = (sum(one) for one in zip(*news.drafts, strict=True)) if news.drafts else (0, 0)
            self._drafted += DRAFTS * (drafted / news.decodes - self._drafted)
            self._accepted += DRAFTS * (accepted / news.decodes - self._accepted)
        shape = StepShape(news.new_tokens, news.contexts, news.decodes)
        self._steps.append((shape, seconds))
        self._recent.append((shape, seconds, between_s))
        self._since_fit += 1
        due = FIRST_FIT if self.calibration is None else FIT_EVERY
        if self._since_fit >= due or (self._since_fit % FIT_AGAIN == 0 and self._misfits()):
            self.calibration, self._since_fit = Calibration.fit([*self._steps], self._counted), 0

    def note_end(self, written: int, asked: int) -> None:
        self.share_written += LEARNING * (written / asked - self.share_written)

    def step_s(self, new_tokens: Sequence[int], contexts: Sequence[int]) -> float | None:
        """Predicted seconds of a step; None before enough steps were seen."""
        if self.calibration is None:
            return None
        shape = StepShape(tuple(new_tokens), tuple(contexts), len(new_tokens))
        return self.calibration(self._counted(shape), shape)

    def _counted(self, shape: StepShape) -> float:
        return 0.0 if self._counted_s is None else self._counted_s(shape)

    def _misfits(self) -> bool:
        """Whether the last steps took much longer or shorter than the calibration says."""
        if self.calibration is None:
            return False
        last = [*self._recent][-FIT_AGAIN:]
        measured = sum(seconds for _, seconds, _ in last)
        return not 1 / MISFIT <= measured / max(self._calibrated(last), 1e-9) <= MISFIT

    def _lately(self) -> float:
        """Measured time of the last steps, with that between them, ÷ calibrated time: the square root, since what comes
        is on the way from one to the other; a burst slows the steps down while it arrives."""
        measured = sum(seconds + between_s for _, seconds, between_s in self._recent)
        return math.sqrt(measured / max(self._calibrated(self._recent), 1e-9))

    def _calibrated(self, steps: Iterable[tuple[StepShape, float, float]]) -> float:
        assert self.calibration is not None
        return sum(self.calibration(self._counted(shape), shape) for shape, _, _ in steps)

    def first_token_s(self, queue: Sequence[tuple[int, int]]) -> float | None:
        """Seconds until the last of a queue of (prompt tokens, tokens asked for) has its first token; None before
        enough steps were seen.
        """
        if self.calibration is None:
            return None
        waiting = [(prompt, self._expected(asked)) for prompt, asked in queue]
        running = [(context, self._expected(left)) for context, left in self._running]
        seconds = self._first_token_s(waiting, running, self._seconds, self._max_running, self._budget)
        return seconds * self._lately()

    def _expected(self, tokens: int) -> int:
        """Steps that a text needs for what it will write of so many tokens."""
        return max(1, round(tokens * self.share_written / (1 + self._accepted)))

    def _seconds(self, rows: int, texts: int, contexts: int) -> float:
        if not rows:
            return 0.0
        assert self.calibration is not None
        texts, one = max(1, texts), self.calibration
        rows += round(texts * self._drafted)
        if self._counted_s is None:  # a simulation asks thousands of times
            return one.step_s + one.row_s * rows + one.text_s * texts + one.context_s * (contexts + rows)
        # one shape stands for all with these sums: the calibration is linear in them
        sizes = (rows - texts + 1, *[1] * (texts - 1)) if rows >= texts else (rows,)
        shape = StepShape(sizes, (contexts, *[0] * (len(sizes) - 1)), texts)
        return one(self._counted_s(shape), shape)


def first_token_s(
    queue: Sequence[tuple[int, int]],
    running: Sequence[tuple[int, int]],
    step_s: StepSeconds,
    max_running: int,
    token_budget: int,
) -> float:
    """Seconds until the last of the queue has its first token; 0 for an empty queue.

    queue: (prompt tokens, tokens to come), the first in the queue first. running: (tokens in the kv, tokens to come) of
    texts that decode. While the queue waits for a place alone, steps are counted together, as long as nobody ends.
    """
    decodes, waiting, prefills = [*running], deque(queue), deque[tuple[int, int, int]]()  # left, prompt, to come
    now = 0.0
    for _ in range(MAX_STEPS):
        while waiting and len(decodes) + len(prefills) < max_running:
            prompt, to_come = waiting.popleft()
            prefills.append((prompt, prompt, to_come))
        if not waiting and not prefills:
            break
        contexts = sum(context for context, _ in decodes)
        room, done, rows = max(0, token_budget - len(decodes)), [], len(decodes)
        while prefills and room:
            left, prompt, to_come = prefills.popleft()
            count = min(left, room)
            room -= count
            rows += count
            contexts += prompt - left
            if left > count:
                prefills.appendleft((left - count, prompt, to_come))
                break
            done.append((prompt, to_come - 1))
        steps = 1 if done or prefills or not decodes else min(to_come for _, to_come in decodes)
        now += steps * step_s(rows, len(decodes) + len(done), contexts)
        decodes = [(context + steps, left - steps) for context, left in decodes] + done
        decodes = [(context, left) for context, left in decodes if left > 0]
    return now
