"""What a method may know of the inputs: text of the training modules, and what of it reaches each linear layer.

Of the inputs X [N, in] of a layer only their second moments H = Σ x·xᵀ and the size of each channel are kept. That is
enough for every method here, because the error of the outputs is a quadratic form in the error of the weights:

    ‖X·(W − Ŵ)ᵀ‖² = Σ over outputs  δ·H·δᵀ        δ a row of W − Ŵ

Calibration text comes from the training modules only; quality is judged on the held-out ones, which are never read
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from workbench.errors import WorkbenchError
from workbench.models.corpus import token_stream, training_files
from workbench.models.decoder import Decoder
from workbench.models.tokenizer import Tokenizer
from workbench.models.training import TrainingAttention, rows_batch
from workbench.quantization.stored import check_finite


@dataclass(frozen=True)
class Calibration:
    """Tokens [sequences, length] int64 that a model reads before it is quantized."""

    rows: torch.Tensor

    def __post_init__(self) -> None:
        rows = self.rows
        if not isinstance(rows, torch.Tensor) or rows.dtype != torch.int64 or rows.dim() != 2 or not rows.numel():
            came = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, torch.Tensor) else repr(rows)[:80]
            raise WorkbenchError(
                f"calibration needs tokens [sequences, length] in int64, at least one of them; got {came}"
            )

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, sequences: int = 32, length: int = 256, seed: int = 0) -> Calibration:
        """Pieces of the training modules, chosen by the seed. Raises WorkbenchError for more than there are."""
        if tokenizer is None:
            raise WorkbenchError("calibration text needs a tokenizer, and this model has none; give Calibration(rows)")
        if sequences < 1 or length < 2:
            raise WorkbenchError(
                f"calibration takes at least 1 sequence of at least 2 tokens, got {sequences} of {length}"
            )
        files = training_files()
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(files), generator=generator).tolist()
        pieces: list[torch.Tensor] = []
        for index in order:  # whole files are tokenized until there is enough
            stream = token_stream([files[index]], tokenizer)
            if len(stream) >= length:
                start = int(torch.randint(len(stream) - length + 1, (1,), generator=generator))
                pieces.append(stream[start : start + length])
            if len(pieces) == sequences:
                return cls(torch.stack(pieces))
        raise WorkbenchError(
            f"the training modules give {len(pieces)} sequences of {length:,} tokens, one a module, not {sequences}; "
            "choose fewer or shorter"
        )

    @property
    def num_tokens(self) -> int:
        return self.rows.numel()

    def check_fits(self, model: Decoder) -> None:
        config = model.config
        if self.rows.shape[1] > config.context_length:
            raise WorkbenchError(
                f"calibration sequences of {self.rows.shape[1]:,} tokens are beyond the context of {model.name}, "
                f"{config.context_length:,}"
            )
        if int(self.rows.min()) < 0 or int(self.rows.max()) >= config.vocab_size:
            raise WorkbenchError(
                f"calibration has token ids from {int(self.rows.min())} to {int(self.rows.max())}; {model.name} knows 0"
                f" to {config.vocab_size - 1}"
            )


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of one linear layer over all calibration text."""

    second_moments: torch.Tensor  # H = Σ x·xᵀ [in, in] float32
    mean_abs: torch.Tensor  # [in]
    max_abs: torch.Tensor  # [in]
    rows: int
    # of the loss [out, in], of the weight as the model came; for methods with `needs_gradients`, see below
    squared_gradients: torch.Tensor | None = None

    def divided(self, divisor: torch.Tensor) -> Inputs:
        """The inputs x / divisor [in]: what the layer gets once the divisor is folded into the operation before it."""
        return Inputs(
            self.second_moments / divisor[:, None] / divisor[None, :],
            self.mean_abs / divisor,
            self.max_abs / divisor,
            self.rows,
        )

    def output_error(self, weight: torch.Tensor, stands_in: torch.Tensor) -> float:
        """‖X·(W − Ŵ)ᵀ‖² / ‖X·Wᵀ‖² for weights [out, in]."""
        lost, all_of_it = self.energy(weight - stands_in), self.energy(weight)
        return lost / all_of_it if all_of_it else 0.0

    def energy(self, weight: torch.Tensor) -> float:
        """‖X·Wᵀ‖²."""
        weight = weight.double()
        return float(((weight @ self.second_moments.double()) * weight).sum())


