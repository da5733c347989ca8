"""Plausible wrong answers to lab 02, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from collections.abc import Callable

from workbench.checks import WrongAnswer


def variant(source: str) -> Callable[..., str]:
    """Answers that differ from `source` by (old, new) replacements, each of something that stands there once."""

    def changed(*replacements: tuple[str, str]) -> str:
        text = source
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    return changed


# --- roofline-intensity ---

LAYERS = """
def linear_costs(rows, d_in, d_out, bytes_per_element):
    flops = 2 * rows * d_in * d_out
    moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
    return flops, moved, flops / moved


def mlp_costs(rows, d, f, bytes_per_element, matrices=3):
    each = [linear_costs(rows, *shape, bytes_per_element) for shape in [(d, f)] * (matrices - 1) + [(f, d)]]
    flops, moved = sum(one[0] for one in each), sum(one[1] for one in each)
    return flops, moved, flops / moved


def attention_costs(sequences, new_tokens, keys, q_heads, kv_heads, head_dim, bytes_per_element):
    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
    flops = 4 * sequences * q_heads * head_dim * pairs
    queries = sequences * new_tokens * q_heads * head_dim
    remembered = sequences * keys * kv_heads * head_dim
    moved = bytes_per_element * (2 * queries + 2 * remembered)
    return flops, moved, flops / moved


layer_costs = {"linear": linear_costs, "mlp": mlp_costs, "attention": attention_costs}
"""

LAYERS_ALTERNATIVE = """
def counted(flops, values, bytes_per_element):
    return flops, values * bytes_per_element, flops / (values * bytes_per_element)


def linear_costs(rows, d_in, d_out, bytes_per_element):
    return counted(rows * d_out * (d_in + d_in), (rows + d_out) * (d_in + rows) - rows * rows, bytes_per_element)


def mlp_costs(rows, d, f, bytes_per_element, matrices=3):
    parameters = matrices * d * f
    return counted(2 * rows * parameters, parameters + matrices * rows * (d + f), bytes_per_element)


def attention_costs(sequences, new_tokens, keys, q_heads, kv_heads, head_dim, bytes_per_element):
    first, last = keys - new_tokens + 1, keys
    pairs = (first + last) * new_tokens // 2
    values = 2 * head_dim * (new_tokens * q_heads + keys * kv_heads)
    return counted(sequences * q_heads * pairs * 4 * head_dim, sequences * values, bytes_per_element)


