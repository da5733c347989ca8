"""Claims about lectures as slides: each fits at both sizes of a projector and can be read from the last row; keys move;
panels run. The file of slides of every lecture is looked at; live are two lectures, and all of them with
WORKBENCH_PRESENT=all (some minutes, longer where a panel's run is)."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import BUSY_S, ROOT, WORKBENCH, free_port, save_picture

from workbench.panels import style
from workbench.presenting import export, lectures_in

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser
LECTURES = lectures_in(ROOT)
SIZES = ((1920, 1080), (1280, 720))
LEAST = 24 / 1920  # of a letter, as a share of the window's width
ALL = os.environ.get("WORKBENCH_PRESENT") == "all"
LIVE = list(LECTURES) if ALL else ["00_start_here", "11_serving"]  # the shortest, and that with most panels

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PANELS = (("a", "nothing=size"), ("b", ""))  # the first fails

# What is cut, lies outside its slide or is set too small, and controls out of line with their names. Letters
# of a formula's indices are smaller by nature.
PROBLEMS = """(least) => {
  const wrong = [];
  present.slides().forEach((slide, number) => {
    const say = (words) => wrong.push(`slide ${number + 1}: ${words}`);
    const box = slide.getBoundingClientRect(), live = slide.matches('.alive:not(.stored)');
    if (present.overflows(slide)) say('overflows');
    const inside = live ? ':scope > .body > .live' : ':scope > .body > .block, :scope > .body > .recorded';
    for (const block of [slide.querySelector('header'), ...slide.querySelectorAll(inside)]) {
      if (getComputedStyle(block).display === 'none') continue;
      for (const one of [block, ...block.querySelectorAll('*')]) {
        if (one.closest('script, style, svg, option') || !one.checkVisibility()) continue;
        const place = one.getBoundingClientRect(), css = getComputedStyle(one);
        if (!place.width || !place.height) continue;
        const name = `${one.tagName} ${one.className} ${one.textContent.trim().slice(0, 40)}`;
        if (place.left < box.left - 1 || place.right > box.right + 1 || place.bottom > box.bottom + 1)
          say(`${name} is outside`);
        if (!one.closest('math') && css.overflowX !== 'visible' && one.scrollWidth > one.clientWidth + 2
            && !one.matches('.noUi-target, .noUi-target *, input, .slider-container')) say(`${name} is too wide`);
        if (!one.closest('math') && css.overflowY !== 'visible' && one.scrollHeight > one.clientHeight + 2
            && !one.matches('.noUi-target, .noUi-target *, textarea, pre')) say(`${name} is cut below`);
        const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (own && !one.closest('math') && parseFloat(css.fontSize) < least - 0.02) say(`${name} has ${css.fontSize}`);
      }
    }
    if (live) for (const one of slide.querySelectorAll('.widget-hslider, .widget-dropdown, textarea')) {
      if (!one.checkVisibility()) continue;
      const css = getComputedStyle(one), place = (name) => one.querySelector(name).getBoundingClientRect();
      const line = parseFloat(css.lineHeight), inner = one.clientHeight - parseFloat(css.paddingTop) * 2;
      if (one.matches('textarea') && (inner + 3) % line > 6) say(`${inner / line} lines of a text`);
      if (one.matches('textarea')) continue;
      const label = place('.widget-label'), other = place(one.matches('.widget-hslider') ? '.noUi-handle' : 'select');
      const apart = (label.top + label.bottom - other.top - other.bottom) / 2;
      if (label.right > other.left || Math.abs(apart) > 0.25 * parseFloat(css.fontSize))
        say(`${one.textContent.trim().slice(0, 40)}: ${apart} px out of line, ${label.right} of ${other.left}`);
      if (one.matches('.widget-dropdown') && getComputedStyle(one.querySelector('select')).backgroundImage !== 'none')
        say(`${one.textContent.trim().slice(0, 40)} has an arrow that is dark on dark`);
    }
  });
  return wrong;
}"""


# Letters of pictures: none of the course's is set in less than 10 points (tests/picture_claims.py), all are as wide.
PICTURES = """([least, wide, tallest]) => {
  const wrong = [];
  present.slides().forEach((slide, number) => {
    const live = slide.matches('.alive:not(.stored)');
    for (const image of slide.querySelectorAll(live ? '.workbench-picture img' : '.block img')) {
      const box = image.getBoundingClientRect(), ratio = image.naturalWidth / image.naturalHeight;
      if (!box.width || wide / ratio > tallest + 0.01) continue;
      const letters = 10 / 72 * Math.min(box.width, box.height * ratio) / wide;
      if (letters < least - 0.05) wrong.push(`slide ${number + 1}: letters of ${letters.toFixed(1)} px`);
    }
  });
  return wrong;
}"""
INCHES = style.sheet()["figure.figsize"][0]


def problems(page) -> list[str]:
    """Of all slides, as they are laid out now."""
    least = LEAST * page.viewport_size["width"]
    return page.evaluate(PROBLEMS, least) + page.evaluate(PICTURES, [least, INCHES, style.TALLEST])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    for name, notebook in LECTURES.items():
        export(notebook, folder / f"{name}.html")
    return folder


@contextmanager
def opened(browser, address: str, width=1920, height=1080, **how):
    """A page whose slides are laid out, with what went wrong on it in `.wrong` and what it asked for in `.asked`."""
    context = browser.new_context(viewport={"width": width, "height": height}, **how)
    page = context.new_page()
    page.wrong, page.asked = [], []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(address, wait_until="commit")
    page.wait_for_selector("html[data-slides]", timeout=BUSY_S * 1000)
    yield page
    context.close()


def number(page) -> int:
    """Of the slide that is shown."""
    return int(page.locator(".foot .number").inner_text().split("/")[0])


@pytest.mark.parametrize("name", LECTURES)
def test_every_slide_fits_and_can_be_read(browser, files, name):
    for width, height in SIZES:
        with opened(browser, f"file://{files}/{name}.html", width, height) as page:
            assert problems(page) == []
            assert int(page.locator("html").get_attribute("data-slides")) > 10
            assert page.wrong == [] and [url for url in page.asked[1:] if not url.startswith("data:")] == []


def test_dark_and_light_differ_and_both_are_whole(browser, files):
    with opened(browser, f"file://{files}/90_reading_list_checked.html", color_scheme="dark") as page:
        ground = "getComputedStyle(document.querySelector('.slide.shown')).backgroundColor"
        dark = page.evaluate(ground)
        page.keyboard.press("d")
        light = page.evaluate(ground)
        assert sum(map(int, re.findall(r"\d+", dark))) < 150 < 600 < sum(map(int, re.findall(r"\d+", light)))


def test_keys_and_a_clicker_move(browser, files):
    with opened(browser, f"file://{files}/06_speculative_sampling.html") as page:
        seen = [number(page)]
        for key in ("ArrowRight", "PageDown", " ", "n", "ArrowLeft", "PageUp", "End", "PageDown", "Home", "PageUp"):
            page.keyboard.press(key)
            seen.append(number(page))
        last = int(page.locator("html").get_attribute("data-slides"))
        assert seen == [1, 2, 3, 4, 5, 4, 3, last, last, 1, 1]
        page.keyboard.press("PageDown")
        assert page.url.endswith("#2")
        page.keyboard.press("b")
        assert page.locator(".cover").count() == 1
        page.keyboard.press("b")
        page.keyboard.press("?")
        assert page.locator(".keys").is_visible() and page.locator(".cover").count() == 0
        assert re.fullmatch(r"\d\d:\d\d", page.locator(".foot .clock").inner_text())


def written(folder: Path, *texts: str) -> Path:
    """The page of a lecture with these texts."""
    made = [{"cell_type": "markdown", "id": f"c{n}", "metadata": {}, "source": text} for n, text in enumerate(texts)]
    notebook = folder / "made.ipynb"
    notebook.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    export(notebook, folder / "made.html")
    return folder / "made.html"


def test_what_is_deeper_is_marked_and_passed_over_and_a_number_goes_to_a_sitting(browser, tmp_path):
    texts = ("# Lab", "# Sitting 1: One", "## Core", "## Deeper: x", "### Within", "## Deeper: y", "# Sitting 2: Two")
    file = written(tmp_path, *(f"{text}\n\nWords." for text in texts))
    with opened(browser, f"file://{file}") as page:
        assert problems(page) == []
        marks = page.evaluate("present.slides().map(slide => Boolean(slide.querySelector('.mark')))")
        assert marks == [False, False, False, True, True, True, False]
        assert page.locator(".slide").nth(3).locator("h2").text_content() == "X"
        seen = []
        for key in ("2", "PageUp", "PageDown", "1", "ArrowRight", "ArrowDown", "n", "n", "ArrowUp", "ArrowLeft", "9"):
            page.keyboard.press(key)
            seen.append(number(page))
        assert seen == [7, 3, 7, 2, 3, 4, 5, 7, 6, 3, 3]
        foot = page.locator(".foot")
        assert foot.locator(".below").inner_text() == "↓ deeper: X"
        assert foot.locator(".name").inner_text() == "Lab · Sitting 1: One"
        with page.expect_popup() as popup:
            page.keyboard.press("s")
        assert popup.value.locator(".next h1").inner_text() == "Sitting 2: Two"


def test_a_formula_that_is_too_wide_is_set_smaller_and_its_prose_is_not(browser, tmp_path):
    long = " + ".join(f"x_{{{n}}} y_{{{n}}}" for n in range(14))
    with opened(browser, f"file://{written(tmp_path, f'# Lab{chr(10)}', f'Words.{chr(10) * 2}$${long}$$')}") as page:
        size = "getComputedStyle(present.slides()[1].querySelector('p')).fontSize"
        assert page.locator(".long1").count() == 1 and float(page.evaluate(size).removesuffix("px")) >= 40
        assert problems(page) == []


def test_a_slide_that_a_smaller_window_makes_too_full_is_laid_out_anew(browser, files):
    with opened(browser, f"file://{files}/15_capstone.html") as page:
        for width, height in ((1280, 720), (1024, 768), (1366, 768)):
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_timeout(300)
            assert problems(page) == []


def test_the_speaker_sees_notes_and_the_next_slide_and_can_move(browser, files):
    with opened(browser, f"file://{files}/03_kv_cache.html") as page:
        at = page.evaluate("present.slides().findIndex(slide => slide.matches('.picture'))")
        page.evaluate("present.show", at)
        with page.expect_popup() as popup:
            page.keyboard.press("s")
        speaker = popup.value
        assert "In words:" in speaker.locator(".said").inner_text()
        assert speaker.locator(".now .slide.picture, .now .slide.tall").count() == 1
        assert speaker.locator(".next .slide").count() == 1
        assert re.search(r"\d:\d\d:\d\d", speaker.locator(".elapsed").inner_text())
        speaker.keyboard.press("PageDown")
        assert number(page) == at + 2


# -- live -----------------------------------------------------------------------------------------------------------


ALIVE = "document.querySelectorAll('.slide.alive').length === document.querySelectorAll('.live').length"
KERNEL_ID = "JSON.parse(document.getElementById('jupyter-config-data').textContent).kernelId"


@contextmanager
def presented(name: str, scratch, cache, course=ROOT, **environment: str):
    """The address at which `workbench present` serves a lecture; it ends with the block. cache: where the machine's
    measured ceilings are kept."""
    scratch.mkdir()
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    with (scratch / "out").open("w") as out, (scratch / "log").open("w") as log:
        server = subprocess.Popen(
            [WORKBENCH, "present", name, "--no-browser", "--port", str(free_port())],
            cwd=course,
            env={
                **os.environ,
                **{one: str(scratch / one.lower()) for one in folders},
                "WORKBENCH_CACHE": str(cache),
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
            stdout=out,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 60
        while "\n" not in (scratch / "out").read_text():
            assert server.poll() is None and time.monotonic() < until, (scratch / "log").read_text()
            time.sleep(0.1)
        yield (scratch / "out").read_text().strip()
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", LIVE)
def test_panels_live_on_their_slides(browser, tmp_path, ceilings_folder, name):
    with presented(name, tmp_path / "lab", ceilings_folder) as address, opened(browser, address) as page:
        first = page.evaluate("present.slides().findIndex(slide => slide.matches('.panel'))")
        if first < 0:
            return
        page.evaluate("present.show", first)
        assert page.locator(".slide.shown img").first.is_visible()  # as recorded, before there is a kernel
        page.wait_for_function(ALIVE, timeout=180_000)
        own = ("data:", "blob:", address.partition("/voila/")[0])
        assert [url for url in page.asked if not url.startswith(own)] == []
        panels = page.evaluate("present.slides().flatMap((slide, at) => slide.matches('.alive') ? [at] : [])")
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_timeout(300)
            assert problems(page) == []
        page.set_viewport_size({"width": 1920, "height": 1080})
        for at in panels if ALL or len(panels) == 1 else ():
            page.evaluate("present.show", at)
            run_to_its_end(page)
            if ALL:
                page.wait_for_timeout(500)
                save_picture(page, f"present-{name}-{at + 1}")
        page.wait_for_timeout(300)  # what is said anew is fitted in the next frame
        wrong = problems(page)
        save_picture(page, f"present-{name}")
        assert wrong == []
        keys_of_a_control_are_its_own(page, panels[0])


def a_recorded_panel_is_shown(page, *words: str) -> None:
    """With these words below it, and the keys move."""
    at = page.evaluate("present.slides().findIndex(slide => slide.matches('.panel'))")
    page.evaluate("present.show", at)
    said = page.locator(".foot .kernel")
    assert all(word in said.inner_text() for word in ("recorded", *words)), said.inner_text()
    assert page.locator(".slide.shown .block.panel img").is_visible()
    assert not page.locator(".slide.shown .workbench-panel").is_visible()
    assert page.evaluate("[document.querySelector('.foot')].every(one => one.scrollWidth <= one.clientWidth)")
    page.keyboard.press("PageDown")
    assert number(page) == at + 2


def test_a_kernel_that_dies_leaves_the_recorded_results_and_the_page_says_so(browser, tmp_path, ceilings_folder):
    with presented("00_start_here", tmp_path / "lab", ceilings_folder) as address, opened(browser, address) as page:
        page.wait_for_function(ALIVE, timeout=180_000)
        name = page.evaluate(KERNEL_ID)
        [pid] = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if name.encode() in cmdline(p)]
        os.kill(pid, signal.SIGKILL)
        page.wait_for_function("document.querySelector('.foot .kernel.failed')", timeout=BUSY_S * 1000)
        a_recorded_panel_is_shown(page, "the kernel has ended", "reload")
        save_picture(page, "present-dead-kernel")
        page.keyboard.press("PageUp")
        page.keyboard.press("r")  # what it showed last is still there
        assert page.locator(".slide.shown .workbench-panel").is_visible()
        page.reload(wait_until="commit")
        page.wait_for_selector("html[data-slides]", timeout=BUSY_S * 1000)
        page.wait_for_function(ALIVE, timeout=180_000)
        assert page.evaluate(KERNEL_ID) != name and page.locator(".foot .failed").count() == 0


def cmdline(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def broken_kernel(folder: Path, *command: str) -> str:
    """A JUPYTER_PATH on which the kernel `python3` is this command."""
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    said = {"argv": [*command, "{connection_file}"], "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(said))
    return str(folder)


def test_a_kernel_that_cannot_be_launched_leaves_the_recorded_results(browser, tmp_path, ceilings_folder):
    path = broken_kernel(tmp_path / "path", "/no/such/python")
    with presented("00_start_here", tmp_path / "lab", ceilings_folder, JUPYTER_PATH=path) as address:
        with opened(browser, address) as page:
            a_recorded_panel_is_shown(page, "the kernel did not start", "/no/such/python")
            assert problems(page) == []
        assert "404" in browser.new_page().goto(address.replace("00_start", "99_start")).text()


def test_a_kernel_that_ends_at_once_leaves_the_recorded_results(browser, tmp_path, ceilings_folder):
    path = broken_kernel(tmp_path / "path", "false")
    with presented("00_start_here", tmp_path / "lab", ceilings_folder, JUPYTER_PATH=path) as address:
        context = browser.new_context()
        page = context.new_page()
        page.clock.install()
        page.goto(address, wait_until="commit")
        page.wait_for_selector("html[data-slides]", timeout=BUSY_S * 1000)
        assert "failed" not in page.locator(".foot .kernel").get_attribute("class")
        page.clock.fast_forward(80_000)
        page.wait_for_selector(".foot .kernel.failed")
        a_recorded_panel_is_shown(page, "the kernel did not start", "reload")
        context.close()


def test_a_panel_that_fails_says_why_the_next_lives_and_the_end_of_the_server_is_said(
    browser, tmp_path, ceilings_folder
):
    shown = [{"output_type": "display_data", "metadata": {}, "data": {"image/png": PNG, "text/plain": "a dot"}}]
    sources = [
        "import workbench as wb\nsize = 1",
        *(f"{one} = wb.panels.roofline({given})\n{one}" for one, given in PANELS),
    ]
    cells = [{"cell_type": "markdown", "id": "t", "metadata": {}, "source": "# Start here"}]
    for n, source in enumerate(sources):
        cell = {"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": source, "execution_count": None}
        cells.append({**cell, "outputs": shown if n else []})
    lecture = tmp_path / "course" / "notebooks" / "00_start_here.ipynb"
    lecture.parent.mkdir(parents=True)
    lecture.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    with ExitStack() as server:
        address = server.enter_context(presented("00", tmp_path / "lab", ceilings_folder, course=lecture.parents[1]))
        with opened(browser, address) as page:
            page.wait_for_function("document.querySelectorAll('.slide.alive').length === 1", timeout=180_000)
            a_recorded_panel_is_shown(page, "no live panel", "nothing")
            assert page.locator(".slide.shown .workbench-panel").is_visible()
            server.close()
            page.wait_for_function("document.querySelector('.foot .kernel').innerText.includes('server has ended')")
            a_recorded_panel_is_shown(page, "the server has ended")


def run_to_its_end(page) -> None:
    slide = page.locator(".slide.shown")
    slide.locator("button.jupyter-button", has_text="Run").click()
    status = slide.locator("[role=status]").first
    until = time.monotonic() + 900
    while not re.match("done: ", status.inner_text()):
        assert "error" not in status.inner_text() and time.monotonic() < until, status.inner_text()
        assert page.locator(".foot .failed").count() == 0, page.locator(".foot .failed").inner_text()
        page.wait_for_timeout(100)


def keys_of_a_control_are_its_own(page, at: int) -> None:
    page.evaluate("present.show", at)
    handle = page.locator(".slide.shown [role=slider]").first
    if handle.count():
        handle.focus()
        handle.press("ArrowRight")
        assert number(page) == at + 1
    page.keyboard.press("PageDown")
    assert number(page) == at + 2
    page.keyboard.press("PageUp")
    page.keyboard.press("r")
    assert page.locator(".slide.shown .recorded").is_visible() and not page.locator(".slide.shown .live").is_visible()
    page.keyboard.press("r")
    assert page.locator(".slide.shown .live").is_visible()
