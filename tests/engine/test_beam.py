"""Claims about beam search: it is transformers' beam search, and every beam is a sequence of one batch."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from conftest import random_decoder, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.decoding import beam_search, generate_beam
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Recompute
from workbench.models.decoder import Decoder

PROMPT = [5, 11, 3, 14, 8]
VOCABULARY = 16  # few tokens, so that end tokens are often among the best


@pytest.fixture(scope="module")
def model() -> Decoder:
    model = random_decoder(tiny_config(vocab_size=VOCABULARY, tie_embeddings=False, eos_token_ids=()), seed=3)
    model.head.weight.mul_(0.5)  # flatter, so that beams compete
    return model


@pytest.fixture(scope="module")
def theirs(model: Decoder) -> LlamaForCausalLM:
    """transformers' Llama with the same weights, copied by name."""
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    copy = LlamaForCausalLM(config).eval()
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    names |= {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    weights = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": model.head.weight}
    weights["model.norm.weight"] = model.norm.weight
    for index, layer in enumerate(model.layers):
        for ours, other in names.items():
            weights[f"model.layers.{index}.{other}.weight"] = layer.get_parameter(f"{ours}.weight")
    copy.load_state_dict(weights)
    return copy


@pytest.mark.parametrize("eos_token_ids", [(), (7,), (7, 11, 2)], ids=["no-eos", "one-eos", "three-eos"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_the_best_hypotheses_are_transformers_token_for_token(model, theirs, eos_token_ids, early_stopping):
    endings = set()
    prompts = [
        torch.randint(0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)
    ]
    for length_penalty, num_beams in itertools.product((-1.0, 0.0, 1.0, 2.0), (2, 4)):
        expected = theirs.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(2, 6),  # or it takes the padding token in a prompt for padding
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=12,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=VOCABULARY - 1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = expected.sequences[:, 6:].reshape(2, num_beams, -1).tolist()
        for prompt, texts, their_scores in zip(
            prompts, sequences, expected.sequences_scores.reshape(2, num_beams), strict=True
        ):
            found = generate_beam(
                model,
                prompt,
                num_beams=num_beams,
                num_return=num_beams,
                max_new_tokens=12,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                stop_token_ids=eos_token_ids,
            )
            case = f"length_penalty {length_penalty}, num_beams {num_beams}, prompt {prompt}"
            for ours, sequence in zip(found, texts, strict=True):
                assert ours.tokens == sequence[: len(ours.tokens)], case
                assert set(sequence[len(ours.tokens) :]) <= {VOCABULARY - 1, *eos_token_ids}, case  # padding
                endings.add(ours.finish_reason)
            scores = torch.tensor([generation.score for generation in found])
            # theirs are float32, whose steps at the largest scores here (−179 with penalty −1) are 1.5e-5 already
            torch.testing.assert_close(scores, their_scores, rtol=1e-6, atol=1e-5, msg=case)
    assert ("stop_token" in endings) == bool(eos_token_ids)  # the cases do reach both ways to end


def test_one_beam_is_greedy_and_more_beams_never_find_a_less_probable_text(model):
    greedy = generate(model, PROMPT, max_new_tokens=10, stop_token_ids=())
    [one] = generate_beam(model, PROMPT, num_beams=1, max_new_tokens=10, stop_token_ids=())
    assert one.tokens == greedy.tokens
    assert one.log_probs == pytest.approx(greedy.log_probs, abs=1e-5)
    [wide] = generate_beam(model, PROMPT, num_beams=8, max_new_tokens=10, length_penalty=0.0)
    assert wide.score > sum(greedy.log_probs)  # holds for this model: greedy is not the best text here


# Three tokens; 0 ends. After "1" the model is sure of 0, after "2" of 2. Worked out by hand below.
TABLE = {(): [0.2, 0.5, 0.3], (1,): [0.9, 0.05, 0.05], (2,): [0.05, 0.05, 0.9], (2, 2): [0.96, 0.02, 0.02]}


def by_table(texts: list[list[int]]) -> torch.Tensor:
    return torch.tensor([TABLE.get(tuple(text[1:]), [0.4, 0.3, 0.3]) for text in texts]).log()


@pytest.mark.parametrize(
    "length_penalty, best",
    [
        (0.0, [1, 0]),  # 0.5·0.9 = 0.45 against 0.3·0.9·0.96 = 0.2592
        (1.0, [1, 0]),  # ln 0.45 / 2 = −0.399 against ln 0.2592 / 3 = −0.450
        (2.0, [2, 2, 0]),  # −0.200 against −0.150
    ],
)
def test_a_larger_length_penalty_favours_longer_texts(length_penalty, best):
    settings = {"num_beams": 2, "max_new_tokens": 3, "eos_token_ids": (0,), "early_stopping": "never"}
    found = beam_search(by_table, [9], length_penalty=length_penalty, num_return=2, **settings)
    assert found[0].tokens == best
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    assert sum(found[0].log_probs) == pytest.approx(found[0].score * len(best) ** length_penalty)


def test_beams_are_the_sequences_of_one_flat_batch_and_rows_are_counted(model):
    sizes = []

    class Watching(Recompute):
        def begin(self, batch):
            sizes.append((len(batch.sequences), batch.num_tokens))
            super().begin(batch)

    kv = Watching(model.config)
    found = generate_beam(model, PROMPT, num_beams=4, max_new_tokens=5, kv=kv, num_return=3)
    assert sizes == [(1, 5), (4, 4 * 6), (4, 4 * 7), (4, 4 * 8), (4, 4 * 9)]
    assert [(g.model_calls, g.rows_processed) for g in found] == [(5, 5 + 4 * (6 + 7 + 8 + 9))] * 3
    assert not kv.lengths


def test_a_kv_that_remembers_sees_each_beam_forked_from_its_parent(model):
    """A stand-in cache: it keeps the tokens of every sequence and must find them to be the text of the beam."""

    class Remembering(Recompute):
        def __init__(self, config):
            super().__init__(config)
            self.texts, self.forks = {}, 0

        @property
        def lengths(self):
            return {name: len(text) for name, text in self.texts.items()}

        def fork(self, sequence, new_sequence):
            self.texts[new_sequence] = list(self.texts[sequence])
            self.forks += 1

        def release(self, sequence):
            del self.texts[sequence]

        def begin(self, batch):
            ids = batch.token_ids.tolist()
            for name, a, b in zip(batch.sequences, batch.query_starts, batch.query_starts[1:]):
                self.texts[name] = self.texts.get(name, []) + ids[a:b]
            assert set(self.texts) == set(batch.sequences)  # beams that were given up are forgotten

        def logits(self, batch):
            """What a right cache would give: the model over everything remembered."""
            whole = [self.texts[name] for name in batch.sequences]
            return model(type(batch).of(whole), Recompute(model.config))

    class Cached(Decoder):
        def forward(self, batch, kv):
            kv.begin(batch)
            return kv.logits(batch)

    cached, kv = Cached(model.config, name="cached"), Remembering(model.config)
    settings = {"num_beams": 3, "max_new_tokens": 6, "num_return": 3}
    plain = generate_beam(model, PROMPT, **settings)
    found = generate_beam(cached, PROMPT, kv=kv, **settings)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert found[0].rows_processed == len(PROMPT) + 5 * 3  # after the prompt one row a beam and step
    assert kv.forks == 5 * 3 and kv.texts == {}


def test_a_cancelled_search_returns_nothing_and_releases_its_sequences(model):
    cancel, calls = threading.Event(), []

    class Cancelling(Recompute):
        def begin(self, batch):
            calls.append(1)
            if len(calls) == 3:
                cancel.set()
            super().begin(batch)

    kv = Cancelling(model.config)
    assert generate_beam(model, PROMPT, num_beams=2, max_new_tokens=20, kv=kv, cancel=cancel) == []
    assert len(calls) == 3 and not kv.lengths


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 0}, "num_beams must be a whole number of at least 1, got 0"),
        ({"num_beams": 2.0}, "num_beams"),
        ({"num_return": 5}, "num_return 5 must be at most num_beams 4"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"max_new_tokens": 400}, "context of model 'tiny' holds 256"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids.0. is 16"),
    ],
)
def test_bad_settings_are_refused_before_the_model_runs(model, settings, message):
    with pytest.raises(WorkbenchError, match=message):
        generate_beam(model, PROMPT, **settings)


