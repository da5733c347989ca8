"""Claims about recording: shares of time, what is kept of a run, and rehearsals without a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from workbench import experiments, recorder
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.instruments.bench import Bench
from workbench.kv import make_kv
from workbench.models import Batch, prepare
from workbench.models.shapes import public_shape
from workbench.processes import Budget
from workbench.recorder import rehearsal


def counted(
    name: str = "a", lab: int = 1, pause_s: float = 0.0, error: Exception | None = None, **record
) -> Experiment:
    def run(bench, *, length, size):
        for number in range(length):
            bench.check_stop()
            time.sleep(pause_s)
            yield bench.measurement(name=name, settings={"number": number}, samples=[1.0], unit="s")
        if error:
            raise error

    settings = (Setting("length", 3, "int", 1, 1000), Setting("size", 1024, "choice", choices=(64, 1024, 4096)))
    return Experiment(name, lab, "?", "", settings, run, lambda ceilings, **_: [], record=record)


def a_run(**given) -> recorder.Run:
    settings = given.pop("settings", {})
    return recorder.Run(counted(**given), settings)


def test_of_a_run_that_failed_nothing_is_kept_and_nothing_is_raised():
    kept: list = []
    taken = recorder.take(a_run(error=ZeroDivisionError("x")), Bench(), kept.append)
    assert (taken.measurements, taken.trouble) == ((), "ZeroDivisionError: x") and len(kept) == 3
    taken = recorder.take(a_run(error=WorkbenchError("no such model")), Bench())
    assert (taken.measurements, taken.trouble) == ((), "no such model")
    assert recorder.take(a_run(error=WorkbenchError()), Bench()).trouble == "WorkbenchError: "
    assert len(recorder.take(a_run(), Bench()).measurements) == 3


def test_shares_follow_what_is_left():
    now = [0.0]
    budget = Budget(600, 10, clock=lambda: now[0])
    assert budget.share() == pytest.approx(3 * 600 / 10)
    now[0] = 500.0
    assert budget.share() == pytest.approx(3 * 100 / 9)
    now[0] = 595.0
    assert budget.share() == pytest.approx(5)
    now[0] = 601.0
    assert budget.share() == 0


def test_the_lab_of_the_kernels_comes_first_and_settings_are_checked_before_anything_runs(monkeypatch):
    found = [counted("a", 1), counted("k", 10), counted("b", 2, cuda=())]
    monkeypatch.setattr(experiments, "list_experiments", lambda lab=None: [e for e in found if lab in (None, e.lab)])
    assert list(recorder.all_runs("cuda")) == [10, 1] and list(recorder.all_runs("cpu")) == [10, 1, 2]
    found.append(counted("c", 3, cuda=({"lenght": 1},)))
    with pytest.raises(WorkbenchError, match="length"):
        recorder.all_runs("cuda")
    with pytest.raises(WorkbenchError, match="lab 99 has no experiments"):
        recorder.runs_of(99, "cpu")


def test_everything_that_the_archive_runs_has_settings_that_exist():
    for device in ("cpu", "cuda"):
        assert sum(map(len, recorder.all_runs(device).values())) > 30


def test_a_rehearsal_makes_numbers_small_and_leaves_names_alone():
    small = rehearsal.in_small(a_run(settings={"length": 500}))
    assert small.settings == {"length": 16, "size": 64}
    assert rehearsal.in_small(a_run(settings={"length": 2})).settings["length"] == 2


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "deepseek-v2-lite", "qwen3-8b", "gpt2"])
def test_a_stand_in_is_the_same_kind_of_model_and_tiny(name):
    shape = public_shape(name)
    tiny = rehearsal.tiny_shape(shape)
    assert tiny.family == shape.family and tiny.qk_norm == shape.qk_norm
    assert (tiny.latent_attention is None) == (shape.latent_attention is None)
    model = rehearsal.RehearsalBench("cpu").model(name, dtype=torch.float32)
    assert model.num_parameters() < 500_000
    batch = Batch.of([[1, 2, 3]])
    truth = model(batch, make_kv("recompute", model.config))
    fast = prepare(model)
    assert torch.allclose(fast(batch, make_kv("recompute", fast.config)), truth, atol=1e-5)
