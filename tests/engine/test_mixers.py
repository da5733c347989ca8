"""Claims about the layers that keep a state: all forms of each give the same numbers, and the model counts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.kv import make_kv
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.conversion import mean_pool_heads
from workbench.models.decoder import Decoder
from workbench.models.fast import prepare
from workbench.models.mixers import MIXER_CLASSES, make_mixer
from workbench.models.mixers.contract import StateMixer
from workbench.models.state_shape import KINDS, StateShape
from workbench.models.training import TrainingAttention, initialize, rows_batch
from workbench.quantization.methods import QuantizationRecipe
from workbench.quantization.outliers import plant_outliers
from workbench.quantization.pipeline import quantize

SHAPES = {  # small and uneven, so that no two sizes can be confused
    "linear_attention": StateShape(
        inner_size=12, state_size=5, num_heads=3, conv_width=3, conv_bias=True, chunk_size=4
    ),
    "s4": StateShape(inner_size=12, state_size=6, chunk_size=4),
    "s4d": StateShape(inner_size=12, state_size=6, chunk_size=4, bias=True),
    "mamba": StateShape(inner_size=14, state_size=5, rank=3, conv_width=3, chunk_size=4, conv_bias=True, bias=True),
    "mamba2": StateShape(inner_size=24, state_size=5, num_heads=4, num_groups=2, chunk_size=4, conv_bias=True),
    "gated_delta": StateShape(inner_size=24, state_size=5, num_heads=4, num_groups=2, conv_width=3, chunk_size=4),
    "rwkv7": StateShape(inner_size=8, num_heads=2, rank=3, chunk_size=4),
    "hyena": StateShape(inner_size=10, order=2, rank=6, conv_width=3),
    "recurrent_memory": StateShape(inner_size=8, num_heads=2, state_size=3, chunk_size=5),
}
LENGTHS = (1, 2, 7, 16)


def config_of(kind: str, **other: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "family": "qwen3",
        "vocab_size": 40,
        "hidden_size": 12,
        "num_layers": 3,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 6,
        "intermediate_size": 16,
        "context_length": 24,
        "tie_embeddings": True,
        "mixers": (kind, "attention", kind),
        "state_shape": SHAPES[kind],
    }
    return ModelConfig(**given | other)


def mixer_of(kind: str, seed: int = 0) -> StateMixer:
    """A mixer in float64 whose every parameter is random, so that none can be left out of a form unseen."""
    mixer = make_mixer(config_of(kind), 0).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            own = mixer.initial_value(name, parameter.shape, generator)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((0 if own is None else own) + noise * 0.4)
    return mixer


def rows(length: int, *lead: int) -> torch.Tensor:
    return torch.randn(*lead, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


@every_kind
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_is_the_recurrence_for_any_length(kind: str, length: int) -> None:
    mixer, x = mixer_of(kind), rows(length, 2)
    states, outputs = mixer.initial_state(x, 2), []
    for t in range(length):
        y, states = mixer.step(x[:, t], states)
        outputs.append(y)
    close(mixer.whole(x), torch.stack(outputs, dim=1))


@every_kind
@pytest.mark.parametrize("cuts", [(16,), (1, 15), (3, 4, 9), (5, 11), (1,) * 16])
def test_chunks_of_any_length_give_what_the_whole_gives_and_the_same_state(kind: str, cuts: tuple[int, ...]) -> None:
    mixer, x = mixer_of(kind), rows(16)
    state = mixer.initial_state(x)
    _, at_once = mixer.chunk(x, state)
    outputs = []
    for part in x.split(cuts):
        y, state = mixer.chunk(part, state)
        outputs.append(y)
    close(torch.cat(outputs), mixer.whole(x[None])[0])
    for name, value in state.items():
        close(value, at_once[name])


@every_kind
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("extreme", ["inputs", "decays"])
def test_large_inputs_and_decays_that_underflow_leave_numbers_and_the_forms_equal(
    kind: str, dtype: torch.dtype, apart: float, extreme: str
) -> None:
    mixer, x = mixer_of(kind).to(dtype), rows(16, 2).to(dtype) * (300 if extreme == "inputs" else 1)
    if extreme == "decays":
        for name, parameter in mixer.named_parameters():
            if name in ("log_step", "log_decay", "a_log", "dt_bias", "decay_up.bias"):
                parameter.data += 6
    states, outputs = mixer.initial_state(x, 2), []
    with torch.no_grad():
        for t in range(16):
            y, states = mixer.step(x[:, t], states)
            outputs.append(y)
        whole, (chunk, _) = mixer.whole(x), mixer.chunk(x[0], mixer.initial_state(x[0]))
    stepped = torch.stack(outputs, dim=1)
    assert stepped.isfinite().all()
    largest = stepped.abs().max()
    assert (whole - stepped).abs().max() < apart * largest and (chunk - stepped[0]).abs().max() < apart * largest


def test_every_parameter_has_a_number_for_a_gradient_where_decays_underflow() -> None:
    mixer = mixer_of("s4d").float()
    mixer.log_decay.data += 9  # type: ignore[union-attr, operator]
    mixer.whole(rows(16, 2).float()).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in mixer.parameters())


@every_kind
def test_a_state_has_the_shapes_that_are_counted_and_is_never_changed_in_place(kind: str) -> None:
    mixer, x = mixer_of(kind), rows(5)
    state = mixer.initial_state(x)
    _, state = mixer.chunk(x, state)
    kept, kept_x = {name: value.clone() for name, value in state.items()}, x.clone()
    _, after = mixer.chunk(x, state)
    mixer.step(x[:1], {name: value[None] for name, value in state.items()})
    counted = mixer.config.state_shapes(0)
    for name, shape in counted.items():
        assert tuple(after[name].shape) == shape
        assert torch.equal(state[name], kept[name])
    assert after.keys() == counted.keys()
    assert mixer.config.state_values() == 2 * sum(value.numel() for value in after.values())
    assert torch.equal(x, kept_x)


@every_kind
def test_sequences_of_a_step_do_not_see_each_other(kind: str) -> None:
    mixer, x = mixer_of(kind), rows(6, 2)
    states = [mixer.chunk(one[:-1], mixer.initial_state(one))[1] for one in x]
    together, after = mixer.step(x[:, -1], {name: torch.stack([s[name] for s in states]) for name in states[0]})
    for index, one in enumerate(x):
        alone, after_alone = mixer.chunk(one[-1:], states[index])
        close(together[index], alone[0])
        for name, value in after_alone.items():
            close(after[name][index], value)


@every_kind
def test_states_stay_float32_under_narrow_weights_and_inputs(kind: str) -> None:
    mixer = make_mixer(config_of(kind), 0).to(torch.bfloat16)
    x = rows(6).to(torch.bfloat16)
    y, state = mixer.chunk(x, mixer.initial_state(x))
    assert y.dtype == torch.bfloat16
    assert {value.dtype for value in state.values()} == {torch.float32}


@every_kind
@pytest.mark.parametrize("wide", [16, 0])
def test_parameters_are_counted_exactly(kind: str, wide: int) -> None:
    mixers = (kind, "attention", kind) if wide else (kind,) * 3
    for gate in (False, True):
        config = config_of(kind, intermediate_size=wide, mixers=mixers, attention_gate=gate)
        assert Decoder(config).num_parameters() == config.num_parameters()


@every_kind
def test_training_and_recompute_give_the_same_logits(kind: str) -> None:
    config = config_of(kind, rotary_dim=4, attention_gate=True)
    model = Decoder(config)
    initialize(model, 0)
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        trained = model(rows_batch(tokens), TrainingAttention(config))
        served = model(Batch.of(tokens.tolist(), logits="all"), make_kv("recompute", config))
    torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-5)


@every_kind
def test_every_parameter_of_a_mixer_has_a_gradient(kind: str) -> None:
    config = config_of(kind, mixers=("attention", kind, kind))
    model = Decoder(config)
    initialize(model, 0)
    tokens = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(1))
    model(rows_batch(tokens), TrainingAttention(config)).square().sum().backward()
    missing = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()
    ]
    assert not missing


def test_every_kind_of_mixer_is_counted_and_made() -> None:
    assert KINDS.keys() == MIXER_CLASSES.keys() == SHAPES.keys()


@pytest.mark.parametrize("kind", ["contiguous", "paged", "window", "quantized"])
def test_a_kv_without_states_refuses_the_model_by_name(kind: str) -> None:
    with pytest.raises(WorkbenchError, match=r"kv='state'"):
        make_kv(kind, config_of("linear_attention"))


def test_a_kv_without_advance_is_refused_before_anything_begins() -> None:
    class Mine:
        began = False

        def begin(self, batch: Batch) -> None:
            self.began = True

        def attend(self, *given: Any) -> torch.Tensor:
            raise AssertionError("not reached")

    mine = Mine()
    with pytest.raises(WorkbenchError, match="has no `advance`"):
        Decoder(config_of("linear_attention"))(Batch.of([[1, 2]]), mine)
    assert not mine.began


@pytest.mark.parametrize(
    "uses",
    [
        lambda model: prepare(model),
        lambda model: quantize(model, QuantizationRecipe("rtn")),
        lambda model: plant_outliers(model),
        lambda model: mean_pool_heads(model, 1),
    ],
    ids=["prepare", "quantize", "plant_outliers", "mean_pool_heads"],
)
def test_what_knows_attention_alone_refuses_a_model_with_states_by_name(uses: Any) -> None:
    model = Decoder(config_of("mamba2"), name="mixed")
    with pytest.raises(WorkbenchError, match=r"mixed has layers of mamba2"):
        uses(model)


def test_recompute_refuses_a_tree_through_state_layers() -> None:
    config = config_of("linear_attention")
    kv = make_kv("recompute", config)
    with pytest.raises(WorkbenchError, match="one branch"):
        kv.begin(Batch.of([[1, 2, 3]], parents=[[-1, 0, 0]]))
    assert not kv.lengths


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mixers": ("linear_attention", "attention")}, "for each of the 3 layers"),
        ({"mixers": ("linear", "attention", "attention")}, "linear_attention"),
        ({"state_shape": None}, "needs one"),
        ({"mixers": ("attention",) * 3}, "there is none to give"),
        ({"mixers": ()}, "state_shape goes with mixers"),
        ({"state_shape": StateShape(inner_size=12, num_heads=5)}, "does not divide"),
        ({"state_shape": StateShape(inner_size=12, state_size=0)}, "at least 1"),
        ({"state_shape": StateShape(inner_size=12, rank=4)}, "no layer of this model reads it"),
        ({"rotary_dim": 3}, "even number"),
        ({"rotary_dim": 8}, "from 0 to head_dim"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"kv_sources": (0, 1, 1)}, "kv_sources"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkbenchError, match=says):
        config_of("linear_attention", **wrong)


def test_a_shape_with_states_comes_back_from_plain_data() -> None:
    config = config_of("linear_attention")
    assert ModelConfig.from_dict(config.to_dict()) == config
    shape = config.to_dict() | {"mixers": ["linear_attention", 3, "attention"]}
    with pytest.raises(WorkbenchError, match="a list of strings"):
        ModelConfig.from_dict(shape)
    assert dataclasses.replace(config, mixers=("linear_attention",) * 3).kv_layers == ()
