"""Panel: controls, Run, Stop, a picture, a table and words around one experiment. No logic of its own.

Who draws, and when:

    slider moved      -> the painter thread draws the newest settings; those overtaken meanwhile are never drawn
    Run, or run(...)  -> the worker (a thread, or the caller of `run`) measures and draws between measurements
    both              -> hold MEASUREMENT_LOCK, so nothing is timed while another panel measures or draws;
                         a run lets go of it between two Measurements, and others may draw then

Threads set traits and never print. Callbacks only note what is wanted and return, so a panel works where they
run beside a busy cell (subshell threads) and where they wait for it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from workbench.errors import WorkbenchError, check_settings
from workbench.experiments.contract import Experiment, brief_mode
from workbench.instruments.bench import Bench
from workbench.instruments.device import Ceilings
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Stopped, exclusive
from workbench.panels import html, style
from workbench.panels.controls import (
    DESCRIPTION,
    control,
    every_widget,
    goes_with,
    let_the_page_choose,
    narrow,
    put,
    row,
)
from workbench.panels.plots import matching
from workbench.panels.stage import ProjectorSwitch, Stage, areas_of
from workbench.panels.view import Snapshot, View
from workbench.panels.words import OF, first_lines, gaps, recorded_label
from workbench.records import Record, records_of

SHOW_EVERY_S = 0.1  # texts of a run in progress are shown this often; more would slow what is measured
DRAW_EVERY_S = 0.25  # so often at most a run in progress is drawn,
DRAW_SHARE = 4  # and after so many times as long as the last drawing took: most of the time is for measuring
DRAW_WITHIN_S = 10.0  # how long a snapshot waits for a run or a drawing in progress
COUNTED = re.compile(r"(\d+) of (?:at most )?(\d+)")


class Panel:
    """The face of one experiment. `display(panel)`, or let it be the last line of a cell.

    A panel made again with the same experiment and `key` closes the former one and all its comms.

    settings: values of the experiment's settings to begin with.
    learner: your own code for its parts, by name (loop=my_loop): measured beside ours on every Run.
    record: Measurements taken elsewhere, drawn hollow and labelled as recorded. Where the archive has some of this
        experiment, a control chooses among them; it begins with those given here, or with none ("live only").
    bench: where to measure (default: this machine's CPU).
    Raises WorkbenchError for an unknown setting or a value outside its bounds.
    """

    experiment: Experiment  # set by each panel
    left_out: Mapping[str, str] = {}
    draws_records: bool = True  # False where `view` has no place for `self.record`: no control for it then
    open_panels: dict[tuple[str, str], Panel] = {}  # noqa: RUF012  the panels of this kernel, by experiment and key

    def __init__(
        self, *, key: str = "", bench: Bench | None = None, record: list[Measurement] | None = None, **given: Any
    ) -> None:
        settings, self.learner = self._split(given)
        self._configuring = False
        values = self.experiment.complete(settings)
        self.record = list(record or [])
        self._recordings, self._records_problem = self._find_recordings()
        self.measurements: list[Measurement] = []  # of the last run that took any
        self._taken: list[Measurement] = []  # of this run
        self.error: Exception | None = None
        self._stop_event = threading.Event()
        self.bench = bench or Bench()
        self.bench.stop, self.bench.report = self._stop_event, self._report
        self._state = threading.Lock()  # guards the four below
        self._running = False
        self._painting = False
        self._wanted = False
        self._closed = False
        self._ceilings: Ceilings | None = None
        self._said_at = self._drawn_at = 0.0  # time.monotonic()
        self._drawing_s = 0.0  # how long the last drawing took
        self._drawing_failed = False
        self._worker: threading.Thread | None = None
        self._painter: threading.Thread | None = None
        self._paint_lock = threading.Lock()
        self._picture: tuple[Figure, str] | None = None  # as it was drawn last, and the same in words
        self._build(values)
        self._guard(lambda: self._follow(set(self.controls) - set(settings)))
        let_the_page_choose(self.root)
        self._register(key)
        self.refresh()

    # -- what each panel says of itself ----------------------------------------------------------------

    def view(self, settings: dict[str, Any]) -> View:
        """The present state as a View: quick, and no model is run for it. Called on any thread."""
        raise NotImplementedError

    # -- the widgets -----------------------------------------------------------------------------------

    def _build(self, values: dict[str, Any]) -> None:
        e = self.experiment
        models = known_models()
        self.controls = {s.name: control(s, values[s.name], models) for s in e.settings}
        for widget in self.controls.values():
            widget.observe(self._changed, names="value")
        self.run_button = widgets.Button(description="Run", tooltip="measure with these settings", icon="play")
        self.run_button.button_style = "primary"
        self.stop_button = widgets.Button(
            description="Stop", tooltip="end the run after the step in progress", icon="stop", disabled=True
        )
        self.run_button.on_click(lambda _: self._guard(self.start))
        self.stop_button.on_click(lambda _: self._guard(self.stop))
        self.progress = widgets.FloatProgress(
            min=0.0, max=1.0, description="progress", style=DESCRIPTION, layout=widgets.Layout(width="16em")
        )
        self.status = widgets.HTML()
        self.image = Stage()
        self.words = widgets.HTML()
        self.why = widgets.HTML()  # what the words leave over
        self.table = widgets.HTML()
        self.extra = widgets.HTML()  # what else a panel shows, under the words
        how = widgets.HTML(html.paragraph(e.how))
        self.more = widgets.Accordion([self.why, self.table, how], titles=("Why", "The numbers", "How it was measured"))
        texts = [w for s, w in zip(e.settings, self.controls.values()) if s.kind == "text"]
        knobs = [w for s, w in zip(e.settings, self.controls.values()) if s.kind != "text"]
        if len(self._recordings) > 1:
            knobs.append(self._record_control())
        run = [self.run_button, self.stop_button, ProjectorSwitch(), self.progress, self.status]
        self.settings_box = widgets.VBox([widgets.HBox(knobs, layout=row()), *texts, *self._records_warning()])
        question = widgets.HTML(html.paragraph(e.question, style="font-weight:600"))
        run_row = widgets.HBox(run, layout=row())
        run_row.add_class("workbench-run")  # in sight on a full screen, however tall the picture is
        parts = [question, self.image, run_row, self.settings_box, self.words, self.extra, self.more]
        self.root = widgets.VBox(parts, layout=widgets.Layout(width="100%"))
        self.root.add_class("workbench-panel")
        self._say("ready: Run measures")

    def add_controls(self, widget: widgets.Widget) -> None:
        """A panel's own controls, under those of the experiment."""
        self.settings_box.children = (*self.settings_box.children, widget)

    def _register(self, key: str) -> None:
        """Take the place of the former panel of this experiment and key."""
        place = (self.experiment.name, key)
        former = Panel.open_panels.pop(place, None)
        if former is not None:
            former.close()
        Panel.open_panels[place] = self

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget; beside it the picture and a sentence, for pages that have no kernel."""
        bundle = dict(self.root._repr_mimebundle_(**kwargs))
        return {**bundle, **self._still()._repr_mimebundle_()[0]}

    @property
    def said(self) -> str:
        """All words under the picture, as HTML: the first lines, and what stands under "Why"."""
        return self.words.value + self.why.value

    # -- settings --------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """What the controls say now, checked."""
        return self.experiment.complete({name: w.value for name, w in self.controls.items()})

    def _split(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = {name: given.pop(name) for name in list(given) if name in self.experiment.learner}
        return given, self.experiment.check_learner(parts)

    def _changed(self, _change: Any) -> None:
        if not self._configuring:
            self._guard(lambda: self._follow(set(self.controls)))
            self._guard(self.refresh)

    def _follow(self, names: set[str]) -> None:
        """Let the controls of these settings offer what a run takes beside the others: what it would refuse cannot be
        chosen. What code has asked for stays, and is refused by name."""
        self._configuring = True
        try:
            before = None
            while before != (before := self.settings):  # a limit may follow another
                for name, limit in self.experiment.limits(**self.settings).items():
                    if name in names or goes_with(limit, self.controls[name].value):
                        setting = self.experiment.setting(name)
                        narrow(self.controls[name], setting, limit, known_models() if setting.kind == "model" else ())
        finally:
            self._configuring = False

    def made(self, settings: dict[str, Any], names: Iterable[str]) -> list[Measurement]:
        """The Measurements whose settings `names` have the values that `settings` has."""
        return matching(self.measurements, **{name: settings[name] for name in names})

    # -- what was recorded elsewhere -------------------------------------------------------------------

    def _find_recordings(self) -> tuple[list[tuple[str, list[Measurement]]], str]:
        """(label, Measurements) of all that can be laid beside, the first is nothing; and why the archive is not
        among them, or ""."""
        found: list[tuple[str, list[Measurement]]] = [("live only", [])]
        if self.record:
            found.append((recorded_label(self.record), self.record))
        if not self.draws_records:
            return found[:1], ""
        try:
            archive = records_of(self.experiment.name)
        except WorkbenchError as error:
            return found, str(error)
        return found + [run for record in archive for run in recorded_runs(self.experiment, record)], ""

    def _record_control(self) -> widgets.Dropdown:
        options = [(label, index) for index, (label, _) in enumerate(self._recordings)]
        words = "measurements of other machines, drawn hollow beside those of this one"
        self.record_choice = widgets.Dropdown(
            options=options,
            value=1 if self.record else 0,
            description="beside it",
            tooltip=words,
            style=DESCRIPTION,
            layout=widgets.Layout(width="49em"),
        )
        self.record_choice.observe(self._record_chosen, names="value")
        return self.record_choice

    def _record_chosen(self, change: Any) -> None:
        self.record = list(self._recordings[change["new"]][1])
        self._guard(self.refresh)

    def _records_warning(self) -> list[widgets.HTML]:
        if not self._records_problem:
            return []
        return [widgets.HTML(html.paragraph(f"No recorded measurements: {self._records_problem}"))]

    # -- running ---------------------------------------------------------------------------------------

    def run(self, **given: Any) -> list[Measurement]:
        """Run here and now, without any widget needing to be shown: the Measurements, or what went wrong raised.

        Settings given are put into the controls first. A learner's parts (loop=my_loop) stay until replaced
        (loop=None takes one out). Stopped by `stop()` or an interrupt, it keeps what it had measured. A run that is
        refused or stopped before it has measured anything leaves the measurements of the run before.
        """
        parts = {name: given.pop(name) for name in list(given) if name in self.experiment.learner}
        self.configure(**given)
        self.learner = self.experiment.check_learner({**self.learner, **parts})
        self._begin()
        self._work()
        self.wait(DRAW_WITHIN_S)
        if self.error is not None:
            raise self.error
        return list(self._taken)

    def configure(self, **given: Any) -> None:
        """Put settings into the controls. All are checked before the first is changed."""
        check_settings(self.experiment.name, given, list(self.controls))
        values = self.experiment.complete({**self.settings, **given})
        models = known_models() if "model" in given else ()
        self._configuring = True
        try:
            for name in given:
                setting = self.experiment.setting(name)
                narrow(self.controls[name], setting, None, models)
                put(self.controls[name], setting, values[name], models)
        finally:
            self._configuring = False
        self._guard(lambda: self._follow(set(self.controls) - set(given)))
        if given:
            self.refresh()

    def start(self) -> None:
        """Run on the worker thread; returns at once. `wait()` waits for it, `stop()` ends it."""
        self._begin()
        self._worker = threading.Thread(target=self._work, name=f"run {self.experiment.name}", daemon=True)
        self._worker.start()

    def stop(self) -> None:
        """End the run after the model step in progress. Harmless when nothing runs."""
        if self._running:
            self._stop_event.set()
            self._say("stopping after the step in progress …")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs and all is drawn. False when that took longer than timeout_s."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running or self._painting:
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def _begin(self) -> None:
        settings = self.settings  # raises before anything has changed
        with self._state:
            if self._closed:
                raise WorkbenchError(f"this {self.experiment.name} panel was closed by a newer one; use that")
            if self._running:
                raise WorkbenchError(f"this {self.experiment.name} panel is still running; stop it first")
            self._running = True
        self._stop_event.clear()
        self._run_settings = settings
        self.error = None
        self._taken = []
        self.run_button.disabled, self.stop_button.disabled = True, False
        self.progress.value = 0.0
        self.progress.bar_style = ""
        self._say("running …")

    def _work(self) -> None:
        """The run itself; whatever goes wrong ends in `error` and in the status line."""
        try:
            self._measure()
            self._paint_quietly()  # "done" stands beside the last picture and the whole table
            self._say(self._finished_words())
            self.progress.value, self.progress.bar_style = 1.0, "success"
        except Stopped:
            self._say(self._stopped_words())
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            self.error = error
        finally:
            self._stop_event.clear()
            with self._state:
                self._running = False
            self.run_button.disabled, self.stop_button.disabled = False, True
        self.refresh()

    def _measure(self) -> None:
        run = self.experiment.run(self.bench, **self._run_settings, **self.learner)
        while True:
            with exclusive(self.bench.check_stop):
                measurement = next(run, None)
                if measurement is not None:
                    self._taken.append(measurement)
                self.measurements = self._taken  # those of the run before stay until there is one of this
                if measurement is None:
                    return
                if time.monotonic() - self._drawn_at > max(DRAW_EVERY_S, DRAW_SHARE * self._drawing_s):
                    self._paint_quietly()
            time.sleep(0.002)  # long enough for whoever waits to draw

    def _finished_words(self) -> str:
        mine = f", with your {' and '.join(self.learner)} beside ours" if self.learner else ""
        count = len(self._taken)
        cut = " (brief mode: repeats and training cut short)" if brief_mode() else ""
        return f"done: {count} measurement{'s' * (count != 1)}{mine}{cut}"

    def _stopped_words(self) -> str:
        kept = len(self.measurements)
        if not self._taken and kept:
            return f"stopped before the first measurement; the {kept} of the run before stay{'s' * (kept == 1)}"
        return f"stopped; {kept} measurement{'s' * (kept != 1)} kept"

    def _report(self, text: str) -> None:
        """What the experiment says as it measures: a line for the status ("3 of 6" moves the bar), then perhaps
        the text written so far. Shown a few times a second and no more often."""
        now = time.monotonic()
        if self._closed or not self._running or now - self._said_at < SHOW_EVERY_S:
            return
        self._said_at = now
        line, _, written = text.partition("\n")
        self._say(f"running: {line}")
        counted = COUNTED.search(line)
        if counted:
            self.progress.value = min(1.0, int(counted[1]) / max(1, int(counted[2])))
        if written:
            self.extra.value = html.running_text([(written, "")], "written so far:")

    # -- drawing ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Draw the newest state soon, on the painter thread. Of many calls in a row the last one counts."""
        with self._state:
            if self._closed or self._running:
                self._wanted = not self._closed  # the worker draws when its measurement is over
                return
            self._wanted = True
            if self._painting:
                return
            self._painting = True
        self._painter = threading.Thread(target=self._paint_all, name=f"draw {self.experiment.name}", daemon=True)
        self._painter.start()

    def _paint_all(self) -> None:
        while True:
            with self._state:
                if not self._wanted or self._closed:
                    self._painting = False
                    return
                self._wanted = False
            with exclusive():
                self._paint_quietly()

    def _paint_quietly(self) -> None:
        """Draw; what goes wrong (an empty prompt) stands in the status line until a drawing goes well."""
        try:
            self.paint()
        except Stopped:
            return
        except Exception as error:
            self._drawing_failed = True
            self._fail(error)
        else:
            if self._drawing_failed:
                self._drawing_failed = False
                self._say("ready: Run measures")

    def paint(self) -> None:
        """Draw the present state into the widgets, on the calling thread."""
        with self._paint_lock:
            began = time.monotonic()
            view = self.view(self.settings)
            hollow = f"Drawn hollow: {recorded_label(self.record)}; not measured here." if self.record else ""
            drawn = style.svg(view.figure)
            self._picture = (view.figure, f"{view.alt} {hollow}".rstrip())
            if self._closed:
                return
            self.image.show(html.image(drawn, self._picture[1]), areas_of(view.figure))
            first, rest = first_lines("\n".join(filter(None, [view.words, *self._gaps(view.words), hollow])))
            self.words.value, self.why.value = html.paragraph(first), html.paragraph(rest) if rest else ""
            self._drawn_at = time.monotonic()
            self._drawing_s = self._drawn_at - began
            self.extra.value = view.extra
            self.table.value = html.table(view.header, view.rows, view.caption) if view.rows else ""

    def _gaps(self, said: str) -> list[str]:
        """How far off the predictions of the last run are, where the panel does not say it itself."""
        return [] if OF in said else gaps(self.measurements, self.left_out)

    def ceilings(self) -> Ceilings:
        """What this machine can do. Measured when it is not known yet, once a machine."""
        if self._ceilings is None:
            self._say("looking up what this machine can do (the first time takes a few seconds) …")
            self._ceilings = self.bench.ceilings()
            self._say("running …" if self._running else "ready: Run measures")
        return self._ceilings

    def snapshot(self) -> Snapshot:
        """The picture as it is now, as a PNG with its text: it stays in a stored notebook without a kernel. Where the
        panel itself is on the page, it is hidden there: the same is not drawn twice."""
        still = self._still()
        self.image.hide_still(still.base64)
        return still

    def _still(self) -> Snapshot:
        self.wait(DRAW_WITHIN_S)
        if self._picture is None:
            self.paint()
        assert self._picture is not None
        figure, alt = self._picture
        with self._paint_lock:
            return Snapshot(style.png(figure), alt)

    # -- words and errors ------------------------------------------------------------------------------

    def _say(self, text: str, style: str = "") -> None:
        if not self._closed:
            self.status.value = html.paragraph(text, role="status", style=style)

    def _fail(self, error: BaseException) -> None:
        """Show an error where the reader looks; nothing a thread raises is lost."""
        kind = "" if isinstance(error, WorkbenchError) else f"{type(error).__name__}: "
        self.progress.bar_style = "danger"
        self._say(f"error: {kind}{error}", style="color:#D55E00;font-weight:600")

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Stop, and close every widget. The comms go; the last picture stays in `snapshot()`."""
        with self._state:
            self._closed = True
        self._stop_event.set()
        for thread in (self._worker, self._painter):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=2)
        for widget in every_widget(self.root):
            widget.close()
        for place, panel in list(Panel.open_panels.items()):
            if panel is self:
                del Panel.open_panels[place]


def known_models() -> tuple[str, ...]:
    """The models whose trained weights are on this machine, and whose layers all attend: what any panel can run."""
    from workbench.models import list_models

    return tuple(m["name"] for m in list_models() if m["trained"] and not m["states"])


def recorded_runs(e: Experiment, record: Record) -> list[tuple[str, list[Measurement]]]:
    """(label, Measurements) of each run of the experiment in a record, told apart by the settings in which the
    runs for the archive differ."""
    found, runs = record.of(e.name), e.record_settings(str(record.device.get("device")))
    values = {key: {repr(run.get(key, e.setting(key).default)) for run in runs} for run in runs for key in run}
    apart = [key for key, seen in values.items() if len(seen) > 1 and all(key in m.settings for m in found)]
    groups: dict[str, list[Measurement]] = {}
    for m in found:
        groups.setdefault(", ".join(f"{key} {m.settings[key]}" for key in apart), []).append(m)
    return [(": ".join(filter(None, (record.label, words))), group) for words, group in groups.items()]