layer_costs = {"linear": linear_costs, "mlp": mlp_costs, "attention": attention_costs}
"""

layers = variant(LAYERS)

ROOFLINE_INTENSITY = [
    WrongAnswer(
        "one FLOP for a multiply and its add",
        layers(("flops = 2 * rows * d_in * d_out", "flops = rows * d_in * d_out")),
        "linear",
        "multiply-accumulates are counted, which are half the FLOPs",
    ),
    WrongAnswer(
        "weights alone",
        layers(
            (
                "bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)",
                "bytes_per_element * d_in * d_out",
            )
        ),
        "linear",
        "right in the limit of one row; with many rows, rows are most of the bytes",
    ),
    WrongAnswer(
        "weights read for every row",
        layers(("rows * d_in + d_in * d_out + rows * d_out", "rows * (d_in + d_in * d_out + d_out)")),
        "linear",
        "then no batch would ever help",
    ),
    WrongAnswer(
        "values for bytes",
        layers(("moved = bytes_per_element * (rows", "moved = (rows")),
        "linear",
        "a value of bfloat16 is two bytes",
    ),
    WrongAnswer(
        "bytes a FLOP",
        layers(
            (
                "rows * d_out)\n    return flops, moved, flops / moved",
                "rows * d_out)\n    return flops, moved, moved / flops",
            )
        ),
        "linear",
        "the intensity is the other way round",
    ),
    WrongAnswer(
        "floats",
        layers(("flops = 2 * rows * d_in * d_out", "flops = 2.0 * rows * d_in * d_out")),
        "linear",
        "counts are whole",
    ),
    WrongAnswer(
        "two matrices in SwiGLU",
        layers(("[(d, f)] * (matrices - 1) + [(f, d)]", "[(d, f)] + [(f, d)]")),
        "mlp",
        "the gate is a third matrix, half as many again",
    ),
    WrongAnswer(
        "a fused MLP",
        layers(("sum(one[1] for one in each)", "bytes_per_element * (matrices * d * f + 2 * rows * d)")),
        "mlp",
        "what goes from product to product is counted here: nothing is fused",
    ),
    WrongAnswer(
        "always three matrices",
        layers(("[(d, f)] * (matrices - 1) + [(f, d)]", "[(d, f), (d, f), (f, d)]")),
        "two-matrices",
        "GPT-2 has no gate",
    ),
    WrongAnswer(
        "one cache for the batch",
        layers(("remembered = sequences * keys", "remembered = keys")),
        "attention-decode",
        "keys and values are not shared among sequences, which is the whole point",
    ),
    WrongAnswer(
        "keys without values",
        layers(("2 * queries + 2 * remembered", "2 * queries + remembered")),
        "attention-decode",
        "values are read as well",
    ),
    WrongAnswer(
        "scores only",
        layers(("flops = 4 * sequences", "flops = 2 * sequences")),
        "attention-decode",
        "the weighted sum of the values computes as much as the scores",
    ),
    WrongAnswer(
        "the whole rectangle",
        layers(
            (
                "new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2",
                "new_tokens * keys",
            )
        ),
        "attention-prompt",
        "eager attention computes the pairs that it then masks; what has to be computed is half",
    ),
    WrongAnswer(
        "scores through memory",
        layers(
            (
                "(2 * queries + 2 * remembered)",
                "(2 * queries + 2 * remembered + 2 * sequences * q_heads * new_tokens * keys)",
            )
        ),
        "attention-prompt",
        "a fused kernel keeps them on the chip; the statement says so",
    ),
    WrongAnswer(
        "not its own key",
        layers(("new_tokens * (new_tokens + 1) // 2", "new_tokens * (new_tokens - 1) // 2")),
        "attention-decode",
        "a query sees its own token's key",
    ),
    WrongAnswer(
        "the triangle alone",
        layers(("new_tokens * (keys - new_tokens) + ", "")),
        "chunks",
        "right for a whole prompt; a chunk sees what came before it, too",
    ),
    WrongAnswer(
        "keys for every query head",
        layers(("keys * kv_heads", "keys * q_heads")),
        "grouped-heads",
        "groups of query heads share their keys and values",
    ),
    WrongAnswer(
        "computed by key-value heads",
        layers(("4 * sequences * q_heads", "4 * sequences * kv_heads")),
        "grouped-heads",
        "every query head computes",
    ),
    WrongAnswer(
        "halved as floats",
        layers(
            (
                "new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2",
                "int(new_tokens * (2 * keys - new_tokens + 1) / 2)",
            ),
            (
                "flops = 4 * sequences * q_heads * head_dim * pairs",
                "flops = int(4.0 * sequences * q_heads * head_dim * pairs)",
            ),
        ),
        "exact",
        "ints at last, but the floats on the way have lost the low digits",
    ),
]

# --- roofline-tpot ---

TPOT = """
def predict_tpot(config, *, batch, context, bytes_per_element, launches, ceilings, dtype):
    d, q_width, kv_width = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = 2 if config.is_gpt2 else 3
    per_layer = 2 * d * q_width + 2 * d * kv_width + matrices * d * config.intermediate_size
    weights = config.num_layers * per_layer + d * config.vocab_size
    keys = context + 1
    flops = batch * (2 * weights + 4 * config.num_layers * q_width * keys)
    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv_width * keys)
    terms = {
        "launch": launches * ceilings.launch_s,
        "bandwidth": moved / ceilings.read_bytes_per_s,
        "compute": flops / ceilings.flop_per_s[dtype],
    }
    limit = max(terms, key=terms.get)
    return limit, terms[limit]