def test_nan_logits_are_refused():
    with pytest.raises(WorkbenchError, match="NaN"):
        beam_search(lambda texts: torch.full((len(texts), 3), torch.nan), [1], num_beams=2, max_new_tokens=2)


def test_a_learners_search_runs_on_the_real_model_and_says_what_ours_says(tiny_model):
    def greedy_pairs(forward_many, prompt_ids, *, num_beams, max_new_tokens, length_penalty, eos_token_ids):
        tokens, total = [], 0.0
        for _ in range(max_new_tokens):
            row = forward_many([[*prompt_ids, *tokens]])[0].log_softmax(dim=-1)
            tokens.append(int(row.argmax()))
            total += row.max().item()
        return [(tokens, total / len(tokens) ** length_penalty)]

    settings = {"num_beams": 1, "max_new_tokens": 6, "stop_token_ids": ()}
    [mine] = generate_beam(tiny_model, [5, 6, 7], search=greedy_pairs, **settings)
    [ours] = generate_beam(tiny_model, [5, 6, 7], **settings)
    assert mine.tokens == ours.tokens and mine.rows_processed == ours.rows_processed
    assert mine.score == pytest.approx(ours.score, abs=1e-4)
    assert mine.log_probs == pytest.approx(ours.log_probs, abs=1e-4)


@pytest.mark.parametrize("found", [None, [], [3], [([], 0.0)], [([1] * 9, 0.0)], [([5_000], 0.0)], [([1.5], 0.0)]])
def test_a_learners_search_that_gives_something_else_is_told_what_was_expected(tiny_model, found):
    with pytest.raises(WorkbenchError, match="search"):
        generate_beam(tiny_model, [5], num_beams=1, max_new_tokens=4, search=lambda *a, **k: found)
