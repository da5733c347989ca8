"""beyond.associative: key-value pairs, then every key again: which mixers learn to answer, at which learning rates.

Multi-query associative recall (MQAR; Zoology, arXiv 2312.04927, section 4), in its plainest form: P pairs of a key and
a value, then the same keys in another order, each followed by its value, which the model must have predicted there.
A loss is taken at the queries only. Small models are trained from nothing, one for each mixer, state size and rate:
that a state does not recall can be a matter of its size, and can be one of the learning rate (arXiv 2508.19029) or of
how the weights begin (arXiv 2410.11135). A sweep tells these apart where one rate cannot.

What is to be expected of the size: S = Σ k vᵀ with keys of N values returns N pairs without error, since no more than
N keys are orthogonal (Schlag et al., arXiv 2102.11174, section 4.1). It is no bound on the answers that are right: the
value that is nearest to a sum with errors in it may still be the right one, and two layers have two states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.costs import step_costs
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.state_shape import ATTENTION, StateShape
from workbench.models.training import TrainingAttention, initialize, rows_batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

KEYS = VALUES = 16  # of the vocabulary; a value's token comes after all keys
HYBRID = "hybrid"  # Mamba-2, and attention in the last layer
MIXERS = (ATTENTION, HYBRID, "gated_delta", "mamba2", "linear_attention", "s4d")
MATRICES = ("gated_delta", "mamba2", "linear_attention")  # whose state is a sum of k vᵀ
STATE_SIZES = (4, 16)  # N
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SOLVED = 0.9  # of the answers
FRESH_SEED = 10_007  # sequences of another seed than those of training
INITIAL_STD = 0.02  # of `training.initialize`


# -- the task --------------------------------------------------------------------------------------------------


def recall_rows(count: int, pairs: int, generator: torch.Generator) -> torch.Tensor:
    """[count, 4·pairs] int64: k v k v … and the same pairs again in another order. Keys of a row are different; values
    are drawn one by one."""
    keys = torch.rand((count, KEYS), generator=generator).argsort(1)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (count, pairs), generator=generator)
    order = torch.rand((count, pairs), generator=generator).argsort(1)
    shown = torch.stack((keys, values), dim=2)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), dim=2)
    return torch.cat((shown.flatten(1), asked.flatten(1)), dim=1)


def queries(rows: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """The batch of rows [B, 4·P] with logits at the B·P queries alone, and their answers [B·P]."""
    count, length = rows.shape
    places = torch.arange(length // 2, length, 2, device=rows.device)
    asked = torch.arange(count, device=rows.device)[:, None] * length + places
    return dataclasses.replace(rows_batch(rows), logit_rows=asked.flatten()), rows[:, places + 1].flatten()


# -- the models ------------------------------------------------------------------------------------------------


def shape_of(mixer: str, state_size: int, width: int, layers: int, pairs: int) -> ModelConfig:
    """A small decoder of one mixer, or of Mamba-2 with attention in the last layer. One head a state, so that a key has
    `state_size` values."""
    kinds = ("mamba2",) * (layers - 1) + (ATTENTION,) if mixer == HYBRID else (mixer,) * layers
    states = sorted({*kinds} - {ATTENTION})
    sizes: dict[str, Any] = {"inner_size": width, "state_size": state_size, "chunk_size": 4 * pairs}  # one chunk a row
    sizes |= {"conv_bias": True} if "mamba2" in states else {}
    return ModelConfig(
        family="qwen3",
        vocab_size=KEYS + VALUES,
        hidden_size=width,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=2,
        head_dim=width // 2,
        intermediate_size=2 * width,
        context_length=4 * pairs,
        norm_eps=1e-6,
        qk_norm=True,
        tie_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
        mixers=kinds if states else (),
        state_shape=StateShape(**sizes) if states else None,
    )


def begin(model: Decoder, seed: int) -> None:
    """Weights of `training.initialize`, with matrices at 1/√(inputs) and embeddings at 1 in place of 0.02, which suits
    widths of hundreds: from 0.02 the models of 32 channels learn nothing for hundreds of steps."""
    initialize(model, seed)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.weight /= INITIAL_STD * math.sqrt(part.in_features)
            elif isinstance(part, nn.Embedding):
                part.weight /= INITIAL_STD


def learning_rate(peak: float, step: int, steps: int) -> float:
    """A tenth of the steps up, then level, the last two fifths linearly to 0."""
    return peak * min(1.0, (step + 1) / (0.1 * steps), (steps - step) / (0.4 * steps))


@dataclass(frozen=True)
class Run:
    """One training. seed: of the weights and of the sequences, the same for every mixer and rate."""

    mixer: str
    state_size: int
    rate: float
    config: ModelConfig
    pairs: int
    steps: int
    sequences: int  # of a step
    seed: int

    @property
    def flops(self) -> int:
        """Of the steps: forward by `step_costs`, with scans in their recurrent form, and twice as much backward."""
        tokens = 4 * self.pairs
        forward = step_costs(
            self.config,
            new_tokens=[tokens] * self.sequences,
            contexts=[0] * self.sequences,
            logit_rows=self.sequences * self.pairs,
            weight_bytes_per_element=4,
        )
        return 3 * self.steps * forward.flops


def train(bench: Bench, run: Run) -> tuple[Decoder, int, float]:
    """(the model, the steps taken, its last loss in nats per answer): all steps, or those before the loss was no
    number."""
    model = Decoder(run.config, name=run.mixer)
    begin(model, run.seed)
    model.to(bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator, kv, last = torch.Generator().manual_seed(run.seed), TrainingAttention(run.config), math.inf
    for step in range(run.steps):
        bench.check_stop()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.rate, step, run.steps)
        batch, answers = queries(recall_rows(run.sequences, run.pairs, generator).to(bench.device))
        loss = F.cross_entropy(model(batch, kv), answers)
        if not math.isfinite(loss.item()):
            return model, step, last
        last = loss.item()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, run.steps, last


@torch.inference_mode()
def accuracy(bench: Bench, model: Decoder, pairs: int, count: int, seed: int) -> float:
    """The share of answers that are the most likely token, over `count` fresh sequences."""
    rows = recall_rows(count, pairs, torch.Generator().manual_seed(FRESH_SEED + seed)).to(bench.device)
    batch, answers = queries(rows)
    logits = model(batch, TrainingAttention(model.config))
    right = (logits.argmax(-1) == answers) & logits.isfinite().all(-1)
    return float(right.double().mean())


# -- the run ---------------------------------------------------------------------------------------------------


def sizes_of(mixer: str) -> tuple[int, ...]:
    """The state sizes that a mixer is trained with; 0 for attention, which has no state. Those whose state is a matrix
    of keys with both, the others with the larger one."""
    if mixer == ATTENTION:
        return (0,)
    return STATE_SIZES if mixer in MATRICES else STATE_SIZES[-1:]


def capacity(mixer: str, state_size: int, pairs: int) -> float | None:
    """The share of P pairs that a matrix of so many orthogonal keys returns without error; None where what is
    remembered is no such matrix."""
    return min(1.0, state_size / pairs) if mixer in MATRICES else None


@functools.cache
def guess(pairs: int) -> float:
    """The share of right answers that needs no key: always the most frequent of a row's values, exactly.

    Values are drawn one by one, so one often stands under several keys. Of P draws among V values the most frequent
    comes E[M] = Σ_{m ≥ 0} P(M > m) times, and P(M ≤ m) = P! / V^P · [x^P] (Σ_{i ≤ m} x^i / i!)^V.
    """
    expected = Fraction(0)
    for limit in range(pairs):
        series = [Fraction(1), *[Fraction(0)] * pairs]
        for _ in range(VALUES):
            series = [
                sum((series[n - i] / math.factorial(i) for i in range(min(n, limit) + 1)), Fraction(0))
                for n in range(pairs + 1)
            ]
        expected += 1 - series[pairs] * math.factorial(pairs) / VALUES**pairs
    return float(expected / pairs)


def run_associative(
    bench: Bench, *, mixers: str, pairs: int, layers: int, width: int, steps: int, sequences: int, fresh: int, seed: int
) -> Iterator[Measurement]:
    """A Measurement for each mixer, state size and learning rate: the share of right answers on fresh sequences."""
    asked = {"pairs": pairs, "layers": layers, "width": width, "steps": steps, "sequences": sequences, "seed": seed}
    for mixer in MIXERS if mixers == "all" else (mixers,):
        for size in sizes_of(mixer):
            for rate in RATES:
                bench.check_stop()
                bench.report(f"{mixer}, N = {size}, learning rate {rate:g}" if size else f"{mixer}, rate {rate:g}")
                config = shape_of(mixer, size, width, layers, pairs)
                yield _measured(bench, Run(mixer, size, rate, config, pairs, steps, sequences, seed), fresh, asked)


def _measured(bench: Bench, run: Run, fresh: int, asked: dict[str, Any]) -> Measurement:
    model, done, loss = train(bench, run)
    share = accuracy(bench, model, run.pairs, fresh, run.seed)
    counts = {
        "answers": fresh * run.pairs,
        "standard_error": math.sqrt(share * (1 - share) / (fresh * run.pairs)),
        "guess": guess(run.pairs),
        "parameters": run.config.num_parameters(),
        "state_values": run.config.state_values(),
        "steps": done,
        "sequences_trained": done * run.sequences,
        "tokens_trained": done * run.sequences * 4 * run.pairs,
        "flops": run.flops * done // run.steps,
    }
    if math.isfinite(loss):
        counts["last_loss"] = loss
    return bench.measurement(
        name="beyond.associative",
        settings={"mixer": run.mixer, "state_size": run.state_size, "rate": run.rate, **asked},
        samples=[share],
        unit="share",
        counts=counts,
        predicted=capacity(run.mixer, run.state_size, run.pairs),
        check=f"{fresh * run.pairs:,} answers on sequences of another seed than those of training"
        + ("" if done == run.steps else f"; the loss was no number after {done} steps"),
    )


EXPERIMENT = Experiment(
    name="beyond.associative",
    lab=14,
    question="Does a state fail to recall since it is too small, or since it was trained at the wrong rate?",
    how=f"pairs of {KEYS} keys and {VALUES} values, then every key again in another order; small models from nothing,"
    " float32, AdamW, loss at the queries only; the same seed for every mixer, state size and learning rate. FLOPs are"
    " three forward passes a step.",
    settings=(
        Setting("mixers", "all", "choice", choices=("all", *MIXERS), help="all of them, or one"),
        Setting("pairs", 8, "choice", choices=(2, 4, 8, 16), help="P, of a sequence of 4 P tokens"),
        Setting("layers", 2, "int", 1, 4, help="each with a feed-forward twice as wide as the model"),
        Setting("width", 32, "choice", choices=(16, 32, 64), help="channels of the model"),
        Setting("steps", 600, "int", 1, 20_000, brief=2, step=50, help="of training, for each learning rate"),
        Setting("sequences", 32, "int", 1, 1024, brief=2, help="of a training step"),
        Setting("fresh", 256, "int", 8, 4096, unit="sequences", brief=8, help="on which the answers are counted"),
        Setting("seed", 0, "int", 0, 10_000, help="of weights and sequences"),
    ),
    run=run_associative,
    predict=no_times,
    record={"cpu": ({},), "cuda": ()},
)
