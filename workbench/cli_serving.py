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

from workbench.errors import WorkbenchError, check_above, check_between
from workbench.files import from_home

if TYPE_CHECKING:
    from workbench.serving.api.settings import ServerSettings
    from workbench.serving.settings import TierSettings

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
    parser.add_argument("--linear", default="auto", help="packed, looped, triton, plain or auto")
    parser.add_argument("--kernels", default="auto", help="torch, triton, c++ or auto")
    parser.add_argument("--compile", action="store_true", help="steps of one row through torch.compile")
    parser.add_argument(
        "--native",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="steps of a few rows as one function in C++, on a CPU (default: where that was measured to be faster)",
    )
    parser.add_argument(
        "--graphs", choices=("auto", "on", "off"), default="auto", help="record and replay decode steps"
    )
    parser.add_argument("--kv", metavar="FORMAT", help="keys and values in int8, fp8 or int4 (default: as computed)")
    parser.add_argument("--attention", default="auto", help="sdpa, eager, blocks, triton or auto")
    parser.add_argument("--blocks", type=int, metavar="N", help="of the pool (default: for max-running whole contexts)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens (default: 16)")
    parser.add_argument("--prefix", choices=("hash", "radix", "none"), default="hash", help="index of the prefix cache")
    parser.add_argument(
        "--host-cache-gib", type=float, default=0.0, metavar="N", help="host memory for blocks that the pool evicts"
    )
    parser.add_argument("--disk-cache", type=Path, metavar="FILE", help="for blocks that host memory evicts, kept")
    parser.add_argument("--disk-cache-gib", type=float, default=0.0, metavar="N", help="size of that file")
    parser.add_argument(
        "--load", choices=("break_even", "always"), default="break_even", help="when evicted blocks are loaded"
    )
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
    here = parser.add_argument_group("for a shipped model on this machine: simulated, then measured")
    here.add_argument("model", metavar="MODEL", nargs="?", help="a shipped model, or a folder")
    here.add_argument("--for", dest="goal", choices=("latency", "throughput", "cost"), help="what it is to be best for")
    here.add_argument("--checked", type=int, metavar="N", help="of the best, on the machine (default: 4)")
    there = parser.add_argument_group("for a shape on a machine that need not be here: simulated from its data sheet")
    there.add_argument(
        "--shape", metavar="NAME", help="a public model, a shipped one, or a folder with its config.json"
    )
    there.add_argument("--machine", metavar="CARD", help="a100, h100, h200")
    there.add_argument("--devices", type=int, metavar="N", help="(default: 1)")
    there.add_argument("--link", metavar="NAME", help="between them: nvlink or pcie (default: nvlink)")
    there.add_argument("--workload", metavar="NAME", help="of lab 08 (default: conversation)")
    there.add_argument("--objective", metavar="NAME", help="goodput, throughput, latency, cost (default: goodput)")
    there.add_argument("--ttft-ms", type=float, metavar="MS", help="of 90 %% of the requests, for goodput and cost")
    there.add_argument("--tpot-ms", type=float, metavar="MS", help="the same (default: TTFT 500 and TPOT 50)")
    there.add_argument(
        "--rate", type=float, metavar="R", help="requests a second, for latency (default: one at a time)"
    )
    there.add_argument("--weights", metavar="A,B", help="to choose from (default: bf16,int8,int4)")
    there.add_argument("--kv", metavar="A,B", help="to choose from (default: bf16,int8)")
    there.add_argument("--bandwidth-share", type=float, metavar="X", help="of the data sheet's (default: 0.7)")
    there.add_argument("--compute-share", type=float, metavar="X", help="of the data sheet's (default: 0.7)")
    there.add_argument("--dollars-per-hour", type=float, metavar="D", help="of a device, for cost")
    there.add_argument("--plans", type=int, metavar="N", help="by the twin, at most, for each answer (default: 6)")
    there.add_argument("--seed", type=int, metavar="N", help="of the requests (default: 0)")
    parser.add_argument("--requests", type=int, metavar="N", help="in each run (default: 48; for a shape 192)")


HERE_ONLY = ("model", "goal", "checked")
THERE_ONLY = (
    *("machine", "devices", "link", "workload", "objective", "ttft_ms", "tpot_ms", "rate", "weights", "kv"),
    *("bandwidth_share", "compute_share", "dollars_per_hour", "plans", "seed"),
)


def choose(args: argparse.Namespace) -> int:
    """For a shape, or for a model on this machine; settings of the other are refused."""
    others = HERE_ONLY if args.shape is not None else THERE_ONLY
    wrong = next((name for name in others if getattr(args, name) is not None), None)
    if wrong is not None:
        given = {"model": "MODEL", "goal": "--for"}.get(wrong, f"--{wrong.replace('_', '-')}")
        raise WorkbenchError(
            f"{given} is for a model on this machine, and --shape for one that is not here; give one of them"
            if args.shape is not None
            else f"{given} goes with --shape, a model on a machine that need not be here; give --shape NAME"
        )
    if args.shape is not None:
        return _choose_there(args)
    if args.model is None:
        raise WorkbenchError("nothing to choose for: give MODEL --for GOAL, or --shape NAME --machine CARD")
    if args.goal is None:
        raise WorkbenchError("what is it to be best for? Give --for latency, throughput or cost")
    return _choose_here(args)


