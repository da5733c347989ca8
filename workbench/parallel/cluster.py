"""A cluster: processes that each have a shard of a model, led by rank 0.

    with Cluster(2) as cluster:
        model = cluster.load("stdlib-10m", tensor=2)
        generate(model, "def ", kv="paged")          # or Engine(model)

Rank 0 tells what is done next, one message of JSON a command; the others do it and listen again. A command names a
model, and brings the notes of what rank 0's kvs did since the last one (`mirror`).
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError, check_path, unknown
from workbench.models.assembly import hollow_decoder
from workbench.models.checkpoints import ZOO, read_config, shipped_tokenizer, stored_parameters, zoo_names
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.tokenizer import Tokenizer
from workbench.parallel.alpha_beta import SIZES, AlphaBeta, check_measures, measure
from workbench.parallel.backends import make_collectives
from workbench.parallel.collectives import Collectives, Count, Span
from workbench.parallel.mirror import Followers, batch_of
from workbench.parallel.pipeline import Progress
from workbench.parallel.ranks import Rank, Ranks, start_ranks
from workbench.parallel.shard import Layout, Link, Shard, Unbroken


class Cluster:
    """`size` processes, this one among them as rank 0. A context; at its end the others have ended.

    backend: of the collectives, "shm", "gloo" or "nccl". Other settings: see `start_ranks`.
    Raises WorkbenchError as `start_ranks` and `make_collectives` do. When a rank ends, whatever is under way raises
    RankLost and names it, and the cluster is of no use any more. So it is after an interrupt in the middle of what all
    ranks do together. One that nobody refers to any more ends its processes; a fork of this process cannot use it.
    """

    def __init__(self, size: int, *, backend: str = "shm", port: int = 0, threads: int = 1, timeout_s: float = 300.0):
        self.size, self.backend = size, backend
        self.ranks = start_ranks(size, follow, backend, port=port, threads=threads, timeout_s=timeout_s)
        try:
            self.world: Collectives = make_collectives(self.ranks.rank, backend=backend)
        except BaseException:
            self.ranks.stop(within_s=0)
            raise
        self._models = self._bytes_before = 0
        self._open = True
        self._process = os.getpid()
        self._forgotten = weakref.finalize(self, _end_forgotten, self.ranks)
        self._forgotten.atexit = False  # then multiprocessing ends them

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(within_s=0.0 if kind else 5.0)

    def close(self, within_s: float = 5.0) -> None:
        """May be called twice."""
        if self._open and os.getpid() == self._process:
            self._open = False
            self._forgotten.detach()
            if not self.ranks.rank.failed:
                self._tell({"do": "stop"})
            self.ranks.stop(within_s)
            self.world.close()

    def load(
        self,
        model: Decoder | str | os.PathLike[str],
        *,
        tensor: int = 1,
        pipeline: int = 1,
        attention: str = "heads",
        groups: int = 1,
        dtype: torch.dtype | None = None,
        prepare: bool = False,
    ) -> Shard:
        """Rank 0's shard of a model that lies on tensor · pipeline ranks: a model for `generate` and the engine.

        model: a Decoder, whose parts are sent; or the name of a shipped model or a folder, which each rank reads for
        itself, keeping its part of one tensor after the other. attention: divided by heads, or "whole" on each rank, so
        that feed-forwards and experts alone are divided. groups: in which a step goes through the pipeline.
        prepare: each part is arranged for inference, as `models.fast.prepare` does.
        Raises WorkbenchError, before anything is sent, for a model that cannot be divided so, and for a number of ranks
        that is not this cluster's.
        """
        if not isinstance(model, Decoder):
            folder = _folder_of(model)
            layout = self._layout(read_config(folder), tensor, pipeline, attention, folder.name, prepare)
            with self._unbroken("loading a model"):
                return self._load_folder(folder, layout, groups, dtype, prepare)
        _check_whole_model(model)
        layout = self._layout(model.config, tensor, pipeline, attention, model.name, prepare)
        with self._unbroken("loading a model"):
            return self._load_whole(model, layout, groups, prepare)

    def _load_whole(self, model: Decoder, layout: Layout, groups: int, prepare: bool) -> Shard:
        shard = self._make(
            layout,
            model.name,
            model.tokenizer,
            groups,
            {"dtype": str(model.dtype).split(".")[1]} | {"prepare": prepare},
        )
        with torch.no_grad():
            for name, whole in model.named_parameters():
                for own, part in layout.parts_of(0, name, whole.detach()):
                    shard.put(own, part.to(self.world.device))
                for rank in range(1, self.size):
                    for _, part in layout.parts_of(rank, name, whole.detach()):
                        self.world.send(part.to(self.world.device), rank)
        shard.ready(self.world.device)
        self.world.barrier()
        return _began(shard, prepare)

    def _load_folder(
        self, folder: Path, layout: Layout, groups: int, dtype: torch.dtype | None, prepare: bool
    ) -> Shard:
        tokenizer = Tokenizer.from_folder(folder) or (shipped_tokenizer() if folder.parent == ZOO else None)
        type_ = None if dtype is None else str(dtype).split(".")[1]
        shard = self._make(
            layout, folder.name, tokenizer, groups, {"folder": str(folder), "dtype": type_, "prepare": prepare}
        )
        shard.fill_from(stored_parameters(folder, dtype), self.world.device)
        digests = self.world.gather(_digest_of(folder).to(self.world.device))
        assert digests is not None, "rank 0 gathers"
        for rank, digest in enumerate(digests):
            if not torch.equal(digest, digests[0]):
                self.ranks.fail(f"rank {rank} has other weights in {folder} than rank 0")
                raise WorkbenchError(
                    f"rank {rank} has other weights in {folder} than rank 0; ranks compute parts of one model, so give "
                    "all the same files"
                )
        return _began(shard, prepare)

    def _layout(
        self, config: ModelConfig, tensor: int, pipeline: int, attention: str, name: str, prepare: bool
    ) -> Layout:
        layout = Layout.checked(config, tensor, pipeline, name, attention)
        if prepare and config.experts is not None:
            raise WorkbenchError(
                f"{name} has experts, and on several ranks these are not arranged for inference; leave out prepare"
            )
        if layout.ranks != self.size:
            raise WorkbenchError(
                f"tensor={tensor} and pipeline={pipeline} take {layout.ranks} ranks, and this cluster has {self.size}; "
                "make a cluster of as many"
            )
        return layout

    def _make(self, layout: Layout, name: str, tokenizer: Tokenizer | None, groups: int, how: dict[str, Any]) -> Shard:
        self._models += 1
        number = self._models
        self._tell(
            {"do": "load", "model": number, "config": layout.config.to_dict(), "name": name, **how}
            | {"tensor": layout.tensor, "pipeline": layout.pipeline, "attention": layout.attention}
        )
        shard = _shard(layout, self.world, number, name, tokenizer)
        shard.link, shard.groups = Link(number, self._tell, self.ranks.fail), groups
        return shard

    def unload(self, model: Shard) -> None:
        """The other ranks forget a model and its kvs."""
        with _link(model).unbroken():
            _link(model).tell({"do": "unload"})
            _close(model)

    def report(self, model: Shard) -> list[Report]:
        """What each rank did for this model since the last report, or since it was loaded."""
        with _link(model).unbroken():
            _link(model).tell({"do": "report"})
            message = self.world.counts["tell"].bytes - self._bytes_before
            made = [_report(model, Count(-1, -message), "tell")]
            for rank in range(1, self.size):
                size = self.world.receive(torch.zeros(1, dtype=torch.int64, device=self.world.device), rank)
                text = torch.empty(int(size.item()), dtype=torch.uint8, device=self.world.device)
                made.append(Report.from_json(bytes(self.world.receive(text, rank).tolist())))
            _begin_again(model)
        return made

    def trace(self, model: Shard) -> None:
        """From now to the next report each rank notes when its operations begin and end, too."""
        with _link(model).unbroken():
            _link(model).tell({"do": "trace"})
            _trace(model)

    def measure(
        self, operation: str = "send", *, sizes: Sequence[int] = SIZES, repeats: int = 50, between_s: float = 0.0
    ) -> AlphaBeta:
        """What a message, or an all-reduce, takes here, by its bytes; see `alpha_beta.measure`."""
        check_measures(self.world, operation, sizes, repeats)
        how: dict[str, Any] = {"sizes": list(sizes), "repeats": repeats, "between_s": between_s}
        with self._unbroken("a measurement"):
            self._tell({"do": "measure", "operation": operation, "how": how})
            return measure(self.world, operation, **how)

    def _unbroken(self, what: str) -> Unbroken:
        return Unbroken(self.ranks.fail, what)

    def _tell(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._process:
            raise WorkbenchError(
                f"this process is a fork of {self._process}, whose ranks know that one alone; "
                "use the cluster there, or make one here"
            )
        self.ranks.rank.check()
        self._bytes_before = self.world.counts["tell"].bytes
        self.world.tell(json.dumps(message, separators=(",", ":")).encode())


def _end_forgotten(ranks: Ranks) -> None:
    """Of a cluster that was not closed. It may run on any thread, so it waits for nobody: the ranks hear that they are
    to end."""
    ranks.fail("the cluster was forgotten: nothing on rank 0 refers to it any more, and it was not closed")


@dataclass(frozen=True)
class Report:
    """Of one rank: calls and bytes of each collective, its stage's and the world's together; its ticks; and, where it
    was to trace, its operations in the order in which they ended."""

    counts: dict[str, Count]
    progress: Progress
    spans: tuple[Span, ...] = ()

    def to_json(self) -> bytes:
        counts = {name: [one.calls, one.bytes] for name, one in self.counts.items()}
        return json.dumps([counts, [self.progress.last, self.progress.busy], self.spans]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Report:
        counts, progress, spans = json.loads(text)
        done = {name: Count(*values) for name, values in counts.items()}
        return cls(done, Progress(*progress), tuple(Span(*one) for one in spans))


def _report(model: Shard, this: Count, operation: str) -> Report:
    """this: the command that asks for the report, which is left out."""
    counts = dict(model.world.counts)
    if model.stage_group is not model.world:
        counts = {name: count + model.stage_group.counts[name] for name, count in counts.items()}
    counts[operation] += this
    spans = [span for group in {model.world, model.stage_group} for span in group.spans or ()]
    spans.sort(key=lambda span: span.end_s)
    return Report(counts, Progress(model.progress.last, model.progress.busy), tuple(spans))


def _begin_again(model: Shard) -> None:
    model.progress, model.world.clock = Progress(), 0
    for group in (model.world, model.stage_group):
        group.reset_counts()
        group.spans = None


def _trace(model: Shard) -> None:
    for group in (model.world, model.stage_group):
        group.spans = []


def _began(model: Shard, prepare: bool) -> Shard:
    """A shard that has its weights; what loading exchanged is not counted."""
    if prepare:
        model.prepare()
    _begin_again(model)
    return model


def _link(model: Shard) -> Link:
    assert model.link is not None, "rank 0's shard has a link"
    return model.link


def _close(model: Shard) -> None:
    if model.stage_group is not model.world:
        model.stage_group.close()


def _shard(layout: Layout, world: Collectives, number: int, name: str, tokenizer: Tokenizer | None) -> Shard:
    """This rank's shard, without weights. Every rank makes its own at the same time."""
    group = world
    if layout.pipeline > 1:
        members = layout.members(layout.place(world.rank.rank)[0])
        group = make_collectives(world.rank, members, backend=world.backend, name=f"model {number}")
    return Shard(layout, world, group, name=name, tokenizer=tokenizer)


