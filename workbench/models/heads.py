"""Draft heads: small networks that read a target's hidden states and share its embedding and its output head.

A hidden state is a row of the target after its last norm, f_t: what its head turns into the distribution of token t +
1. To have it costs nothing, the target has computed it anyway.

    Medusa (Cai et al., arXiv 2401.10774 §2.1): from f_t alone, head k = 1, 2, … guesses f_(t+k)
        block     x = f_t + SiLU(W_k f_t + b_k)
        out       P_k x, which goes through the target's own head: distribution of token t + 1 + k

    EAGLE (Li et al., arXiv 2401.15077): from f_t and the token that came after it, one decoder layer
    guesses the next hidden state, and so on from its own guess
        fc        [norm(embedding of token t + 1) ; f_t]  2d -> d
        layer     one decoder layer, over all rows before
        norm      as the target's last one            -> f_(t+1), through the target's head: distribution of token t + 2

In Medusa-1 every head has a vocabulary matrix of its own, V·d values. Here it is E·P_k, with E the target's head:
d·d values, 384² instead of 4,096·384, and the same rank.

In a folder: heads.safetensors and heads.json, every tensor checked; nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from workbench.errors import WorkbenchError, check_settings, check_whole, is_number, is_whole, unknown
from workbench.files import finish_saving, read_json_object, replacing_files, write_tensors, write_text
from workbench.models.batch import Batch
from workbench.models.checkpoints import ZOO
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Decoder, DecoderLayer, Shaped
from workbench.models.layers import RMSNorm, Rotary

VERSION = 1
TENSORS, DESCRIPTION = "heads.safetensors", "heads.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_HEADS = 16
RANKS = 10  # best tokens of a Medusa head that a tree is chosen from


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of a set of Medusa heads."""

    hidden_size: int  # d of the target
    vocab_size: int  # V of the target
    num_heads: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_whole(field.name, getattr(self, field.name), 1)
        if self.num_heads > MAX_HEADS:
            raise WorkbenchError(f"num_heads must be at most {MAX_HEADS}, got {self.num_heads}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MedusaConfig:
        names = [field.name for field in dataclasses.fields(cls)]
        check_settings("Medusa heads", values, names)
        for name in names:
            if not is_whole(values.get(name)):
                raise WorkbenchError(f"Medusa heads: {name} must be a whole number, got {values.get(name)!r}")
        return cls(**values)


class Heads(nn.Module):
    """What both kinds of heads share: the name of their target, and the check that a model is that target."""

    kind: str
    config: MedusaConfig | ModelConfig

    def __init__(self, target: str, name: str) -> None:
        super().__init__()
        self.target, self.name = target, name

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def check_target(self, target: Shaped) -> None:
        """Raise WorkbenchError unless these heads were trained on this model's hidden states."""
        for what in ("hidden_size", "vocab_size"):
            ours, its = getattr(self.config, what), getattr(target.config, what)
            if ours != its:
                raise WorkbenchError(
                    f"{self.name} reads the hidden states of {self.target}, with {what} {ours:,}; {target.name} has "
                    f"{its:,}. Heads belong to one target: take {self.target}, or train heads for {target.name}"
                )
        if target.name != self.target:
            raise WorkbenchError(
                f"{self.name} was trained on the hidden states of {self.target}, and those of {target.name} mean "
                f"something else; take {self.target}, or train heads for {target.name}"
            )

    def num_parameters(self) -> int:
        """Without the target's embedding and head, which are shared."""
        return sum(p.numel() for p in self.parameters())


class MedusaHead(nn.Module):
    """One head: a residual SiLU block, and the map in front of the target's head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.block = nn.Linear(size, size)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.out(hidden_states + F.silu(self.block(hidden_states)))


class MedusaHeads(Heads):
    """`num_heads` guesses from one hidden state: head k (from 0) is for the token k + 2 after the hidden state's own.

    shares [num_heads][RANKS]: how often the best token, the second best, … of each head was the one that the target
    finds best; measured on training text. None: not measured.
    """

    kind = "medusa"

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, *, target: str, name: str = "unnamed") -> None:
        super().__init__(target, name)
        self.config = config
        self.shares: list[list[float]] | None = None
        heads = nn.ModuleList(MedusaHead(config.hidden_size) for _ in range(config.num_heads))
        self.heads = cast("Sequence[MedusaHead]", heads)

    def initialize(self, target: Decoder, seed: int) -> None:
        """Every head begins as the target's own, W = b = 0 (arXiv 2401.10774 §2.1), but less sure: P = 0.3.

        With P = 1 it begins by being sure of the wrong token, and spends a good part of a short training to unlearn it.
        """
        with torch.no_grad():
            for head in self.heads:
                head.block.weight.zero_()
                head.block.bias.zero_()
                nn.init.eye_(head.out.weight).mul_(0.3)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [n, d] -> [num_heads, n, d], for the target's head."""
        return torch.stack([head(hidden_states) for head in self.heads])


class EagleHead(Heads):
    """One decoder layer from hidden states and tokens to hidden states. `config` is that layer's, with the target's d
    and V.

    Row i has hidden state i and token i + 1 and speaks of hidden state i + 1; its position is i.
    """

    kind = "eagle"

    config: ModelConfig

    def __init__(self, config: ModelConfig, *, target: str, name: str = "unnamed") -> None:
        super().__init__(target, name)
        if config.num_layers != 1 or config.latent_attention is not None or not config.uses_rotary:
            raise WorkbenchError(
                f"an EAGLE head is one decoder layer with rotary positions, got {config.num_layers} layers of "
                f"{config.family}"
            )
        self.config = config
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config)

    def initialize(self, target: Decoder, seed: int) -> None:
        """Begin as "the next hidden state is this one": fc passes the hidden state through, and the norm is the
        target's."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    scale = 0.002 if name.endswith(("attention.o.weight", "mlp.down.weight")) else 0.02
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
                else:
                    parameter.fill_(1.0)
            self.fc.weight[:, self.config.hidden_size :] += torch.eye(self.config.hidden_size)
            self.norm.weight.copy_(target.norm.weight)

    def forward(self, embeddings: torch.Tensor, hidden_states: torch.Tensor, batch: Batch, kv: Attends) -> torch.Tensor:
        """embeddings [N, d] of the next tokens, hidden_states [N, d] -> next hidden_states [N, d].

        batch says whose rows these are and where they stand; its token ids are not read. `kv.begin` may refuse it.
        """
        kv.begin(batch)
        x = self.fc(torch.cat((self.token_norm(embeddings), hidden_states), dim=-1))
        return self.norm(self.layer(x, self.rotary(batch.positions, x.dtype), 0, batch, kv))


KINDS: dict[str, tuple[Callable[..., MedusaHeads | EagleHead], type[MedusaConfig | ModelConfig]]] = {
    "medusa": (MedusaHeads, MedusaConfig),
    "eagle": (EagleHead, ModelConfig),
}


# -- files ---------------------------------------------------------------------------------------------------------


def heads_names() -> list[str]:
    """The heads that ship."""
    return sorted(file.parent.name for file in ZOO.glob(f"*/{DESCRIPTION}"))


def save_heads(heads: Heads, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write heads.safetensors and heads.json, both or none, however it is interrupted; other files there stay."""
    folder, name = Path(folder), str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise unknown("dtype", name, _DTYPES)
    tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in heads.named_parameters()}
    description = {
        "version": VERSION,
        "kind": heads.kind,
        "target": heads.target,
        "dtype": name,
        "config": heads.config.to_dict(),
    }
    if isinstance(heads, MedusaHeads) and heads.shares is not None:
        description["shares"] = [[round(share, 4) for share in of_head] for of_head in heads.shares]
    with replacing_files(folder) as fresh:
        write_tensors(fresh / TENSORS, tensors, {"format": "pt"})
        write_text(fresh / DESCRIPTION, json.dumps(description, indent=2) + "\n")


