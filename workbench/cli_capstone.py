"""`workbench capstone`: start a submission, try it, predict, judge, and read the board."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError, in_one_line
from workbench.files import from_home, user_folder

if TYPE_CHECKING:
    from workbench.capstone.submission import Submission
    from workbench.capstone.tracks import Track


def add_capstone_command(command: Any) -> None:
    """`workbench capstone` with its parts, by `command(name, run, words, among)` of `workbench.cli.make_parser`."""
    capstone = command("capstone", None, "serve a trace under a budget: begin, try, predict, judge, compare")
    parts = capstone.add_subparsers(metavar="PART", required=True)

    def part(name: str, run: Any, words: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = command(name, run, words, parts)
        return made

    new = part("new", run_new, "write a folder with the baseline of a track, to begin with")
    new.add_argument("track", metavar="TRACK", help="memory, latency, cost or open")
    new.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")

    run = part("run", run_practice, "counts of a practice trace beside the baseline's; are the answers right?")
    run.add_argument("folder", type=Path, metavar="FOLDER")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the practice trace (default: 0)")
    run.add_argument("--json", action="store_true")

    predict = part("predict", run_predict, "what the timed runs will come to on this machine, by its own step times")
    predict.add_argument("folder", type=Path, metavar="FOLDER")

    judge = part("judge", run_judge, "all gates, counts and pairs; writes a record for the board")
    judge.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="submissions, one after the other")
    judge.add_argument("--seed", type=int, metavar="N", help="of the traces; no rank (default: drawn)")
    judge.add_argument("--pairs", type=int, metavar="N", help="of timed runs (default: 5, which a rank needs)")
    judge.add_argument("--board", type=Path, metavar="FOLDER", help="for the record (default: your own board)")

    board = part("board", run_board, "records by track and machine")
    board.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="(default: your own board)")
    board.add_argument("--json", action="store_true")


def own_board() -> Path:
    """Where records go that name no board."""
    return user_folder("data") / "capstone"


def run_new(args: argparse.Namespace) -> int:
    from workbench.capstone.submission import FILE
    from workbench.capstone.tracks import track_named
    from workbench.files import write_text

    track, folder = track_named(args.track), from_home(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkbenchError(f"{folder} is there already; name a new folder, or an empty one")
    write_text(folder / FILE, json.dumps({"track": track.name, **track.baseline}, indent=2) + "\n")
    print(f"{folder / FILE}: the baseline of track {track.name}. {track.question}")
    print(f"next: change a switch, then `workbench capstone run {args.folder}`")
    return 0


def _read(folder: Path) -> tuple[Submission, Track]:
    from workbench.capstone.submission import read_submission
    from workbench.capstone.tracks import track_named

    submission = read_submission(from_home(folder))
    return submission, track_named(submission.track)


def run_practice(args: argparse.Namespace) -> int:
    """0; 1 where a gate fails."""
    from workbench.capstone.practice import practice

    submission, track = _read(args.folder)
    tried = practice(submission, track, seed=f"practice/{args.seed}")
    if args.json:
        print(json.dumps(tried.plain(), indent=2))
    else:
        print(tried.in_words())
    return int(any(not one.passed for one in tried.gates))


def run_predict(args: argparse.Namespace) -> int:
    from workbench.capstone.predict import predict

    submission, track = _read(args.folder)
    predicted = predict(submission, track)
    print(f"{predicted.tokens_per_s:.0f} tokens/s within the objectives, predicted for this machine by its steps")
    constants = {name: value for name, value in predicted.rates.items() if value}
    said = ", ".join(f"{name.removesuffix('_s')} {1e6 * value:.3g} µs" for name, value in constants.items())
    print(f"by {predicted.steps} steps of two practice traces: {said}")
    print(f"the predicted run's own steps took {predicted.measured_tokens_per_s:.0f} tokens/s")
    low, *_, high = predicted.rehearsed_tokens_per_s
    print(
        f"rehearsed as the judge times it: {predicted.median_tokens_per_s:.0f} tokens/s, the median of"
        f" {len(predicted.rehearsed_tokens_per_s)} practice traces ({low:.0f} to {high:.0f})"
    )
    print(f'put it into submission.json: "predicted_tokens_per_s": {predicted.median_tokens_per_s:.0f}')
    return 0


def run_judge(args: argparse.Namespace) -> int:
    """0; 1 where a submission failed a gate. One that cannot be judged does not keep others from it."""
    from workbench.capstone import board
    from workbench.capstone.judge import judge
    from workbench.capstone.score import MIN_PAIRS

    folder = own_board() if args.board is None else from_home(args.board)
    failed = 0
    for one in args.folders:
        try:
            record = judge(
                from_home(one),
                seed=args.seed,
                pairs=MIN_PAIRS if args.pairs is None else args.pairs,
                report=lambda words: print("  ", words, file=sys.stderr, flush=True),
            )
        except Exception as error:  # a fault of the judge's own, too, is of this submission alone
            kind = "" if isinstance(error, WorkbenchError) else f"{type(error).__name__}: "
            print(f"{one}: not judged: {in_one_line(f'{kind}{error}')}")
            failed += 1
            continue
        wrong = [gate for gate in record["gates"] if not gate["passed"]]
        failed += bool(wrong)
        said = f"; FAILED {wrong[0]['gate']}: {wrong[0]['words']}" if wrong else ""
        print(f"{record['name']}: {record['total']:.1f} of 100 ({record['points']:.1f} points by counts){said}")
        print(f"  record: {board.save(record, folder)}")
    return int(failed > 0)


def run_board(args: argparse.Namespace) -> int:
    """0; 1 where a file of the folder is no untouched record."""
    from workbench.capstone import board

    records = board.read_board(own_board() if args.folder is None else from_home(args.folder))
    if args.json:
        print(json.dumps([vars(row) for row in records.rows], indent=2))
    else:
        print(board.in_words(records))
    for name, why in records.broken if args.json else ():
        print(f"left out: {name} {why}", file=sys.stderr)
    return int(bool(records.broken))
