"""Claims about checkpoints with state layers: each is kept bit for bit, what is not computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mixers import config_of, every_kind

from workbench.errors import WorkbenchError
from workbench.models import Decoder, load, save_checkpoint
from workbench.models.layout import config_from_hf
from workbench.models.training import initialize

MAMBA2 = {"model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}
MAMBA2 |= {"head_dim": 8}
ATTENDING = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
ATTENDING |= {"intermediate_size": 48}
JAMBA = {"model_type": "jamba", **ATTENDING, "num_experts": 1}
QWEN = {"model_type": "qwen3_5_text", **ATTENDING}


@every_kind
def test_every_kind_is_saved_and_loaded_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = Decoder(config_of(kind, attention_gate=True, rotary_dim=2))
    initialize(model, 0)
    save_checkpoint(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_a_checkpoint_of_another_state_size_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save_checkpoint(Decoder(config_of("mamba2")), tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    shape["model_config"]["state_shape"]["state_size"] = 6
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(WorkbenchError, match=r"mixer\.proj"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**JAMBA, "num_experts": 16}, "num_experts = 16 asks for a mixture of experts"),
        ({k: v for k, v in JAMBA.items() if k != "num_experts"}, "num_experts = 16"),
        ({**JAMBA, "attn_layer_offset": 8}, "attn_layer_offset must be from 0 to 7"),
        ({**JAMBA, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**MAMBA2, "time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({**MAMBA2, "head_dim": 16}, "they must be the same"),
        ({**MAMBA2, "n_groups": 3}, "num_groups 3"),
        ({**QWEN, "layer_types": ["full_attention"] * 3}, "layer_types must be a list of 4"),
        ({**QWEN, "layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types must be a list of 4"),
        ({**QWEN, "rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ({**QWEN, "linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim"),
        ({"model_type": "qwen3_next", **ATTENDING}, "qwen3_next"),
    ],
)
def test_what_is_not_computed_is_refused_by_the_name_of_its_key(values: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkbenchError, match=says):
        config_from_hf(values)
