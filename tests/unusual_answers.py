"""Right answers that nobody would write like this: each gets every point.

UNUSUAL: grade_id -> source of its cell. BEFORE: grade_id -> cells of the same notebook that stand before it.
"""

from __future__ import annotations

BEFORE = {
    "sampling-filters": [
        "import numpy as np\nMINUS = -float('inf')\n",
        "%matplotlib inline\ndef in_numpy(filter):\n    'Rows in float64.'\n"
        "    def called(logits, setting):\n        rows = logits.detach().numpy().astype('float64')\n"
        "        return torch.from_numpy(filter(rows, setting)).to(logits.dtype)\n    return called\n",
    ],
    "count-rows": ["from functools import lru_cache as remembered"],
    "kernels-norm": [
        "@triton.jit\ndef root_of_mean(squares, width, eps):\n    return tl.sqrt(squares / width + eps)\n"
    ],
}

UNUSUAL = {
    # --- lab 01 ---
    "naive-loop": '''
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    """workbench.decoding.loop does it with a loop; this one calls itself."""

    def go_on(text, left):
        if left > 0:
            yield (token := choose(forward(list(text))[-1].double(), list(text)))
            if token not in {*stop_token_ids}:
                yield from go_on((*text, token), left - 1)

    return go_on(tuple(prompt_ids), max_new_tokens)


checks.check("naive-loop", token_loop)
''',
    "sampling-filters": """
@in_numpy
def temperature(rows, t):
    return rows / t


@in_numpy
def top_k(rows, k):
    if k >= rows.shape[-1]:
        return rows.copy()
    border = np.partition(rows, -k, axis=-1)[..., -k, None]
    return np.where(rows >= border, rows, MINUS)


def softmax(rows):
    weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@in_numpy
def top_p(rows, p):
    out = np.full_like(rows, MINUS)
    for at in np.ndindex(rows.shape[:-1]):
        held, shares = 0.0, softmax(rows[at])
        for token in sorted(range(len(shares)), key=lambda token: -shares[token]):
            if held >= p - 1e-12:
                break
            out[at][token] = rows[at][token]
            held += shares[token]
    return out


@in_numpy
def min_p(rows, p):
    shares = softmax(rows)
    return np.where(shares >= p * shares.max(axis=-1, keepdims=True), rows, MINUS)


sampling_filters = {f.__name__: f for f in ()} | dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
""",
    "repetition-penalty": """
import numpy as np


def penalize_repetition(logits, token_ids, penalty):
    row = logits.numpy().astype(np.float64)
    factor = np.array([penalty if token in set(token_ids) else 1.0 for token in range(len(row))])
    return np.where(row > 0, row / factor, np.where(factor == 1.0, row, row * factor))
""",
    "beam-search": """
%time import heapq, itertools, math


def beam_search(forward_many, prompt_ids, *, num_beams, max_new_tokens, length_penalty=1.0, eos_token_ids=()):
    live, finished = {(): 0.0}, {}
    for step in itertools.count(1):
        if step > max_new_tokens or not live:
            break
        rows = forward_many([[*prompt_ids, *tokens] for tokens in live]).double().log_softmax(-1).tolist()
        ranked = heapq.nlargest(
            num_beams * (1 + len(eos_token_ids)),
            ((total + p, (*tokens, t)) for (tokens, total), row in zip(live.items(), rows) for t, p in enumerate(row)),
        )
        live = {}
        for total, tokens in ranked:
            if len(live) == num_beams:
                break
            (finished if tokens[-1] in eos_token_ids else live)[tokens] = total
    scored = [(list(t), total / math.pow(len(t), length_penalty)) for t, total in (finished | live).items()]
    return sorted(scored, key=lambda pair: -pair[1])[:num_beams]
""",
    "count-rows": """
%%time
@remembered
def count_rows(prompt_tokens: int, new_tokens: int) -> "torch.Tensor":
    return torch.arange(prompt_tokens, prompt_tokens + new_tokens).sum()
""",
    # --- lab 02 ---
    "roofline-intensity": """
from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Cost:
    flops: int = 0
    moved: int = 0

    def __add__(self, other):
        return Cost(self.flops + other.flops, self.moved + other.moved)

    def shown(self):
        return [self.flops, self.moved, float(Fraction(self.flops, self.moved))]


def cost_of(op, read, written, bytes_per_element):
    moved = bytes_per_element * sum(torch.Size(shape).numel() for shape in (*read, written))
    match op:
        case "product":
            return Cost(2 * torch.Size(read[0]).numel() * read[1][-1], moved)
        case "attention":
            sequences, heads, new, width = read[0]
            return Cost(2 * sequences * heads * width * new * (2 * read[1][2] - new + 1), moved)
    return Cost(0, moved)


layer_costs = lambda calls: sum((cost_of(**call) for call in calls), Cost()).shown()
""",
    "roofline-tpot": """
from collections import namedtuple

Term = namedtuple("Term", "seconds name")


def predict_tpot(config, *, batch, context, bytes_per_element, launches, ceilings, dtype):
    def per_layer(width):
        return config.num_layers * width

    d, D, S = config.hidden_size, config.head_dim, context + 1
    P = per_layer(2 * d * D * (config.num_heads + config.num_kv_heads)) + d * config.vocab_size
    P += per_layer((3 - bool(config.is_gpt2)) * d * config.intermediate_size)
    return max(
        Term(launches * ceilings.launch_s, "launch"),
        Term(
            bytes_per_element * (P + 2 * batch * per_layer(config.num_kv_heads * D * S)) / ceilings.read_bytes_per_s,
            "bandwidth",
        ),
        Term(2 * batch * (P + 2 * per_layer(config.num_heads * D * S)) / ceilings.flop_per_s[dtype], "compute"),
    )[::-1]


class Stopwatch:
    def __init__(self, step, finish, clock):
        self.step, self.finish, self.clock = step, finish, clock

    def __iter__(self):
        while True:
            self.finish()
            started = self.clock()
            self.step()
            self.finish()
            yield self.clock() - started


def measure_tpot(step, finish, clock, repeats):
    _, *taken = (seconds for _, seconds in zip(range(repeats + 1), Stopwatch(step, finish, clock)))
    return torch.tensor(taken, dtype=torch.float64).quantile(0.5)


step_times = dict(measure=measure_tpot, predict=predict_tpot)
""",
    "roofline-knee": """
from functools import lru_cache


class Limits:
    def __call__(self, measure, max_batch):
        @lru_cache(maxsize=None)
        def took(batch):
            try:
                return statistics.median(measure(batch)[1:])
            except MemoryError:
                return None

        def between(fits, full):
            middle = (fits + full) // 2
            if full - fits == 1:
                return fits
            return between(middle, full) if took(middle) else between(fits, middle)

        doubled = []
        while (batch := 2 ** len(doubled)) <= max_batch and took(batch):
            doubled.append(batch)
        if not doubled:
            return [None, 0]
        seconds = torch.tensor([took(b) for b in doubled], dtype=torch.float64)
        best = int((torch.tensor(doubled) / seconds.square()).argmax())
        return [doubled[best], between(doubled[-1], min(2 * doubled[-1], max_batch + 1))]


batch_limits = Limits()
""",
    "roofline-reading": """
def read_roofline(points, ceilings, dtype):
    peak, slope = ceilings.flop_per_s[dtype], ceilings.read_bytes_per_s

    def read(point):
        flops, moved, samples = point
        limit, roof, helps = min((flops / moved * slope, "bandwidth", "fewer bytes"), (peak, "compute", "more FLOP/s"),
                                 key=lambda one: (one[0], one[1] == "bandwidth"))
        middle = sorted(samples)[(len(samples) - 1) // 2 : len(samples) // 2 + 1]
        attained = flops / (sum(middle) / len(middle))
        return [roof, share := torch.tensor(attained / limit, dtype=torch.float64),
                "fewer launches" if share < 0.5 else helps]

    return tuple(map(read, points))
""",
    "workload-cost": """
import numpy as np


def workload_price(steps, *, parameters, peak_flop_per_s, dollars_per_hour):
    prefill = np.array([step["kind"] == "prefill" for step in steps])
    start, end, sequences, tokens = (
        np.array([step[name] for step in steps], dtype=float)
        for name in ("start_s", "end_s", "sequences", "prompt_tokens")
    )
    took, price = end - start, dollars_per_hour / 3600 * 1e6
    seconds = np.array([took[prefill].sum(), took[~prefill].sum(), end.max() - start.min()])
    divided = seconds / np.array([tokens.sum(), sequences.sum(), tokens.sum() + sequences.sum()])
    return [*(price * divided), 2 * parameters * tokens.sum() / seconds[0] / peak_flop_per_s]
""",
    "one-graph": """
def cap_logits(logits, limit):
    top = logits.max(dim=-1, keepdim=True).values
    factor = torch.where(top > limit, limit / top, torch.ones_like(top))
    return logits * factor
""",
    # --- lab 03 ---
    "kv-append": """
class MyCache(Slots):
    def append_and_attend(self, layer, sequence, q, k, v):
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]
        length = self.lengths[sequence]
        out = torch.zeros(q.shape, dtype=torch.float64)
        for i in range(len(q)):
            at = length - len(q) + i
            keys[at], values[at] = k[i], v[i]
            for h in range(q.shape[1]):
                g = h * k.shape[1] // q.shape[1]
                scores = [float(q[i, h].double() @ keys[t, g].double()) * self.scale for t in range(at + 1)]
                weights = torch.tensor(scores, dtype=torch.float64).exp()
                for t, weight in enumerate(weights / weights.sum()):
                    out[i, h] += weight * values[t, g]
        return out
""",
    "kv-chunks": """
from itertools import islice


def prefill(model, kv, prompt_ids, chunk_size, sequence=0):
    position, coming = dict(kv.lengths).get(sequence, 0), iter(prompt_ids)
    for chunk in iter(lambda: tuple(islice(coming, chunk_size)), ()):
        logits = model(Batch.of([list(chunk)], first_positions=[position], sequences=[sequence]), kv)
        position += len(chunk)
    return logits.numpy().astype("float64")
""",
    "kv-bytes": """
import numpy as np


def kv_bytes(config, tokens, bytes_per_element=2, batch=1):
    return np.prod([2, config.num_layers, config.num_kv_heads, config.head_dim, tokens, batch, bytes_per_element])


def largest_batch(config, card_gb, tokens, weight_bytes_per_element=2, kv_bytes_per_element=2):
    left = card_gb * 10**9 - config.num_parameters() * weight_bytes_per_element
    return torch.tensor(max(0.0, float(left) // float(kv_bytes(config, tokens, kv_bytes_per_element)))).long()


kv_calculator = {
    "kv_bytes": kv_bytes,
    "to_gib": lambda number_of_bytes: torch.tensor(number_of_bytes, dtype=torch.float64) / (1 << 30),
    "largest_batch": largest_batch,
}
""",
    "kv-truncate": """
class RewindableCache(Chunks):
    def truncate(self, sequence, length):
        if not 0 <= length <= self.lengths.get(sequence, -1):
            raise WorkbenchError(f"no {length} tokens of {sequence!r} here")
        self.chunks[sequence] = [
            [tuple(torch.cat(parts)[:length] for parts in zip(*layer))] if layer else []
            for layer in self.chunks[sequence]
        ]
        self.lengths |= {sequence: length}
""",
    "kv-bug": """
class RepairedCache(SuspectCache):
    def append_and_attend(self, layer, sequence, q, k, v):
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]
        new, length = len(q), self.lengths[sequence]
        keys[length - new : length], values[length - new : length] = k, v
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("nkgd,skd->nkgs", q.double().unflatten(1, (-1, group)), keys[:length].double())
        later = torch.arange(length) > torch.arange(length - new, length)[:, None]
        weights = (scores * self.scale).masked_fill(later[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("nkgs,skd->nkgd", weights, values[:length].double()).flatten(1, 2)
""",
    "kv-savings": """
import numpy as np


def count_work(prompt_tokens, new_tokens, cached):
    lengths = np.arange(prompt_tokens, prompt_tokens + new_tokens, dtype=np.int64)
    before = np.where(np.arange(new_tokens) > 0, lengths - 1, 0) * bool(cached)
    return [(lengths - before).sum(), (lengths * (lengths + 1) // 2 - before * (before + 1) // 2).sum()]
""",
    # --- lab 04 ---
    "smaller-gqa": """
def grouped_attention(q, k, v, *, scale):
    heads = []
    for query, key, value in zip(q.chunk(k.shape[1], dim=1), k.unbind(1), v.unbind(1)):
        for one in query.unbind(1):
            seen = causal_mask(len(q), len(k), None, q.device)
            heads.append(torch.where(seen, one @ key.T * scale, -torch.inf).softmax(-1) @ value)
    return torch.stack(heads, dim=1)
""",
    "smaller-window": '''
class RollingBuffer(Ring):
    """Token by token, however many come at once."""

    def append_and_attend(self, q, k, v):
        return torch.cat([self.one(*row) for row in zip(q.split(1), k.split(1), v.split(1))])

    def one(self, q, k, v):
        seen = [p % self.places for p in range(max(0, self.length - self.window + 1), self.length)]
        out = eager_attention(q, torch.cat([self.keys[seen], k]), torch.cat([self.values[seen], v]), scale=self.scale)
        self.keys[self.length % self.places], self.values[self.length % self.places] = k[0], v[0]
        self.length += 1
        self.oldest = max(self.oldest, self.length - self.places)
        return out

    def truncate(self, length):
        needs = max(0, length - self.window + 1)
        if length < 0 or length > self.length or (length and needs < min(self.oldest, length)):
            raise WorkbenchError(f"cannot go back to {length}")
        self.length = length
        if self.oldest > length:
            self.oldest = length
''',
    "smaller-int8": """
import numpy as np


def quantize(x, dim):
    x = np.asarray(x, dtype=np.float64)
    low, high = x.min(axis=dim, keepdims=True), x.max(axis=dim, keepdims=True)
    scale = (high - low) / 255
    scale[scale == 0] = 1.0
    codes = np.clip(np.rint((x - low) / scale) - 128, -128, 127)
    return [codes.astype(np.int8), scale.astype(np.float32), low.astype(np.float32)]


int8_kv = {
    "quantize": quantize,
    "dequantize": lambda codes, scale, low: (np.asarray(codes, dtype="f4") + 128) * np.asarray(scale) + np.asarray(low),
    "quantize_kv": lambda k, v: [quantize(k, 0), quantize(v, 2)],
}
""",
    "smaller-convert": """
def to_gqa(weights, config, num_kv_heads):
    if num_kv_heads not in [n for n in range(1, config.num_kv_heads + 1) if config.num_kv_heads % n == 0]:
        raise WorkbenchError(f"{num_kv_heads} does not divide {config.num_kv_heads}")
    group = config.num_kv_heads // num_kv_heads
    mix = torch.eye(num_kv_heads).repeat_interleave(group, dim=1) / group  # [new, old]
    return {
        name: torch.einsum("gh,hdx->gdx", mix, tensor.reshape(config.num_kv_heads, config.head_dim, -1)).reshape(
            -1, *tensor.shape[1:]
        )
        if any(f".attention.{part}." in name for part in "kv")
        else tensor
        for name, tensor in weights.items()
    }
""",
    "smaller-budget": """
from fractions import Fraction


def kv_bytes(config, tokens, bytes_per_element=2):
    latent = config.latent_attention
    numbers = 2 * config.num_kv_heads * config.head_dim if latent is None else latent.kv_rank + latent.rotary_head_dim
    kept = sum(
        min(tokens, tokens if (w := config.window_of(layer)) is None else w + config.attention_sinks)
        for layer in config.kv_layers
    )
    return -int(-(kept * numbers * Fraction(bytes_per_element)) // 1)


def memory_bytes(text):
    number, unit = text.rsplit(maxsplit=1)
    return int(Fraction(number) * {"GB": 1000, "GiB": 1024}[unit] ** 3)


class Choice:
    def __call__(self, designs, memory, users, tokens):
        best = None
        for design in designs:
            one = kv_bytes(design.config, tokens, design.kv_bytes_per_element)
            room = (memory_bytes(memory) - 2 * design.config.num_parameters()) // one
            if room >= users and (best is None or (design.loss, one) < best[:2]):
                best = design.loss, one, design.name, room
        return best and list(best[2:])


cache_planner = {"kv_bytes": kv_bytes, "memory_bytes": memory_bytes, "choose": Choice()}
""",
    # --- lab 05 ---
    "quant-pack": """
import numpy as np


def quantize(weight, bits, group):
    w = np.asarray(weight, dtype=np.float64)
    if w.shape[1] % group:
        raise WorkbenchError("whole groups only")
    blocks = w.reshape(len(w), -1, group)
    low = blocks.min(axis=2)
    scale = ((blocks.max(axis=2) - low) / (2**bits - 1)).astype(np.float16)
    zero = low.astype(np.float16)
    step = np.where(scale == 0, 1, scale).astype(np.float64)[..., None]
    codes = np.clip(np.rint((blocks - zero.astype(np.float64)[..., None]) / step), 0, 2**bits - 1)
    return [codes.reshape(w.shape).astype(np.uint8), scale, zero]


def dequantize(codes, scale, zero):
    codes, scale, zero = (np.asarray(one, dtype=np.float32) for one in (codes, scale, zero))
    wide = codes.shape[1] // scale.shape[1]
    return codes * scale.repeat(wide, axis=1) + zero.repeat(wide, axis=1)


def pack(codes):
    if codes.shape[-1] & 1:
        raise WorkbenchError("an odd number")
    codes = np.asarray(codes)
    half = codes.shape[-1] // 2
    return codes[..., :half] + 16 * codes[..., half:]


def unpack(packed):
    return np.concatenate(np.divmod(np.asarray(packed), 16)[::-1], axis=-1)


groups = dict(quantize=quantize, dequantize=dequantize, pack=pack, unpack=unpack)
""",
    "quant-awq": """
import numpy as np


def output_error(weight, stands_in, second_moments):
    h = np.asarray(second_moments, dtype=np.float64)
    lost, whole = (np.asarray(one, dtype=np.float64) for one in (weight - stands_in, weight))
    return np.einsum("oi,ij,oj", lost, h, lost) / np.trace(whole @ h @ whole.T)


def scale_for(inputs, alpha):
    mean = inputs.mean_abs.double()
    scale = torch.maximum(mean, mean.max() * 1e-4).pow(alpha)
    return scale / torch.sqrt(scale.aminmax()[0] * scale.aminmax()[1])


def search(weights, inputs, format, group, grid):
    w = torch.vstack(tuple(weights))
    alphas = (i / grid for i in range(grid))
    return tuple(
        [alpha, output_error(w, rounded.dequantize() / s, inputs.second_moments)]
        for alpha in alphas
        if (s := scale_for(inputs, alpha).float()) is not None
        and (rounded := quantize_tensor(w * s, format, over=1, group=group))
    )


awq = {
    "output_error": output_error,
    "scale_for": scale_for,
    "search": search,
    "fold": lambda gain, weights, scale: [
        gain.double() / scale,
        tuple(torch.einsum("oi,i->oi", w, scale) for w in weights),
    ],
}
""",
    "quant-gptq": """
def inverse_factor(second_moments, damping):
    h = second_moments.double()
    h = h + damping * h.trace() / len(h) * torch.eye(len(h), dtype=torch.float64)
    # from the lower factor of the flipped matrix
    lower = torch.linalg.cholesky(h.flip(0, 1))
    return torch.linalg.inv(lower).flip(0, 1)


def quantize_columns(weight, factor, scale, zero, highest):
    rows = []
    for out, row in enumerate(weight.double().tolist()):
        codes, group = [], len(row) // scale.shape[1]
        for j in range(len(row)):
            s, z = float(scale[out, j // group]), float(zero[out, j // group])
            code = min(max(round((row[j] - z) / s), 0), highest)
            error = (row[j] - (code * s + z)) / float(factor[j, j])
            row[j + 1 :] = [w - error * u for w, u in zip(row[j + 1 :], factor[j, j + 1 :].tolist())]
            codes.append(code)
        rows.append(codes)
    return torch.tensor(rows, dtype=torch.uint8)


gptq = {"inverse_factor": inverse_factor, "quantize_columns": quantize_columns}
""",
    "quant-codebook": """
def assign(weight, levels):
    def nearest(row, levels):
        return [min(range(len(levels)), key=lambda code: abs(w - levels[code])) for w in row]

    return torch.tensor(list(map(nearest, weight.tolist(), levels.tolist())), dtype=torch.uint8)


def fit_levels(weight, sensitivity, levels, steps):
    if not steps:
        return levels.double()
    codes, new = assign(weight, levels), levels.double().clone()
    for out, row in enumerate(codes.tolist()):
        for code in set(row):
            took = codes[out] == code
            mass = sensitivity[out][took].double().sum()
            if mass > 0:
                new[out, code] = (sensitivity[out][took].double() * weight[out][took]).sum() / mass
    return fit_levels(weight, sensitivity, new, steps - 1)


def take_outliers(weight, count):
    flat = [(abs(w), i, j, w) for i, row in enumerate(weight.tolist()) for j, w in enumerate(row)]
    _, rows, columns, values = zip(*sorted(flat)[-count:])
    places = torch.tensor(rows), torch.tensor(columns)
    rest = weight.double().index_put(places, torch.zeros((), dtype=torch.float64))
    return [rest, torch.tensor(rows), torch.tensor(columns), torch.tensor(values)]


codebook = {"assign": assign, "fit_levels": fit_levels, "take_outliers": take_outliers}
""",
    # --- lab 06 ---
    "spec-rule": """
def my_verify(proposal, p, draws, node=0):
    if node == len(proposal):
        return Verdict([*range(node)], draws.choose(p[node]), bonus=True)
    token = proposal.tokens[node]
    here, there = p[node][token], proposal.distributions[node][token]
    if here >= there or draws.accept(here / there):
        return my_verify(proposal, p, draws, node + 1)
    return Verdict([*range(node)], draws.choose(residual(p[node], proposal.distributions[node])), bonus=False)
""",
    "spec-residual": """
def left_over(p, q):
    left = [max(a - b, 0 * a) for a, b in zip(p, q)]
    total = sum(left)
    if not total > 0:
        return p
    row = (p * 0).clone() if hasattr(p, "clone") else p * 0
    for x, share in enumerate(left):
        row[x] = share / total
    return row
""",
    "spec-length": """
import itertools
import operator

import numpy as np


def expected_tokens(alpha, K):
    if alpha < 0 or alpha > 1 or K < 0:
        raise WorkbenchError("alpha from 0 to 1, K from 0")
    total = torch.ones((), dtype=torch.float64)
    for _ in range(K):
        total = 1 + alpha * total
    return total


def speedup(alpha, K, c, verify):
    if not c >= 0:
        raise WorkbenchError("c from 0")
    return np.float64(expected_tokens(alpha, K)) / (verify + K * c)


lengths = {
    "expected_tokens": expected_tokens,
    "expected_by_position": lambda rates: sum(itertools.accumulate(rates, operator.mul, initial=1.0)),
    "speedup": speedup,
    "best_length": lambda alpha, c, verify, max_K: np.argmax(
        [speedup(alpha, K, c, verify(K + 1)) for K in range(max_K + 1)]
    ),
}
""",
    "spec-rollback": """
def roll_back(sequence, text, drafted, verdict, target_kv, draft_kv):
    after = (*text, *(drafted[node] for node in verdict.path), verdict.token)
    for kv in {id(kv): kv for kv in (target_kv, draft_kv)}.values():
        if sequence in kv.lengths:
            kv.truncate(sequence, min(kv.lengths[sequence], len(after) - 1))
    return after


rollback = {
    "roll_back": roll_back,
    "next_tokens": lambda sequence, text, kv: tuple(text)[dict(kv.lengths).get(sequence, 0) :],
}
""",
    # --- lab 07 ---
    "drafts-lookup": """
def lookup(token_ids, K, min_ngram, max_ngram):
    text, end = tuple(token_ids), len(token_ids)
    for n in reversed(range(min_ngram, max_ngram + 1)):
        places = {text[i : i + n]: i + n for i in range(end - n)}  # the latest of each
        if n < end and (place := places.get(text[end - n :])) is not None:
            period = end - place
            return torch.tensor([text[place + i % period] for i in range(K)], dtype=torch.int64)
    return ()
""",
    "drafts-threshold": """
import math


class MyThreshold(Controller):
    def limit(self):
        self.so_far = []
        return torch.tensor(self.max_tokens)

    def go_on(self, confidence):
        self.so_far.append(confidence)
        self.held = math.prod(self.so_far)
        return not self.held < self.threshold

    def learn(self, outcome):
        if outcome.drafted and not outcome.plain:
            reached = math.prod(outcome.confidences[: outcome.accepted + 1])
            all_of_them = outcome.accepted >= outcome.drafted
            by = -self.step if all_of_them else self.pull * (reached - self.threshold)
            self.threshold = sorted((self.low, self.threshold + by, self.high))[1]
""",
    "drafts-tree-mask": """
import numpy as np


def tree_batch(parents, remembered):
    if any(parent not in range(-1, node) for node, parent in enumerate(parents)):
        raise WorkbenchError("a parent comes before its child")

    def line(node):
        return [] if node < 0 else [*line(parents[node]), node]

    mask = np.zeros((len(parents), remembered + len(parents)), dtype=bool)
    mask[:, :remembered] = True
    for node in range(len(parents)):
        mask[node, [remembered + one for one in line(node)]] = True
    return np.array([remembered - 1 + len(line(node)) for node in range(len(parents))], dtype=np.int64), mask
""",
    "drafts-medusa": """
from itertools import product


def candidates(logits, paths):
    order = [sorted(range(len(row)), key=lambda t: -row[t]) for row in logits.tolist()]
    named = [tuple(path) for path in paths]
    tokens = torch.tensor([order[len(path) - 1][path[-1]] for path in named], dtype=torch.int64)
    return tokens, [named.index(path[:-1]) if path[:-1] in named else -1 for path in named]


def accept(tokens, parents, best, at=-1):
    for node in range(len(tokens)):
        if parents[node] == at and tokens[node] == best[at + 1]:
            path, token = accept(tokens, parents, best, node)
            return (node, *path), token
    return (), best[at + 1]


medusa = {
    "all_paths": lambda widths: [p for n in range(len(widths)) for p in product(*map(range, widths[: n + 1]))],
    "candidates": candidates,
    "accept": accept,
}
""",
    "drafts-jump": """
def allowed(grammar, state, vocabulary):
    def may_follow(text):
        return grammar.after(state, text) is not None if text else state in grammar.ends

    return {token for token, text in enumerate(vocabulary) if may_follow(text)}


def without_choice(grammar, state):
    while state not in grammar.ends and len(grammar.edges[state]) == 1:
        character, state = next(iter(grammar.edges[state].items()))
        yield character


def forced(grammar, state, vocabulary):
    options = allowed(grammar, state, vocabulary)
    if len(options) != 1 or 0 in options:
        return ()
    (token,) = options
    return (token, *forced(grammar, grammar.after(state, vocabulary[token]), vocabulary))


def write(grammar, vocabulary, choose):
    tokens, calls = [], 0
    while True:
        state = grammar.after(0, "".join(vocabulary[t] for t in tokens))
        tokens += forced(grammar, state, vocabulary)
        options = sorted(allowed(grammar, grammar.after(0, "".join(vocabulary[t] for t in tokens)), vocabulary))
        if options == [0] or (calls := calls + 1) and not (token := choose(tuple(tokens), options)):
            return tuple(tokens), calls
        tokens.append(token)


jump = {
    "allowed": allowed,
    "forced_text": lambda grammar, state: "".join(without_choice(grammar, state)),
    "forced": forced,
    "write": write,
}
""",
    # --- lab 08 ---
    "batching-waste": """
import heapq


def checked(count):
    def called(lengths, B):
        if min([B, *(n for pair in lengths for n in pair)]) < 1:
            raise WorkbenchError("at least 1")
        return count(lengths, B, sum(map(sum, lengths)) - len(lengths))

    return called


@checked
def static(lengths, B, useful):
    left, rows, steps = list(lengths), 0, 0
    while left:
        group, left = left[:B], left[B:]
        prompt, output = map(max, zip(*group))
        rows, steps = rows + len(group) * (prompt + output - 1), steps + output
    return [rows, useful, (rows - useful) / max(rows, 1), steps]


@checked
def continuous(lengths, B, useful):
    free = [0] * B
    ends = [0]
    for _, output in lengths:
        ends.append(heapq.heappop(free) + output)
        heapq.heappush(free, ends[-1])
    return [useful, useful, 0, max(ends)]


waste = {"static": static, "continuous": continuous}
""",
    "batching-turn": """
from collections import deque
from math import ceil


def turn(running, waiting, max_running, num_blocks, block_size):
    size = lambda s: ceil(s.request.longest / block_size)
    reason = lambda s: ("stop" if s.written > 0 and s.token_ids[-1] in {*s.request.stop_token_ids} else
                        "length" if s.remaining <= 0 else None)
    finished = tuple((s, r) for s in running if (r := reason(s)))
    now, queue = [s for s in running if not reason(s)], deque(waiting)
    kept = len(now)
    while queue and len(now) < max_running and sum(map(size, now)) + size(queue[0]) <= num_blocks:
        now.append(queue.popleft())
    return finished, tuple(now[kept:]), now, queue
""",
    "batching-chunks": """
def plan(sequences, budget, chunk):
    decodes = [s for s in sequences if s.unsent == 1]
    for s in (*decodes, *(s for s in sequences if s.unsent > 1)):
        if (count := min(s.unsent, budget, budget if chunk is None else chunk)) > 0:
            budget -= count
            yield Work(s, s.num_tokens - s.unsent, count)


def postprocess(work, tokens):
    if work:
        piece, *rest = work
        sequence = piece.sequence
        sequence.computed = piece.start + piece.count
        sequence.token_ids += [tokens[sequence.id]] * (sequence.computed == sequence.num_tokens)
        postprocess(rest, tokens)


chunks = {
    "plan_step": lambda sequences, budget, chunk=None: tuple(plan(sequences, budget, chunk)),
    "postprocess": postprocess,
}
""",
    "batching-deadline": """
from functools import total_ordering


@total_ordering
class by_slack:
    def __init__(self, sequence, now_s, *, prefill_per_s, tokens_per_s, patience_s):
        due_s = patience_s if sequence.request.deadline_s is None else sequence.request.deadline_s
        waited_s = now_s - sequence.arrival_s
        self.slack_s = due_s - waited_s - sequence.unsent / prefill_per_s - sequence.remaining / tokens_per_s
        self.arrival_s = sequence.arrival_s

    def __eq__(self, other):
        return abs(self.slack_s - other.slack_s) < 1e-9 and self.arrival_s == other.arrival_s

    def __lt__(self, other):
        if abs(self.slack_s - other.slack_s) < 1e-9:
            return self.arrival_s < other.arrival_s
        return self.slack_s < other.slack_s
""",
    # --- lab 09 ---
    "paged-prefix": '''
from dataclasses import dataclass, field


@dataclass
class Node:
    block: int = -1
    used: int = 0
    children: dict = field(default_factory=dict)


class MyPrefixCache:
    """A tree of blocks, a root for each tenant; the tokens themselves are the keys."""

    def __init__(self, block_size):
        self.size, self.roots, self.clock = block_size, {}, 0

    def walk(self, token_ids, tenant, add=False):
        at = self.roots.setdefault(tenant, Node())
        for end in range(self.size, len(token_ids) + 1, self.size):
            key = tuple(token_ids[end - self.size : end])
            if key not in at.children and not add:
                return
            at = at.children.setdefault(key, Node())
            yield at

    def use(self, node):
        self.clock += 1
        node.used = self.clock
        return node.block

    def lookup(self, token_ids, tenant=""):
        return tuple(map(self.use, self.walk(token_ids[:-1], tenant)))

    def insert(self, token_ids, blocks, tenant=""):
        for node, block in zip(self.walk(token_ids[: self.size * len(blocks)], tenant, add=True), blocks):
            node.block = block if node.block < 0 else node.block
            self.use(node)

    def evict(self, held):
        leaves, stack = [], list(self.roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                stack.append(child)
                if not child.children and child.block not in held:
                    leaves.append((child.used, key, node))
        if not leaves:
            return None
        _, key, node = min(leaves, key=lambda leaf: leaf[0])
        return node.children.pop(key).block
''',
    "paged-attention": """
def paged_attention(q, keys, values, tables, lengths):
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]

    def one(query, table, length):
        at = torch.arange(int(length))
        k, v = (pool[table[at // size], at % size].double() for pool in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(
            query.double()[:, None],
            k.transpose(0, 1).repeat_interleave(group, 0),
            v.transpose(0, 1).repeat_interleave(group, 0),
        )[:, 0]

    return torch.stack([*map(one, q, tables, lengths)])
""",
    "paged-waste": """
HELD = {
    "contiguous": lambda request, there, size: request.maximum,
    "buddy": lambda request, there, size: 1 << (there - 1).bit_length() if there else 1,
    "paged": lambda request, there, size: sum(size for _ in range(0, there, size)),
}


def slots_held(request, kind, block_size):
    try:
        return HELD[kind](request, request.prompt + request.written, block_size)
    except KeyError:
        raise WorkbenchError(f"no kind {kind!r}") from None


def account(requests, gaps, waiting, kind, block_size):
    found = dict.fromkeys(("used", "reserved", "internal", "external", "free"), 0)
    slots_held(type("R", (), {"prompt": 1, "written": 0, "maximum": 1}), kind, block_size)
    for r in requests:
        for slot in range(slots_held(r, kind, block_size)):
            later = slot >= r.prompt + r.written
            found["internal" if slot >= r.prompt + r.output and later else "reserved" if later else "used"] += 1
    asks = waiting and waiting.prompt + waiting.written <= sum(gaps) and kind != "paged"
    kept_out = bool(asks) and max(gaps, default=0) < slots_held(waiting, kind, block_size)
    found["external" if kept_out else "free"] += sum(gaps)
    taken = sum(found.values()) - found["free"]
    return found | {"useful": torch.tensor(found["used"] / taken if taken else 0.0, dtype=torch.float64)}


waste = dict(slots_held=slots_held, account=account)
""",
    # --- lab 10 ---
    "kernels-norm": """
@triton.jit
def norm_kernel(x, residual, weight, y, total, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    h = tl.load(x + row * width + at, mask=at < width, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        h = h + tl.load(residual + row * width + at, mask=at < width, other=0).to(tl.float32)
        tl.store(total + row * width + at, h, mask=at < width)
    gain = tl.load(weight + at, mask=at < width, other=0).to(tl.float32)
    tl.store(y + row * width + at, gain * h / root_of_mean(tl.sum(h * h), width, eps), mask=at < width)


def rms_norm(x, weight, eps, residual=None):
    y, total = torch.empty_like(x), torch.empty_like(x)
    fused = residual is not None
    launch(norm_kernel, (x.shape[0],), x, residual if fused else x, weight, y, total, x.shape[1], eps,
           HAS_RESIDUAL=fused, BLOCK=triton.next_power_of_2(x.shape[1]))
    return [y, total] if fused else y
""",
    # --- lab 11 ---
    "server-stops": '''
class MyStops:
    """Character by character, with every beginning of a stop string that the text may be in."""

    def __init__(self, stop):
        self.stop, self.text, self.shown, self.found = tuple(stop), "", 0, False
        self.begun = set()  # where in the text a stop string may have begun

    def add(self, piece):
        for character in piece:
            self.begun.add(len(self.text))
            self.text += character
            tails = {at: self.text[at:] for at in self.begun}
            self.begun = {at for at, tail in tails.items() if any(s.startswith(tail) for s in self.stop)}
            complete = [at for at in self.begun if tails[at] in self.stop]
            if complete:
                self.found = True
                shown, self.shown = self.text[self.shown : min(complete)], len(self.text)
                return shown
        until = min(self.begun, default=len(self.text))
        shown, self.shown = self.text[self.shown : until], until
        return shown

    def finish(self):
        shown, self.shown = self.text[self.shown :], len(self.text)
        return shown
''',
    "server-events": """
from itertools import chain


class MyEvents:
    def __init__(self, head, include_usage=False):
        self.head = dict(head, object="chat.completion.chunk")
        self.usage = {"usage": None} if include_usage else {}
        self.roles = {}

    def sent(self, **more):
        return bytearray("data: %s\\n\\n" % json.dumps({**self.head, **more}), "ascii")

    def of(self, piece):
        deltas = [({"role": "assistant", "content": ""}, None)] * (not self.roles.pop(piece.index, None))
        self.roles[piece.index] = True
        deltas += [({"content": piece.text}, None)] * bool(piece.text)
        deltas += [({}, piece.finish_reason)] * (piece.finish_reason is not None)
        for delta, reason in deltas:
            choice = {"finish_reason": reason, "logprobs": None, "delta": delta, "index": piece.index}
            yield self.sent(choices=[choice], **self.usage)

    def pieces(self, pieces):
        return b"".join(chain.from_iterable(map(self.of, pieces))) or b": ping\\n\\n"

    def end(self, usage):
        return (bytes(self.sent(choices=[], usage=usage)) if self.usage else b"") + b"data: [DONE]\\n\\n"

    def error(self, body):
        return "data: {}\\n\\n".format(json.dumps(body)).encode()
""",
    "server-admission": """
from dataclasses import dataclass


@dataclass
class Text:
    context: int
    left: int  # of the prompt
    to_come: int


def first_token_s(queue, running, step_s, max_running, token_budget):
    work, waiting = [Text(c, 0, n) for c, n in running], [Text(0, p, n) for p, n in queue]
    last = waiting[-1] if waiting else None
    return rest_s(work, waiting, last, step_s, max_running, token_budget) if last else 0


def rest_s(work, waiting, last, step_s, places, budget):
    seconds = 0
    while last.left:
        while waiting and len(work) < places:
            work.append(waiting.pop(0))
        room, rows, contexts, texts = budget - sum(not one.left for one in work), 0, 0, []
        for one in work:
            count = min(one.left, room) if one.left else 1
            room -= count if one.left else 0
            if count:
                rows, contexts = rows + count, contexts + one.context
                one.context += count
                one.left = max(0, one.left - count)
                texts += [one] * (not one.left)
        seconds = seconds + step_s(rows, len(texts), contexts)
        for one in texts:
            one.to_come -= 1
        work = [one for one in work if one.left or one.to_come]
    return seconds


admission = {
    "first_token_s": first_token_s,
    "retry_after": lambda first_token_s, deadline_s: (
        None if first_token_s <= deadline_s else -int((deadline_s - first_token_s) // 1)
    ),
}
""",
    "server-goodput": """
import numpy as np


def tpot_s(row):
    return np.divide(row.last_s - row.first_s, row.tokens - 1) if row.tokens >= 2 else None


def met(seconds, limit):
    return limit is None or seconds is None or seconds <= limit


def good(row, objectives, since):
    return met(row.first_s - since, objectives.ttft_s) and met(tpot_s(row), objectives.tpot_s)


def share(goods, seconds):
    return [np.sum(goods, dtype=float) / seconds, float(np.mean(goods)) if goods else 0.0]


counting = {
    "tpot_s": tpot_s,
    "is_good": lambda row, objectives: np.bool_(row.outcome == "ok" and good(row, objectives, row.due_s)),
    "goodput": lambda rows, objectives, start_s, end_s: share(
        [row.outcome == "ok" and good(row, objectives, row.due_s) for row in rows if start_s <= row.due_s < end_s],
        end_s - start_s,
    ),
    "vllm_goodput": lambda rows, objectives, duration_s: share(
        [
            good(row, objectives, row.send_s)
            for row in rows
            if row.outcome in {"ok", "error_event"} and row.first_s is not None
        ],
        duration_s,
    ),
}
""",
    "server-policy": """
def by_prefix(sequence, now_s, *, cached, patience_s):
    patient = now_s - sequence.arrival_s < patience_s
    return [patient, patient and -cached(sequence), sequence.arrival_s, sequence.number]
""",
    # --- the exercises that had none: other data structures, other orders of the same sums, numpy, fractions ---
    "smaller-latent": """
def _weights(scores):
    new, there = scores.shape[-2:]
    late = torch.arange(there)[None] - torch.arange(new)[:, None] > there - new
    shares = (scores - scores.masked_fill(late, -torch.inf).amax(-1, keepdim=True)).exp() * (~late)
    return shares / shares.sum(-1, keepdim=True)


def _by_head(q, latents, k_up, v_up, absorb):
    results = []
    for head, (up, out) in enumerate(zip(k_up, v_up)):
        rank, content = up.shape[1], up.shape[0]
        c, r, mine = latents[:, :rank], latents[:, rank:], q[:, head] / math.sqrt(q.shape[-1])
        if absorb:
            scores = torch.cat((mine[:, :content] @ up, mine[:, content:]), 1) @ latents.T
            results.append((_weights(scores) @ c) @ out.T)
        else:
            results.append(_weights(mine @ torch.cat((c @ up.T, r), 1).T) @ (c @ out.T))
    return torch.stack(results, 1)


def _absorbed(q, latents, k_up, v_up):
    rank, content = k_up.shape[2], k_up.shape[1]
    mine = (q / math.sqrt(q.shape[-1])).transpose(0, 1)
    scores = torch.cat((mine[..., :content] @ k_up, mine[..., content:]), -1) @ latents.T
    return ((_weights(scores) @ latents[:, :rank]) @ v_up.mT).transpose(0, 1)


latent_attention = {
    "absorbed": lambda q, latents, k_up, v_up: _absorbed(q, latents, k_up, v_up),
    "expanded": lambda *given: _by_head(*given, absorb=False),
}
""",
    "quant-llm-int8": """
import numpy as np


def _split(rows, columns):
    rows = np.array(rows.tolist(), dtype=np.float32).reshape(tuple(rows.shape))
    apart = rows[:, columns.numpy()].copy()
    rows[:, columns.numpy()] = 0
    step = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step > 0, np.rint(rows / step), 0)
    return codes.astype(np.int8), step, apart


def _store(weight, columns):
    codes, step, apart = map(torch.from_numpy, _split(weight, columns))
    return [codes, step, apart.to(torch.float16)]


def _multiply(x, codes, scale, outliers, columns):
    mine, step, apart = _split(x, columns)
    ordinary = mine.astype(np.int64) @ codes.numpy().astype(np.int64).T
    beside = apart @ outliers.numpy().astype(np.float32).T
    return torch.from_numpy((ordinary * (step * scale.numpy().T) + beside).astype(np.float32))


int8_product = {
    "outlier_columns": lambda x, threshold: torch.tensor(
        [j for j in range(x.shape[1]) if any(abs(v) > threshold for v in x[:, j].tolist())], dtype=torch.long
    ),
    "store": _store,
    "multiply": _multiply,
}
""",
    "quant-recipe": """
from fractions import Fraction as F


class Planner(dict):
    def __missing__(self, name):
        return getattr(self, name)

    @staticmethod
    def linears(weights, stored):
        scales = F(weights.linears, stored.group) * stored.scale_bits if stored.group else F(0)
        return -((-F(weights.linears) * F(stored.bits) - scales) // 8)

    def model_bytes(self, weights, stored):
        head = 0 if weights.tied else weights.embedding
        return int(self.linears(weights, stored)) + 2 * (weights.norms + weights.embedding) + 2 * head

    def step_bytes(self, weights, stored):
        return int(self.linears(weights, stored)) + 2 * weights.norms + 2 * weights.embedding

    def speed_up(self, weights, stored):
        return float(F(2 * (weights.linears + weights.norms + weights.embedding), self.step_bytes(weights, stored)))

    def step_seconds(self, weights, stored, tokens, machine):
        rates = {8: machine.int8_per_s, 16: machine.flops_per_s}
        work = 2.0 * tokens * weights.linears / rates[stored.input_bits] + 2.0 * tokens * weights.embedding / rates[16]
        return max((work, self.step_bytes(weights, stored) / machine.bytes_per_s))

    def choose(self, weights, recipes, tokens, machine, budget, max_excess):
        best = None
        for stored in reversed(list(recipes)):
            seconds = self.step_seconds(weights, stored, tokens, machine)
            row = (seconds, stored.excess_nats, self.model_bytes(weights, stored), stored.name)
            if stored.excess_nats <= max_excess and row[2] <= budget and (best is None or row < best):
                best = row
        return best and best[-1]


planner = Planner()
recipe_planner = {n: planner[n] for n in "model_bytes step_bytes speed_up step_seconds choose".split()}
""",
    "spec-proof": """
from collections import Counter
from itertools import product
from math import prod


def distribution_of_round(target, draft, K):
    out = Counter()
    V = range(len(target(())))
    for d in product(V, repeat=K):
        q = [draft(d[:i]) for i in range(K)]
        p = [target(d[:i]) for i in range(K + 1)]
        weight = prod((q[i][d[i]] for i in range(K)), start=Fraction(1))
        if weight == 0:
            continue
        accept = [min(Fraction(1), p[i][d[i]] / q[i][d[i]]) for i in range(K)]
        for n in range(K + 1):
            here = weight * prod(accept[:n], start=Fraction(1)) * (1 - accept[n] if n < K else 1)
            if not here:
                continue
            excess = [max(Fraction(0), a - b) for a, b in zip(p[n], q[n])] if n < K else p[n]
            for x in V:
                out[d[:n] + (x,)] += here * Fraction(excess[x]) / sum(excess)
    return out


def broken(rules, target, draft, K):
    def texts(verify):
        made = theory.distribution_of_texts(target, draft, K + 1, [1] * K, verify=verify)
        return {text: share for text, share in made.items() if share}

    wanted = {text: share for text, share in theory.distribution_of_target(target, K + 1).items() if share}
    return sorted(filter(lambda name: texts(rules[name]) != wanted, rules), key=list(rules).index)


proof = {**{f.__name__: f for f in (broken, distribution_of_round)}}
""",
    "paged-pool": """
from collections import Counter as Times


class MyPool(Blocks):
    def take(self, count):
        keep = len(self.free) - count
        if keep < 0:
            raise NoRoom(count, self.num_free, "take")
        taken = self.free[keep:]
        del self.free[keep:]
        for block in taken:
            self.references[block] += 1
        return taken

    def _change(self, blocks, by):
        times = Times(blocks)
        for block, count in times.items():
            there = self.references[block] if block in range(self.num_blocks) else 0
            if there < (count if by < 0 else 1):
                raise WorkbenchError(f"block {block!r} has {there} holders")
        for block, count in times.items():
            self.references[block] += by * count
        return [block for block in times if self.references[block] == 0]

    def share(self, blocks):
        self._change(blocks, +1)

    def give_back(self, blocks):
        self.free.extend(self._change(blocks, -1))
""",
    "paged-cow": """
from math import ceil


class MyTables(Tables):
    def _plan(self, lengths):
        held, steps = {}, []
        for name, length in lengths.items():
            before, table = self.lengths.get(name, 0), self.tables.get(name, [])
            if before > length:
                raise WorkbenchError(f"{name!r} would shrink from {before} to {length}")
            copied = None
            if before % self.block_size and length > before:
                last = table[-1]
                if held.setdefault(last, self.pool.references[last]) > 1:
                    held[last] -= 1
                    copied = last
            steps.append((name, length, copied, ceil(length / self.block_size) - len(table)))
        return steps

    def grow(self, lengths):
        steps = self._plan(lengths)
        needed = sum(new + (copied is not None) for _, _, copied, new in steps)
        if needed > self.pool.num_free:
            raise NoRoom(needed, self.pool.num_free, "growing")
        fresh, copies = iter(self.pool.take(needed)), []
        for name, length, copied, new in steps:
            table = self.tables.setdefault(name, [])
            if copied is not None:
                table[-1] = next(fresh)
                copies.append((copied, table[-1]))
            table.extend(next(fresh) for _ in range(new))
            self.lengths[name] = length
        self.pool.give_back([copied for copied, _ in copies])
        return copies

    def fork(self, sequence, new_sequence):
        try:
            blocks, length = self.tables[sequence], self.lengths[sequence]
        except KeyError as error:
            raise WorkbenchError(f"no sequence {sequence!r}") from error
        if new_sequence in self.tables:
            raise WorkbenchError(f"{new_sequence!r} is there")
        self.tables |= {new_sequence: blocks[:]}
        self.lengths |= {new_sequence: length}
        self.pool.share(blocks)

    def release(self, sequence):
        blocks = self.tables.pop(sequence, None)
        if blocks is None:
            raise WorkbenchError(f"no sequence {sequence!r}")
        self.lengths.pop(sequence)
        self.pool.give_back(blocks)
""",
    "kernels-softmax": """
@triton.jit
def softmax_kernel(x, y, n, TILE: tl.constexpr):
    row = tl.program_id(0)
    x += row * n
    y += row * n
    lanes = tl.arange(0, TILE)
    highest = tl.full([TILE], -float("inf"), tl.float32)
    sums = tl.zeros([TILE], tl.float32)
    start = 0
    while start < n:
        tile = tl.load(x + start + lanes, mask=start + lanes < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tile)
        safe = tl.where(higher > -float("inf"), higher, 0.0)
        sums = sums * tl.exp(highest - safe) + tl.exp(tile - safe)
        highest = higher
        start += TILE
    top = tl.max(highest, axis=0)
    total = tl.sum(sums * tl.exp(highest - top), axis=0)
    start = 0
    while start < n:
        inside = start + lanes < n
        tile = tl.load(x + start + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + start + lanes, tl.exp(tile - top - tl.log(total)), mask=inside)
        start += TILE


def softmax(x, tile=1024):
    (rows, n), y = x.shape, x.new_zeros(x.shape)
    launch(softmax_kernel, (rows, 1, 1), x, y, n, TILE=tile)
    return y
""",
    "kernels-merge": """
@triton.jit
def merge_kernel(parts, lse, out, out_lse, splits, heads, size, SIZE: tl.constexpr):
    i, d = tl.program_id(0), tl.arange(0, SIZE)
    top = -float("inf")
    for s in range(splits):
        top = tl.maximum(top, tl.load(lse + s * heads + i))
    top = tl.where(top > -float("inf"), top, 0.0)
    share = 0.0
    mixed = tl.zeros([SIZE], tl.float32)
    for s in range(splits):
        weight = tl.exp(tl.load(lse + s * heads + i) - top)
        part = tl.load(parts + (s * heads + i) * size + d, mask=d < size, other=0.0)
        mixed += tl.where(weight > 0, part, 0.0) * weight
        share += weight
    tl.store(out + i * size + d, mixed / tl.where(share > 0, share, 1.0), mask=d < size)
    tl.store(out_lse + i, tl.where(share > 0, tl.log(tl.where(share > 0, share, 1.0)) + top, -float("inf")))


def merge(parts, lse):
    S, B, H, D = parts.shape
    out, total = parts.new_empty(B, H, D), lse.new_empty(B, H)
    launch(merge_kernel, (B * H,), parts, lse, out, total, S, B * H, D, SIZE=1 << max(0, D - 1).bit_length())
    return (out, total)
""",
    "kernels-int4": """
@triton.jit
def int4_kernel(
    x, codes, scale, zero, y, rows, outs, width, group, ROWS: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr
):
    o, n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[None, :], tl.arange(0, ROWS)[:, None]
    bytes_of_row = width // 2
    half = group // 2
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, bytes_of_row, TILE):
        byte = (start + tl.arange(0, TILE))[:, None]
        there = (byte < bytes_of_row) & (o < outs)
        packed = tl.load(codes + o * bytes_of_row + byte, mask=there, other=0)
        at = o * (width // group) + byte // half
        step = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
        zeros = tl.load(zero + at, mask=there, other=0.0).to(tl.float32)
        row = (start + tl.arange(0, TILE))[None, :]
        column = row // half * group + row % half
        ok = (n < rows) & (row < bytes_of_row)
        left = tl.load(x + n * width + column, mask=ok, other=0.0).to(tl.float32)
        right = tl.load(x + n * width + column + half, mask=ok, other=0.0).to(tl.float32)
        acc += tl.sum(left[:, :, None] * ((packed % 16).to(tl.float32) * step + zeros)[None, :, :], axis=1)
        acc += tl.sum(right[:, :, None] * ((packed // 16).to(tl.float32) * step + zeros)[None, :, :], axis=1)
    tl.store(y + n * outs + o, acc, mask=(n < rows) & (o < outs))


def matvec_int4(x, codes, scale, zero, *, group):
    y = torch.zeros(len(x), len(codes), dtype=x.dtype, device=x.device)
    settings = dict(ROWS=1 << (len(x) - 1).bit_length(), OUTS=16, TILE=16)
    launch(int4_kernel, (-(-len(codes) // 16),), x, codes, scale, zero, y, *y.shape, x.shape[1], group, **settings)
    return y
""",
    # --- lab 12 ---
    "pruning-importance": """
import numpy as np
from collections import Counter


def _score(values, mask):
    values, mask = np.abs(np.asarray(values, dtype=float)), np.asarray(mask)
    means = [rows[there].sum(0) / there.sum() for rows, there in zip(values, mask) if there.any()]
    return torch.from_numpy(np.sqrt(sum((m**2 for m in means), np.zeros(values.shape[-1]))))


def _neurons(x, gate, up, mask):
    z = x @ gate.mT
    return _score((z / (1 + torch.exp(-z)) * (x @ up.mT)).numpy(), mask.numpy())


def _groups(heads, num_kv_heads, mask):
    each, total = _score(torch.linalg.vector_norm(heads, dim=3).numpy(), mask.numpy()), Counter()
    for head, value in enumerate(each.tolist()):
        total[head * num_kv_heads // len(each)] += value
    return torch.tensor([total[group] for group in range(num_kv_heads)], dtype=torch.float64)


def _kept(scores, share):
    left = dict(enumerate(scores))
    for _ in range(len(scores) - max(1, int(np.floor(round(len(scores) * share, 9) + 0.5)))):
        left.pop(min(reversed(left), key=left.get))
    return [*left]


importance = dict(
    neurons=_neurons,
    channels=lambda normed, mask: torch.stack([_score(one.numpy(), mask.numpy()) for one in normed]).sum(0),
    kv_groups=_groups,
    kept=_kept,
)
""",
    "pruning-cut": """
class Cutter(dict):
    def __missing__(self, name):
        return self["x"]


def cut(block, head_dim, channels, neurons, groups):
    sizes = {name: t.shape[0] for name, t in block.items()}
    kv_heads = sizes["k"] // head_dim
    keep = torch.zeros(kv_heads, dtype=torch.bool)
    keep[groups] = True
    rows = Cutter(x=torch.tensor(channels))
    rows["k"] = rows["v"] = keep.repeat_interleave(head_dim).nonzero().flatten()
    rows["q"] = keep.repeat_interleave(sizes["q"] // kv_heads).nonzero().flatten()
    rows["gate"] = rows["up"] = torch.tensor(neurons)
    columns = Cutter(x=rows["x"], o=rows["q"], down=rows["gate"])
    made = {}

    def smaller(name, tensor):
        if name.endswith("_norm") and len(name) == 6:
            return tensor.detach().clone()
        if name in ("embedding", "head"):
            return tensor[:, rows["x"]]
        one = tensor[rows[name.split("_")[0] if name.endswith("bias") else name]]
        return one if one.ndim < 2 else one.index_select(1, columns[name])

    for name, tensor in block.items():
        made.setdefault(id(tensor), smaller(name, tensor))
    return {name: made[id(tensor)] for name, tensor in block.items()}
""",
    "pruning-distill": """
from torch.autograd import grad
from torch.nn import functional as F


def _loss(student, teacher, temperature, mask):
    places = mask.flatten().nonzero().flatten()
    z, y = (x.flatten(0, 1).index_select(0, places).double() / temperature for x in (student, teacher.detach()))
    never = y.isneginf()
    p, log_q = y.softmax(1), F.log_softmax(z, 1).masked_fill(never, 0)
    entropy = -torch.special.entr(p).sum()
    return (temperature * temperature * (entropy - (p * log_q).sum()) / max(len(places), 1)).float()


def _gradient(student, teacher, temperature, mask):
    z = student.detach().double().masked_fill(~mask[..., None], 0.0).requires_grad_()
    return grad(_loss(z, teacher, temperature, mask), z)[0].float()


distill = {"loss": _loss, "gradient": _gradient}
""",
    "pruning-wanda": """
def _norms(batches):
    from functools import reduce

    tops = [batch.double().norm(dim=0) for batch in batches]
    return reduce(torch.hypot, tops)


def _masked(rows, norms, count):
    ranks = (rows.abs() * norms).flip(-1).argsort(dim=-1, stable=True).argsort(dim=-1).flip(-1)
    return rows * (ranks >= count).to(rows.dtype)


def _two(weight, norms):
    outputs, inputs = weight.shape
    if inputs & 3:
        raise ValueError("not in fours")
    return torch.cat([_masked(w, n, 2) for w, n in zip(weight.split(4, 1), norms.split(4))], 1)


wanda = dict(
    input_norms=_norms, by_row=lambda weight, norms, share: _masked(weight, norms, int(share * norms.numel() + 1e-6)),
    two_of_four=_two
)
""",
    "pruning-plan": """
def _cost(table, cut):
    pieces = [table["pieces"][i] for i in cut]
    whole = [piece for piece in pieces if piece["kind"] == "layer"]
    parts = [piece for piece in pieces if all(piece["layer"] != one["layer"] for one in whole)]
    total = {key: sum(piece[key] for piece in whole + parts) for key in ("parameters", "launches", "loss")}
    parameters, launches = (table[key] - total[key] for key in ("parameters", "launches"))
    step_s = parameters * table["element_bytes"] / table["bytes_per_s"] + launches * table["launch_s"]
    return dict(parameters=parameters, launches=launches, step_s=step_s, loss=total["loss"])


def _plan(table, max_parameters, max_step_s):
    pieces = table["pieces"]
    layers = sorted({piece["layer"] for piece in pieces})

    def of(layer, kind):
        return {i for i, piece in enumerate(pieces) if piece["layer"] == layer and (piece["kind"] == "layer") is kind}

    def allowed(cut):
        gone = {pieces[i]["layer"] for i in cut if pieces[i]["kind"] == "layer"}
        if gone == set(layers):
            return False
        for layer in layers:
            parts = of(layer, False)
            if layer in gone and parts & cut:
                return False
            kinds = {pieces[i]["kind"] for i in parts}
            if layer not in gone and kinds != {pieces[i]["kind"] for i in parts - cut}:
                return False
        return True

    plans = []
    for bits in range(1 << len(pieces)):
        cut = {i for i in range(len(pieces)) if bits >> i & 1}
        if allowed(cut):
            costs = _cost(table, sorted(cut))
            if costs["parameters"] <= max_parameters and costs["step_s"] <= max_step_s:
                plans.append(((costs["loss"], costs["parameters"]), sorted(cut)))
    plans.sort()
    return plans[0][1] if plans else None


budget = {"cost": _cost, "plan": _plan}
""",
    # --- lab 13 ---
    "parallel-split": """
import numpy as np
from functools import partial


def _share(units, columns, own, weights):
    'Rows of everything but `columns`, whose bias is whole; arrays.'
    out = {}
    for name, tensor in weights.items():
        rows = own[name[0]]
        if name == columns:
            out[name] = np.ascontiguousarray(tensor.numpy().T[rows].T)
        elif name == columns + "_bias":
            out[name] = np.array(tensor)
        else:
            out[name] = tensor.numpy()[rows]
    return out


def _stretch(units, rank, ranks):
    if units % ranks:
        raise ValueError
    return [i for i in range(units) if i // (units // ranks) == rank]


class Split(dict):
    def feed_forward(self, weights, rank, ranks):
        own = _stretch(len(weights["up"]), rank, ranks)
        return _share(len(own), "down", dict.fromkeys("gud", own), weights)

    def attention(self, weights, head_dim, rank, ranks):
        queries, keys = (weights[name].shape[0] // head_dim for name in ("q", "k"))
        own = _stretch(queries, rank, ranks)
        needed = sorted({head * keys // queries for head in own})
        if keys % ranks and ranks % keys:
            raise ValueError("cut")
        wide = lambda heads: [head * head_dim + i for head in heads for i in range(head_dim)]
        return _share(0, "o", {"q": wide(own), "o": wide(own), "k": wide(needed), "v": wide(needed)}, weights)

    def forward(self, x, part, all_reduce):
        part = {name: torch.as_tensor(one) for name, one in part.items()}
        silu = torch.nn.SiLU()
        zero = torch.zeros((), dtype=x.dtype)
        inner = silu(x.matmul(part["gate"].t()).add(part.get("gate_bias", zero)))
        inner.mul_(x.matmul(part["up"].t()).add(part.get("up_bias", zero)))
        result = all_reduce(inner.matmul(part["down"].t()))
        result += part.get("down_bias", zero)
        return result


_made = Split()
split = {name: getattr(_made, name) for name in ("feed_forward", "attention", "forward")}
""",
    "parallel-count": """
from collections import Counter
import numpy as np


def step_counts(model, tensor, pipeline, rank, groups):
    layers, size = model["layers"], model["element_bytes"]
    if not layers >= pipeline:
        raise ValueError
    stage = rank // tensor
    mine = len(np.array_split(np.arange(layers), pipeline)[stage])
    calls, bytes_ = Counter(), Counter()

    def note(kind, each, times=1):
        calls[kind] += times
        bytes_[kind] += times * each

    for n, m in groups:
        many, end = tensor != 1, stage + 1 == pipeline
        row = n * model["hidden_size"] * size
        note("all_reduce", row, 2 * mine * many)
        note("send", row, not end)
        note("receive", row, stage != 0)
        note("gather", m * ((model["vocabulary"] + tensor - 1) // tensor) * size, bool(end and many and m))
        answer = m * model["vocabulary"] * size
        note("send", answer, bool(pipeline > 1 and m and rank == (pipeline - 1) * tensor))
        note("receive", answer, bool(pipeline > 1 and m and not rank))
    return {kind: np.array([calls[kind], bytes_[kind]]) for kind in ("receive", "send", "gather", "all_reduce")}
""",
    "parallel-schedule": """
from fractions import Fraction
from itertools import accumulate, count


def _run(times):
    ends, starts = [Fraction(0)] * len(times[0]), []
    for row in times:
        own, last = [], Fraction(0)
        for ready, seconds in zip(ends, row):
            own.append(max(last, ready))
            last = own[-1] + Fraction(seconds)
        ends = [start + Fraction(one) for start, one in zip(own, row)]
        starts.append(torch.tensor([float(one) for one in own], dtype=torch.float64))
    total = max([*ends, 0])
    work = sum(Fraction(one) for row in times for one in row)
    share = float(1 - work / (len(times) * total)) if total else 0
    return dict(starts=[row.tolist() for row in starts], total_s=float(total), idle_share=torch.tensor(share).double())


def _smallest(stages, max_idle):
    bound = Fraction(max_idle)
    if stages > 1 and not bound:
        return None
    return next(m for m in count(1) if (stages - 1) <= bound * (m + stages - 1))


schedule = {"min_groups": _smallest, "run": _run}
""",
    "parallel-connector": """
from collections import defaultdict, deque
from dataclasses import dataclass, field


@dataclass
class Place:
    blocks: list
    layers: int
    bits: int = 0

    def full(self):
        return self.bits + 1 == 1 << self.layers * len(self.blocks)


class MyConnector:
    def __init__(self, blocks, block_size):
        self._owner = {block: None for block in blocks}
        self._size = block_size
        self._places = {}

    def num_free(self):
        return sum(owner is None for owner in self._owner.values())

    def reserve(self, request, tokens, layers):
        if self._places.get(request):
            return True
        wanted = len(range(0, tokens, self._size))
        free = deque(block for block, owner in self._owner.items() if owner is None)
        blocks = [free.pop() for _ in range(wanted) if free]
        if len(blocks) != wanted:
            return False
        self._owner.update(dict.fromkeys(blocks, request))
        self._places[request] = Place(blocks, layers)
        return True

    def receive(self, request, layer, index):
        place = self._places.get(request)
        if place is not None and layer < place.layers and index < len(place.blocks):
            place.bits |= 1 << index * place.layers + layer

    def arrived(self, request):
        place = self._places.get(request)
        return place is not None and place.full()

    def drop(self, request):
        self._places[request] = None
        for block, owner in self._owner.items():
            if owner == request:
                self._owner[block] = None

    def table(self, request):
        place = self._places.get(request)
        return torch.tensor(place.blocks) if place else ()
""",
    "parallel-break-even": """
import numpy as np


def _load(machine, tiers, n):
    block = math.prod(machine[name] for name in ("block_size", "layers", "kv_heads", "head_dim", "element_bytes")) * 2

    def seconds(name):
        number, facts = sum(tier == name for tier in tiers[:n]), machine["tiers"][name]
        return (number > 0) * facts["latency_s"] + number * block / facts["bytes_per_s"]

    return np.float64(math.fsum(map(seconds, machine["tiers"])))


def _compute(machine, tokens, begin):
    before = torch.arange(begin, tokens, dtype=torch.float64)
    return (machine["token_s"] + machine["pair_s"] * (before + 1)).sum()


def _plan(machine, tokens, tiers):
    size, usable = machine["block_size"], 0
    while usable < len(tiers) and tiers[usable] is not None and tokens - size * (usable + 1) >= 1:
        usable += 1
    seconds = [float(_load(machine, tiers, n) + _compute(machine, tokens, n * size)) for n in range(usable + 1)]
    n = int(np.argmin(seconds))  # the first of equal ones, which loads less
    load = tuple(i for i in range(n) if tiers[i] in machine["tiers"])
    return {"seconds": np.float64(seconds[n]), "load": load, "begin": n * size}


break_even = {"load_s": _load, "compute_s": _compute, "plan": _plan}
""",
    # --- lab 14 ---
    "beyond-convolution": """
import numpy as np


def _powers(a_bar, b_bar, c, length):
    a, x, out = a_bar.numpy(), b_bar.numpy(), c.numpy()
    rows = np.empty((len(x), length), dtype=x.dtype)
    for at in range(length):
        rows[:, at] = np.einsum("en,en->e", out, x)
        x = np.einsum("enm,em->en", a, x) if a.ndim == 3 else a * x
    return torch.from_numpy(np.ascontiguousarray(rows.real))


def _late(u, kernel, skip):
    y = skip * u
    for late in range(min(kernel.shape[1], u.shape[1])):
        y = y + torch.nn.functional.pad(u, (0, 0, late, 0))[:, : u.shape[1]] * kernel[:, late]
    return y


convolution = dict(convolve=_late, kernel=_powers)
""",
    "beyond-scan": """
from functools import reduce
from itertools import accumulate


def combine(first, second):
    return first[0] * second[0], torch.addcmul(second[1], second[0], first[1])


def selective_scan(u, step, a, b, c, h):
    def steps(row):
        yield torch.ones_like(h[row]), h[row]
        for dt, x, into in zip(step[row], u[row], b[row]):
            yield torch.exp(dt[:, None] * a), torch.outer(dt * x, into)

    y, last = [], []
    for row in range(len(u)):
        _, *after = [state for _, state in accumulate(steps(row), combine)]
        y.append(torch.stack([state @ read for state, read in zip(after, c[row])]))
        last.append(reduce(lambda _, state: state, after))
    return torch.stack(y), torch.stack(last)


scan = {f.__name__: f for f in (selective_scan, combine)}
""",
    "beyond-unmask": """
def unmask(tokens, logits, passes, mask_token, noise=None):
    left = {place for place in range(len(tokens)) if not tokens[place] != mask_token}
    surest = []
    for place in sorted(left):
        row = logits[place].index_fill(0, torch.tensor([mask_token]), float("-inf"))
        drawn = (row if noise is None else row + noise[place]).tolist()
        token = max(range(len(row)), key=drawn.__getitem__)
        surest.append((-float(row.softmax(0)[token]), place, token))
    chosen = sorted(surest)[: (len(left) + passes - 1) // passes]
    return [place for _, place, _ in chosen], [token for *_, token in chosen]
""",
    "beyond-passes": """
from collections import deque
from fractions import Fraction


class Passes(dict):
    def passes_of(self, prompt, tokens, block_size, passes, cached):
        wanted = deque(passes) if isinstance(passes, list) else None
        made, kept = [], 0
        for block in range(-(-(prompt + tokens) // block_size)):
            first, end = block * block_size, min((block + 1) * block_size, prompt + tokens)
            if end <= prompt:
                continue
            number = wanted.popleft() if wanted is not None else passes
            for _ in range(min(number, end - max(prompt, first))):
                made.append([end - kept, end])
                kept = first if cached else 0
        return made

    def totals(self, made, tokens, weights, pair_flops):
        flops = sum(rows * (weights + weights + pair_flops * keys) for rows, keys in made)
        count = {"rows": sum(rows for rows, _ in made), "passes": len(made)}
        return count | {"tokens_per_pass": tokens / count["passes"], "flops": flops}

    def speedup(self, made, tokens, batch, flop_per_s, bytes_per_s):
        def seconds(rows):
            return max(Fraction(2) / Fraction(bytes_per_s), Fraction(2 * rows * batch) / Fraction(flop_per_s))

        return float(tokens * seconds(1) / sum(seconds(rows) for rows, _ in made))


_parts = Passes()
passes = {name: getattr(_parts, name) for name in ("passes_of", "totals", "speedup")}
""",
    # --- lab 15 ---
    "capstone-price": """
from collections import Counter


def step_s(counts, overhead_s, bandwidth, flop_rate):
    of = Counter(counts)
    each = {"passes": overhead_s, "weight_bytes": 1 / bandwidth, "flops": 1 / flop_rate}
    both = [("", each), ("draft_", each)]
    return of["kv_bytes"] / bandwidth + sum(of[who + name] * s for who, prices in both for name, s in prices.items())
""",
    "capstone-points": """
class Score(dict):
    def level(self, ratio, thresholds):
        steps = zip(thresholds, thresholds[1:])
        return sum(min(1.0, max(0.0, (ratio - low) / (high - low))) for low, high in steps)

    def points(self, ratios, weights, thresholds, share_served):
        return 100 / 3 * share_served * math.fsum(w * self.level(ratios[n], thresholds) for n, w in weights.items())


_made = Score()
score = {"points": _made.points, "level": _made.level}
""",
    "capstone-least-rows": """
def least_rows(prompts, outputs):
    texts = [tuple(a) + tuple(b) for a, b in zip(prompts, outputs)]
    return len({text[:end] for text in texts for end in range(1, len(text))})
""",
}
