"""The panel of server.ordering: hits and times to first token, in both orders."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.ordering import EXPERIMENT, ORDERS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, Series, count, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("documents", "asked", "document_tokens")
COLOURS = {"first_come": style.LEARNER, "longest_match": style.TARGET}
NAMES = {"first_come": "first come", "longest_match": "longest match"}


class OrderingPanel(Panel):
    """Lab 11: prefix-aware ordering against first come."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = {m.settings["measured"]: m for m in self.made(settings, KNOBS)}
        return view(
            _first_tokens(made),
            Bars(
                [_hits(order, made.get(order)) for order in ORDERS],
                Axis("of the prompts' tokens", "{:.0%}".format, ticks=(0, 0.5, 1), limits=(0.0, 1.1)),
                title="from the prefix cache",
            ),
            height=3.6,
            boxes=[(0.12, 0.17, 0.42, 0.7), (0.73, 0.3, 0.25, 0.5)],
            table=table(
                made.values(),
                {
                    "order": lambda m: NAMES[m.settings["measured"]],
                    "prompt tokens": count("prompt_tokens", "{:,.0f}"),
                    "hits": count("hit_tokens", "{:,.0f}"),
                    "rows": count("rows", "{:,.0f}"),
                    "steps": count("steps", "{:.0f}"),
                    "TTFT, mean": count("ttft_mean_s", milliseconds),
                    "TTFT p99": count("ttft_p99_s", milliseconds),
                    "all done after": count("all_done_s", milliseconds),
                    "as fast as first come": count("as_fast_as_first_come", "{:.2f} ×"),
                },
            ),
            caption=f"{settings['asked']} questions about each of {settings['documents']} documents"
            + ("" if made else "; Run asks them"),
            words=_words(made),
        )


def _first_tokens(made: dict[str, Measurement]) -> Chart:
    return Chart(
        *(
            Series(NAMES[order], list(enumerate(sorted(m.samples), 1)), "line", COLOURS[order], look={"linewidth": 2.4})
            for order, m in made.items()
        ),
        x=Axis("requests that have a first token", scale="zero"),
        y=Axis("after", milliseconds, "zero"),
        title="first tokens, in order of time",
        legend="upper left",
    )


def _hits(order: str, m: Measurement | None) -> Bar:
    share = None if m is None else m.counts["hit_tokens"] / m.counts["prompt_tokens"]
    return Bar(NAMES[order], share, COLOURS[order])


def _words(made: dict[str, Measurement]) -> str:
    if not made:
        return (
            "The prefix cache keeps what there is room for. Who asks about the document that is there now costs a few"
            " rows; who asks about another one costs all of its rows, and evicts what the next would have needed."
        )
    lines = [
        f"{NAMES[order].capitalize()}: {m.counts['hit_tokens']:,.0f} of {m.counts['prompt_tokens']:,.0f} prompt tokens"
        f" were in the cache; TTFT {milliseconds(m.counts['ttft_mean_s'])} on average,"
        f" {milliseconds(m.counts['ttft_p99_s'])} at p99."
        for order, m in made.items()
    ]
    last = made.get("longest_match")
    if last is not None:
        lines.append(f"All are done {last.counts['as_fast_as_first_come']:.2f} times as fast as by first come.")
    lines.append(f"Verified: {next(iter(made.values())).check}.")
    return "\n".join(lines)
