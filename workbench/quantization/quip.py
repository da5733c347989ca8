"""QuIP#: rotate a weight matrix until it looks Gaussian, then round 8 weights at a time to points of the E8 lattice.

    W̃ = R_out·W·R_inᵀ      R = Hadamard · random signs, of each side: no outliers are left (`hadamard`)
    Ŵ̃ = scale · points     block LDLQ: 8 columns at a time, what rounding leaves behind made up for by the next ones
    y = R_outᵀ·(Ŵ̃·(R_in·x))   what runs: x is rotated, multiplied with points that are looked up, and rotated back

Block LDLQ goes through the columns from the last block to the first. With H̃ = R_in·H·R_inᵀ = L·D·Lᵀ, L unit lower
triangular in blocks of 8,

    Ŵ_k = round(W_k + Σ over j > k of (W_j − Ŵ_j)·L_jk)        lost: Σ over k of E_k·D_k·E_kᵀ, E what `round` left

which is GPTQ with blocks of 8 in place of single columns. One scale for the whole matrix, and nothing else: 2 bits are
2 bits. 3 and 4 bits round what is left once more, with a finer scale: E8P + E81, and E8P twice.

Source: QuIP#, Tseng et al., arXiv 2402.04396 (§3 incoherence, §4 lattice, equation 2 block LDLQ). Left out here:
training the signs and norms afterwards (§5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_above, check_settings, check_whole, is_whole
from workbench.quantization import hadamard, lattice, stored
from workbench.quantization.calibration import Inputs
from workbench.quantization.formats import pack, unpack
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import StoredWeight, check_finite, expect, register, take


@dataclass(frozen=True)
class LatticeFormat:
    """The points of one number of bits: E8P, and for 3 and 4 bits what is left rounded once more."""

    scale: float  # of the points, over the weights' root mean square: the best for a Gaussian
    finer: float | None = None  # how many times finer the second points are
    second: torch.dtype | None = None  # of the second codes: uint8 for E81, int16 for E8P

    def round(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [N, 8] in units of the scale -> codes [N] of each stage."""
        codes = [_as_int16(lattice.nearest_e8p(x))]
        if self.second is not None and self.finer is not None:
            left = (x - self.points(codes)) * self.finer
            again = self.second is torch.int16
            codes.append(_as_int16(lattice.nearest_e8p(left)) if again else lattice.nearest_e81(left).byte())
        return codes

    def points(self, codes: list[torch.Tensor]) -> torch.Tensor:
        """Codes […] of each stage -> their sum […, 8] float32, in units of the scale."""
        device = codes[0].device
        found = F.embedding(codes[0].long() & 0xFFFF, lattice.e8p_points(device))
        if len(codes) == 1 or self.finer is None:
            return found
        again = codes[1].dtype is torch.int16
        second = lattice.e8p_points(device) if again else lattice.e81_points(device)
        return found + F.embedding(codes[1].long() & (0xFFFF if again else 0xFF), second) / self.finer


FORMATS = {2: LatticeFormat(0.97), 3: LatticeFormat(1.0, 2.0, torch.uint8), 4: LatticeFormat(1.05, 3.6, torch.int16)}


def _as_int16(codes: torch.Tensor) -> torch.Tensor:
    """16 bits, the highest of which is the sign here: safetensors and torch index alike know int16."""
    return codes.to(torch.int16)