def _choose_here(args: argparse.Namespace) -> int:
    """Simulate all configurations, check the best on this machine, and print what to start the server with."""
    from workbench.experiments import run_experiment
    from workbench.instruments.bench import Bench

    asked = {
        "model": args.model,
        "goal": args.goal,
        "requests": _or(args.requests, 48),
        "checked": _or(args.checked, 4),
    }
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


def _choose_there(args: argparse.Namespace) -> int:
    """Print the best configuration of a shape on a machine by data sheet, its runner-up, and why."""
    from workbench.choosing import Asked, Effort, Space, choose, machine, report
    from workbench.experiments.inputs import shape_of
    from workbench.serving.load import workload

    if args.machine is None:
        raise WorkbenchError("--shape needs a machine: give --machine a100, h100 or h200, and --devices N")
    shares = {"bandwidth_share": args.bandwidth_share, "compute_share": args.compute_share}
    on = machine(
        args.machine,
        _or(args.devices, 1),
        _or(args.link, "nvlink"),
        **{name: share for name, share in shares.items() if share is not None},
    )
    objective, named = _or(args.objective, "goodput"), _or(args.workload, "conversation")
    asked = Asked(workload(named), objective, _limits(args, objective), args.rate, _or(args.seed, 0))
    dollars = args.dollars_per_hour
    if dollars is not None and (objective != "cost" or check_above("--dollars-per-hour", dollars, 0) <= 0):
        raise WorkbenchError(f"--dollars-per-hour goes with --objective cost, and not with {objective}")
    of = {"weights": args.weights, "kv": args.kv}
    space = Space(**{name: tuple(given.split(",")) for name, given in of.items() if given is not None})
    sizes = {"requests": args.requests, "job": args.requests, "plans": args.plans}
    effort = Effort(**{name: size for name, size in sizes.items() if size is not None})
    shape = shape_of(args.shape)
    made = choose(
        shape,
        on,
        asked,
        name=args.shape,
        space=space,
        effort=effort,
        say=lambda words: print("  ", words, file=sys.stderr),
    )
    for line in report.lines(made, args.shape, named):
        print(line)
    if dollars is not None:
        print(
            f"  {made.best.score / 3600 * dollars:,.4g} dollars per million new tokens at {dollars:g} dollars an hour"
        )
    print()
    report.print_rows(report.HEADER, report.rows(made))
    for head, lines in (("refused:", report.refused(made)), ("how sure:", report.sure(made))):
        for at, line in enumerate(lines):
            print(f"\n{head}\n  {line}" if not at else f"  {line}")
    return 0


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def _limits(args: argparse.Namespace, objective: str) -> Any:
    """Of TTFT and TPOT, for the objectives that have some."""
    from workbench.choosing import LIMITED, Objectives

    given = {"ttft_s": ("--ttft-ms", args.ttft_ms), "tpot_s": ("--tpot-ms", args.tpot_ms)}
    limits = {name: check_above(flag, ms, 0) / 1e3 for name, (flag, ms) in given.items() if ms is not None}
    if objective not in LIMITED:
        return Objectives(**limits) if limits else None
    return Objectives(**(limits or {"ttft_s": 0.5, "tpot_s": 0.05}))


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
    tiers = _tiers(args)
    graphs = {"auto": "auto", "on": True, "off": False}[args.graphs]

    def make() -> Engine:
        model = load(args.model, weights="random" if args.random else "trained", dtype=args.dtype, device=args.device)
        arranged: dict[str, Any] = {"weights": args.weights, "linear": args.linear, "kernels": args.kernels}
        arranged |= {"compile": args.compile, "native": args.native, "graphs": graphs}
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
            draft=_draft(args.draft, args.native),
            draft_length=length,
            attention=args.attention,
            asynchronous=args.asynchronous,
            tiers=tiers,
        )

    return make


def _tiers(args: argparse.Namespace) -> TierSettings | None:
    """None where no tier below the pool was asked for."""
    from workbench.serving.settings import TierSettings

    if not args.host_cache_gib and args.disk_cache is None and not args.disk_cache_gib:
        if args.load != "break_even":
            raise WorkbenchError(f"--load {args.load} is about tiers; give --host-cache-gib or --disk-cache, too")
        return None
    sizes = {"--host-cache-gib": args.host_cache_gib, "--disk-cache-gib": args.disk_cache_gib}
    host_bytes, disk_bytes = (int(check_between(name, size, 0, 2**20) * 2**30) for name, size in sizes.items())
    path = None if args.disk_cache is None else from_home(args.disk_cache)
    return TierSettings(host_bytes=host_bytes, disk_path=path, disk_bytes=disk_bytes, load=args.load)


def _draft(name: str | None, native: bool | str) -> Any:
    """A shipped model by its name, arranged by itself where its layers can be, its steps as asked of the target's;
    other names are drafts that need no model."""
    from workbench.models import load, prepare
    from workbench.models.checkpoints import zoo_names

    if name not in zoo_names():
        return name
    model = load(name)
    return model if model.config.state_layers else prepare(model, native=native)


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
