"""Claims about what texts point to: lectures, sections, files, names. Each is followed.

Read are lectures, exercises and the checks and hints of every lab.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from workbench.grading.check import ExerciseSet
from workbench.labs import current_name, exercise_sets, experiment_names, panel_names
from workbench.panels.base import Panel
from workbench.site.pages import for_reading

ROOT = Path(__file__).parents[2]
LECTURES = {f.name[:2]: f for f in sorted((ROOT / "notebooks" / "source").glob("*.py"))}
TEXTS = sorted(
    [
        *LECTURES.values(),
        *(ROOT / "solutions").glob("*.py"),
        *(ROOT / "workbench" / "labs").glob("*/checks/*.py"),
        *(ROOT / "workbench" / "labs").glob("*/*.py"),
        *(ROOT / "workbench" / "labs").glob("*/panels/*.py"),
    ]
)
every_text = pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))


def headings(lecture: str) -> set[str]:
    """Of a lecture, by its two digits."""
    text = LECTURES[lecture].read_text(encoding="utf-8")
    return {line.strip() for line in re.findall(r"^# #+ (.+)$", text, flags=re.M)}


def in_one_line(file: Path) -> str:
    """A text without line ends, comment marks and the quotes between joined strings."""
    text = file.read_text(encoding="utf-8")
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\s*\n[ \t]*#?[ \t]*", " ", text)


def pointed_sections(text: str) -> list[tuple[str, str]]:
    """(lecture, heading) of `Lab 06, "The rule" and "Why it is exact"`."""
    quoted = r'"([^"\n]{2,80})"'
    pointed: list[tuple[str, str]] = []
    for lab, rest, _ in re.findall(rf"[Ll]ab (\d\d?), ((?:{quoted}(?:,| and|, and)? ?)+)", text):
        pointed += [(lab.zfill(2), heading) for heading in re.findall(quoted, rest)]
    return pointed


def resolved(dotted: str) -> bool:
    """Whether `workbench.kv.blocks.NoRoom` is there: the longest module of it, and then attributes."""
    parts = ["workbench", *dotted.split(".")[1:]] if dotted.startswith("wb.") else dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            at = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(at, name) and name not in getattr(at, "__annotations__", ()):
                return False
            at = getattr(at, name, None)
        return True
    return False


def test_pointers_are_seen_where_a_text_has_some():
    """Also over the end of a line."""
    text = in_one_line(ROOT / "solutions" / "04_smaller_caches.py")
    assert ("04", "Smaller caches buy larger batches") in pointed_sections(text)
    assert pointed_sections('see lab 6, "The rule" and "Two caches".') == [("06", "The rule"), ("06", "Two caches")]
    assert resolved("workbench.kv.blocks.NoRoom") and resolved("wb.generate") and not resolved("workbench.kv.no.such")


@every_text
def test_a_named_lecture_and_its_section_are_there(file):
    text = in_one_line(file)
    for lab, heading in pointed_sections(text):
        assert heading in headings(lab), f'lab {lab} has no section "{heading}"'
    for lab in re.findall(r"\b[Ll]abs? (\d\d?)\b", text):
        assert lab.zfill(2) in LECTURES, f"there is no lab {lab}"


@every_text
def test_a_named_file_is_there(file):
    """By its path, by a link from a notebook, or by its name in backticks."""
    text = re.sub(r"https?://\S+", "", in_one_line(file))
    for path in re.findall(
        r"\b((?:workbench|kernels|notebooks|solutions|exercises|docs|tests)/[\w./-]+\.(?:py|md|ipynb|json))", text
    ):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((\.\.?/[^)#\s]+)", text):
        assert (ROOT / "notebooks" / path).resolve().exists(), path
    for name in re.findall(r"`(\w+\.py)`", text):
        assert list(ROOT.glob(f"kernels/{name}")) or list((ROOT / "workbench").rglob(name)), name


@pytest.mark.parametrize("file", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_link_inside_a_lecture_leads_to_a_heading_in_jupyterlab_and_on_the_site(file):
    """JupyterLab puts hyphens between the words of a heading and keeps its capitals; the site's names have none."""
    notebook = json.loads(file.read_text(encoding="utf-8"))

    def linked_and_named(made: dict) -> tuple[set[str], set[str]]:
        text = "\n".join("".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown")
        named = re.findall(r"^#+ (.+)$", text, flags=re.M)
        return set(re.findall(r"\]\(#([^)\s]+)\)", text)), {heading.strip().replace(" ", "-") for heading in named}

    linked, named = linked_and_named(notebook)
    assert linked <= named
    linked, named = linked_and_named(for_reading(notebook, file.name))
    assert linked <= {re.sub(r"[^\w-]", "", name.lower()) for name in named}


@every_text
def test_a_named_part_of_the_package_is_there(file):
    """A dotted name in backticks, an exercise by its number, an experiment or a panel by its name."""
    text = in_one_line(file)
    for dotted in re.findall(r"`((?:workbench|wb)(?:\.\w+)+)", text):
        assert resolved(dotted), dotted
    known = experiment_names()
    for name in re.findall(r"`workbench (?:record|experiment run) ([a-z_]+\.[a-z_0-9]+)", text):
        assert current_name(name) in known, name
    for name in re.findall(r"\bpanels?\.([a-z_]+)\(", text) if file in LECTURES.values() else ():
        assert name in panel_names() or hasattr(Panel, name), name
    if file.parent.name == "solutions" and (exercises := of_file(file)) is not None:
        for number in re.findall(r"\bexercise (\d+)\b", text):
            assert 1 <= int(number) <= len(exercises.exercises), f"there is no exercise {number}"


# -- what is said about clocks -------------------------------------------------------------------------------------


def of_file(file: Path) -> ExerciseSet | None:
    return exercise_sets().get(file.stem)


EXERCISES = sorted(f for f in (ROOT / "solutions").glob("*.py") if of_file(f) is not None)
WORDS = ("No", "One", "Two", "Three", "Four", "Five")


@pytest.mark.parametrize("file", EXERCISES, ids=lambda file: file.stem)
def test_an_exercise_says_which_of_its_points_are_for_speed(file):
    """Each with a timed check says so with the factor, and the introduction says how many points and where; where no
    check is timed, nothing is said of speed."""
    exercises = of_file(file).exercises
    introduction, *parts = re.split(r"^# ## \d+\. ", file.read_text(encoding="utf-8"), flags=re.M)
    introduction, parts = (re.sub(r"\s*\n#? ?", " ", introduction), [re.sub(r"\s*\n#? ?", " ", p) for p in parts])
    timed = {}
    for number, (exercise, part) in enumerate(zip(exercises, parts, strict=True), 1):
        speed = [check for check in exercise.checks if check.speedup is not None]
        if not speed:
            assert "is for speed" not in part, f"exercise {number} has no timed check"
            continue
        timed[number] = sum(check.points for check in speed)
        assert f"{WORDS[timed[number]]} point is for speed" in part, f"exercise {number}"
        for check in speed:
            assert f"at least **{check.speedup.at_least:g} times**" in part, f"exercise {number}: {check.name}"
    if not timed:
        assert "for speed" not in introduction
        return
    points, where = sum(timed.values()), " and ".join(map(str, timed))
    said = f"{WORDS[points].lower()} point{'s' * (points > 1)}, in exercise{'s' * (len(timed) > 1)} {where},"
    assert f"{said} {'are' if points > 1 else 'is'} for speed" in introduction
    assert not re.search(r"(no|nothing|not one|none)\b[^.]{0,40}\bclock", introduction, flags=re.I)
