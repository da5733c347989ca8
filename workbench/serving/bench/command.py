"""`workbench load URL`: its words, its files and its exit codes. The work is elsewhere.

0: done. 1: the run is invalid, or nothing was answered. 2: wrong use. 130: interrupted; what there is was written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, check_above, check_whole
from workbench.files import write_text
from workbench.serving.bench import search
from workbench.serving.bench.client import Client, Target, accepted_fields, body_of, served_models
from workbench.serving.bench.export import vllm_json
from workbench.serving.bench.recording import About, Recorder, Recording, read_recording
from workbench.serving.bench.report import Report, in_words, report_on
from workbench.serving.bench.runner import WORDS, prompt_of, run
from workbench.serving.bench.schedule import (
    ARRIVALS,
    GAMMA_CV,
    TRACES,
    Schedule,
    closed_loop,
    from_trace,
    gaps_of,
    open_loop,
)
from workbench.serving.bench.timers import new_loop
from workbench.serving.load import WORKLOADS, workload
from workbench.serving.metrics import Objectives

VOCAB_SIZE, RESERVED = 2048, 256  # prompts as token ids: most tokenizers have special tokens and bytes first
NUM_REQUESTS = 100
SAID_EVERY_S = 5.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workbench load",
        description="Put load on an OpenAI endpoint, record what comes when, and report on it.",
        epilog="An open loop (poisson, gamma, constant, a trace) measures latency under load. closed keeps so many "
        "requests running and measures service times. What a number means is in workbench/serving/bench/report.py.",
    )
    parser.add_argument("url", metavar="URL", nargs="?", help="http(s)://HOST[:PORT][/PATH], with or without /v1")
    parser.add_argument("--model", help="default: the only one that the server lists")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: the workload's own)")
    parser.add_argument("--arrivals", choices=ARRIVALS, help="default: the workload's own; of a trace: its times")
    parser.add_argument(
        "--burstiness-cv", type=float, metavar="C", help=f"of gamma: coefficient of variation (default: {GAMMA_CV:g})"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="K", help="closed: so many at a time; else a cap, whose wait is counted"
    )
    parser.add_argument(
        "--num-requests", type=int, metavar="N", help=f"default: {NUM_REQUESTS}; of a trace: all its rows"
    )
    parser.add_argument("--workload", metavar="NAME", help=f"{', '.join(WORKLOADS)} (default: ragged)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help=f"{', '.join(TRACES)}, by its first line")
    parser.add_argument("--trace-kind", choices=tuple(TRACES), help="where the first line does not say it")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, times and texts (default: 0)")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="L",
        help="scale lengths: prompt and output have no more tokens than this (default: what the server says)",
    )
    parser.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="objective: time to first token, from when due")
    parser.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="objective: time per output token after it")
    parser.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="objective: the whole, from when due")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions; default: /v1/completions")
    parser.add_argument("--text", action="store_true", help="prompts as text; default: token ids, but with --chat")
    parser.add_argument(
        "--vocab-size", type=int, default=VOCAB_SIZE, metavar="V", help=f"of prompts as ids (default: {VOCAB_SIZE})"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first line is the key")
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="of one request (default: 600)")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="the recording; a new file")
    parser.add_argument("--report", type=Path, metavar="FILE.jsonl", help="send nothing; report on this recording")
    parser.add_argument("--export-vllm", type=Path, metavar="FILE", help="also in the JSON keys of vllm bench serve")
    parser.add_argument(
        "--search", action="store_true", help="the highest rate whose requests meet the objectives, from --rate on"
    )
    parser.add_argument(
        "--max-trials", type=int, default=search.MAX_TRIALS, metavar="N", help="of --search (default: %(default)s)"
    )
    parser.add_argument(
        "--share", type=float, default=search.SHARE, metavar="P", help="of --search (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(list(argv))
    objectives = _objectives(args)
    if args.report is not None:
        if args.url is not None or args.out is not None or args.search:
            raise WorkbenchError("--report sends nothing: it takes no URL, --out or --search")
        return _show(read_recording(args.report), objectives, args.export_vllm)
    if args.url is None:
        raise WorkbenchError("required: the URL of a server, or --report FILE")
    if args.search and (objectives is None or args.export_vllm is not None or args.arrivals == "closed"):
        raise WorkbenchError("--search needs an objective (--slo-ttft-ms …) and an open loop, and exports nothing")
    client = Client(Target.of(args.url), chat=args.chat, api_key=_api_key(args), timeout_s=args.timeout_s)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        if args.search:
            return runner.run(_search(args, client, objectives))
        recording = runner.run(_one_run(args, client))
    return _show(recording, objectives, args.export_vllm)


def _show(recording: Recording, objectives: Objectives | None, export: Path | None) -> int:
    if export is not None:
        write_text(export, json.dumps(vllm_json(recording, objectives), ensure_ascii=False) + "\n")
    if recording.interrupted and not recording.results:
        print("workbench: no request was sent", file=sys.stderr)
        return 130
    report = report_on(recording, objectives)
    print(in_words(report))
    return 130 if recording.interrupted else int(not report.valid)


def _objectives(args: argparse.Namespace) -> Objectives | None:
    limits = {"ttft_s": args.slo_ttft_ms, "tpot_s": args.slo_tpot_ms, "latency_s": args.slo_e2e_ms}
    asked = {name: check_above(f"the objective {name}", ms, 0) / 1000 for name, ms in limits.items() if ms is not None}
    return Objectives(**asked) if asked else None


def _api_key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return None
    lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise WorkbenchError(f"{args.api_key_file} has no key in its first line")
    return str(lines[0].strip())


# -- runs --------------------------------------------------------------------------------------------------------


async def _one_run(args: argparse.Namespace, client: Client) -> Recording:
    model, max_length = await _model(args, client)
    schedule = _schedule(args, max_length, args.rate)
    fields = await _fields(client, model, args)
    with _stopped_by_ctrl_c() as stop:
        return await _record(args, client, model, fields, schedule, args.out, stop)


async def _search(args: argparse.Namespace, client: Client, objectives: Objectives | None) -> int:
    if args.rate is None:
        raise WorkbenchError("--search begins at a rate: --rate R")
    model, max_length = await _model(args, client)
    fields = await _fields(client, model, args)
    with _stopped_by_ctrl_c() as stop:

        async def measure(rate_per_s: float) -> search.Trial | None:
            out = args.out and args.out.with_name(f"{args.out.stem}-{rate_per_s:.4g}ps{args.out.suffix}")
            recording = await _record(args, client, model, fields, _schedule(args, max_length, rate_per_s), out, stop)
            if recording.interrupted:
                return None
            report: Report = report_on(recording, objectives)
            trial = search.Trial.of_report(rate_per_s, report)
            print(f"{rate_per_s:.4g} requests/s: {trial.good} of {trial.of} met all objectives", file=sys.stderr)
            return trial

        made = await search.highest_rate(measure, args.rate, share=args.share, max_trials=args.max_trials)
    if made.trials:
        print(search.in_words(made))
    return 130 if stop.is_set() else 0


async def _record(
    args: argparse.Namespace,
    client: Client,
    model: str,
    fields: dict[str, Any],
    schedule: Schedule,
    out: Path | None,
    stop: asyncio.Event,
) -> Recording:
    settings = {
        "schedule": schedule.words,
        "workload": str(args.trace.name if args.trace else args.workload or "ragged"),
        "rate_per_s": schedule.rate_per_s,
        "burstiness": schedule.burstiness,
        "concurrency": schedule.concurrency,
        "seed": args.seed,
        "prompts": "text" if args.text or args.chat else "ids",
        "fields": fields,
        "skipped_rows": schedule.skipped,
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
    }
    about = About(client.target.url, model, client.endpoint, schedule.mode, settings)
    recorder = Recorder(out, about, schedule.planned)

    @functools.lru_cache(maxsize=2)  # made ahead of its time, and asked for once
    def bodies(index: int) -> bytes:
        arrival = schedule.arrivals[index]
        own = replace(arrival, texts=arrival.texts or ((f"request {index}", arrival.prompt_tokens),))
        prompt = prompt_of(
            own, as_text=args.text or args.chat, vocab_size=args.vocab_size, reserved=_reserved(args), seed=args.seed
        )
        return body_of(model, prompt, arrival.new_tokens, chat=args.chat, fields=fields)

    said = asyncio.create_task(_say_progress(recorder, len(schedule.arrivals)))
    try:
        return await run(schedule, client, recorder, bodies, stop=stop)
    finally:
        said.cancel()


async def _say_progress(recorder: Recorder, of: int) -> None:
    while True:
        await asyncio.sleep(SAID_EVERY_S)
        print(f"workbench: {recorder.ended} of {of} requests have ended", file=sys.stderr)


def _reserved(args: argparse.Namespace) -> int:
    return min(RESERVED, check_whole("--vocab-size", args.vocab_size, 2) // 2)


async def _model(args: argparse.Namespace, client: Client) -> tuple[str, int | None]:
    """The model's name, and how long a sequence of it may be: as given, else as the server says."""
    if args.model is not None and args.max_length is not None:
        return args.model, args.max_length
    try:
        listed = await served_models(client)
    except WorkbenchError as error:
        if args.model is None:
            raise
        print(f"workbench: {error}; lengths are as the workload has them", file=sys.stderr)
        listed = {}
    if args.model is None and len(listed) != 1:
        raise WorkbenchError(f"the server lists {len(listed)} models, {', '.join(listed)}; name one (--model)")
    model = args.model or next(iter(listed))
    return model, listed.get(model) if args.max_length is None else args.max_length


