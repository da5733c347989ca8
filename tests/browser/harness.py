"""A real JupyterLab and a real browser, for tests: serve a course folder, open a notebook, use it as a person does.

    with LabServer(course_folder, scratch) as lab, LabPage(browser, lab) as page:
        page.open("notebooks/01_naive_generation.ipynb")
        page.run_all(timeout_s=120)
        assert page.cell_problems() == []
        panel = page.panel("words on the panel")
        panel.set("points", "3")
        panel.press("Run")
        panel.wait_status("^done", timeout_s=60)

Everything that a test asserts is read from the page, or from the notebook as the page saved it.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nbformat
from playwright.sync_api import Browser, Locator, Page, Response, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / "artifacts"
WORKBENCH = Path(sys.executable).parent / "workbench"
# JupyterLab saves a notebook by itself every two minutes. A save that begins while another is under way finds the
# file changed and asks what to do with it ("File Changed"): here the tests alone save.
NO_AUTOSAVE = "lab/user-settings/@jupyterlab/docmanager-extension/plugin.jupyterlab-settings"

# Seconds that a busy machine, whose kernels still import and whose cores others use, may take for what a quiet one does
# at once. A wait ends as soon as what it waits for is there, so a long one costs a passing test nothing.
BUSY_S = 180
expect.set_options(timeout=BUSY_S * 1000)

# True after three quiet looks in a row, and at once when a dialog is open; `wait` tells one waiting from the next.
QUIET = """wait => {
    const all = (where, selector) => [...where.querySelectorAll(selector)];
    if (all(document, '.jp-Dialog, .Toastify__toast').some(e => e.checkVisibility())) return true;
    const book = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden)');
    const indicator = book && book.querySelector('.jp-Notebook-ExecutionIndicator');
    const waiting = book && all(book, '.jp-CodeCell .jp-InputPrompt').some(e => e.textContent.includes('[*]'));
    if (!window.quiet || window.quiet.wait !== wait) window.quiet = {wait, looks: 0};
    const idle = indicator && indicator.dataset.status === 'idle' && !waiting;
    window.quiet.looks = idle ? window.quiet.looks + 1 : 0;
    return window.quiet.looks >= 3;
}"""

# Whatever the panel's status says from now on, however short: a look now and then would miss a quick run's "running".
LISTEN = """panel => {
    window.said = [];
    const hear = () => window.said.push(panel.querySelector('[role=status]')?.textContent.trim() || '');
    new MutationObserver(hear).observe(panel, {childList: true, characterData: true, subtree: true});
}"""
HAS_RUN = "window.said.some(text => text.startsWith('running'))"

# Of the shown texts outside the picture (which is an image, and checked as a figure).
SMALL_OR_CUT = """(panel, pixels) => {
    const found = [];
    const words = document.createTreeWalker(panel, NodeFilter.SHOW_TEXT);
    while (words.nextNode()) {
        const text = words.currentNode.textContent.trim(), owner = words.currentNode.parentElement;
        if (!text || owner.closest('style, script, select') || !owner.checkVisibility()) continue;
        const size = parseFloat(getComputedStyle(owner).fontSize);
        if (size < pixels) found.push(`${text.slice(0, 40)}: ${size} px`);
    }
    for (const label of panel.querySelectorAll('.widget-label, .widget-readout, button, .jp-Collapse-header'))
        if (label.checkVisibility() && label.scrollWidth > label.clientWidth + 1)
            found.push(`${label.textContent.trim().slice(0, 40)} is cut`);
    return found;
}"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class LabServer:
    """`workbench lab --no-browser` on `course`, with settings and history of its own under `scratch`.

    cache: where the machine's measured ceilings are kept; default a folder of its own too.
    `.url` is the one line it printed. Leaving the `with` block ends the server and its kernels.
    """

    def __init__(self, course: Path, scratch: Path, cache: Path | None = None, start_timeout_s: float = BUSY_S):
        self.course = course
        scratch.mkdir(parents=True, exist_ok=True)
        self.output, self.log = scratch / "lab.out", scratch / "lab.log"
        folders = {
            name: str(scratch / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        }
        autosave = Path(folders["JUPYTER_CONFIG_DIR"], NO_AUTOSAVE)
        autosave.parent.mkdir(parents=True)
        autosave.write_text('{"autosave": false}')
        self.process = subprocess.Popen(
            [WORKBENCH, "lab", "--no-browser", "--port", str(free_port())],
            cwd=course,
            env={
                **os.environ,
                **folders,
                "WORKBENCH_CACHE": str(cache or scratch / "cache"),
                "WORKBENCH_PROGRESS": str(scratch / "progress.jsonl"),
                "HF_HUB_OFFLINE": "1",
            },
            stdout=self.output.open("w"),
            stderr=self.log.open("w"),
            start_new_session=True,
        )
        try:
            self.url = self._printed_url(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _printed_url(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while "\n" not in self.output.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"workbench lab printed no URL; its log:\n{self.log.read_text()}")
            time.sleep(0.1)
        return self.output.read_text().splitlines()[0]

    def api(self, method: str, path: str) -> object:
        """Call the server's REST interface, as the page does: api("GET", "sessions")."""
        parts = urlsplit(self.url)
        request = Request(f"{parts.scheme}://{parts.netloc}/api/{path}?{parts.query}", method=method)
        with urlopen(request, timeout=BUSY_S) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def end_kernel(self, notebook: str) -> None:
        for session in self.api("GET", "sessions"):
            if session["path"] == notebook:
                self.api("DELETE", f"sessions/{session['id']}")

    def close(self) -> None:
        """End the server's whole process group; kernels with it."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, sign)
                try:
                    self.process.wait(15)
                except subprocess.TimeoutExpired:
                    continue

    def __enter__(self) -> "LabServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class LabPage:
    """One browser page with JupyterLab in it. Console errors are collected in `.console_errors` from the start."""

    def __init__(self, browser: Browser, server: LabServer, width: int = 1400, height: int = 1250):
        self.server, self.notebook = server, ""
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.context.set_default_timeout(BUSY_S * 1000)  # for one click
        self.page = self.context.new_page()
        self.book = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")  # the notebook in front
        self.console_errors: list[str] = []
        self.page.on("console", lambda m: m.type == "error" and self.console_errors.append(m.text))
        self.page.on("pageerror", lambda error: self.console_errors.append(f"uncaught: {error}"))

    def open(self, notebook: str, timeout_s: float = BUSY_S) -> None:
        """Open `notebook` (a path inside the course), alone, and wait until its kernel is idle. A dialog fails the
        wait."""
        self.notebook = notebook
        parts = urlsplit(self.server.url)
        self.page.goto(
            f"{parts.scheme}://{parts.netloc}/lab/tree/{notebook}?{parts.query}&reset", timeout=timeout_s * 1000
        )
        expect(self.book.locator(".jp-Cell").first).to_be_visible(timeout=timeout_s * 1000)
        self.wait_idle(timeout_s)
        assert self.dialogs() == [], "JupyterLab asked something when the notebook was opened"

    def close(self) -> None:
        """Close the page and end its kernel, so that the next page finds an idle machine."""
        self.context.close()
        self.server.end_kernel(self.notebook)

    def __enter__(self) -> "LabPage":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def dialogs(self) -> list[str]:
        """The texts of open dialogs and notifications, which a stranger would have to understand first."""
        return self.page.locator(".jp-Dialog:visible, .Toastify__toast:visible").all_inner_texts()

    def kernel_name(self) -> str:
        return self.book.locator(".jp-KernelName").inner_text().strip()

    def wait_idle(self, timeout_s: float) -> None:
        """Until the kernel is idle and no cell waits its turn, three times in a row. The page looks itself: asking it
        from here, several questions five times a second, would take a tenth of a core from what is waited for."""
        with contextlib.suppress(PlaywrightTimeout):
            self.page.wait_for_function(QUIET, arg=time.monotonic(), polling=200, timeout=max(1.0, timeout_s * 1000))
            assert self.dialogs() == [], "a dialog came up"
            return
        raise TimeoutError(f"kernel not idle after {timeout_s} s: {self.waiting_cells()} cells to run")

    def waiting_cells(self) -> int:
        return self.book.locator(".jp-CodeCell .jp-InputPrompt", has_text="[*]").count()

    def menu(self, *path: str) -> None:
        """Choose from the menu bar: menu("Run", "Run All Cells")."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{re.escape(path[0])}$")).click()
        for label in path[1:]:
            self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(label)}$")).click()

    def run_all(self, timeout_s: float = 300) -> None:
        """Clear all outputs, so that a number beside a cell says that it ran now; run all; wait until nothing is left
        to run.

        Nothing waits before the page has queued the first cell, which takes a busy machine a while.
        """
        self.menu("Edit", "Clear Outputs of All Cells")
        self.menu("Run", "Run All Cells")
        begun = self.book.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[(\*|\d+)\]"))
        expect(begun.first).to_be_attached()
        self.wait_idle(timeout_s)

    def saved(self) -> nbformat.NotebookNode:
        """The notebook as the page holds it now: saved from the menu and read back."""
        path = self.server.course / self.notebook

        def ended_a_save(answer: Response) -> bool:
            """After it wrote the file, the page asks for the hash of what is there now."""
            nonlocal written
            if urlsplit(answer.url).path.endswith(f"/api/contents/{self.notebook}"):
                written = written or answer.request.method == "PUT"
                return written and answer.request.method == "GET"
            return False

        written = False
        with self.page.expect_response(ended_a_save):
            self.menu("File", "Save Notebook")
        return nbformat.read(path, as_version=4)

    def cell_problems(self) -> list[str]:
        """Errors, warnings and broken widgets that the page shows, and code cells that never ran."""
        # the renderer of errors marks them with this type too
        shown = self.book.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
        broken = self.book.get_by_text(re.compile("Error displaying widget|Loading widget|model not found"))
        code = [cell for cell in self.saved().cells if cell.cell_type == "code" and cell.source.strip()]
        unrun = [f"never ran: {cell.source[:80]!r}" for cell in code if cell.execution_count is None]
        return shown + broken.all_inner_texts() + unrun

    def panel(self, words: str, among: int = 1) -> "PanelOnPage":
        """The first output with a Run button that holds `words`. among: how many the lecture has."""
        run = button(self.page, "Run")
        output = self.book.locator(".jp-OutputArea-output").filter(has=run).filter(has_text=words)
        expect(output).to_have_count(among)
        output = output.first
        output.scroll_into_view_if_needed()
        return PanelOnPage(self, output)

    def screenshot(self, name: str) -> Path:
        """What the window shows now, as artifacts/NAME.png."""
        return save_picture(self.page, name)


