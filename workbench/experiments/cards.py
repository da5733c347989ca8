"""Cards beside this machine: their ceilings, from data sheets and measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.instruments.device import PUBLISHED

if TYPE_CHECKING:
    from workbench.instruments.device import Ceilings


HERE = "this machine"
CARDS = (HERE, *PUBLISHED)


def card_ceilings(card: str, here: Ceilings) -> Ceilings:
    return here if card == HERE else PUBLISHED[card]