def _check_whole_model(model: Decoder) -> None:
    if isinstance(model, Shard):
        raise WorkbenchError(f"{model.name} lies on several ranks already; load the whole model")
    if getattr(model, "quantization", None) is not None:
        raise WorkbenchError(f"{model.name} is quantized, and its codes are not divided here; load the plain model")


def _folder_of(model: str | os.PathLike[str]) -> Path:
    check_path("model", model)
    name = os.fspath(model)
    folder = ZOO / name if name in zoo_names() else Path(name)
    if not folder.is_dir():
        raise unknown("model", name, zoo_names())
    return folder.resolve()


def _digest_of(folder: Path) -> torch.Tensor:
    """[32] uint8 of the files that make the model."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


# -- the other ranks -----------------------------------------------------------------------------------------


def follow(rank: Rank, backend: str) -> None:
    """The work of ranks 1 … N−1: do what rank 0 says, until it says stop."""
    world = make_collectives(rank, backend=backend)
    models: dict[int, tuple[Shard, Followers]] = {}
    while True:
        heard = world.hear()
        message = json.loads(heard)
        match message["do"]:
            case "stop":
                for model, _ in models.values():
                    _close(model)
                models.clear()
                world.close()
                return
            case "load":
                model = _follow_load(world, message)
                models[message["model"]] = model, Followers(model.config, world.device)
                continue
            case "measure":
                measure(world, message["operation"], **message["how"])
                continue
        model, followers = models[message["model"]]
        followers.repeat(message["notes"])
        with torch.inference_mode():
            match message["do"]:
                case "step":
                    kv, batch = followers.kvs[message["kv"]], batch_of(message["batch"], world.device)
                    kv.begin(batch)
                    x = model.compute(batch, kv)
                    model.answer(x, batch, message["wanted"], message["temperature"], message["uniforms"])
                case "logits":
                    shape = message["rows"], model.config.hidden_size
                    x = world.broadcast(torch.empty(shape, dtype=model.dtype, device=world.device))
                    if model.is_last:
                        model.send_back(model.finish(x, "logits", 0.0, []))
                case "report":
                    text = _report(model, Count(-1, -len(heard)), "hear").to_json()
                    content = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(world.device)
                    world.send(torch.tensor([len(content)], device=world.device), 0)
                    world.send(content, 0)
                    _begin_again(model)
                case "trace":
                    _trace(model)
                case "unload":
                    _close(model)
                    del models[message["model"]]


def _follow_load(world: Collectives, message: dict[str, Any]) -> Shard:
    config = ModelConfig.from_dict(message["config"])
    layout = Layout(config, message["tensor"], message["pipeline"], message["attention"])
    shard = _shard(layout, world, message["model"], message["name"], None)
    dtype = None if message["dtype"] is None else getattr(torch, message["dtype"])
    if "folder" in message:
        folder = Path(message["folder"])
        shard.fill_from(stored_parameters(folder, dtype), world.device)
        world.gather(_digest_of(folder).to(world.device))
        return _began(shard, message["prepare"])
    for name, whole in hollow_decoder(config, name=message["name"]).named_parameters():
        for own, part in layout.parts_of(world.rank.rank, name, whole.detach()):
            shard.put(own, world.receive(torch.empty(part.shape, dtype=dtype, device=world.device), world.members[0]))
    shard.ready(world.device)
    world.barrier()
    return _began(shard, message["prepare"])
