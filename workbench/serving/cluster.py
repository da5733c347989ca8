"""The server on a cluster: the same ASGI application as a Ray Serve deployment, with replicas and autoscaling by Ray.

    with running("stdlib-10m", replicas=2) as address:   # pip install 'workbench[ray]'
        openai.OpenAI(base_url=f"{address}/v1", api_key="none")

On a cluster that stands, `ray.serve.run(deployment("stdlib-10m", replicas=8))`.

Ray starts each replica in a process of its own, on whichever machine has room, calls the builder there, spreads the
requests over them, and starts a replica again when it ends. What a replica was running then ends with an error; what
waits in Ray's proxy or in its router goes to another replica. Nothing of that is ours: it is a cluster manager's work.

What this does not do: route by prefix (Ray has a router for its own LLM classes alone), divide one model over machines,
or share a KV cache between replicas. vLLM's production stack and llm-d do; see docs/running.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError, check_whole

if TYPE_CHECKING:
    from workbench.serving.api.app import Server
    from workbench.serving.engine import Engine

NAME = "workbench"  # of the deployment, in Ray
LOOPBACK = "127.0.0.1"


def deployment(
    model: str,
    *,
    replicas: int = 1,
    max_replicas: int | None = None,
    requests_per_replica: int = 64,
    cpus: float = 1.0,
    gpus: float = 0.0,
    make_engine: Callable[[], Engine] | None = None,
) -> Any:
    """The server of a model for `ray.serve.run`: `replicas` of it, or from so many up to max_replicas as load asks for.

    requests_per_replica: that one runs at a time; more wait in Ray. cpus, gpus: that Ray sets aside for each.
    make_engine: called in each replica; default an engine of the named model with default settings.
    Raises WorkbenchError where Ray is not installed, and for numbers that make no sense.
    """
    serve = _ray("ray.serve")
    check_whole("replicas", replicas, 1)
    check_whole("requests_per_replica", requests_per_replica, 1)
    if max_replicas is not None and check_whole("max_replicas", max_replicas, 1) < replicas:
        raise WorkbenchError(f"max_replicas must be at least replicas, {replicas}, got {max_replicas}")
    if cpus < 0 or gpus < 0 or not cpus + gpus > 0:
        raise WorkbenchError(f"a replica needs cpus or gpus above 0, got {cpus!r} and {gpus!r}")

    def build() -> Server:
        """In a replica: nothing of the engine travels."""
        from workbench.serving.api.app import build_app

        return build_app(make_engine or (lambda: engine_of(model, "cuda" if gpus else "cpu")), name=model)

    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        target = max(1.0, requests_per_replica / 2)  # so busy a replica is before another one is started
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": target,
            }
        }

    @serve.deployment(
        name=NAME,
        max_ongoing_requests=requests_per_replica,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        graceful_shutdown_timeout_s=30,
        **scaling,
    )
    @serve.ingress(build)
    class Replica:
        """Ray's class around the application."""

    bound: Any = Replica
    return bound.bind()


def _ray(name: str) -> Any:
    """A module of Ray, which most machines do not have."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WorkbenchError(
            "a cluster is Ray's work, and Ray is not installed; pip install 'workbench[ray]'"
        ) from error


def engine_of(model: str, device: str) -> Engine:
    """As `workbench serve MODEL` makes it."""
    from workbench.models import load, prepare
    from workbench.serving.engine import Engine

    return Engine(prepare(load(model, device=device)))


@contextlib.contextmanager
def running(model: str, *, port: int = 8000, **how: Any) -> Iterator[str]:
    """A cluster of this machine alone, on loopback: the address of its server. At the end all of Ray's processes have
    ended. how: as for `deployment`. Raises WorkbenchError as it does, and where the port is in use."""
    from workbench.serving.api.serve import listening

    app = deployment(model, **how)
    listening(LOOPBACK, port).close()  # Ray would say so in a log of its own
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray, serve = _ray("ray"), _ray("ray.serve")
    ray.init(include_dashboard=False, _node_ip_address=LOOPBACK, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": LOOPBACK, "port": port}, logging_config={"log_level": "ERROR"})
        serve.run(app)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
