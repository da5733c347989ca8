"""When will a request that comes now have its first token? From the step-time model and who is before it.

The time of a step is `serving.step_time`'s, calibrated to the steps that this engine has run lately. From there it is a
simulation of plans: decodes take a row each, waiting prompts the rest of the budget in their order, a place is free
when a running text ends. How long texts become is bounded by max_tokens, and learned from those that have ended.
Mooncake rejects early by the same estimate (Qin et al., arXiv 2407.00079 §5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from workbench.serving.api.link import StepNews
from workbench.serving.step_time import Calibration, StepShape

KEPT, FIT_EVERY, FIRST_FIT = 256, 64, 16  # steps
MAX_STEPS = 4_000  # of a simulation; beyond it the wait is at least so long
LEARNING = 0.05  # weight of the newest text in the mean


class Forecast:
    """counted_s: seconds of a step by the cost model; None: the calibration's other terms alone."""

    def __init__(self, max_running: int, token_budget: int, counted_s: Callable[[StepShape], float] | None = None):
        self._max_running, self._budget = max_running, token_budget
        self._counted_s = counted_s or (lambda shape: 0.0)
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=KEPT)
        self._since_fit, self._running = 0, tuple[tuple[int, int], ...]()
        self.calibration: Calibration | None = None
        self.share_written = 1.0
        """Mean of generated ÷ asked tokens of texts that ended."""

    def note(self, news: StepNews) -> None:
        """A step that was run."""
        self._running = news.running
        if not news.new_tokens or news.drafts:
            return
        self._steps.append((StepShape(news.new_tokens, news.contexts, news.decodes), news.seconds))
        self._since_fit += 1
        due = FIRST_FIT if self.calibration is None else FIT_EVERY
        if self._since_fit >= due:
            self.calibration, self._since_fit = Calibration.fit([*self._steps], self._counted_s), 0

    def note_end(self, written: int, asked: int) -> None:
        self.share_written += LEARNING * (written / asked - self.share_written)

    def step_s(self, new_tokens: Sequence[int], contexts: Sequence[int]) -> float | None:
        """Predicted seconds of a step; None before enough steps were seen."""
        if self.calibration is None:
            return None
        shape = StepShape(tuple(new_tokens), tuple(contexts), len(new_tokens))
        return self.calibration(self._counted_s(shape), shape)

    def first_token_s(self, queue: Sequence[tuple[int, int]]) -> float | None:
        """Seconds until the last of a queue of (prompt tokens, tokens asked for) has its first token; None before
        enough steps were seen.

        Texts that decode are counted together: B rows, and the sum of their contexts.
        """
        if self.calibration is None:
            return None
        decodes = [(self._expected(left), context) for context, left in self._running]
        waiting, prefills = deque(queue), deque[tuple[int, int, int]]()  # left of the prompt, prompt, asked
        now = 0.0
        for _ in range(MAX_STEPS):
            while waiting and len(decodes) + len(prefills) < self._max_running:
                prompt, asked = waiting.popleft()
                prefills.append((prompt, prompt, asked))
            contexts = sum(context for _, context in decodes)
            room, done, rows = max(1, self._budget - len(decodes)), [], len(decodes)
            while prefills and room:
                left, prompt, asked = prefills.popleft()
                count = min(left, room)
                room -= count
                rows += count
                contexts += prompt - left
                if left > count:
                    prefills.appendleft((left - count, prompt, asked))
                    break
                done.append((self._expected(asked - 1), prompt + 1))
            steps = 1 if done or prefills or not decodes else max(1, min(left for left, _ in decodes))
            now += steps * self._seconds(rows, len(decodes) + len(done), contexts)
            decodes = [(left - steps, context + steps) for left, context in decodes if left > steps] + done
            if not waiting and not prefills:
                return now
        return now

    def _expected(self, tokens: int) -> int:
        return max(1, round(tokens * self.share_written))

    def _seconds(self, rows: int, texts: int, contexts: int) -> float:
        if not rows:
            return 0.0
        assert self.calibration is not None
        texts = max(1, texts)
        # one shape stands for all with these sums: the calibration is linear in them
        sizes = (rows - texts + 1, *[1] * (texts - 1)) if rows >= texts else (rows,)
        shape = StepShape(sizes, (contexts, *[0] * (len(sizes) - 1)), texts)
        return self.calibration(self._counted_s(shape), shape)
