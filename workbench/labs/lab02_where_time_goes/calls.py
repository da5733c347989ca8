"""What a function of torch calls: its operations with the shapes that each reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
ATTENTION = "_scaled_dot_product"
NAMES = {"_softmax": "softmax", "clone": "copy", "_to_copy": "copy", "copy_": "copy"}


class _Recorder(TorchDispatchMode):
    """Keeps every operation that makes a tensor; a view of another one moves nothing and is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        written = made[0] if isinstance(made, tuple) else made
        read = [x for x in args if isinstance(x, torch.Tensor)]
        places = {x.untyped_storage().data_ptr() for x in read}
        if isinstance(written, torch.Tensor) and written.untyped_storage().data_ptr() not in places:
            name = function.overloadpacket.__name__
            op = "product" if name in PRODUCTS else "attention" if name.startswith(ATTENTION) else name
            self.calls.append(
                {
                    "op": NAMES.get(op, op),
                    "read": [list(x.shape) for x in (read[-2:] if op == "product" else read)],
                    "written": list(written.shape),
                    "bytes_per_element": written.element_size(),
                }
            )
        return made


@torch.no_grad()
def record_calls(function: Callable, *inputs: torch.Tensor) -> list[dict[str, Any]]:
    """The operations of function(*inputs), in order: {"op", "read": shapes, "written": shape, "bytes_per_element"}.

    op: "product" for a matrix product, "attention" for one that keeps its scores on the chip, else torch's name of it.
    A bias that a product adds is left out.
    """
    with _Recorder() as recorder:
        function(*inputs)
    return recorder.calls