"""

TPOT_ALTERNATIVE = """
def predict_tpot(config, *, batch, context, bytes_per_element, launches, ceilings, dtype):
    d, D, L = config.hidden_size, config.head_dim, config.num_layers
    matrices = [(d, D * config.num_heads), (d, D * config.num_kv_heads), (d, D * config.num_kv_heads)]
    matrices += [(D * config.num_heads, d), (d, config.intermediate_size), (config.intermediate_size, d)]
    matrices += [] if config.is_gpt2 else [(d, config.intermediate_size)]
    P = sum(a * b for a, b in matrices) * L + d * config.vocab_size
    cache = config.kv_values_per_token() * (1 + context)
    compute = (2 * batch * P + batch * 4 * L * config.num_heads * D * (1 + context)) / ceilings.flop_per_s[dtype]
    bandwidth = (P + batch * cache) * bytes_per_element / ceilings.read_bytes_per_s
    seconds, limit = sorted(
        [(compute, "compute"), (bandwidth, "bandwidth"), (launches * ceilings.launch_s, "launch")]
    )[-1]
    return limit, seconds
"""

tpot = variant(TPOT)

ROOFLINE_TPOT = [
    WrongAnswer(
        "no cache",
        tpot(("(weights + batch * 2 * config.num_layers * kv_width * keys)", "weights")),
        "one-sequence",
        "the weights alone; a long context then costs nothing",
    ),
    WrongAnswer(
        "without the new token",
        tpot(("keys = context + 1", "keys = context")),
        "one-sequence",
        "the new token attends to itself as well",
    ),
    WrongAnswer(
        "no head",
        tpot((" + d * config.vocab_size", "")),
        "one-sequence",
        "the output head is read in every step",
    ),
    WrongAnswer(
        "all parameters",
        tpot(("config.num_layers * per_layer + d * config.vocab_size", "config.num_parameters()")),
        "one-sequence",
        "of the embedding table, a row a token is looked up",
    ),
    WrongAnswer(
        "weights read for each sequence",
        tpot(("(weights + batch * 2 *", "batch * (weights + 2 *")),
        "batch",
        "batching would not help at all",
    ),
    WrongAnswer(
        "one cache",
        tpot(("(weights + batch * 2 *", "(weights + 2 *")),
        "batch",
        "every sequence brings a cache of its own",
    ),
    WrongAnswer(
        "the sum of the terms",
        tpot(("return limit, terms[limit]", "return limit, sum(terms.values())")),
        "one-sequence",
        "the three go on at the same time",
    ),
    WrongAnswer(
        "the fastest",
        tpot(("max(terms", "min(terms")),
        "limits",
        "the slowest decides",
    ),
    WrongAnswer(
        "never launch-bound",
        tpot(('        "launch": launches * ceilings.launch_s,\n', "")),
        "limits",
        "small models on large GPUs are",
    ),
    WrongAnswer(
        "FLOPs of weight bytes",
        tpot(("(2 * weights + 4", "(2 * bytes_per_element * weights + 4")),
        "limits",
        "the published error: FLOPs are 2 a parameter",
    ),
    WrongAnswer(
        "FLOPs of one sequence",
        tpot(("flops = batch * (2 * weights", "flops = (2 * weights")),
        "limits",
        "every sequence computes, and so there is a knee",
    ),
    WrongAnswer(
        "always the peak of bfloat16",
        tpot(("flop_per_s[dtype]", 'flop_per_s["bfloat16"]')),
        "limits",
        "float32 is slower",
    ),
    WrongAnswer(
        "names changed",
        tpot(
            (
                "    return limit, terms[limit]",
                "    return limit.replace('bandwidth', 'memory'), terms[limit]",
            )
        ),
        "one-sequence",
        "the limit is called bandwidth",
    ),
    WrongAnswer(
        "cache for every query head",
        tpot(("config.num_layers * kv_width * keys", "config.num_layers * q_width * keys")),
        "grouped-heads",
        "grouped query heads share keys and values",
    ),
    WrongAnswer(
        "attention by key-value heads",
        tpot(("4 * config.num_layers * q_width", "4 * config.num_layers * kv_width")),
        "grouped-heads",
        "every query head computes",
    ),
    WrongAnswer(
        "always three matrices",
        tpot(("2 if config.is_gpt2 else 3", "3")),
        "gpt2",
        "GPT-2 has no gate",
    ),
    WrongAnswer(
        "always two bytes",
        tpot(("moved = bytes_per_element *", "moved = 2 *")),
        "any-step",
        "what an element takes is an argument",
    ),
]

# --- roofline-knee ---

KNEE = """
def batch_limits(config, *, context, bytes_per_element, memory_bytes, ceilings, dtype):
    d, q_width, kv_width = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = 2 if config.is_gpt2 else 3
    per_layer = 2 * d * q_width + 2 * d * kv_width + matrices * d * config.intermediate_size
    weights = config.num_layers * per_layer + d * config.vocab_size
    tokens = context + 1
    one_cache = bytes_per_element * 2 * config.num_layers * kv_width * tokens
    compute_s = (2 * weights + 4 * config.num_layers * q_width * tokens) / ceilings.flop_per_s[dtype]
    cache_s = one_cache / ceilings.read_bytes_per_s
    weights_s = bytes_per_element * weights / ceilings.read_bytes_per_s
    knee = None
    if compute_s > cache_s:
        knee = math.ceil(weights_s / (compute_s - cache_s))
    free = memory_bytes - bytes_per_element * config.num_parameters()
    return knee, max(0, free // one_cache)
"""

KNEE_ALTERNATIVE = """
def batch_limits(config, *, context, bytes_per_element, memory_bytes, ceilings, dtype):
    L, D, d = config.num_layers, config.head_dim, config.hidden_size
    P = L * d * (2 * D * (config.num_heads + config.num_kv_heads) + (3 - config.is_gpt2) * config.intermediate_size)
    P += d * config.vocab_size
    cache = config.kv_values_per_token() * (context + 1) * bytes_per_element
    ridge = ceilings.flop_per_s[dtype] / ceilings.read_bytes_per_s  # FLOPs a byte

    def compute_binds(batch):
        flops = batch * (2 * P + 4 * L * config.num_heads * D * (context + 1))
        return flops >= ridge * (P * bytes_per_element + batch * cache)

    low, high = 0, 1  # compute does not bind at low
    while not compute_binds(high):
        low, high = high, 2 * high
        if high > 2**50:
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_binds(middle) else (middle, high)
    left = memory_bytes - config.num_parameters() * bytes_per_element
    return (high if compute_binds(high) else None), (left // cache if left > 0 else 0)
"""

knee = variant(KNEE)

ROOFLINE_KNEE = [
    WrongAnswer(
        "rounded down",
        knee(("math.ceil(weights_s", "math.floor(weights_s")),
        "knee",
        "there the bytes still take longer",
    ),
    WrongAnswer(
        "no cache at the knee",
        knee(("(compute_s - cache_s)", "compute_s")),
        "knee",
        "the caches' bytes grow with the batch as well",
    ),
    WrongAnswer(
        "no attention",
        knee(("(2 * weights + 4 * config.num_layers * q_width * tokens)", "2 * weights")),
        "knee",
        "attention computes, too",
    ),
    WrongAnswer(
        "a float",
        knee(("math.ceil(weights_s / (compute_s - cache_s))", "-(-weights_s // (compute_s - cache_s))")),
        "knee",
        "the right number, but // of floats is a float",
    ),
    WrongAnswer(
        "always a knee",
        knee(
            ("if compute_s > cache_s:", "if compute_s != cache_s:"),
            ("math.ceil(weights_s / (", "math.ceil(weights_s / abs("),
        ),
        "never",
        "where the caches outgrow the FLOPs, compute never catches up",
    ),
    WrongAnswer(
        "infinity for none",
        knee(("knee = None", "knee = math.inf")),
        "never",
        "None says that there is none",
    ),
    WrongAnswer(
        "one more than balanced",
        knee(("math.ceil(weights_s / (compute_s - cache_s))", "int(weights_s / (compute_s - cache_s)) + 1")),
        "tie",
        "where they balance exactly, that batch is the knee",
    ),
    WrongAnswer(
        "weights forgotten in memory",
        knee(("memory_bytes - bytes_per_element * config.num_parameters()", "memory_bytes")),
        "memory",
        "the caches have only what the weights leave",
    ),
    WrongAnswer(
        "matrices alone in memory",
        knee(("bytes_per_element * config.num_parameters()", "bytes_per_element * weights")),
        "memory",
        "the embedding table lies there, too",
    ),
    WrongAnswer(
        "without the new token",
        knee(("tokens = context + 1", "tokens = max(context, 1)")),
        "memory",
        "each sequence holds one token more when the step is done",
    ),
    WrongAnswer(
        "cache for every query head",
        knee(("config.num_layers * kv_width * tokens", "config.num_layers * q_width * tokens")),
        "grouped-heads",
        "grouped query heads share keys and values",
    ),
    WrongAnswer(
        "fewer than none",
        knee(("max(0, free // one_cache)", "free // one_cache")),
        "memory-edges",
        "weights that do not fit leave a negative rest",
    ),
    WrongAnswer(
        "never filled",
        knee(("max(0, free // one_cache)", "max(0, (free - 1) // one_cache)")),
        "memory-edges",
        "memory may be filled to the last byte",
    ),
    WrongAnswer(
        "always three matrices",
        knee(("2 if config.is_gpt2 else 3", "3")),
        "gpt2",
        "GPT-2 has no gate",
    ),
]

# --- roofline-reading ---

READING = """
def read_roofline(points, ceilings, dtype):
    read, peak = ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
    readings = []
    for intensity, attained in points:
        roof = "bandwidth" if intensity * read < peak else "compute"
        fraction = attained / min(intensity * read, peak)
        helps = "fewer bytes" if roof == "bandwidth" else "more FLOP/s"
        if fraction < 0.5:
            helps = "fewer launches"
        readings.append((roof, fraction, helps))
    return readings
"""

READING_ALTERNATIVE = """
def read_roofline(points, ceilings, dtype):
    def one(intensity, attained):
        slope, peak = intensity * ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
        if slope >= peak:
            return ("compute", attained / peak, "more FLOP/s" if attained >= peak / 2 else "fewer launches")
        return ("bandwidth", attained / slope, "fewer bytes" if attained >= slope / 2 else "fewer launches")

    return [one(*point) for point in points]
"""

reading = variant(READING)

ROOFLINE_READING = [
    WrongAnswer(
        "the higher roof",
        reading(("intensity * read < peak else", "intensity * read > peak else")),
        "roof",
        "the lower of the two limits is the roof",
    ),
    WrongAnswer(
        "intensity against the peak",
        reading(("if intensity * read < peak", "if intensity < peak")),
        "roof",
        "FLOPs a byte are compared with FLOP/s",
    ),
    WrongAnswer(
        "a fraction of the peak",
        reading(("attained / min(intensity * read, peak)", "attained / peak")),
        "fraction",
        "under the slope, the peak is out of reach",
    ),
    WrongAnswer(
        "percent",
        reading(
            ("attained / min(intensity * read, peak)", "100 * attained / min(intensity * read, peak)"),
            ("fraction < 0.5", "fraction < 50"),
        ),
        "fraction",
        "a fraction was asked for",
    ),
    WrongAnswer(
        "the larger limit",
        reading(("min(intensity * read, peak)", "max(intensity * read, peak)")),
        "fraction",
        "the lower limit is the roof",
    ),
    WrongAnswer(
        "never launches",
        reading(("if fraction < 0.5:", "if False:")),
        "what-helps",
        "far below its roof, a point is not held by it",
    ),
    WrongAnswer(
        "launches wherever there is room",
        reading(("if fraction < 0.5:", "if fraction < 1:")),
        "what-helps",
        "no point is quite at its roof",
    ),
    WrongAnswer(
        "helps swapped",
        reading(('roof == "bandwidth"', 'roof == "compute"')),
        "what-helps",
        "under the bandwidth roof, bytes are what counts",
    ),
    WrongAnswer(
        "the ridge to bandwidth",
        reading(("intensity * read < peak else", "intensity * read <= peak else")),
        "borders",
        "at the ridge, compute is said",
    ),
    WrongAnswer(
        "half counted as launches",
        reading(("fraction < 0.5", "fraction <= 0.5")),
        "borders",
        "at exactly half, the roof holds it",
    ),
    WrongAnswer(
        "never above the roof",
        reading(
            ("attained / min(intensity * read, peak)", "min(1.0, attained / min(intensity * read, peak))")
        ),
        "borders",
        "above the roof is worth seeing",
    ),
    WrongAnswer(
        "always the peak of bfloat16",
        reading(("flop_per_s[dtype]", 'flop_per_s["bfloat16"]')),
        "other-machine",
        "each dtype has its own peak, and so its own ridge",
    ),
]

# --- workload-cost ---

PRICE = """
def workload_price(
    *, parameters, weight_bytes_per_element, cache_bytes_per_sequence, prompt_tokens, output_tokens, batch,
    dollars_per_hour, ceilings, dtype,
):
    dollars_per_s = dollars_per_hour / 3600
    prefill_s = batch * prompt_tokens * 2 * parameters / ceilings.flop_per_s[dtype]
    step_bytes = parameters * weight_bytes_per_element + batch * cache_bytes_per_sequence
    decode_s = (output_tokens - 1) * step_bytes / ceilings.read_bytes_per_s
    prompt_price = prefill_s * dollars_per_s / (batch * prompt_tokens) * 1e6
    output_price = decode_s * dollars_per_s / (batch * output_tokens) * 1e6
    price = (prefill_s + decode_s) * dollars_per_s / (batch * (prompt_tokens + output_tokens)) * 1e6
    return prompt_price, output_price, price
"""

PRICE_ALTERNATIVE = """
def workload_price(**w):
    machine, batch = w["ceilings"], w["batch"]
    tpot = (w["weight_bytes_per_element"] * w["parameters"] + batch * w["cache_bytes_per_sequence"]) / machine.read_bytes_per_s
    per_prompt_token_s = 2 * w["parameters"] / machine.flop_per_s[w["dtype"]]
    per_output_token_s = tpot / batch * (w["output_tokens"] - 1) / w["output_tokens"]
    prompt, output = (s * w["dollars_per_hour"] / 3600e-6 for s in (per_prompt_token_s, per_output_token_s))
    share = w["prompt_tokens"] / (w["prompt_tokens"] + w["output_tokens"])
    return [prompt, output, share * prompt + (1 - share) * output]
"""

price = variant(PRICE)

WORKLOAD_COST = [
    WrongAnswer(
        "FLOPs of weight bytes",
        price(("2 * parameters / ceilings", "2 * parameters * weight_bytes_per_element / ceilings")),
        "prompt-tokens",
        "the published error: at 2 bytes a parameter, twice the FLOPs",
    ),
    WrongAnswer(
        "a byte for a FLOP",
        price(("2 * parameters / ceilings", "parameters * weight_bytes_per_element / ceilings")),
        "other-weights",
        "right in bfloat16, where a parameter happens to be 2 bytes and 2 FLOPs",
    ),
    WrongAnswer(
        "always two bytes",
        price(("parameters * weight_bytes_per_element + batch", "parameters * 2 + batch")),
        "other-weights",
        "quantized weights are read faster",
    ),
    WrongAnswer(
        "multiply-accumulates",
        price(("2 * parameters / ceilings", "parameters / ceilings")),
        "prompt-tokens",
        "a multiply and its add are 2 FLOPs",
    ),
    WrongAnswer(
        "minutes",
        price(("/ 3600", "/ 60")),
        "prompt-tokens",
        "an hour has 3,600 seconds",
    ),
    WrongAnswer(
        "a step for every sequence",
        price(("decode_s = (output_tokens - 1)", "decode_s = batch * (output_tokens - 1)")),
        "output-tokens",
        "one step makes a token for each sequence",
    ),
    WrongAnswer(
        "one cache",
        price((" + batch * cache_bytes_per_sequence", " + cache_bytes_per_sequence")),
        "output-tokens",
        "every sequence brings a cache of its own",
    ),
    WrongAnswer(
        "tokens of one sequence",
        price(("(batch * output_tokens)", "output_tokens")),
        "output-tokens",
        "the batch shares the price of its steps",
    ),
    WrongAnswer(
        "shared among the prompt's tokens",
        price(("(batch * output_tokens)", "(batch * prompt_tokens)")),
        "output-tokens",
        "prompt and output tokens mixed up",
    ),
    WrongAnswer(
        "the mean of two prices",
        price(("    return prompt_price", "    price = (prompt_price + output_price) / 2\n    return prompt_price")),
        "all-tokens",
        "there are more tokens of one kind than of the other",
    ),
    WrongAnswer(
        "everything on the output",
        price(("(batch * (prompt_tokens + output_tokens))", "(batch * output_tokens)")),
        "all-tokens",
        "that is another common price, but not what a million tokens of either kind cost",
    ),
    WrongAnswer(
        "prices added",
        price(("    return prompt_price", "    price = prompt_price + output_price\n    return prompt_price")),
        "all-tokens",
        "they are per token of different kinds",
    ),
    WrongAnswer(
        "a step for the first token",
        price(("(output_tokens - 1)", "output_tokens")),
        "one-output-token",
        "the first token comes from the prompt's pass",
    ),
    WrongAnswer(
        "at least one step",
        price(("(output_tokens - 1)", "max(1, output_tokens - 1)")),
        "one-output-token",
        "with one token out, there is no step",
    ),
]  # fmt: skip

# --- one-graph ---

CAP = """
def cap_logits(logits, limit):
    top = logits.max(dim=-1, keepdim=True).values
    return torch.where(top > limit, logits * (limit / top), logits)
"""

CAP_ALTERNATIVE = """
def cap_logits(logits, limit):
    factor = limit / logits.amax(-1).clamp(min=limit)
    return logits * factor[:, None]
"""

cap = variant(CAP)

ONE_GRAPH = [
    WrongAnswer(
        "as it was",
        """
def cap_logits(logits, limit):
    rows = []
    for row in logits:
        if row.max() > limit:
            row = row * (limit / row.max())
        rows.append(row)
    return torch.stack(rows)
""",
        "one-graph",
        "the branch needs the value of a tensor: a graph break",
    ),
    WrongAnswer(
        "item instead of if",
        """
def cap_logits(logits, limit):
    top = logits.max(dim=-1, keepdim=True).values
    if (top > limit).any().item():
        return torch.where(top > limit, logits * (limit / top), logits)
    return logits.clone()
""",
        "one-graph",
        "item() asks for the value just as well",
    ),
    WrongAnswer(
        "a list of Python bools",
        """
def cap_logits(logits, limit):
    over = [bool(row.max() > limit) for row in logits]
    factors = torch.stack([limit / row.max() if o else torch.ones(()) for o, row in zip(over, logits)])
    return logits * factors[:, None].to(logits.dtype)
""",
        "one-graph",
        "bool() asks for the value just as well",
    ),
    WrongAnswer(
        "kept away from the compiler",
        """
@torch.compiler.disable
def cap(logits, limit):
    return torch.stack([row * (limit / row.max()) if row.max() > limit else row for row in logits])


def cap_logits(logits, limit):
    return cap(logits, limit)
""",
        "one-graph",
        "disable is a graph break by request",
    ),
    WrongAnswer(
        "where in a loop over rows",
        """
def cap_logits(logits, limit):
    rows = []
    for row in logits:
        rows.append(torch.where(row.max() > limit, row * (limit / row.max()), row))
    return torch.stack(rows)
""",
        "any-length",
        "one graph, but of N times the operations, and another one for every N",
    ),
    WrongAnswer(
        "another way for large batches",
        """
def cap_logits(logits, limit):
    top = logits.max(dim=-1, keepdim=True).values
    if logits.shape[0] > 4:
        return logits * (limit / top.clamp(min=limit))
    return torch.where(top > limit, logits * (limit / top), logits)
""",
        "any-length",
        "a branch on the shape is a guard: two graphs",
    ),
    WrongAnswer(
        "another way for small limits",
        """
def cap_logits(logits, limit):
    top = logits.max(dim=-1, keepdim=True).values
    if limit < 1.0:
        return logits * (limit / top.clamp(min=limit))
    return torch.where(top > limit, logits * (limit / top), logits)
""",
        "any-limit",
        "a branch on a Python number is a guard: two graphs",
    ),
    WrongAnswer(
        "each logit clipped",
        "def cap_logits(logits, limit):\n    return logits.clamp(max=limit)\n",
        "same-values",
        "clips the tokens above the limit into a tie",
    ),
    WrongAnswer(
        "the largest of all rows",
        cap(("logits.max(dim=-1, keepdim=True).values", "logits.max()")),
        "same-values",
        "one confident row would cap all others",
    ),
    WrongAnswer(
        "every row scaled",
        cap(("torch.where(top > limit, logits * (limit / top), logits)", "logits * (limit / top)")),
        "same-values",
        "rows below the limit are blown up to it",
    ),
    WrongAnswer(
        "in place",
        """
def cap_logits(logits, limit):
    return logits.mul_(limit / logits.max(dim=-1, keepdim=True).values.clamp(min=limit))
""",
        "same-values",
        "the caller's logits are changed",
    ),
    WrongAnswer(
        "a factor of at most 1",
        cap(
            (
                "torch.where(top > limit, logits * (limit / top), logits)",
                "logits * (limit / top).clamp(max=1.0)",
            )
        ),
        "edges",
        "limit / top is negative where all logits are",
    ),
    WrongAnswer(
        "the largest size",
        cap(("logits.max(", "logits.abs().max(")),
        "edges",
        "a very negative logit exceeds nothing",
    ),
    WrongAnswer(
        "chosen by multiplying",
        cap(
            (
                "torch.where(top > limit, logits * (limit / top), logits)",
                "logits * (limit / top) * (top > limit) + logits * (top <= limit)",
            )
        ),
        "edges",
        "0 · inf is nan: a mask chooses, a product does not",
    ),
]

WRONG: dict[str, list[WrongAnswer]] = {
    "roofline-intensity": ROOFLINE_INTENSITY,
    "roofline-tpot": ROOFLINE_TPOT,
    "roofline-knee": ROOFLINE_KNEE,
    "roofline-reading": ROOFLINE_READING,
    "workload-cost": WORKLOAD_COST,
    "one-graph": ONE_GRAPH,
}

ALTERNATIVE: dict[str, str] = {
    "roofline-intensity": LAYERS_ALTERNATIVE,
    "roofline-tpot": TPOT_ALTERNATIVE,
    "roofline-knee": KNEE_ALTERNATIVE,
    "roofline-reading": READING_ALTERNATIVE,
    "workload-cost": PRICE_ALTERNATIVE,
    "one-graph": CAP_ALTERNATIVE,
}
