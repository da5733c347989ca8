"""Claims about recordings: what was written is read back, and a file that says something else is refused by line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.serving.bench.recording import (
    OUTCOMES,
    About,
    Chunk,
    Planned,
    Recorder,
    Recording,
    Result,
    read_recording,
)

ABOUT = About("http://fake:80", "fake", "completions", "open", {"seed": 0, "fields": {}})
PLANNED = (Planned(0, 0.0, 4, 3), Planned(1, 0.5, 5, 2))
RESULT = Result(
    1, "ok", 0.5, 2.0, scheduled_s=0.5, status=200, finish_reason="length", done=True, chunks=(Chunk(1.5, " a", 1),)
)

times = st.floats(0, 1e6, allow_nan=False).map(lambda value: round(value, 6))
maybe = st.none() | st.integers(0, 10**6)


@st.composite
def recordings(draw):
    mode = draw(st.sampled_from(("open", "closed")))
    count = draw(st.integers(0, 4))
    schedule = tuple(
        Planned(i, draw(times) if mode == "open" else None, draw(st.integers(1, 99)), draw(st.integers(1, 99)))
        for i in range(count)
    )
    results = []
    for index in draw(st.permutations(range(count)))[: draw(st.integers(0, count))]:
        start = schedule[index].at_s or 0.0
        sizes = draw(st.lists(maybe, max_size=5))
        at = sorted(draw(st.lists(times, min_size=len(sizes) + 4, max_size=len(sizes) + 4)))
        send, connected, headers, *rest = (round(start + value, 6) for value in at)
        chunks = tuple(Chunk(t, draw(st.text(max_size=6)), tokens) for t, tokens in zip(rest, sizes))
        results.append(
            Result(
                index, draw(st.sampled_from(list(OUTCOMES))), send, rest[-1], draw(st.text(max_size=9)),
                schedule[index].at_s, draw(times), draw(st.sampled_from((None, connected))),
                draw(st.sampled_from((None, headers))), draw(maybe), draw(st.none() | times),
                draw(st.none() | st.text(max_size=6)), draw(st.booleans()), draw(maybe), draw(maybe), chunks,
            )
        )  # fmt: skip
    about = replace(ABOUT, mode=mode, model=draw(st.text(max_size=9)), settings={"note": draw(st.text(max_size=9))})
    return Recording(about, schedule, tuple(results), draw(times), draw(st.booleans()))


def write(path, recording):
    recorder = Recorder(path, recording.about, recording.schedule)
    for result in recording.results:
        recorder.add(result)
    return recorder.end(recording.ended_s, interrupted=recording.interrupted)


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_what_was_written_is_read_back(tmp_path_factory, recording):
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    assert write(path, recording) == recording == read_recording(path)


def test_a_result_is_in_the_file_as_soon_as_it_is_there_and_a_cut_last_line_is_let_go(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, ABOUT, PLANNED)  # held, so that nothing is written by closing it
    recorder.add(RESULT)
    read = read_recording(path)
    assert (read.results, read.ended_s, read.unsent) == ((RESULT,), None, 1)
    with path.open("a") as file:
        file.write('{"kind":"result","index":0,"outco')
    assert read_recording(path) == read and recorder is not None


def test_a_recording_is_never_overwritten(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("mine")
    with pytest.raises(WorkbenchError, match="never overwritten"):
        Recorder(path, ABOUT, PLANNED)
    assert path.read_text() == "mine"


def changed(number, **values):
    """The lines of a good recording, one of them changed; a value of ... takes the entry out."""

    def change(lines):
        line = {**json.loads(lines[number]), **values}
        lines[number] = json.dumps({name: value for name, value in line.items() if value is not ...})
        return lines

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [], "is empty"),
        (lambda lines: lines[1:], "line 1: the first line, and no other"),
        (lambda lines: [*lines, lines[0]], "line 6: nothing may follow the end"),
        (lambda lines: [*lines[:3], lines[0]], "line 4: the first line, and no other"),
        (lambda lines: [lines[0], "nonsense", *lines[1:]], "line 2: not JSON"),
        (lambda lines: [lines[0], "[]", *lines[1:]], "line 2: expected a JSON object"),
        (lambda lines: [*lines[:4], lines[3], lines[4]], "is there twice"),
        (changed(0, version=2), "line 1: this recording is not of version 1"),
        (changed(0, mode="half open"), "line 1: unknown mode"),
        (changed(0, colour="red"), "line 1: .*unexpected keyword argument 'colour'"),
        (changed(1, kind="planned"), "line 2: unknown kind of line 'planned'"),
        (changed(1, at_s=None), "a request has a time in an open loop"),
        (changed(1, index=4), "must be numbered 0, 1, 2"),
        (changed(1, max_tokens=0), "line 2: max_tokens must be"),
        (changed(3, outcome="good"), "line 4: unknown outcome 'good'"),
        (changed(3, outcome=...), "line 4: .*missing 1 required"),
        (changed(3, end_s=1.0), "line 4: request 1: end_s is 1.0 s, before a chunk, 1.5 s"),
        (changed(3, send_s=0.25), "line 4: request 1: send_s is 0.25 s, before scheduled_s"),
        (changed(3, scheduled_s=0.25), "request 1 was due at 0.5 s"),
        (changed(3, index=7), "was not scheduled"),
        (changed(3, chunks=[[1.5, " a"]]), "line 4: chunks must be"),
        (changed(3, chunks=[[1.5, " a", 1.5]]), "line 4: the tokens of a chunk must be"),
        (changed(3, chunks=[["soon", " a", 1]]), "line 4: the time of a chunk must be"),
        (changed(3, status="200"), "line 4: status must be"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_line(tmp_path, change, words):
    path = tmp_path / "run.jsonl"
    write(path, Recording(ABOUT, PLANNED, (RESULT,), 3.0))
    lines = change(path.read_text().splitlines())
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(WorkbenchError, match=words):
        read_recording(path)
