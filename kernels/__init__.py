"""Triton kernels, one operation a file; installed as workbench.kernels.

>>> from workbench.kernels import KERNELS
>>> KERNELS["norm"].rms_norm  # doctest: +SKIP

A module is imported when it is first asked for: importing this package loads neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

_NAMES = (  # in the order of a course: what only moves, then what multiplies
    "ceilings",
    "softmax",
    "norm",
    "rotary",
    "swiglu",
    "sampling",
    "flash_attention",
    "flash_decoding",
    "merge",
    "paged_decode",
    "paged_prefill",
    "latent_decode",
    "paged_quantized",
    "matvec",
    "matvec_int8",
    "matvec_int4",
    "grouped_matmul",
    "state_update",
    "chunked_scan",
)


class _Kernels(Mapping[str, ModuleType]):
    """name -> module, each imported when it is looked up. Raises KeyError for a name that there is not."""

    def __getitem__(self, name: str) -> ModuleType:
        if name not in _NAMES:
            raise KeyError(f"no kernel {name!r}; there are {', '.join(_NAMES)}")
        return importlib.import_module(f"{__name__}.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def __contains__(self, name: object) -> bool:
        return name in _NAMES


KERNELS: Mapping[str, ModuleType] = _Kernels()

__all__ = ["KERNELS"]
