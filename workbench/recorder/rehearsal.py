"""A rehearsal of a recording: the settings of a GPU on this CPU, small numbers, a tiny model for each large one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.errors import is_number
from workbench.instruments.bench import Bench, steps_of
from workbench.recorder import Run

if TYPE_CHECKING:
    from workbench.models.config import ModelConfig

SMALL = 16  # in a rehearsal: the most of anything that is counted


def in_small(run: Run) -> Run:
    """The same run with small numbers: of whole numbers SMALL at most, of numbers to choose from the least."""
    settings = dict(run.settings)
    for setting in run.experiment.settings:
        value = settings.get(setting.name, setting.default)
        if setting.kind == "int":
            settings[setting.name] = max(int(setting.low or 0), min(value, SMALL))
        elif setting.kind == "choice" and is_number(value):
            settings[setting.name] = min(one for one in setting.choices if is_number(one))
    return replace(run, settings=settings)


class RehearsalBench(Bench):
    """A bench on the CPU that gives a tiny model of the same kind for the shape of a public one."""

    def model(self, name, *, arrangement: str = "plain", **settings):
        from workbench.models import prepare
        from workbench.models.shapes import public_name

        if not isinstance(name, str) or public_name(name) is None:
            return super().model(name, arrangement=arrangement, **settings)
        key = ("rehearsal", name, arrangement, str(settings.get("dtype")))
        if key not in self._models:
            self.check_stop()
            if arrangement == "plain":
                self._models[key] = stand_in(name, settings.get("dtype"))
            else:
                self._models[key] = prepare(self.model(name, **settings), **steps_of(arrangement))
        return self._models[key]


def stand_in(name: str, dtype=None):
    """A Decoder like the public model of that name, but tiny: 2 layers of 64."""
    import torch

    from workbench.models.assembly import fill, hollow_decoder, random_tensors
    from workbench.models.shapes import public_shape

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
    config = tiny_shape(public_shape(name))
    model = hollow_decoder(config, name=name, tokenizer=None)
    device = torch.device("cpu")
    return fill(model, random_tensors(model, dtype, device, 0), device)


def tiny_shape(config: ModelConfig) -> ModelConfig:
    """The same kind of model with 2 layers of width 64 and 4 heads."""
    latent = config.latent_attention
    if latent is not None:
        latent = replace(
            latent,
            kv_rank=32,
            query_rank=latent.query_rank and 32,
            content_head_dim=16,
            rotary_head_dim=16,
            value_head_dim=16,
        )
    experts = config.experts
    if experts is not None:
        several = experts.num_groups > 1
        experts = replace(
            experts,
            num_experts=4,
            experts_per_token=2,
            intermediate_size=32,
            dense_layers=min(1, experts.dense_layers),
            num_groups=2 if several else 1,
            groups_per_token=1,
        )
    return replace(
        config,
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=max(1, 4 * config.num_kv_heads // config.num_heads),
        head_dim=16 if latent is None else latent.key_head_dim,
        intermediate_size=128,
        latent_attention=latent,
        experts=experts,
        bos_token_id=0,
        eos_token_ids=(0,),
    )
