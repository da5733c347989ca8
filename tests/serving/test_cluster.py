"""Claims about the server on a cluster: what Ray spreads over replicas is answered as one engine answers it, and a
replica that ends takes with it what it was running and nothing else."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.models import load
from workbench.serving import cluster

RUNNING = 2  # requests of a replica at a time
ray_alone = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("ray"), reason="needs Ray: pip install 'workbench[ray]'"
)


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


@ray_alone
def test_a_replica_that_is_killed_takes_its_running_requests_with_it_and_no_others():
    import httpx
    import ray
    from ray import serve

    prompts = [f"def f{i}(" for i in range(16)]
    model = load("stdlib-1m")
    expected = {p: generate(model, p, max_new_tokens=150, stop_token_ids=()).text for p in prompts}

    def ask(address: str, prompt: str) -> str | None:
        """The text, or None for an error. It is streamed, as a request that was accepted and then broke off is."""
        body = {
            "model": "stdlib-1m",
            "prompt": prompt,
            "max_tokens": 150,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        text, ended = "", False
        try:
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
                if answer.status_code != 200:
                    return None
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return None
                        text += event["choices"][0]["text"]
        except httpx.HTTPError:
            return None
        return text if ended else None

    with (
        cluster.running("stdlib-1m", port=free_port(), replicas=2, requests_per_replica=RUNNING, cpus=0.5) as address,
        ThreadPoolExecutor(16) as clients,
    ):
        assert httpx.get(f"{address}/ready", timeout=60).status_code == 200
        names = [name for name in ray.util.list_named_actors(all_namespaces=True) if "REPLICA" in name["name"]]
        assert len(names) == 2
        waiting = [clients.submit(ask, address, prompt) for prompt in prompts]
        while not any(one.done() for one in waiting):
            time.sleep(0.01)
        ray.kill(ray.get_actor(names[0]["name"], namespace=names[0]["namespace"]))
        texts = [one.result(timeout=120) for one in waiting]
        lost = [prompt for prompt, text in zip(prompts, texts) if text is None]
        assert len(lost) <= RUNNING, "what waited was lost"
        assert all(text == expected[prompt] for prompt, text in zip(prompts, texts) if text is not None)
        until = time.monotonic() + 90
        while serve.status().applications["default"].deployments[cluster.NAME].replica_states != {"RUNNING": 2}:
            assert time.monotonic() < until, serve.status()
            time.sleep(0.2)
        assert ask(address, prompts[0]) == expected[prompts[0]]
        assert [ask(address, prompt) for prompt in lost] == [expected[prompt] for prompt in lost]
    assert not ray.is_initialized()


@ray_alone
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"replicas": 0}, "replicas must be a whole number of at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be at least replicas, 3, got 2"),
        ({"cpus": 0.0}, "a replica needs cpus or gpus above 0"),
        ({"requests_per_replica": 0}, "requests_per_replica"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_starts(how, words):
    with pytest.raises(WorkbenchError, match=words):
        cluster.deployment("stdlib-1m", **how)


@ray_alone
def test_a_port_in_use_is_said_before_ray_starts():
    import ray

    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        at.listen()
        with pytest.raises(WorkbenchError, match="cannot listen"), cluster.running("m", port=at.getsockname()[1]):
            raise AssertionError
    assert not ray.is_initialized()


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(WorkbenchError, match=r"Ray is not installed; pip install 'workbench\[ray\]'"):
        cluster.deployment("stdlib-1m")