class PanelOnPage:
    """One panel, used through what is on the page: its sliders and buttons, and what it then says and shows."""

    def __init__(self, lab_page: LabPage, output: Locator):
        self.lab_page, self.page, self.output = lab_page, lab_page.page, output

    def slider(self, description: str) -> tuple[Locator, Locator]:
        """The handle and the shown value of the slider so described."""
        words = re.compile(rf"^\s*{re.escape(description)}\s*$")
        label = self.page.locator(".widget-label", has_text=words)
        box = self.output.locator(".widget-inline-hbox", has=label)
        return box.locator("[role=slider]"), box.locator(".widget-readout")

    def move(self, description: str, key: str) -> str:
        """Focus the slider and press a key, as someone without a mouse does; the value that it then shows."""
        handle, shown = self.slider(description)
        before = shown.inner_text()
        handle.focus()
        handle.press(key)
        expect(shown).not_to_have_text(before)
        return shown.inner_text()

    def redraw(self, description: str, key: str = "ArrowLeft") -> None:
        """Move the slider by a key, and wait until another picture is there."""
        before = self.picture()
        self.move(description, key)
        self.wait_for_change(self.picture, before)

    def set(self, description: str, value: str) -> None:
        """Move the slider from its left end until it shows `value`, and wait until the kernel has been told.

        The page holds a slider's next value back while the kernel is busy with the last one, but never a click: a
        button pressed at once could arrive first.
        """
        handle, shown = self.slider(description)
        handle.focus()
        handle.press("Home")
        for _ in range(100):
            if shown.inner_text() == value:
                self.lab_page.wait_idle(BUSY_S)
                return
            self.move(description, "ArrowRight")
        raise AssertionError(f"the slider {description!r} never shows {value!r}")

    def press(self, name: str) -> None:
        button(self.output, name).click()

    def play(self) -> None:
        """Press Play; pressed again it pauses."""
        self.output.locator(".jupyter-widgets.widget-play button").first.click()

    def run(self, timeout_s: float = 600) -> None:
        """Press Run and wait until it is done; the notebook's own run may have left "done" there."""
        self.begin()
        self.wait_status("^done: ", timeout_s)
        self.lab_page.wait_idle(BUSY_S)  # the last drawing too

    def begin(self) -> None:
        """Press Run and wait until it runs, or has run."""
        self.output.evaluate(LISTEN)
        self.press("Run")
        self.page.wait_for_function(HAS_RUN, timeout=BUSY_S * 1000)

    def stop(self) -> None:
        """Press Run, and Stop as soon as it runs. On a busy machine a short run may end first: then once more."""
        for _ in range(3):
            self.begin()
            self.press("Stop")
            self.wait_status("^(stopped|done)", BUSY_S)
            if self.status().startswith("stopped"):
                return
        raise AssertionError(f"Stop came too late three times: {self.status()}")

    def status(self) -> str:
        return self.output.locator("[role=status]").first.inner_text().strip()

    def wait_status(self, pattern: str, timeout_s: float) -> float:
        """Seconds until the status line matches `pattern`; fails with the line it had instead."""
        start = time.monotonic()
        expect(self.output.locator("[role=status]").first).to_have_text(re.compile(pattern), timeout=timeout_s * 1000)
        return time.monotonic() - start

    def table(self) -> list[list[str]]:
        """The rows of the panel's first table, head row first; [] while it has none."""
        rows = self.output.locator("table").first.locator("tr")
        return [row.locator("th, td").all_inner_texts() for row in rows.all()] if rows.count() else []

    def picture(self) -> tuple[str, str]:
        """The plot now on the page: its data and its alternative text."""
        plot = self.output.locator("img[alt]").first
        return plot.get_attribute("src"), plot.get_attribute("alt")

    def small_or_cut(self, pixels: float) -> list[str]:
        """Texts of the panel with letters smaller than so many pixels, and labels that are wider than their place."""
        return self.output.evaluate(SMALL_OR_CUT, pixels)

    def wait_for_change(self, read: Callable[[], object], before: object, timeout_s: float = BUSY_S) -> object:
        """The first value of `read()` that differs from `before`."""
        deadline = time.monotonic() + timeout_s
        while (now := read()) == before:
            assert time.monotonic() < deadline, f"nothing changed in {timeout_s} s: {before!r}"[:500]
            self.page.wait_for_timeout(150)  # a picture is a long text to read
        return now

    def wait_for_picture_of(self, words: str, timeout_s: float = BUSY_S) -> str:
        """The plot's alternative text, once it has `words`. A slider on its way draws other pictures first."""
        plot = self.output.locator("img[alt]").first
        expect(plot).to_have_attribute("alt", re.compile(words), timeout=timeout_s * 1000)
        return plot.get_attribute("alt")

    def screenshot(self, name: str) -> Path:
        return save_picture(self.output, name)


def button(inside: Page | Locator, name: str) -> Locator:
    """A widget button by its words; its icon counts as a letter to Chromium, so not by its accessible name."""
    return inside.locator("button.jupyter-button", has_text=re.compile(rf"^\s*{re.escape(name)}\s*$"))


def shot(question: str) -> str:
    """A panel's question as the name of a picture."""
    return re.sub(r"\W+", "-", question.lower()).strip("-")


def save_picture(of: Page | Locator, name: str) -> Path:
    ARTIFACTS.mkdir(exist_ok=True)
    path = ARTIFACTS / f"{name}.png"
    of.screenshot(path=path)
    return path
