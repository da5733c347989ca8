"""A lecture as slides, from its own notebook: `workbench present LAB`, live by Voilà, or one file of HTML.

The slides show what the notebook holds: its text, code and recorded results. Live, the panels run beside them; nothing
else of the lecture is executed, so that a lecture begins within seconds, whatever it takes to execute.
"""

from __future__ import annotations

from workbench.presenting.live import export, lectures_in, present

__all__ = ["export", "lectures_in", "present"]
