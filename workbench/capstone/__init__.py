"""The capstone: serve a trace with the course's engine under a budget, judged so that it cannot be fooled.

A submission is data, and perhaps a file of advice; what runs it is ours:

    judge.py           draws a fresh trace, keeps the clock and the reference, decides
      │  JSON lines
      ├── worker.py    a process with the course's engine, set up as the submission says; it counts
      │     │  JSON lines
      │     └── own_child.py   a process that has nothing but own.py: it orders, plans and drafts, and only advises
      └── reference        the same process as the judge: the shipped model, teacher-forced

In reading order: `tracks` (what is asked), `submission` (what is handed in), `rules` (what own.py may say), `own_parts`
and `own_child` (where it runs), `advised` (a policy, a scheduler and a draft by advice), `traces` (what is served),
`course_clock` (seconds from counts), `worker`, `served` (the judge's end of it), `gates`, `api_gate`, `score`, `judge`,
`predict`, `board`.
"""

from __future__ import annotations

from workbench.capstone.tracks import TRACKS, Track, track_named

__all__ = ["TRACKS", "Track", "track_named"]
