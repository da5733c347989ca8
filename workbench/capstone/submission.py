"""What is handed in: a folder with `submission.json`, perhaps `own.py`, and in the open track perhaps `weights/`.

    {"track": "cost", "predicted_tokens_per_s": 410, "max_running": 32, "draft": "stdlib-1m-pruned", "draft_length": 3}

Every switch of the engine is a key; one that is left out has the engine's default. The folder is untrusted: no link, no
pickle, no key that is not known, nothing larger than it may be.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from workbench.capstone.rules import MAX_SOURCE_BYTES
from workbench.capstone.tracks import Track, track_named
from workbench.errors import WorkbenchError, check_between, check_flag, check_settings, check_whole, shown, unknown
from workbench.serving.settings import SchedulerSettings

FILE, OWN, WEIGHTS = "submission.json", "own.py", "weights"
MAX_FILE_BYTES = 64 << 10
MAX_WEIGHT_BYTES = 128 << 20
DRAFTS = ("prompt_lookup", "ngram", "phrases", "lookahead", "self-int4", "own")
PREFIXES = ("hash", "radix", "none")
OF_THE_SCHEDULER = ("max_running", "token_budget", "chunk", "aging_s", "preemption", "watermark", "batching")


@dataclass(frozen=True)
class Submission:
    """The switches. model: a shipped model's name, or "weights" for the folder's own; weights, kv: formats of few bits;
    blocks: of the pool, None for as many as the track's budget has room for. policy, scheduler, draft: "own" for
    own.py. host_cache_bytes: a tier below the pool, inside the budget."""

    track: str
    predicted_tokens_per_s: float | None = None
    model: str = "stdlib-10m"
    weights: str | None = None
    kv: str | None = None
    attention: str = "auto"
    blocks: int | None = None
    block_size: int = 16
    prefix: str = "hash"
    draft: str | None = None
    draft_length: int | str | None = None
    asynchronous: bool = False
    host_cache_bytes: int = 0
    scheduler: str = "course"
    max_running: int = 16
    token_budget: int = 512
    chunk: int | None = None
    policy: str = "first_come"
    aging_s: float | None = None
    preemption: str = "recompute"
    watermark: float = 0.01
    batching: str = "continuous"
    own_source: str = ""
    weights_folder: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        track = track_named(self.track)
        if self.predicted_tokens_per_s is not None:
            check_between("predicted_tokens_per_s", self.predicted_tokens_per_s, 0.01, 1e7)
        for name in ("model", "attention", "prefix", "scheduler", "policy"):
            if not isinstance(getattr(self, name), str):
                raise WorkbenchError(f"{name} must be a text, got {getattr(self, name)!r:.80}")
        for name, known in (("prefix", PREFIXES), ("scheduler", ("course", "own"))):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        check_whole("block_size", self.block_size, 1)
        check_whole("host_cache_bytes", self.host_cache_bytes, 0)
        check_flag("asynchronous", self.asynchronous)
        if self.blocks is not None:
            check_whole("blocks", self.blocks, 1)
        if not track.max_nats and self.model != track.model:
            raise WorkbenchError(
                f"track {track.name!r} serves {track.model!r}, and model is {self.model!r:.80}; other models are for"
                " the track 'open'"
            )
        self._check_draft()
        self._check_own()
        self.settings()

    def _check_draft(self) -> None:
        from workbench.models.checkpoints import zoo_names

        if self.draft is not None and self.draft not in (*DRAFTS, *zoo_names()):
            raise unknown("draft", self.draft, (*DRAFTS, *zoo_names()))
        if self.draft is None and self.draft_length is not None:
            raise WorkbenchError(f"draft_length={self.draft_length!r} has no effect without a draft; leave it out")
        if isinstance(self.draft_length, int):
            check_whole("draft_length", self.draft_length, 1)

    def _check_own(self) -> None:
        if self.wants_own and not self.own_source:
            raise WorkbenchError(f"the submission says {self.wants_own[0]} is its own, and it has no {OWN}; add it")
        if self.scheduler == "own" and self.policy != "first_come":
            raise WorkbenchError("policy is of the course's scheduler, and the scheduler is your own; leave policy out")

        if self.scheduler == "own" and self.draft is not None:
            raise WorkbenchError(
                "a scheduler of your own plans no drafted tokens; leave the draft out, or the scheduler"
            )

    @property
    def wants_own(self) -> list[str]:
        """Which of policy, scheduler and draft are own.py's."""
        return [name for name in ("policy", "scheduler", "draft") if getattr(self, name) == "own"]

    @property
    def draft_rows(self) -> int:
        """Drafted tokens that a step plans for each sequence."""
        if self.draft is None:
            return 0
        return self.draft_length if isinstance(self.draft_length, int) else 8 if self.draft_length else 4

    def settings(self, policy: Any = None) -> SchedulerSettings:
        """Of the engine. policy: the function, where it is own.py's. Raises WorkbenchError for values out of range."""
        given = {name: getattr(self, name) for name in OF_THE_SCHEDULER}
        chosen = policy if policy is not None else "first_come" if self.policy == "own" else self.policy
        remember = self.prefix != "none"
        return SchedulerSettings(**given, policy=chosen, draft_tokens=self.draft_rows, remember=remember)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


