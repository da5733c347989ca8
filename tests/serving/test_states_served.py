"""A server with a model that keeps states answers as the model alone does: streams, shared prefixes, drafts."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from conftest import random_decoder
from serving_claims import serving

from workbench.cli_serving import add_options, engine_maker
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.models.checkpoints import save_checkpoint, shipped_tokenizer
from workbench.models.recipes import STATE_VARIANTS

PROMPT = "def read_lines(path):\n" + 40 * "    line = line.strip()\n"


def arguments(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(list(line))


@pytest.fixture(scope="module", params=["stdlib-3m-mamba2", "stdlib-3m-jamba4"])
def folder(request, tmp_path_factory):
    """A small checkpoint with the mixers of a recipe and random weights."""
    config = STATE_VARIANTS[request.param]
    small = dataclasses.replace(
        config,
        hidden_size=32,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=32,
        mixers=config.mixers[:4],
        state_shape=dataclasses.replace(config.state_shape, inner_size=32, state_size=8, num_heads=2),
    )
    place = tmp_path_factory.mktemp("states")
    save_checkpoint(random_decoder(small), place)
    shipped_tokenizer().save(place)
    return place


def test_whole_and_streamed_answers_are_what_the_model_writes_alone(folder):
    engine = engine_maker(arguments(str(folder), "--max-running", "2", "--draft", "prompt_lookup"))()
    asked = {"model": "states", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with serving(engine, name="states") as server:
        whole = [server.openai.completions.create(**asked) for _ in range(2)]
        stream = server.openai.completions.create(**asked, stream=True)
        streamed = "".join(choice.text for chunk in stream for choice in chunk.choices)
    expected = generate(engine.model, PROMPT, max_new_tokens=12, kv="recompute").text
    assert [one.choices[0].text for one in whole] == [expected] * 2 and streamed == expected
    first, second = (one.usage.prompt_tokens_details.cached_tokens for one in whole)
    assert first == 0 and second > 0 and second % 16 == 0  # a state was kept at a block's edge
    assert engine.kv.cells.num_held_by_sequences() == 0


def test_what_no_state_layer_has_is_refused_by_name(folder):
    with pytest.raises(WorkbenchError, match="prepare does not arrange"):
        engine_maker(arguments(str(folder), "--linear", "fused"))()
