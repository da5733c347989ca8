"""Claims about what one has to read: the files through which a request goes, and a prompt through `generate`.

Counted by running: files of which a function is entered from `Engine.add` to the last token of a greedy request, or in
`generate`. Not counted: the model (its forward pass, with all that the kv does in it, and its shape; `Batch` is
counted), what makes a kv or counts its bytes, and checks of what comes from outside (`errors`, `request_checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_decoder, tiny_config

from workbench.generation import generate
from workbench.models.decoder import Decoder
from workbench.serving import Engine, Request, SchedulerSettings

PACKAGE = Path(__file__).parents[2] / "workbench"
PROMPT = tuple(range(1, 30))


def files_entered(run: Callable[[], object]) -> set[Path]:
    """Files of the package with a function that was entered outside of a forward pass."""
    entered: set[Path] = set()
    within = [0]

    def profile(frame, event: str, argument: object) -> None:
        code = frame.f_code
        forward = code.co_name == "forward" and code.co_filename == Decoder.forward.__code__.co_filename
        if event == "call":
            if not within[0] and not forward and Path(code.co_filename).is_relative_to(PACKAGE):
                entered.add(Path(code.co_filename))
            within[0] += forward
        elif event == "return":
            within[0] -= forward

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {file for file in entered if not elsewhere(file)}


def elsewhere(file: Path) -> bool:
    """What is no part of the way: the model, kinds of kv and their common bookkeeping of slots."""
    part, name = file.relative_to(PACKAGE).parts[0], file.name
    kinds = {"__init__.py", "quantized.py", "recompute.py", "slots.py", "paged_store.py"}
    return (
        name in ("errors.py", "request_checks.py")
        or (part == "models" and name != "batch.py")
        or (part == "kv" and name in kinds)
    )


def lines(files: set[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(tiny_config(), seed=1)


def test_a_request_from_add_to_its_last_token_goes_through_ten_files(model):
    engine = Engine(model, SchedulerSettings(max_running=2, token_budget=16), num_blocks=6, block_size=8, graphs=False)

    def serve() -> None:
        for name in ("a", "b", "c"):
            engine.add(Request(name, PROMPT[: 12 if name == "a" else 20], 14))
        while not engine.idle:
            engine.step()

    files = files_entered(serve)
    assert engine.scheduler.preemptions, "the pool is small enough for a preemption"
    assert {"engine.py", "scheduler.py", "sequence.py", "step.py", "sampling.py"} <= {file.name for file in files}
    assert len(files) <= 10 and lines(files) <= 2560, (lines(files), sorted(map(str, files)))


def test_a_prompt_through_generate_without_a_draft_goes_through_seven_files(model):
    files = files_entered(lambda: generate(model, list(PROMPT), max_new_tokens=8))
    assert {"generation.py", "loop.py", "runner.py", "sampling.py"} <= {file.name for file in files}
    assert len(files) <= 7, sorted(map(str, files))
