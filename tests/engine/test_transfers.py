"""What the host sends to the device it does not wait for."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch

from workbench.decoding.sampling import SamplingSettings
from workbench.kv.paged import Paged
from workbench.kv.paged_step import PagedStep
from workbench.kv.paged_triton import KernelStep
from workbench.models import graphs, transfers
from workbench.models.batch import Batch
from workbench.models.graphs import Decoded
from workbench.serving import ahead

# -- between a launch and the landing of its tokens --------------------------------------------------------------------

UNDER_WAY = (
    ahead.chosen,
    ahead.InOrder.run,
    ahead.Launcher.launch,
    ahead.Launcher._batch,
    ahead.Launcher._eager,
    graphs.StaticTables.prepare,
    graphs.StaticNumbers.prepare,
    graphs.GraphedSteps.prepare,
    Batch.of,
    Batch.to,
    PagedStep,
    KernelStep.of,
    Paged._take_room,
    Paged._places_of,
)
LOOKS = ("item", "tolist", "cpu", "synchronize", "nonzero", "numpy")
ON_HOST = ("values", "some", "batch.token_ids")  # pinned, or asked before


def waiting(source: str) -> list[str]:
    """Calls that wait for the device: a value that is looked at, a tensor that is made there of Python's numbers or
    moved without non_blocking. A look at host memory (`ON_HOST`) costs nothing."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(source))) if _waits(node)]


def _waits(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, keywords, of = node.func.attr, {one.arg for one in node.keywords}, ast.unparse(node.func.value)
    if of == "torch" and name in ("tensor", "as_tensor"):
        return "device" in keywords
    if name == "to":
        given = [ast.unparse(one) for one in node.args] + ["device"] * ("device" in keywords)
        return of != "batch" and any("device" in one for one in given) and "non_blocking" not in keywords
    return name in LOOKS and of not in ON_HOST


@pytest.mark.parametrize("part", UNDER_WAY, ids=lambda part: part.__qualname__)
def test_nothing_waits_for_the_device_while_a_step_is_under_way(part):
    assert waiting(inspect.getsource(part)) == []


@pytest.mark.parametrize(
    "line",
    [
        "at = torch.tensor(rows, device=logits.device)",
        "tokens = batch.token_ids.to(device)",
        "best = logits.argmax().item()",
        "best = logits.argmax(-1).tolist()",
        "values = logits.cpu()",
    ],
)
def test_planted_a_call_that_waits_is_seen(line):
    assert len(waiting(line)) == 1


# -- how much is copied ----------------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch) -> list[list[int]]:
    """Sizes of the lists of each copy to the device."""
    seen: list[list[int]] = []

    def noted(numbers, **where):
        seen.append([len(some) for some in numbers])
        return transfers.sent(numbers, **where)

    monkeypatch.setattr(ahead, "sent", noted)
    return seen


def test_all_random_numbers_of_a_step_go_in_one_copy_and_greedy_rows_need_none(copies):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    decoded = Decoded(logits, logits.argmax(dim=-1), logits.amax(dim=-1))
    warm, few, greedy = (
        SamplingSettings(temperature=0.8),
        SamplingSettings(temperature=1.0, top_k=3),
        SamplingSettings(),
    )
    tokens, _ = ahead.chosen(decoded, [warm, few, greedy, warm, few], [0.1, 0.2, None, 0.4, 0.5])
    assert copies == [[4, 4]] and tokens[2] == decoded.best[2]
    ahead.chosen(decoded, [greedy] * 5, [None] * 5)
    assert len(copies) == 1


def test_what_is_sent_arrives_in_its_lists_and_a_batch_as_it_was():
    """The path of a GPU, on the device without memory and on the host."""
    one, two = transfers.sent([[1, 2, 3], [4]], dtype=torch.int64, device="cpu")
    assert one.tolist() == [1, 2, 3] and two.tolist() == [4]
    one, two = transfers.sent([[1, 2, 3], []], dtype=torch.int64, device="meta")
    assert one.shape == (3,) and two.shape == (0,) and one.device.type == "meta"
    batch = Batch.of([[1, 2, 3], [4]], logits=[2, 1])
    there = batch.to("meta")
    assert there.token_ids.shape == (4,) and there.logit_rows.shape == (3,) and there.positions.device.type == "meta"
    assert there.sequences == batch.sequences and batch.to("cpu") is not None
    assert batch.to("cpu").token_ids is batch.token_ids and Batch.of([[1]]).to("meta").logit_rows is None
