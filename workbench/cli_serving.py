"""`workbench serve`: its options, and the engine and server that they make. Every switch of the engine is here. And
`workbench choose`, which says which of them are best here.

The options are read without torch, so that `workbench --help` is quick.
"""

from __future__ import annotations

import argparse
import ipaddress
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.files import from_home

if TYPE_CHECKING:
    from workbench.serving.api.settings import ServerSettings

LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the model, the engine, the scheduler, and the server."""
    parser.add_argument("model", metavar="MODEL", help="a shipped model, a folder, or a public shape with --random")
    parser.add_argument("--host", default="127.0.0.1", help="another than loopback asks for --api-key-file")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line; clients send one as Bearer")
    parser.add_argument("--name", help="of the model, for clients (default: its own)")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda" (default: cpu)')
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as load chooses)")
    parser.add_argument("--random", action="store_true", help="random weights, for a public shape")
    parser.add_argument("--weights", help="int8, int4 … (default: as they are)")
    parser.add_argument("--linear", default="auto", help="packed, triton, plain or auto")
    parser.add_argument("--kernels", default="auto", help="torch, triton or auto")
    parser.add_argument("--compile", action="store_true", help="steps of one row through torch.compile")
    parser.add_argument(
        "--graphs", choices=("auto", "on", "off"), default="auto", help="record and replay decode steps"
    )
    parser.add_argument("--kv", metavar="FORMAT", help="keys and values in int8, fp8 or int4 (default: as computed)")
    parser.add_argument("--attention", default="auto", help="sdpa, eager, blocks, triton or auto")
    parser.add_argument("--blocks", type=int, metavar="N", help="of the pool (default: for max-running whole contexts)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens (default: 16)")
    parser.add_argument("--prefix", choices=("hash", "radix", "none"), default="hash", help="index of the prefix cache")
    parser.add_argument("--draft", help="a model's name, or prompt_lookup, ngram, eagle, … as of generate")
    parser.add_argument("--draft-length", metavar="K", help="tokens a round, or a policy's name (default: 4)")
    parser.add_argument("--asynchronous", action="store_true", help="schedule one step ahead")
    parser.add_argument("--max-running", type=int, default=64, metavar="N", help="sequences at a time (default: 64)")
    parser.add_argument("--token-budget", type=int, default=512, metavar="N", help="rows of a step (default: 512)")
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens of one prompt in a step at most")
    parser.add_argument("--policy", default="first_come", help="first_come, shortest_remaining, priority or deadline")
    parser.add_argument("--aging", type=float, metavar="S", help="seconds of waiting that count as one level")
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute")
    parser.add_argument("--batching", choices=("continuous", "static"), default="continuous")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="steps and requests, for Perfetto")
    parser.add_argument("--engine-process", action="store_true", help="the engine in a process of its own")
    parser.add_argument("--engine-at", help=argparse.SUPPRESS)  # be that process, for a server with sockets there
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of one text (default: what the context leaves)")
    parser.add_argument("--max-queued-requests", type=int, metavar="N")
    parser.add_argument("--max-queued-tokens", type=int, metavar="N")
    parser.add_argument("--ttft-slo-ms", type=float, metavar="MS", help="a deadline for requests without one")
    parser.add_argument("--no-early-rejection", action="store_true", help="let in whose deadline cannot be kept")
    parser.add_argument("--max-connections", type=int, metavar="N")
    parser.add_argument("--max-body-bytes", type=int, metavar="N")
    parser.add_argument("--drain-seconds", type=float, metavar="S", help="that running requests have after SIGTERM")


def add_choose_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a shipped model, or a folder")
    parser.add_argument(
        "--for", dest="goal", choices=("latency", "throughput", "cost"), required=True, help="what it is to be best for"
    )
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="in each run (default: 48)")
    parser.add_argument("--checked", type=int, default=4, metavar="N", help="of the best, on the machine (default: 4)")


def choose(args: argparse.Namespace) -> int:
    """Simulate all configurations, check the best on this machine, and print what to start the server with."""
    from workbench.experiments import run_experiment
    from workbench.instruments.bench import Bench

    asked = {"model": args.model, "goal": args.goal, "requests": args.requests, "checked": args.checked}
    bench = Bench(report=lambda *words: print("  ", *words, file=sys.stderr))
    made = run_experiment("server.choose", asked, bench)
    machine = [one for one in made if one.settings["measured"] == "machine"]
    print(f"{len(made) - len(machine)} configurations for {args.goal} were simulated; measured on this machine:")
    for one in machine:
        away = (
            f"{one.counts['worse_than_best']:.1%} worse than the best" if one.counts["worse_than_best"] else "the best"
        )
        print(
            f"  {one.median:10.4g} {one.unit}  (predicted {one.predicted:.4g}; place {one.counts['place']:.0f}),"
            f" {away}:  {one.settings['options']}"
        )
    best = min(machine, key=lambda one: one.counts["worse_than_best"])
    print(f"workbench serve {args.model} {best.settings['options']}")
    return 0


LIMITS = (
    "max_body_bytes",
    "max_tokens",
    "max_queued_requests",
    "max_queued_tokens",
    "max_connections",
    "drain_seconds",
)


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """What was not given is as `ServerSettings` has it."""
    from workbench.serving.api.settings import ServerSettings

    given = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    if args.ttft_slo_ms is not None:
        given["ttft_slo_s"] = args.ttft_slo_ms / 1e3
    return ServerSettings(early_rejection=not args.no_early_rejection, **given)


def engine_maker(args: argparse.Namespace) -> Callable[[], Any]:
    """A function that loads the model and makes the engine. What can be checked without the model is checked now."""
    from workbench.models import load
    from workbench.quantization.prepared import prepare
    from workbench.serving.engine import Engine
    from workbench.serving.settings import SchedulerSettings

    length: Any = args.draft_length
    if length is not None and length.isdigit():
        length = int(length)
    rows = length if isinstance(length, int) else 8 if length is not None else 4
    settings = SchedulerSettings(
        max_running=args.max_running,
        token_budget=args.token_budget,
        chunk=args.chunk,
        policy=args.policy,
        aging_s=args.aging,
        preemption=args.preemption,
        batching=args.batching,
        draft_tokens=0 if args.draft is None else rows,
        remember=args.prefix != "none",
    )
    graphs = {"auto": "auto", "on": True, "off": False}[args.graphs]

    def make() -> Engine:
        model = load(args.model, weights="random" if args.random else "trained", dtype=args.dtype, device=args.device)
        arranged: dict[str, Any] = {"weights": args.weights, "linear": args.linear, "kernels": args.kernels}
        arranged |= {"compile": args.compile, "graphs": graphs}
        # nothing arranges layers that keep a state; what was asked for beyond the defaults is refused there
        as_loaded = model.config.state_layers and set(arranged.values()) <= {None, "auto", False}
        prepared = model if as_loaded else prepare(model, **arranged)
        return Engine(
            prepared,
            settings,
            num_blocks=args.blocks,
            block_size=args.block_size,
            prefix=None if args.prefix == "none" else args.prefix,
            format=args.kv,
            draft=_draft(args.draft),
            draft_length=length,
            attention=args.attention,
            asynchronous=args.asynchronous,
        )

    return make


def _draft(name: str | None) -> Any:
    """A shipped model by its name; other names are drafts that need none."""
    from workbench.models import load
    from workbench.models.checkpoints import zoo_names

    return load(name) if name in zoo_names() else name


def on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def names_of(host: str) -> tuple[str, ...]:
    """What clients of a server on loopback may call it: loopback's names, and the one it was started with."""
    from workbench.serving.api.http import LOOPBACK

    return (*LOOPBACK, host.lower(), f"[{host.lower()}]")


