"""Workers on other machines, behind the interface that concurrent.futures has: here, those of a dask cluster.

The cluster is the instructor's: dask sends code and data between its machines as pickles, so its scheduler and workers
belong on a network that no student reaches. What comes from students stays text on the way; it is run on a worker as it
would be run here. A worker that dies takes its submission along, which dask gives to another.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import Executor

from workbench.errors import WorkbenchError

CONNECT_SECONDS = 30
ADDRESS = re.compile(r"(\w+://)?[^\s/]+:\d{1,5}/?|inproc://\S+")
RETRIES = 3


@contextlib.contextmanager
def dask_executor(scheduler: str) -> Iterator[Executor]:
    """An Executor whose work is done by the workers of the dask scheduler at this address, which have this package."""
    if not ADDRESS.fullmatch(scheduler):  # dask would wait for it on a thread that nothing ends
        raise WorkbenchError(f"{scheduler!r} is not the address of a dask scheduler, such as tcp://10.0.0.1:8786")
    try:
        from distributed import Client
    except ImportError as error:
        raise WorkbenchError('grading on a cluster needs dask: pip install "inference-workbench[dask]"') from error
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise WorkbenchError(f"no dask scheduler answers at {scheduler}: {error}") from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise WorkbenchError(f"the scheduler at {scheduler} has no workers; start some: dask worker {scheduler}")
        yield client.get_executor(retries=RETRIES, pure=False)
