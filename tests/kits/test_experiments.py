"""Experiments: settings are checked before anything runs, counts are exact, outputs are held to an oracle."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench import labs
from workbench.errors import WorkbenchError
from workbench.experiments import Experiment, Setting, experiment, list_experiments, run_experiment
from workbench.experiments.inputs import PROMPT, tokens_of
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Stopped
from workbench.labs.lab01_naive_generation import step_time as naive
from workbench.labs.lab01_naive_generation import strategies as choosing
from workbench.models import Decoder
from workbench.models.checkpoints import shipped_tokenizer


class KnownBench(Bench):
    """A bench whose ceilings are a data sheet's, so that nothing is measured for them."""

    def ceilings(self):
        return PUBLISHED["h100-sxm"]


@pytest.fixture
def model(tiny_model) -> Decoder:
    return tiny_model


@pytest.fixture
def bench() -> KnownBench:
    return KnownBench()


def my_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = choose(forward(ids)[-1], ids)
        ids.append(token)
        yield token
        if token in stop_token_ids:
            return


# -- the contract ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (Setting("n", 3, "int", 1, 9), "7", 7),
        (Setting("t", 1.0, "float", 0.0, 2.0), "1.5", 1.5),
        (Setting("c", 16, "choice", choices=(16, 32)), "32", 32),
        (Setting("c", "sdpa", "choice", choices=("sdpa", "eager")), "eager", "eager"),
        (Setting("f", False, "flag"), "Yes", True),
        (Setting("p", "x", "text"), "a=b", "a=b"),
        (Setting("m", "stdlib-10m", "model"), "gpt2", "gpt2"),
    ],
)
def test_a_setting_reads_what_a_command_line_says(setting, text, value):
    assert setting.parse(text) == value
    assert type(setting.parse(text)) is type(value)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (Setting("n", 3, "int", 1, 9), 10, "n must be a whole number from 1 to 9, got 10"),
        (Setting("n", 3, "int", 1, 9), 2.5, "whole number"),
        (Setting("n", 3, "int", 1, 9), True, "whole number"),
        (Setting("n", 3, "int", 0), -1, "at least 0"),
        (Setting("t", 1.0, "float", 0.0, 2.0), float("nan"), "number from 0 to 2, got nan"),
        (Setting("t", 1.0, "float", 0.0, 2.0), None, "got None"),
        (Setting("c", 16, "choice", choices=(16, 32)), 33, "unknown c 33"),
        (Setting("f", False, "flag"), 1, "True or False"),
        (Setting("p", "x", "text"), 3, "a text"),
        (Setting("p", "x", "text"), "x" * 200_000, "200,000 characters"),
        (Setting("m", "stdlib-10m", "model"), "", "a model's name or a Decoder"),
    ],
)
def test_a_setting_refuses_what_it_is_not(setting, value, message):
    with pytest.raises(WorkbenchError, match=message):
        setting.check(value)


@pytest.mark.parametrize("text", ["x", "1.5", "nan", ""])
def test_a_text_that_is_no_whole_number_is_refused_by_name(text):
    with pytest.raises(WorkbenchError, match="n must be a whole number"):
        Setting("n", 3, "int", 1, 9).parse(text)


def test_every_experiment_is_listed_once_and_its_own_defaults_are_allowed():
    names = [e.name for e in list_experiments()]
    assert len(names) == len(set(names))
    assert {"naive.step_time", "naive.strategies", "naive.request"} <= set(names)
    for one in list_experiments():
        assert one.complete() == {s.name: s.default for s in one.settings}
        assert one.question and one.how
    assert all(e.lab == 1 for e in list_experiments(lab=1))


def test_an_unknown_experiment_setting_or_part_names_the_nearest_known():
    with pytest.raises(WorkbenchError, match=r"did you mean 'naive\.step_time'"):
        experiment("naive.steptime")
    with pytest.raises(WorkbenchError, match="did you mean 'repeats'"):
        run_experiment("naive.step_time", {"repeat": 3})
    with pytest.raises(WorkbenchError, match=r"part of naive\.step_time"):
        run_experiment("naive.step_time", {}, learner={"loop": my_loop})


def test_a_wrong_setting_is_refused_before_anything_runs(monkeypatch):
    ran = []
    watched = Experiment(
        "x",
        1,
        "?",
        "!",
        (Setting("n", 1, "int", 1, 2), Setting("m", 1, "int", 1, 2)),
        run=lambda bench, **s: ran.append(s) or iter(()),
        predict=lambda c, **s: [],
    )
    monkeypatch.setattr(labs, "experiment", lambda name: watched)
    with pytest.raises(WorkbenchError, match="m must be"):
        run_experiment("x", {"n": 1, "m": 5}, KnownBench())
    assert ran == []
    run_experiment("x", {"n": "2"}, KnownBench())
    assert ran == [{"n": 2, "m": 1}]


