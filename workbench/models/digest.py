"""A short name of a model's shape and weights, by which two processes see that they have the same model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLED = 1024  # numbers of each tensor, evenly spread


def model_digest(model: Any) -> str:
    """64 hex digits of the config, the type and the weights of a Decoder, or of the one that was prepared.

    Of each tensor its name, shape, type and about `SAMPLED` of its numbers count, so that it takes milliseconds for any
    size: models that were trained differently differ. A change of single weights can be missed; it is no signature.
    """
    if (known := getattr(model, "digest", None)) is not None:
        return str(known)
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.is_meta:  # a shape without numbers
            continue
        flat = tensor.detach().reshape(-1)
        digest.update(flat[:: max(1, len(flat) // SAMPLED)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