def squared_gradients(
    model: Decoder, calibration: Calibration, names: Iterable[str], *, check_stop: Callable[[], None] | None = None
) -> dict[str, torch.Tensor]:
    """E[(∂loss/∂W)²] over the calibration sequences [out, in] float32, of the weight of each linear named.

    The diagonal of the empirical Fisher information (Kim et al., arXiv 2306.07629, equation 3): how much the loss of a
    sequence, its mean nats per token, moves with each weight. One forward and backward a sequence; the model and its
    gradients are left alone. Raises WorkbenchError for sequences of one token, and weights that are not finite.
    """
    calibration.check_fits(model)
    if calibration.rows.shape[1] < 2:
        raise WorkbenchError("gradients of the loss need sequences of at least 2 tokens, got 1")
    leaves = {f"{name}.weight": model.get_parameter(f"{name}.weight").detach() for name in names}
    for name, leaf in leaves.items():
        try:
            check_finite(leaf.requires_grad_())
        except WorkbenchError as error:
            raise WorkbenchError(f"{name.removesuffix('.weight')}: {error}") from error
    found = {name: torch.zeros(leaf.shape, device=leaf.device) for name, leaf in leaves.items()}
    kv = TrainingAttention(model.config)
    for row in calibration.rows.to(model.device):
        if check_stop is not None:
            check_stop()
        with torch.enable_grad():
            logits = functional_call(model, leaves, (rows_batch(row[None]), kv))
            loss = F.cross_entropy(logits[:-1].float(), row[1:])
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for name, gradient in zip(leaves, gradients):
            if gradient is None:  # an expert that no token of this sequence was routed to
                continue
            found[name] += gradient.float().square() / len(calibration.rows)
    return {name.removesuffix(".weight"): squares for name, squares in found.items()}


class Reading:
    """A pass of the calibration text through a model, layer by layer.

    Layers are quantized in order, so the inputs of a layer are the outputs of already quantized layers.
    """

    def __init__(self, model: Decoder, calibration: Calibration) -> None:
        calibration.check_fits(model)
        self._model, self._kv = model, TrainingAttention(model.config)
        self._batch = rows_batch(calibration.rows.to(model.device))
        self._kv.begin(self._batch)
        self._x, self._turns = model.start(self._batch)
        self._layer = 0

    def inputs(self, names: Iterable[str]) -> dict[str, Inputs]:
        """Of these linear layers (names within the present layer, "attention.q"), as the layer runs now.

        The layer runs no further than to the last of them.
        """
        names = tuple(names)
        layer = self._model.layers[self._layer]
        found: dict[str, Inputs] = {}
        hooks = [
            layer.get_submodule(name).register_forward_pre_hook(self._taking(found, name, len(names))) for name in names
        ]
        try:
            self._run()
        except _Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def step(self) -> None:
        """Advance to the next layer."""
        self._x = self._run()
        self._layer += 1

    def _run(self) -> torch.Tensor:
        return self._model.run_layer(self._layer, self._x, self._turns, self._batch, self._kv)

    @staticmethod
    def _taking(found: dict[str, Inputs], name: str, number: int) -> Callable[[nn.Module, tuple], None]:
        def take(_: nn.Module, args: tuple) -> None:
            x = args[0].detach().float()
            found[name] = Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), len(x))
            if len(found) == number:
                raise _Enough

        return take


class _Enough(Exception):
    """All inputs that were asked for have come."""