# -- naive.step_time -------------------------------------------------------------------------------------------


def test_lengths_are_powers_of_two_up_to_the_longest():
    assert naive.text_lengths(512, 6) == [16, 32, 64, 128, 256, 512]
    assert naive.text_lengths(512, 4, naive.SHORTEST) == [1, 8, 64, 512], "a curve over texts begins with one row"
    assert naive.text_lengths(1024, 7) == [16, 32, 64, 128, 256, 512, 1024]
    assert naive.text_lengths(32, 12)[0] == 16 and naive.text_lengths(32, 12)[-1] == 32


def test_rows_are_counted_and_agree_with_the_formula():
    assert naive.count_rows(10, 100) == naive.rows_without_cache(10, 100) == 5_950
    assert naive.count_rows(2000, 1000) == naive.rows_without_cache(2000, 1000) == 2_499_500


def test_step_time_yields_one_checked_measurement_a_length(model, bench):
    rows, *steps = run_experiment(
        "naive.step_time", {"model": model, "max_length": 64, "points": 3, "repeats": 2}, bench
    )
    assert rows.unit == "rows" and rows.counts["rows"] == 5_950
    assert [m.settings["length"] for m in steps] == [1, 8, 64]
    for m in steps:
        assert m.counts["rows"] == m.settings["length"] and m.counts["model_calls"] == 1
        assert {"flops", "bytes_read", "launches"} <= set(m.counts)
        assert len(m.samples) == 2 and m.unit == "s"
        assert m.limit in ("launch", "bandwidth", "compute") and m.predicted > 0
        assert "equals that of a run with eager attention" in m.check
        assert m.settings["model"] == "tiny"
    predicted = naive.predict_step_time(bench.ceilings(), model=model, max_length=64, points=3, attention="sdpa")
    assert predicted == [(m.settings["length"], m.predicted, m.limit) for m in steps]
    assert all(Measurement.from_dict(m.to_dict()) == m for m in [rows, *steps])


def test_eager_attention_is_predicted_with_the_half_it_masks_away(model, bench):
    fused, _ = naive.predicted_step(bench.ceilings(), model, 48, "sdpa")
    eager, _ = naive.predicted_step(bench.ceilings(), model, 48, "eager")
    assert eager.flops == fused.rectangle_flops > fused.flops


def test_a_step_whose_output_is_wrong_is_never_reported(bench, monkeypatch):
    wrong = random_decoder(tiny_config(), tokenizer=shipped_tokenizer())
    honest = wrong.forward
    calls = iter(range(10**6))
    monkeypatch.setattr(wrong, "forward", lambda b, kv: honest(b, kv) * (1 if next(calls) % 4 == 3 else -1))
    with pytest.raises(WorkbenchError, match="its output is wrong, so its time was thrown away"):
        run_experiment("naive.step_time", {"model": wrong, "max_length": 32, "points": 2, "repeats": 2}, bench)


def test_every_timed_step_gets_text_it_has_not_seen(bench, monkeypatch):
    watched = random_decoder(tiny_config(), tokenizer=shipped_tokenizer())
    seen, honest = [], watched.forward
    monkeypatch.setattr(watched, "forward", lambda b, kv: (seen.append(tuple(b.token_ids.tolist())), honest(b, kv))[1])
    run_experiment("naive.step_time", {"model": watched, "max_length": 32, "points": 3, "repeats": 3}, bench)
    # one warm-up and three repeats; the fifth is the oracle. Texts of one token, the first five, may be the same token
    timed = [seen[5:9], seen[10:14]]
    assert all(len(set(texts)) == 4 for texts in timed)