SWITCHES = [field.name for field in fields(Submission) if field.name not in ("own_source", "weights_folder", "digest")]


def baseline(track: Track) -> Submission:
    """What a submission to this track is compared with."""
    return Submission(track=track.name, model=track.model, digest="baseline", **track.baseline)


def read_submission(folder: Path) -> Submission:
    """Of a folder. Runs nothing in it. Raises WorkbenchError, naming the file, for whatever it should not be."""
    folder = Path(folder)
    if not folder.is_dir():
        raise WorkbenchError(f"there is no folder {folder}; a submission is a folder with {FILE}")
    names = sorted(os.listdir(folder))
    if FILE not in names:
        raise WorkbenchError(f'{folder} has no {FILE}; write one, such as {{"track": "cost"}}')
    given = _object(_bytes_of(folder / FILE, MAX_FILE_BYTES))
    check_settings(FILE, given, SWITCHES)
    if "track" not in given:
        raise WorkbenchError(f"{FILE} names no track; add one of memory, latency, cost, open")
    own = _text(_bytes_of(folder / OWN, MAX_SOURCE_BYTES), OWN) if OWN in names else ""
    weights = ""
    if given.get("model") == WEIGHTS:
        _check_weights(folder / WEIGHTS)
        weights = str((folder / WEIGHTS).absolute())
    made = _made({**given, "own_source": own, "weights_folder": weights})
    return replace(made, digest=_digest(folder, [FILE, *([OWN] if own else [])], weights))


def _made(given: dict[str, Any]) -> Submission:
    try:
        return Submission(**given)
    except TypeError as error:
        raise WorkbenchError(f"{FILE} has a value of a wrong kind: {error}") from error


def _bytes_of(path: Path, limit: int) -> bytes:
    """A plain file's content; no link, no device, no pipe."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise WorkbenchError(f"{path.name} must be a plain file: no link, folder or device; copy what it points to")
        if status.st_size > limit:
            raise WorkbenchError(f"{path.name} has {status.st_size:,} bytes, and {limit:,} are allowed")
        return path.read_bytes()
    except OSError as error:
        raise WorkbenchError(f"cannot read {path.name}: {error.strerror or error}") from error


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WorkbenchError(f"{name} is no UTF-8 text: {error}") from error


def _object(content: bytes) -> dict[str, Any]:
    try:
        given = json.loads(_text(content, FILE), parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise WorkbenchError(f"{FILE} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise WorkbenchError(f'{FILE} must be an object such as {{"track": "cost"}}, got {type(given).__name__}')
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(shown(name) for name in names if names.count(name) > 1)} is there twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _check_weights(folder: Path) -> None:
    """Plain files of a checkpoint in safetensors, of at most MAX_WEIGHT_BYTES together."""
    if folder.is_symlink() or not folder.is_dir():
        raise WorkbenchError(f'model is "{WEIGHTS}", and the submission has no folder {WEIGHTS}/ with a checkpoint')
    total = 0
    for entry in os.scandir(folder):
        if not entry.is_file(follow_symlinks=False):
            raise WorkbenchError(f"{WEIGHTS}/{entry.name} must be a plain file: no link, no folder; copy it")
        if not entry.name.endswith((".json", ".safetensors")):
            raise WorkbenchError(
                f"{WEIGHTS}/{entry.name} is neither .json nor .safetensors; other files (pickles above all) are not"
                " read, so leave it out"
            )
        total += entry.stat(follow_symlinks=False).st_size
    if total > MAX_WEIGHT_BYTES:
        raise WorkbenchError(f"{WEIGHTS}/ has {total:,} bytes, and {MAX_WEIGHT_BYTES:,} are allowed")


def _digest(folder: Path, names: list[str], weights: str) -> str:
    """SHA-256 of names and contents."""
    digest = hashlib.sha256()
    files = [folder / name for name in names]
    files += sorted(Path(weights).iterdir()) if weights else []
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