async def _fields(client: Client, model: str, args: argparse.Namespace) -> dict[str, Any]:
    prompt: str | list[int] = WORDS[0] if args.text or args.chat else [_reserved(args)]
    fields = await accepted_fields(client, lambda extra: body_of(model, prompt, 1, chat=args.chat, fields=extra))
    if "ignore_eos" not in fields:
        print("workbench: the server refuses ignore_eos: answers may be shorter than asked for", file=sys.stderr)
    return fields


def _schedule(args: argparse.Namespace, max_length: int | None, rate_per_s: float | None) -> Schedule:
    if args.trace is not None:
        if args.workload is not None or args.arrivals is not None:
            raise WorkbenchError(
                "a trace has its own lengths and times: --trace goes without --workload and --arrivals"
            )
        return from_trace(
            args.trace,
            kind=args.trace_kind,
            num_requests=args.num_requests,
            rate_per_s=rate_per_s,
            max_length=max_length,
            concurrency=args.concurrency,
        )
    asked = workload(args.workload or "ragged")
    if max_length is not None:
        asked = asked.scaled(max_length)
    count = NUM_REQUESTS if args.num_requests is None else args.num_requests
    if args.arrivals == "closed":
        if args.concurrency is None or rate_per_s is not None:
            raise WorkbenchError("a closed loop needs --concurrency K, and takes no --rate")
        return closed_loop(asked, count, args.concurrency, seed=args.seed)
    if args.burstiness_cv is not None and args.arrivals != "gamma":
        raise WorkbenchError("--burstiness-cv is of --arrivals gamma")
    if args.arrivals is not None:
        if rate_per_s is None:
            raise WorkbenchError(f"--arrivals {args.arrivals} needs --rate R")
        gaps = gaps_of(args.arrivals, rate_per_s, GAMMA_CV if args.burstiness_cv is None else args.burstiness_cv)
    else:
        gaps = asked.gaps if rate_per_s is None else asked.at_rate(rate_per_s).gaps
    return open_loop(asked, count, gaps=gaps, seed=args.seed, concurrency=args.concurrency)


@contextlib.contextmanager
def _stopped_by_ctrl_c() -> Iterator[asyncio.Event]:
    """The first Ctrl-C ends the run in good order, the second one at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    heard = threading.current_thread() is threading.main_thread()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        print("workbench: ending; Ctrl-C again ends at once", file=sys.stderr)

    if heard:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        if heard:
            loop.remove_signal_handler(signal.SIGINT)
