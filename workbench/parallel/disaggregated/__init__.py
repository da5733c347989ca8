"""Disaggregated prefill and decode: two engines, keys and values sent from one to the other.

with PrefillDecode("stdlib-10m", transport="shm") as pair:   # a process prefills, this one decodes
    finished = pair.run(requests)                            # the tokens are those of one `Engine`

DistServe: Zhong et al., arXiv 2401.09670. Splitwise: Patel et al., arXiv 2311.18677.
"""

from __future__ import annotations

from workbench.parallel.disaggregated.connector import Receiver, Sender
from workbench.parallel.disaggregated.decode import DecodeEngine, Transfer
from workbench.parallel.disaggregated.links import InProcess, Link, LinkLost
from workbench.parallel.disaggregated.messages import BadMessage, Message
from workbench.parallel.disaggregated.pair import PrefillDecode, make_link
from workbench.parallel.disaggregated.prefill import PrefillEngine

__all__ = [
    "BadMessage",
    "DecodeEngine",
    "InProcess",
    "Link",
    "LinkLost",
    "Message",
    "PrefillDecode",
    "PrefillEngine",
    "Receiver",
    "Sender",
    "Transfer",
    "make_link",
]
