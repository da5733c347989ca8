"""The kit of the lectures: ask for a guess first, compare it with what was measured, and show things in one look.

    guess = ask("sixteen users", "How many times as long does a step take?", unit="times", example=16)
    guess                                           # the last line of a cell: a box, "Predict" and "Show me"

    guess.answer()                                  # the first line of the next cell: it waits for the guess
    guess.compare(measured=3.1, predicted=2.8)      # one sentence, and a bar for each of the three
    summary()                                       # at the end of a lecture: all its questions

`picture`, `table` and `say` show a figure, a table and a sentence. Like panels, the kit knows no lab.
"""

from __future__ import annotations

from workbench.lectures.comparison import Comparison, Summary
from workbench.lectures.guess import Guess, Unanswered, ask, summary
from workbench.lectures.show import picture, say, table

__all__ = ["ask", "summary", "picture", "table", "say", "Guess", "Comparison", "Summary", "Unanswered"]