@pytest.mark.parametrize(
    ("yours", "said"), [(lambda p, n: n * p + n * (n - 1) // 2, "5,950, equal"), (lambda p, n: n * p, "off by -4,950")]
)
def test_a_learners_count_of_rows_stands_beside_the_counted_one(model, bench, yours, said):
    chosen = experiment("naive.step_time")
    first = next(chosen.run(bench, **chosen.complete({"model": model, "max_length": 32}), rows=yours))
    assert said in first.check and first.counts["rows_yours"] == yours(10, 100)


def test_a_count_of_rows_that_is_no_number_is_refused_at_once(model, bench):
    with pytest.raises(WorkbenchError, match="must return a whole number, got None"):
        run_experiment("naive.step_time", {"model": model, "max_length": 32}, bench, {"rows": lambda p, n: None})


def test_a_text_beyond_the_context_is_refused_with_numbers(model, bench):
    with pytest.raises(WorkbenchError, match=r"512 is beyond the 256 tokens"):
        run_experiment("naive.step_time", {"model": model, "max_length": 512}, bench)


@pytest.mark.parametrize("name", ["naive.step_time", "naive.strategies", "naive.request"])
def test_an_experiment_that_is_told_to_stop_stops(model, bench, name):
    bench.stop.set()
    values = {"model": model} | ({"max_length": 32} if name == "naive.step_time" else {})
    with pytest.raises(Stopped):
        run_experiment(name, values, bench)


# -- naive.strategies ------------------------------------------------------------------------------------------


def test_stages_hold_the_distribution_after_each_filter():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    sampling = choosing.sampling_of({"temperature": 0.5, "top_k": 3, "top_p": 1.0})
    model, cooled, kept = choosing.stages(sampling, logits, [0])
    assert [s.name for s in (model, cooled, kept)] == ["model", "temperature", "top_k"]
    assert torch.allclose(cooled.probabilities, torch.softmax(2 * logits.double(), 0))
    assert kept.kept == 3 and kept.probabilities[3] == 0
    assert float(kept.probabilities.sum()) == pytest.approx(1)
    even = choosing.stage_of("model", torch.zeros(8))
    assert even.entropy_bits == pytest.approx(3) and even.kept == 8


def test_strategies_yield_stages_then_seeded_texts(model, bench):
    asked = {"model": model, "shown_tokens": 5, "continuations": 2, "new_tokens": 4, "top_k": 40, "seed": 3}
    found = run_experiment("naive.strategies", asked, bench)
    stages = [m for m in found if m.unit == "probability"]
    texts = [m for m in found if m.unit == "s"]
    assert [m.settings["stage"] for m in stages] == ["model", "temperature", "top_k", "top_p"]
    assert all(len(m.samples) == len(m.settings["tokens"]) == 5 for m in stages)
    assert stages[2].counts["kept_tokens"] == 40
    assert [m.settings["seed"] for m in texts] == [3, 4]
    assert [m.settings["text"] for m in texts] == [
        m.settings["text"] for m in run_experiment("naive.strategies", asked, bench) if m.unit == "s"
    ]
    written = len(model.tokenizer.encode(texts[0].settings["prompt"] + ""))
    written += len(model.tokenizer.encode(texts[0].settings["written"]))
    assert texts[0].counts["rows"] == naive.rows_without_cache(written, 4)


def test_written_text_counts_as_generated_for_the_penalties(model, bench):
    """Guards against handing the written text over as a part of the prompt."""
    asked = {
        "model": model,
        "prompt": "a",
        "written": "return",
        "presence_penalty": 2.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "continuations": 1,
        "new_tokens": 1,
    }
    prompt, written = choosing.prompt_and_written(model, "a", "return")
    logits = choosing.next_logits(model, [*prompt, *written])
    _, after = choosing.stages(choosing.sampling_of(asked), logits, prompt, written)
    expected = logits.clone()
    expected[written] -= 2.0
    assert torch.allclose(after.probabilities, expected.double().softmax(0))
    generated = []

    def loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        generated.append(list(prompt_ids))
        yield from my_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids)

    run_experiment("naive.strategies", asked, bench, {"loop": loop})
    assert generated == [[*prompt, *written]]


def test_a_learners_filter_is_run_beside_ours(model, bench):
    asked = {"model": model, "continuations": 1, "new_tokens": 3, "top_p": 0.5}
    found = run_experiment("naive.strategies", asked, bench, {"filters": {"top_p": lambda logits, p: logits}})
    last = {m.settings["by"]: m for m in found if m.settings.get("stage") == "top_p"}
    assert last["ours"].counts["kept_tokens"] < last["yours"].counts["kept_tokens"] == 4096
    assert "largest difference from ours" in last["yours"].check
    assert [m.settings["by"] for m in found if m.unit == "s"] == ["ours", "yours"]


def test_an_empty_or_overlong_prompt_is_refused(model, bench):
    with pytest.raises(WorkbenchError, match="prompt is empty"):
        run_experiment("naive.strategies", {"model": model, "prompt": ""}, bench)
    with pytest.raises(WorkbenchError, match="reads at most 256"):
        run_experiment("naive.request", {"model": model, "prompt": "x = 1\n" * 200}, bench)
    with pytest.raises(WorkbenchError, match="tokens are left to write in"):
        run_experiment("naive.strategies", {"model": model, "written": "x = 1\n" * 30, "new_tokens": 200}, bench)


# -- naive.request ---------------------------------------------------------------------------------------------


def test_a_request_has_a_first_token_and_further_ones(model, bench):
    said = []
    bench.report = said.append
    first, further = run_experiment("naive.request", {"model": model, "max_new_tokens": 6, "seed": 1}, bench)
    prompt = len(tokens_of(model, PROMPT))
    assert (first.settings["phase"], len(first.samples)) == ("first token", 1)
    assert (further.settings["phase"], len(further.samples)) == ("each further token", 5)
    assert first.counts["rows"] == naive.rows_without_cache(prompt, 6)
    assert first.counts["model_calls"] == 6
    _, predicted = naive.predicted_step(bench.ceilings(), model, prompt)
    assert first.predicted == predicted.seconds
    assert said[-1].startswith("ours: token 6 of at most 6\n") and said[-1].endswith(first.settings["text"])


def test_a_learners_loop_is_measured_on_the_same_request(model, bench):
    found = run_experiment("naive.request", {"model": model, "max_new_tokens": 5}, bench, {"loop": my_loop})
    assert [m.settings["by"] for m in found] == ["ours", "ours", "yours", "yours"]
    assert found[-1].check.endswith("the same tokens as ours")
    assert found[-1].settings["text"] == found[0].settings["text"]


def test_a_learners_loop_that_writes_something_else_is_told_where(model, bench):
    def off(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        ids = list(prompt_ids)
        for i in range(max_new_tokens):
            token = choose(forward(ids)[-1], ids) if i < 2 else 7
            ids.append(token)
            yield token

    found = run_experiment("naive.request", {"model": model, "max_new_tokens": 5}, bench, {"loop": off})
    assert found[-1].check.endswith("not the tokens of ours, from new token 3 on")


def test_a_stopped_request_keeps_the_tokens_that_came(model, bench):
    def stop_after_three(text: str) -> None:
        if text.startswith("ours: token 3"):
            bench.stop.set()

    bench.report = stop_after_three
    chosen = experiment("naive.request")
    kept = []
    with pytest.raises(Stopped):
        for m in chosen.run(bench, **chosen.complete({"model": model, "max_new_tokens": 50})):
            kept.append(m)
    assert [len(m.samples) for m in kept] == [1, 2]
    assert "cancelled" in kept[0].check


def test_a_model_without_a_tokenizer_reads_bytes(bench):
    bare = random_decoder(tiny_config(vocab_size=300))
    assert tokens_of(bare, "ab") == [97, 98]
    found = run_experiment("naive.request", {"model": bare, "prompt": "ab", "max_new_tokens": 3}, bench)
    assert found[0].settings["text"].count("#") == 3
    run_experiment("naive.step_time", {"model": bare, "max_length": 32, "points": 2, "repeats": 1}, bench)


# -- brief mode ------------------------------------------------------------------------------------------------


def numbers(*settings: Setting) -> Experiment:
    return Experiment("test.brief", 0, "?", "by nothing", settings, lambda bench: iter(()), lambda ceilings: [])


def test_brief_mode_cuts_what_is_marked_and_nothing_else(monkeypatch):
    one = numbers(
        Setting("repeats", 9, "int", 1, 100, brief=2),
        Setting("context", 1024, "choice", choices=(256, 512, 1024), brief=512),
        Setting("batch", 8, "int", 1, 64),
    )
    full = {"repeats": 9, "context": 1024, "batch": 8}
    monkeypatch.delenv("WORKBENCH_BRIEF", raising=False)
    assert one.complete() == full
    monkeypatch.setenv("WORKBENCH_BRIEF", "0")
    assert one.complete() == full
    monkeypatch.setenv("WORKBENCH_BRIEF", "1")
    assert one.complete() == {"repeats": 2, "context": 512, "batch": 8}
    assert one.complete({"repeats": 1, "context": 256}) == {"repeats": 1, "context": 256, "batch": 8}
    with pytest.raises(WorkbenchError, match="repeats must be"):
        one.complete({"repeats": 1000})


def test_only_how_often_and_on_how_much_is_cut_and_within_what_is_allowed():
    cut = [s for e in list_experiments() for s in e.settings if s.brief is not None]
    assert len(cut) > 20
    for setting in cut:
        assert setting.check(setting.brief) == setting.brief < setting.default, setting.name
    assert {s.name for s in cut} <= {
        "repeats",
        "points",
        "blocks",  # of steps, in turns
        "largest",  # batch
        "passages",
        "prompts",
        "texts",
        "draws",
        "seeds",  # of random choices
        "seconds",
        "evaluations",
        "requests",
        "context",
        "largest_context",
        "max_context",
        "max_batch",
        "length",
        "sequences",  # of calibration text
        "new_tokens",
        "prompt_tokens",
        "batch",
        "max_new_tokens",
        "document_tokens",
        "longest",
        "max_tokens",
        "samples",
        "steps",  # of training
        "fresh",  # sequences to answer
        "counted",  # tokens of the training modules
        "tokens",  # of held-out text
    }