def read_keys(file: Path | None, host: str) -> list[str] | None:
    """Raises WorkbenchError for a file without a key, and for an open address without a file."""
    if file is None:
        if not on_loopback(host):
            raise WorkbenchError(
                f"--host {host} is open to others than this machine; give --api-key-file FILE with a key a line, or"
                " stay on 127.0.0.1"
            )
        return None
    file = from_home(file)
    try:
        keys = [line.strip() for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise WorkbenchError(f"{file} is no text with a key a line: {error}") from error
    if not keys:
        raise WorkbenchError(f"{file} has no key; write one a line, each of at least 8 characters")
    return keys


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code."""
    if args.engine_at is not None:
        return _engine_alone(args)
    from workbench.serving.api.app import build_app
    from workbench.serving.api.serve import listening, serve
    from workbench.serving.api.trace import trace_to

    settings, keys = settings_of(args), read_keys(args.api_key_file, args.host)
    make = _process(args) if args.engine_process else engine_maker(args)
    at = listening(args.host, args.port)
    with trace_to(None if args.trace is None else from_home(args.trace)) as trace:
        hosts = names_of(args.host) if keys is None else None
        app = build_app(make, name=args.name, settings=settings, keys=keys, hosts=hosts, trace=trace)
        host, port = at.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{port}/v1  (the model is being loaded; /ready says when it is)", flush=True)
        code = serve(app, settings, at)
    if app.why_not_loaded is not None:
        print(f"workbench: error: {app.why_not_loaded}", file=sys.stderr)
    return code


def _process(args: argparse.Namespace) -> Callable[[], Any]:
    """The engine of these options in a process of its own."""
    engine_maker(args)  # says what is wrong with them at once

    def make() -> Any:
        from workbench.serving.api.process import EngineProcess

        return EngineProcess([sys.executable, "-m", "workbench.cli", *args.argv, "--engine-at"])

    return make


def _engine_alone(args: argparse.Namespace) -> int:
    from workbench.serving.api.process import serve_engine

    for one in (signal.SIGINT, signal.SIGTERM):  # of a terminal or of systemd, which signal the server's whole group
        signal.signal(one, signal.SIG_IGN)  # the server drains, and then says when to stop
    return serve_engine(engine_maker(args), args.engine_at)