def load_heads(
    name_or_path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MedusaHeads | EagleHead:
    """Trained heads by the name they ship under ("stdlib-10m-medusa"), or from a folder; ready to run.

    Raises WorkbenchError for an unknown name, and for files that are missing or not what they should be, naming the
    tensor.
    """
    name = os.fspath(name_or_path)
    folder = ZOO / name if name in heads_names() else Path(name)
    if not folder.is_dir():
        raise unknown("heads", name, heads_names())
    finish_saving(folder)
    try:
        return _read(folder, dtype).to(device).eval().requires_grad_(False)
    except WorkbenchError as error:
        raise WorkbenchError(f"{folder}: {error}") from error


def _read(folder: Path, dtype: torch.dtype) -> MedusaHeads | EagleHead:
    description = _description(folder / DESCRIPTION)
    kind, shape = KINDS[description["kind"]]
    config = shape.from_dict(description["config"])
    with torch.device("meta"):
        heads = kind(config, target=description["target"], name=folder.resolve().name)
    if not (folder / TENSORS).is_file():
        raise WorkbenchError(f"{TENSORS} is missing; the heads are incomplete")
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise WorkbenchError(f"{TENSORS} is damaged or cut short: {error}") from error
    stored = _DTYPES[description["dtype"]]
    for name, parameter in list(heads.named_parameters()):
        if name not in tensors:
            raise WorkbenchError(f"tensor {name!r} is missing; expected shape {list(parameter.shape)}")
        value = tensors.pop(name)
        if value.shape != parameter.shape or value.dtype != stored:
            raise WorkbenchError(
                f"tensor {name!r} is {value.dtype} {list(value.shape)}, {DESCRIPTION} makes it {stored} "
                f"{list(parameter.shape)}"
            )
        if not value.isfinite().all():
            raise WorkbenchError(f"tensor {name!r} holds numbers that are not finite")
        owner, _, leaf = name.rpartition(".")
        setattr(heads.get_submodule(owner), leaf, nn.Parameter(value.to(dtype)))
    if tensors:
        raise WorkbenchError(
            f"tensor {next(iter(tensors))!r} has no place in {description['kind']} heads of this shape"
        )
    if isinstance(heads, EagleHead):
        heads.rotary = Rotary(heads.config)
    elif "shares" in description:
        heads.shares = _shares(description["shares"], heads.config.num_heads)
    return heads


def _shares(values: Any, num_heads: int) -> list[list[float]]:
    ok = isinstance(values, list) and len(values) == num_heads
    if not ok or not all(
        isinstance(row, list) and len(row) == RANKS and all(is_number(s) and 0 <= s <= 1 for s in row) for row in values
    ):
        raise WorkbenchError(f"shares must be {num_heads} lists of {RANKS} numbers from 0 to 1, got {values!r:.80}")
    return values


def _description(file: Path) -> dict[str, Any]:
    values = read_json_object(file, file.name)
    check_settings(file.name, values, ("version", "kind", "target", "dtype", "config", "shares"))
    if values.get("version") != VERSION:
        raise WorkbenchError(f"{file.name} is of version {values.get('version')!r}, this package reads {VERSION}")
    for key, kind in (("kind", str), ("target", str), ("dtype", str), ("config", dict)):
        if not isinstance(values.get(key), kind):
            raise WorkbenchError(f"{file.name}: {key} must be a {kind.__name__}, got {values.get(key)!r:.80}")
    if values["kind"] not in KINDS:
        raise unknown("kind of heads", values["kind"], KINDS)
    if values["dtype"] not in _DTYPES:
        raise unknown("dtype", values["dtype"], _DTYPES)
    return values
