"""Claims about masks: exactly the weights that a pattern says, and SparseGPT against the optimal brain surgeon."""

from __future__ import annotations

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.models.checkpoints import load
from workbench.pruning import Cut, loss_without
from workbench.pruning.masks import METHODS, Pattern, masked, masked_model, sparsegpt
from workbench.quantization.calibration import Calibration, Inputs


def inputs_of(x: torch.Tensor) -> Inputs:
    return Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), len(x))


def given(out: int = 6, wide: int = 16, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(wide, wide, generator=draw) / 4 + torch.eye(wide)
    x = torch.randn(tokens, wide, generator=draw) @ mix * torch.linspace(0.2, 3, wide)
    return torch.randn(out, wide, generator=draw), x


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("pattern", "zeros"), [("0.5", 8), ("0.3", 4), ("0", 0), ("1", 16), ("2:4", 8), ("1:8", 2)])
def test_each_row_has_so_many_zeros_and_each_group_its_own(method, pattern, zeros):
    weight, x = given()
    before = weight.clone()
    got = masked(weight, inputs_of(x), Pattern.parse(pattern), method)
    assert torch.equal(weight, before)
    assert ((got == 0).sum(1) == zeros).all()
    if ":" in pattern:
        n, m = map(int, pattern.split(":"))
        assert ((got.view(-1, m) == 0).sum(1) == n).all()
    if method != "sparsegpt":
        assert torch.equal(got[got != 0], weight[got != 0])


def test_wanda_is_its_formula():
    weight, x = given()
    got = masked(weight, inputs_of(x), Pattern(0.5), "wanda")
    for row, kept in zip(weight, got):
        scores = [abs(float(w)) * float(x[:, j].norm()) for j, w in enumerate(row)]
        lowest = sorted(range(16), key=lambda j: scores[j])[:8]
        assert {j for j in range(16) if kept[j] == 0} == set(lowest)


def test_of_equal_scores_the_lower_column_stays():
    ones = torch.ones(2, 8)
    assert masked(ones, None, Pattern(0.5), "magnitude")[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert masked(ones, None, Pattern.parse("2:4"), "magnitude")[0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def surgeon(row: torch.Tensor, h: torch.Tensor, goes: list[int]) -> torch.Tensor:
    """The weights that stay, so that ‖X·w − X·ŵ‖ is least with these at 0: solved outright."""
    stays = [j for j in range(len(row)) if j not in goes]
    out = torch.zeros_like(row)
    out[stays] = torch.linalg.solve(h[stays][:, stays], (h @ row)[stays])
    return out


@pytest.mark.parametrize("block", [4, 16])
def test_sparsegpt_moves_what_stays_as_the_optimal_brain_surgeon_does(block):
    """Column by column: at each, the columns to come take the best values given all that is fixed before them."""
    weight, x = given(out=3, wide=8)
    h = (x.T @ x).double()
    pattern = Pattern.parse("2:4")
    got = sparsegpt(weight.double(), h, pattern, block=block, damping=1e-12)
    for row, result in zip(weight.double(), got):
        w = row.clone()
        for j in range(8):
            if result[j] != 0:
                assert float(result[j]) == pytest.approx(float(w[j]), rel=1e-6)
                continue
            # fix columns up to j, j at 0, and solve for those to come
            fixed = torch.cat((result[: j + 1], torch.zeros(7 - j).double()))
            rest = list(range(j + 1, 8))
            if rest:
                target = (h @ (row - fixed))[rest]
                w[rest] = torch.linalg.solve(h[rest][:, rest], target)


def test_a_share_is_rounded_down_from_what_it_says_and_not_from_its_float():
    weight = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    for share, zeros in ((0.29, 29), (0.57, 57), (0.295, 29), (0.01, 1)):
        assert ((masked(weight, None, Pattern(share), "magnitude") == 0).sum(1) == zeros).all(), share


@pytest.mark.parametrize("pattern", ["1:3", "3:6", "5:192"])
def test_sparsegpt_takes_groups_that_its_blocks_do_not_divide(pattern):
    """Groups across the end of a block of 128 columns ended in torch's own errors."""
    weight, x = given(out=2, wide=384, tokens=500)
    zeros, of = map(int, pattern.split(":"))
    got = masked(weight, inputs_of(x), Pattern.parse(pattern), "sparsegpt")
    assert ((got.view(-1, of) == 0).sum(1) == zeros).all()


def test_sparsegpt_loses_less_than_wanda_and_wanda_less_than_magnitude():
    weight, x = given(out=32, wide=64, tokens=1000)
    inputs = inputs_of(x)
    lost = {m: inputs.output_error(weight, masked(weight, inputs, Pattern(0.5), m)) for m in METHODS}
    assert lost["sparsegpt"] < lost["wanda"] < lost["magnitude"]
    best, h = 0.0, inputs.second_moments.double()
    for row, kept in zip(weight, masked(weight, inputs, Pattern(0.5), "sparsegpt")):
        zeros = (kept == 0).nonzero().flatten().tolist()
        best += inputs.energy((row - surgeon(row.double(), h, zeros))[None]) / inputs.energy(weight)
    assert best <= lost["sparsegpt"] * (1 + 1e-6)  # of the same zeros nothing can lose less


def test_a_whole_model_and_what_it_loses():
    model = load("stdlib-1m")
    text = Calibration.of(model.tokenizer, sequences=4, length=64)
    whole, losses = loss_without(model, text.rows, Cut()), {}
    for method in METHODS:
        small, lost = masked_model(model, Pattern.parse("2:4"), method, calibration=text)
        assert len(lost) == 7 * model.config.num_layers and all(0 < share < 1 for share in lost.values())
        for layer in small.layers:
            assert float((layer.mlp.down.weight == 0).float().mean()) == 0.5
        assert torch.equal(small.embed.weight, model.embed.weight)
        losses[method] = loss_without(small, text.rows, Cut())
    assert loss_without(model, text.rows, Cut()) == whole  # it stays as it was
    assert whole < losses["sparsegpt"] < losses["wanda"] < losses["magnitude"]


def test_what_cannot_be_masked_is_refused_and_left():
    weight, x = given()
    for pattern, words in (
        ("2:4:1", "two zeros in four"),
        ("half", "two zeros in four"),
        ("5:4", "two zeros in four"),
        ("1:0", "two zeros in four"),
        ("1.5", "share"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            Pattern.parse(pattern)
    with pytest.raises(WorkbenchError, match="3 divides, this weight has 16"):
        masked(weight, inputs_of(x), Pattern.parse("1:3"), "sparsegpt")
    with pytest.raises(WorkbenchError, match="wandaa"):
        masked(weight, inputs_of(x), Pattern(), "wandaa")
    with pytest.raises(WorkbenchError, match="looks at the inputs"):
        masked(weight, None, Pattern(), "wanda")
    broken = inputs_of(x)
    broken.second_moments[2, 2] = torch.nan
    for method in ("wanda", "sparsegpt"):
        with pytest.raises(WorkbenchError, match="inputs of this layer are not finite"):
            masked(weight, broken, Pattern(), method)
    model = load("stdlib-1m")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WorkbenchError, match="5 divides"):
        masked_model(model, Pattern.parse("1:5"), calibration=Calibration.of(model.tokenizer, sequences=1, length=16))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