@register
class LatticeWeight(StoredWeight):
    """Codes of lattice points of the rotated weight, a scale, and the signs of the rotations.

    codes [out, in/8] int16, second [out, in/8] (3 bits: uint8, 4 bits: int16), scale [1] float32, in_signs [⌈in/8⌉] and
    out_signs [⌈out/8⌉] uint8, a bit a sign. The points themselves are part of the format and not counted.
    `bits_per_weight` is so 2, 3 or 4, and 1/out + 1/in for the signs, and 32 / (out·in).
    """

    kind = "e8_lattice"

    codes: torch.Tensor
    second: torch.Tensor | None
    scale: torch.Tensor
    in_signs: torch.Tensor
    out_signs: torch.Tensor

    def __init__(
        self,
        bits: int,
        codes: list[torch.Tensor],
        scale: torch.Tensor,
        in_signs: torch.Tensor,
        out_signs: torch.Tensor,
        shape: tuple[int, int],
    ) -> None:
        super().__init__(*shape)
        self.bits, self.format = bits, FORMATS[bits]
        self.register_buffer("codes", codes[0])
        self.register_buffer("second", codes[1] if len(codes) == 2 else None)
        self.register_buffer("scale", scale)
        self.register_buffer("in_signs", in_signs)
        self.register_buffer("out_signs", out_signs)

    def rotated_rows(self, start: int, end: int) -> torch.Tensor:
        """Rows start … end − 1 of Ŵ̃, float32 [end − start, in]."""
        codes = [c[start:end] for c in (self.codes, self.second) if c is not None]
        return self.format.points(codes).flatten(1).mul_(self.scale)

    def dequantize(self) -> torch.Tensor:
        rotated = self.rotated_rows(0, self.out_features)
        rows = hadamard.rotate(rotated, inverse=True) * unpack_signs(self.in_signs, self.in_features)
        signs = unpack_signs(self.out_signs, self.out_features)
        return hadamard.rotate(rows.T, inverse=True).T * signs[:, None]

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        """Every row of W is made of all rotated rows, so this is as much work as `dequantize`."""
        return self.dequantize()[start:end]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, out] in x's type, computed in float32."""
        rotated = hadamard.rotate(x.float() * unpack_signs(self.in_signs, self.in_features))
        rows = max(1, stored.ROW_BLOCK_BYTES // (4 * self.in_features))
        parts = [
            F.linear(rotated, self.rotated_rows(at, min(at + rows, self.out_features)))
            for at in range(0, self.out_features, rows)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        signs = unpack_signs(self.out_signs, self.out_features)
        return (hadamard.rotate(y, inverse=True) * signs).to(x.dtype)

    def settings(self) -> dict[str, int | str | bool | None]:
        return {"bits": self.bits, "in_features": self.in_features, "out_features": self.out_features}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> LatticeWeight:
        check_settings("a lattice weight", settings, ("bits", "in_features", "out_features"))
        bits = _bits(settings.get("bits"))
        shape: Any = settings.get("out_features"), settings.get("in_features")
        if not all(is_whole(n) and n > 0 for n in shape) or shape[1] % 8:
            raise WorkbenchError(
                f"a lattice weight has out_features, and in_features in eights, got {shape[0]!r} and {shape[1]!r}"
            )
        second = FORMATS[bits].second
        named = ("codes", "scale", "in_signs", "out_signs", *(["second"] if second else []))
        codes, scale, in_signs, out_signs, *rest = take(tensors, cls.kind, named)
        of_codes = (shape[0], shape[1] // lattice.SIZE)
        expect(codes, "codes", of_codes, (torch.int16,))
        for one in rest:
            assert second is not None, "named above"
            expect(one, "second", of_codes, (second,))
        expect(scale, "scale", (1,), (torch.float32,))
        check_finite(scale, "scale of a lattice weight")
        expect(in_signs, "in_signs", (-(-shape[1] // 8),), (torch.uint8,))
        expect(out_signs, "out_signs", (-(-shape[0] // 8),), (torch.uint8,))
        return cls(bits, [codes, *rest], scale, in_signs, out_signs, shape)


def pack_signs(signs: torch.Tensor) -> torch.Tensor:
    """±1 [n] -> [⌈n/8⌉] uint8, a bit each."""
    bits = F.pad((signs < 0).byte(), (0, -len(signs) % 8))
    return pack(bits, -1, 1)


def unpack_signs(packed: torch.Tensor, n: int) -> torch.Tensor:
    """[⌈n/8⌉] uint8 -> ±1 [n] float32."""
    return 1 - 2 * unpack(packed, -1, 1)[:n].float()


def _bits(bits: object) -> int:
    if not is_whole(bits) or bits not in FORMATS:
        raise WorkbenchError(f"quip has 2, 3 or 4 bits, got {bits!r}")
    return bits


@method(
    "quip",
    "weights are rotated until they look Gaussian, and 8 at a time become a point of the E8 lattice",
    numbers=("bits",),
    options=("damping", "seed"),
)
class QuIP(Method):
    """bits 2, 3 or 4. damping: share of H's mean diagonal. seed: of the random signs."""

    needs_inputs = True

    def __init__(self, bits: int = 2, damping: float = 0.01, seed: int = 0) -> None:
        self.bits = _bits(bits)
        self.damping, self.seed = check_above("damping", damping, 0), check_whole("seed", seed, 0)

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> LatticeWeight:
        assert inputs is not None
        check_finite(weight)
        out, wide = weight.shape
        if wide % lattice.SIZE:
            raise WorkbenchError(
                f"quip rounds {lattice.SIZE} inputs at a time, and {wide} are no multiple of that; skip this linear"
            )
        generator = torch.Generator().manual_seed(self.seed)
        in_signs, out_signs = (hadamard.random_signs(n, generator).to(weight.device) for n in (wide, out))
        rotated = rotate_weight(weight.float(), out_signs, in_signs)
        moments = rotate_weight(inputs.second_moments.float(), in_signs, in_signs)
        scale, codes = lattice_ldlq(rotated, moments, FORMATS[self.bits], self.damping)
        return LatticeWeight(self.bits, codes, scale, pack_signs(in_signs), pack_signs(out_signs), (out, wide))


def rotate_weight(weight: torch.Tensor, out_signs: torch.Tensor, in_signs: torch.Tensor) -> torch.Tensor:
    """R_out·W·R_inᵀ, R = Hadamard · signs. [out, in]."""
    rows = hadamard.rotate(weight * in_signs)
    return hadamard.rotate((rows * out_signs[:, None]).T).T


def lattice_ldlq(
    weight: torch.Tensor, second_moments: torch.Tensor, format: LatticeFormat, damping: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rotated weight [out, in] and H̃ [in, in] -> scale [1] float32, codes [out, in/8] of each stage.

    The scale that the points are chosen with is that of a Gaussian of this size. The one that is kept is then the best
    for the chosen points Q: ⟨W̃, Q⟩ / ⟨Q, Q⟩ in the outputs, which is what H̃ measures.
    """
    scale = weight.square().mean().sqrt() * format.scale
    codes: list[list[torch.Tensor]] = []

    def round_block(target: torch.Tensor) -> torch.Tensor:
        codes.append(format.round(target / scale if scale > 0 else target))
        return format.points(codes[-1]) * scale

    rounded = ldlq(weight, second_moments, round_block, lattice.SIZE, damping)
    in_order = [torch.stack(stage[::-1], dim=1) for stage in zip(*codes)]
    weighed = rounded @ second_moments
    energy = (weighed * rounded).sum()
    fit = (weighed * weight).sum() / energy if energy > 0 else torch.ones_like(energy)
    return (scale * fit).reshape(1), in_order


def ldlq(
    weight: torch.Tensor,
    second_moments: torch.Tensor,
    round_block: Callable[[torch.Tensor], torch.Tensor],
    block: int,
    damping: float,
) -> torch.Tensor:
    """Ŵ [out, in] of blocks of `block` columns, rounded from the last to the first.

    round_block: [out, block] -> the rounded values. H is damped by `damping` · its mean diagonal.
    """
    feedback = block_factor(second_moments, block, damping).to(weight.dtype)
    lost = torch.zeros_like(weight)  # W − Ŵ of the blocks done
    rounded = torch.empty_like(weight)
    for start in range(weight.shape[1] - block, -1, -block):
        here, done = slice(start, start + block), slice(start + block, None)
        rounded[:, here] = round_block(weight[:, here] + lost[:, done] @ feedback[done, here])
        lost[:, here] = weight[:, here] - rounded[:, here]
    return rounded


def block_factor(second_moments: torch.Tensor, block: int, damping: float) -> torch.Tensor:
    """L of H + damping·mean(diag H)·I = L·D·Lᵀ, identity in its diagonal blocks, [in, in] float64."""
    h = second_moments.double().clone()
    mean = h.diagonal().mean()
    h.diagonal().add_(damping * mean if mean > 0 else 1.0)
    lower = torch.linalg.cholesky(h)
    columns = lower.unflatten(1, (-1, block))  # [in, blocks, block]
    corners = torch.stack([lower[at : at + block, at : at + block] for at in range(0, len(h), block)])
    return (
        torch.linalg.solve_triangular(corners, columns.transpose(0, 1), upper=False, left=False)
        .transpose(0, 1)
        .flatten(1)
    )
