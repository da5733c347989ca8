"""Parallelism: one model on several processes, by hand.

with Cluster(2) as cluster:                       # two processes, this one among them
    model = cluster.load("stdlib-10m", tensor=2)  # each has half of every layer
    generate(model, "def ", kv="paged")           # or Engine(model)
"""

from __future__ import annotations

from workbench.parallel.backends import make_collectives
from workbench.parallel.cluster import Cluster, Report
from workbench.parallel.collectives import Collectives, Count, Span
from workbench.parallel.decode import sharded_tokens
from workbench.parallel.pipeline import bubble, idle_share
from workbench.parallel.ranks import Rank, RankLost, Ranks, join_ranks, ranks_of_environment, start_ranks
from workbench.parallel.shard import Layout, Shard

__all__ = [
    "Cluster",
    "Collectives",
    "Count",
    "Layout",
    "Rank",
    "RankLost",
    "Ranks",
    "Report",
    "Shard",
    "Span",
    "bubble",
    "idle_share",
    "join_ranks",
    "make_collectives",
    "ranks_of_environment",
    "sharded_tokens",
    "start_ranks",
]
