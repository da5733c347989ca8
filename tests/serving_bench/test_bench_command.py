"""Claims about `workbench load`: over real sockets, from the command line, with its files and exit codes. No claim is
about how long anything took."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading

import pytest
from fake_openai import DONE, FakeServer, plain, stream, token

from workbench import cli
from workbench.serving.bench.recording import read_recording


async def closed(servers):
    for server in servers:
        server.close()
    answering = asyncio.all_tasks() - {asyncio.current_task()}
    for task in answering:
        task.cancel()
    if answering:
        await asyncio.wait(answering)


@pytest.fixture
def serve():
    """Starts a fake server on a thread, and returns its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers = []

    def start(fake: FakeServer) -> str:
        server = asyncio.run_coroutine_threadsafe(fake.serve(), loop).result(10)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    asyncio.run_coroutine_threadsafe(closed(servers), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


RATE = ("--rate", "400", "--num-requests", "30", "--max-length", "40")


def load(capsys, *arguments):
    try:
        code = cli.main(["load", *map(str, arguments)])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_run_is_recorded_reported_and_exported(serve, capsys, tmp_path):
    fake = FakeServer(ttft_s=0.0, gap_s=0.0)
    file, exported = tmp_path / "run.jsonl", tmp_path / "vllm.json"
    asked = (*RATE, "--slo-e2e-ms", "60000", "--out", file, "--export-vllm", exported)
    code, out, err = load(capsys, serve(fake), *asked)
    assert code == 0 and "latency under load" in out and "100.0%" in out and not err
    recording = read_recording(file)
    assert len(recording.results) == 30 and all(r.ok for r in recording.results)
    assert all(r.completion_tokens == recording.schedule[r.index].max_tokens for r in recording.results)
    assert all(r.prompt_tokens == recording.schedule[r.index].prompt_tokens for r in recording.results)
    assert json.loads(exported.read_text())["completed"] == 30
    again = load(capsys, "--report", file, "--slo-e2e-ms", "60000")
    assert again == (0, out, ""), "the report is computed from the recording alone"
    code, _, err = load(capsys, "--report", file, "--out", file)
    assert code == 2 and "--report sends nothing" in err


def test_one_seed_sends_the_same_prompts_and_the_probe_is_in_no_recording(serve, capsys):
    made = []
    for seed in (7, 7, 8):
        fake = FakeServer(ttft_s=0.0, gap_s=0.0)
        assert load(capsys, serve(fake), *RATE, "--seed", seed)[0] == 0
        made.append(sorted(json.dumps(body) for body in fake.asked[1:]))
    assert made[0] == made[1] != made[2] and len(made[0]) == 30
    assert all(min(json.loads(body)["prompt"]) >= 256 for body in made[0])


def test_chat_is_asked_in_text_with_a_key(serve, capsys, tmp_path):
    fake = FakeServer(ttft_s=0.0, gap_s=0.0)
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    closed = ("--arrivals", "closed", "--concurrency", "2", "--num-requests", "6", "--max-length", "40")
    code, out, _ = load(capsys, f"{serve(fake)}/v1", "--chat", "--api-key-file", key, "--workload", "uniform", *closed)
    assert code == 0 and "Closed loop" in out and "sk-secret" not in out
    assert all("Authorization: Bearer sk-secret" in head for head in fake.heads)
    assert all(isinstance(body["messages"][0]["content"], str) for body in fake.asked)


def test_a_trace_is_replayed(serve, capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": n / 1000, "input_length": 5 + n, "output_length": 1 + n} for n in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fake = FakeServer(ttft_s=0.0, gap_s=0.0)
    code, out, _ = load(capsys, serve(fake), "--trace", trace)
    assert code == 0 and "the times of trace.jsonl" in out
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in fake.asked[1:]) == [
        (5 + n, 1 + n) for n in range(5)
    ]


def test_lengths_are_scaled_to_what_the_server_says_it_can_hold(serve, capsys):
    fake = FakeServer(ttft_s=0.0, gap_s=0.0, max_model_len=48)
    assert load(capsys, serve(fake), "--rate", "400", "--num-requests", "20", "--workload", "conversation")[0] == 0
    longest = max(len(body["prompt"]) + body["max_tokens"] for body in fake.asked)
    assert 24 < longest <= 48


def test_refusals_are_in_the_report_and_a_run_of_nothing_but_errors_exits_1(serve, capsys):
    answers = [stream(token(" a", "stop"), DONE), *[plain("500 Oops", b"<h1>no</h1>", kind="text/html")] * 40]
    code, out, _ = load(capsys, serve(FakeServer(script=lambda number, body: [answers[number]])), *RATE)
    assert code == 1 and "INVALID: no request was answered" in out and "30 http_error" in out and "<h1>no</h1>" in out


def test_ctrl_c_writes_what_there_is_and_exits_130(serve, capsys, tmp_path):
    def script(number, body):
        if number == 2:  # the probe is 0; the second request interrupts
            os.kill(os.getpid(), signal.SIGINT)
        return [5.0] if number >= 2 else None

    file = tmp_path / "run.jsonl"
    url = serve(FakeServer(ttft_s=0.0, gap_s=0.0, script=script))
    closed = ("--arrivals", "closed", "--concurrency", "1", "--num-requests", "30", "--max-length", "40")
    code, out, err = load(capsys, url, *closed, "--out", file)
    recording = read_recording(file)
    assert code == 130 and "interrupted" in out and "Ctrl-C" in err and recording.interrupted
    assert [r.outcome for r in recording.results] == ["ok", "cancelled"] and recording.unsent == 28


def test_a_long_run_says_how_far_it_is(serve, capsys, monkeypatch):
    monkeypatch.setattr("workbench.serving.bench.command.SAID_EVERY_S", 0.01)
    code, _, err = load(capsys, serve(FakeServer(ttft_s=0.0, gap_s=0.0)), *RATE)
    assert code == 0 and " of 30 requests have ended\n" in err


def test_a_search_prints_each_rate_and_keeps_each_recording(serve, capsys, tmp_path):
    url = serve(FakeServer(ttft_s=0.0, gap_s=0.0))
    asked = ("--search", "--max-trials", 2, "--slo-e2e-ms", "60000", "--out", tmp_path / "run.jsonl")
    code, out, err = load(capsys, url, *RATE, *asked)
    assert code == 0 and "Goodput: at least 800 requests/s" in out and "\n800 requests/s: " in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-400ps.jsonl", "run-800ps.jsonl"]


WRONG = {
    "no url": ([], "required: the URL"),
    "no server": (["http://127.0.0.1:9", "--model", "m", "--rate", "1", "--max-length", "99"], "no connection"),
    "no models": (["http://127.0.0.1:9", "--rate", "1"], "gives no answer"),
    "a file": (["file:///etc/passwd"], "URL must be"),
    "no key file": (["http://127.0.0.1:9", "--api-key-file", "none"], "none: No such file"),
    "no recording": (["--report", "none"], "none: No such file"),
    "no objective": (["http://127.0.0.1:9", "--search", "--rate", "1"], "--search needs an objective"),
    "a negative objective": (["--report", "x", "--slo-ttft-ms", "-1"], "objective ttft_s must be"),
    "arrivals": (["http://127.0.0.1:9", "--arrivals", "poison"], "invalid choice"),
    "a word for a number": (["http://127.0.0.1:9", "--rate", "many"], "invalid float value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_exits_2_with_a_line_that_says_why(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, words = WRONG[name]
    code, out, err = load(capsys, *arguments)
    assert code == 2 and words in err and "Traceback" not in err and not out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arrivals", "poisson"), "needs --rate"),
        (("--arrivals", "closed"), "needs --concurrency"),
        (("--arrivals", "closed", "--concurrency", "2", "--rate", "1"), "takes no --rate"),
        (("--workload", "ragged"), "has no rate of its own"),
        (("--workload", "raged"), "did you mean 'ragged'"),
        (("--trace", "t", "--workload", "ragged"), "--trace goes without"),
        (("--rate", "1", "--burstiness-cv", "2"), "is of --arrivals gamma"),
        (("--rate", "1", "--num-requests", "0"), "num_requests must be"),
        (("--rate", "1", "--concurrency", "0"), "concurrency must be"),
        (("--rate", "nan"), "rate_per_s must be"),
        (("--rate", "1", "--vocab-size", "1"), "--vocab-size must be"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_request_is_sent(arguments, words, serve, capsys):
    fake = FakeServer(ttft_s=0.0, gap_s=0.0)
    code, out, err = load(capsys, serve(fake), *arguments)
    assert code == 2 and words in err and not out and not fake.asked
