"""The archive: what is read back is what was written, damaged files are named, and nothing recorded looks live."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from workbench import records
from workbench.errors import WorkbenchError
from workbench.experiments import Setting, list_experiments
from workbench.experiments.contract import Experiment
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.panels import base, style
from workbench.panels.base import Panel
from workbench.panels.view import View
from workbench.records import Record, list_records, load_record, place_for, records_of, write_record

H200 = {"name": "NVIDIA H200", "device": "cuda"}
DATE = "2026-01-31T12:00:00+00:00"


def measurement(name: str = "test.curve", **changes) -> Measurement:
    settings = {"model": "stdlib-10m", "length": 16}
    return replace(Measurement(name, settings, [0.5, 0.25], "s", device=H200, date=DATE), **changes)


def record(*measurements: Measurement, **changes) -> Record:
    made = Record(H200, {"torch": "2.13"}, "abc", DATE, "a note", measurements or (measurement(),))
    return replace(made, **changes)


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "archive"
    folder.mkdir()
    monkeypatch.setattr(records, "FOLDER", folder)
    return folder


# -- files -----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_by_name_and_by_path(archive):
    made = record(measurement(), measurement("test.other", unit="rows", predicted=2.0, check="Été ≤ 3"))
    place = place_for(H200, 2)
    write_record(place, made)
    assert place.name == "nvidia-h200-lab02.json" and list_records() == ["nvidia-h200-lab02"]
    assert load_record("nvidia-h200-lab02") == load_record(place) == load_record(str(place)) == made
    assert load_record(place).label == "recorded on NVIDIA H200, 2026-01-31"
    entry = json.loads(place.read_text(encoding="utf-8"))
    assert list(entry) == ["format", "device", "versions", "commit", "date", "note", "measurements"]
    assert len(place.read_text(encoding="utf-8").splitlines()) == 12  # one line a measurement


def test_records_of_an_experiment_are_those_that_hold_it_newest_first(archive):
    write_record(archive / "a.json", record(date="2026-01-01T00:00:00+00:00"))
    write_record(archive / "b.json", record(date="2026-03-01T00:00:00+00:00"))
    write_record(archive / "c.json", record(measurement("test.other")))
    assert [r.date[:7] for r in records_of("test.curve")] == ["2026-03", "2026-01"]
    assert [m.name for m in records_of("test.other")[0].of("test.other")] == ["test.other"]
    assert records_of("test.nothing") == []


def test_a_file_is_read_once_and_again_when_it_changes(archive):
    file = archive / "a.json"
    write_record(file, record())
    assert load_record(file) is load_record("a")
    write_record(file, record(note="recorded again"))
    assert load_record("a").note == "recorded again"


def test_the_same_name_for_the_device_gives_the_same_place_whatever_characters_it_has():
    assert place_for({"name": "Intel(R) Xeon(R) @ 2.1GHz"}, 12).name == "intel-r-xeon-r-2-1ghz-lab12.json"
    assert place_for({"name": "../../../etc"}, 1).name == "etc-lab01.json"
    assert place_for({"name": "…"}, 1).name == "device-lab01.json"


def entry_of(made: Record) -> dict:
    rows = [m.to_dict() for m in made.measurements]
    return {"format": 1} | {k: v for k, v in vars(made).items() if k != "measurements"} | {"measurements": rows}


def changed(**changes):
    return lambda entry: json.dumps(entry | changes)


def changed_row(**changes):
    return lambda entry: json.dumps(entry | {"measurements": [entry["measurements"][0] | changes]})


DAMAGE = {
    "empty": (lambda entry: "", "no JSON"),
    "cut off": (lambda entry: json.dumps(entry)[:-20], "no JSON"),
    "not UTF-8": (lambda entry: b"\xff\xfe{}", "no JSON"),
    "too deep": (lambda entry: "[" * 100_000, "no JSON"),
    "a list": (lambda entry: "[]", "must be a JSON object"),
    "another format": (changed(format=2), "format must be 1"),
    "format true": (changed(format=True), "format must be 1"),
    "a key too many": (changed(measurments=[]), "did you mean 'measurements'"),
    "a key missing": (lambda e: json.dumps({k: v for k, v in e.items() if k != "date"}), "lacks date"),
    "no measurements": (changed(measurements=[]), "measurements must be 1 to 5,000"),
    "too many measurements": (changed(measurements=[0] * 5001), "at most 5,000 of them; got 5001"),
    "measurements no list": (changed(measurements={}), "must be a list"),
    "device a text": (changed(device="H200"), "device must be an object"),
    "no device name": (changed(device={}), "device name must be"),
    "a long device name": (changed(device={"name": "x" * 121}), "device name must be"),
    "a name that writes backwards": (changed(device={"name": "\u202eabc"}), "device name must be"),
    "no date": (changed(date="yesterday"), "date must be"),
    "a long note": (changed(note="n" * 2001), "note must be"),
    "commit a number": (changed(commit=5), "commit must be"),
    "an unknown key in a measurement": (changed_row(sample=[1]), "measurement 0: .*did you mean 'samples'"),
    "samples that are texts": (changed_row(samples=["1"]), "measurement 0: .*samples must be"),
    "samples that are NaN": (changed_row(samples=[float("nan")]), "NaN is no number"),
    "samples beyond every float": (changed_row(samples=[10**400]), "no JSON|samples must be"),
    "too many samples": (changed_row(samples=[1.0] * 20_001), "at most 20,000 samples; got 20001"),
    "a measurement of another device": (changed_row(device={"name": "A100"}), "of 'NVIDIA H200'.*got 'A100'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_says_what_is_wrong(archive, damage):
    spoil, words = DAMAGE[damage]
    text = spoil(entry_of(record()))
    (archive / "bad.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WorkbenchError, match=rf"(?s)bad\.json is damaged: .*(?:{words}).*record it again"):
        load_record("bad")
    with pytest.raises(WorkbenchError, match=r"bad\.json"):
        records_of("test.curve")


def test_the_undamaged_entry_of_the_tests_above_is_read(archive):
    (archive / "good.json").write_text(json.dumps(entry_of(record())))
    assert load_record("good") == record()


def test_a_file_too_large_is_refused_before_it_is_read(archive, monkeypatch):
    file = archive / "large.json"
    with file.open("wb") as sparse:
        os.truncate(sparse.fileno(), records.LARGEST_FILE + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("it was read"))
    with pytest.raises(WorkbenchError, match="16,777,217 bytes; at most 16,777,216 are read"):
        load_record("large")


def test_a_missing_record_is_answered_with_the_nearest(archive):
    write_record(archive / "h200-lab02.json", record())
    with pytest.raises(WorkbenchError, match="did you mean 'h200-lab02'"):
        load_record("h200-lab2")
    with pytest.raises(WorkbenchError, match=r"cannot read the record .*nothing\.json"):
        load_record(archive / "nothing.json")


def test_a_write_that_fails_leaves_the_old_record(archive, monkeypatch):
    file = archive / "a.json"
    write_record(file, record())
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(WorkbenchError, match="cannot write"):
        write_record(file, record(note="new"))
    assert load_record("a").note == "a note" and [f.name for f in archive.iterdir()] == ["a.json"]


def test_every_shipped_record_is_read():
    for name in list_records():
        assert {m.name for m in load_record(name).measurements} <= {e.name for e in list_experiments()}, name


def test_every_experiment_takes_the_settings_it_names_for_the_archive():
    for e in list_experiments():
        for kind in ("cpu", "cuda"):
            assert all(set(s) <= set(e.complete(s)) for s in e.record_settings(kind)), e.name


# -- panels ----------------------------------------------------------------------------------------------------


class Curve(Panel):
    """A panel that draws what is recorded, and keeps what it was given to draw."""

    def view(self, settings):
        figure, (axes,) = style.new_figure()
        for m in self.record:
            axes.plot([m.settings["length"]], [m.median], **style.RECORDED)
        return View(figure, "a curve", ["n"], [["1"]], "table", "words")


class Bare(Curve):
    draws_records = False


@pytest.fixture
def curve(archive, monkeypatch):
    """curve(**settings): the panel, drawn."""
    settings = (Setting("model", "stdlib-10m", "model"), Setting("length", 16, "int", 1, 99))
    one = Experiment("test.curve", 0, "?", "!", settings, lambda bench, **_: iter([live()]), lambda c, **s: [])

    def live() -> Measurement:
        return measurement(device={"name": "this machine"})

    class KnownBench(Bench):
        def ceilings(self):
            return PUBLISHED["h200"]

    def made(kind: type[Panel] = Curve, record_settings=None, **given) -> Panel:
        monkeypatch.setattr(Curve, "experiment", replace(one, record=record_settings or {}))
        panel = kind(bench=KnownBench(), **given)
        assert panel.wait(30)
        return panel

    monkeypatch.setattr(Curve, "experiment", one, raising=False)
    yield made
    for panel in list(Panel.open_panels.values()):
        panel.close()


def labels(panel: Panel) -> list[str]:
    return [label for label, _ in panel.record_choice.options]


def choose(panel: Panel, index: int) -> None:
    panel.record_choice.value = index
    assert panel.wait(30)


def test_without_records_there_is_no_control(curve):
    panel = curve()
    assert not hasattr(panel, "record_choice") and panel.record == []
    assert "recorded" not in panel.said


def test_the_control_lists_the_recorded_devices_and_begins_with_none(curve, archive):
    write_record(archive / "a.json", record())
    write_record(archive / "b.json", record(measurement("test.other")))
    panel = curve()
    assert labels(panel) == ["live only", "recorded on NVIDIA H200, 2026-01-31"]
    assert panel.record == [] and "recorded" not in panel.said


def test_the_chosen_record_is_drawn_named_in_words_and_never_counted_as_live(curve, archive):
    write_record(archive / "a.json", record())
    panel = curve()
    before = panel.snapshot()
    choose(panel, 1)
    assert panel.snapshot().data != before.data
    said = "Drawn hollow: recorded on NVIDIA H200, 2026-01-31; not measured here."
    assert said in panel.said and panel.snapshot().alt.endswith(said) and said in panel.image.value
    assert panel.measurements == []
    assert [m.device["name"] for m in panel.run()] == ["this machine"]
    choose(panel, 0)
    assert panel.record == [] and "recorded" not in panel.said
    assert panel.snapshot().data == before.data


def test_a_record_given_by_hand_is_one_of_the_choices_and_chosen(curve, archive):
    write_record(archive / "a.json", record())
    panel = curve(record=[measurement(device={"name": "A100"})])
    assert labels(panel)[1:] == ["recorded on A100, 2026-01-31", "recorded on NVIDIA H200, 2026-01-31"]
    assert panel.record_choice.value == 1 and "recorded on A100" in panel.said


def test_runs_of_one_record_with_other_settings_are_told_apart(curve, archive):
    """Two models in one record would otherwise be drawn as one line."""
    rows = [measurement(settings={"model": model, "length": n}) for model in ("small", "large") for n in (16, 32)]
    write_record(archive / "a.json", record(*rows))
    panel = curve(record_settings={"cuda": ({"model": "small"}, {"model": "large"})})
    assert [label.rpartition(": ")[2] for label in labels(panel)[1:]] == ["model small", "model large"]
    choose(panel, 2)
    assert [m.settings for m in panel.record] == [{"model": "large", "length": n} for n in (16, 32)]


def test_a_damaged_archive_is_said_and_the_panel_works(curve, archive):
    write_record(archive / "a.json", record())
    (archive / "bad.json").write_text("{<b>")
    panel = curve()
    page = "".join(w.value for w in base.every_widget(panel.root) if type(w).__name__ == "HTML")
    assert "No recorded measurements: the record" in page and "bad.json is damaged" in page
    assert not hasattr(panel, "record_choice") and len(panel.run()) == 1


def test_a_panel_that_draws_no_records_offers_none(curve, archive):
    write_record(archive / "a.json", record())
    assert not hasattr(curve(Bare), "record_choice")
