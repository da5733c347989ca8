"""A cache for models whose layers share keys: they are kept once, for the layer that makes them.

    kv_sources (0, 0, 2, 2)     layer 0 -> keys 0 <- layer 1        two sets of keys and values instead of four:
                                layer 2 -> keys 2 <- layer 3        2·H_kv·D·b bytes per token for each source

A layer that attends over another's keys has no k and v projections (the model's affair) and hands over none.
Cross-layer attention: Brandon et al., arXiv 2405.12981 §3. Grouped heads make each set smaller and sharing makes
the sets fewer; both can be had together. `Contiguous` would keep such a model right as well; this kind says that it
must share, and refuses one that does not.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError
from workbench.kv.contiguous import Contiguous
from workbench.models.config import ModelConfig


class SharedLayers(Contiguous):
    """`Contiguous` for a model with `kv_sources`: room for the keys of `config.kv_layers` and no others.

    Settings and errors as there; and a model in which every layer has its own keys is refused.
    """

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        if len(config.kv_layers) == config.num_layers:
            raise WorkbenchError(
                "kv 'shared_layers' is for models whose layers share keys (kv_sources), and in this one each of the "
                f"{config.num_layers} layers has its own; use kv 'contiguous'"
            )
        super().__init__(config, **settings)
