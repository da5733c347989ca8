"""Plausible wrong answers to lab 05, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- quant-pack ---

PACK = """
def quantize(weight, bits, group):
    out, wide = weight.shape
    if wide % group:
        raise WorkbenchError(f"groups of {group} do not divide {wide} inputs")
    blocks = weight.reshape(out, wide // group, group)
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
    step = scale.float().where(scale > 0, 1.0)
    codes = (blocks - zero.float()[..., None]) / step[..., None]
    codes = codes.round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8).reshape(out, wide), scale, zero


def dequantize(codes, scale, zero):
    blocks = codes.float().unflatten(1, (scale.shape[1], -1))
    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)


def pack(codes):
    if codes.shape[-1] % 2:
        raise WorkbenchError(f"two codes fill a byte; {codes.shape[-1]} is odd")
    first, second = codes.chunk(2, dim=-1)
    return first | (second << 4)


def unpack(packed):
    return torch.cat((packed & 15, packed >> 4), dim=-1)


groups = {"quantize": quantize, "dequantize": dequantize, "pack": pack, "unpack": unpack}
"""

PACK_ALTERNATIVE = """
def quantize(weight, bits, group):
    if weight.shape[1] % group != 0:
        raise WorkbenchError("the last group would be cut off")
    all_codes, scales, zeros, most = [], [], [], (1 << bits) - 1
    for stretch in weight.double().split(group, dim=1):  # a group of all outputs at a time
        zero = stretch.min(dim=1, keepdim=True).values.to(torch.float16)
        scale = ((stretch.max(dim=1, keepdim=True).values - zero) / most).to(torch.float16)
        ratio = torch.nan_to_num((stretch - zero) / scale, posinf=0.0, neginf=0.0)
        all_codes.append(torch.floor(ratio + 0.5).clamp(0, most).byte())
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(all_codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)


def dequantize(codes, scale, zero):
    group = codes.shape[1] // scale.shape[1]
    wide = [part.float().repeat_interleave(group, dim=1) for part in (scale, zero)]
    return torch.addcmul(wide[1], codes.float(), wide[0])


def pack(codes):
    half, left = divmod(codes.shape[-1], 2)
    if left:
        raise WorkbenchError("an odd number of codes")
    return codes[..., :half] + 16 * codes[..., half:]


def unpack(packed):
    half = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], 2 * half)
    codes[..., :half], codes[..., half:] = packed % 16, packed // 16
    return codes


groups = dict(pack=pack, unpack=unpack, quantize=quantize, dequantize=dequantize)
"""


def pack(*replacements: tuple[str, str]) -> str:
    return changed(PACK, *replacements)


RANGE = "low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)"
STORED_SCALE = "scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()"
STEP = "step = scale.float().where(scale > 0, 1.0)"
RATIO = "codes = (blocks - zero.float()[..., None]) / step[..., None]"
BYTE = "return first | (second << 4)"
DIVIDES = """    if wide % group:
        raise WorkbenchError(f"groups of {group} do not divide {wide} inputs")
"""
EVEN = """    if codes.shape[-1] % 2:
        raise WorkbenchError(f"two codes fill a byte; {codes.shape[-1]} is odd")
"""
QUANT_PACK = [
    WrongAnswer("cut off", pack(("codes.round().clamp", "codes.clamp")), "nearest-codes", "the cast drops the fraction"),
    WrongAnswer("rounded up", pack(("codes.round().clamp", "codes.ceil().clamp")), "nearest-codes", "up to a whole step away"),
    WrongAnswer(
        "codes for the unrounded scale",
        pack((RATIO, "codes = (blocks - low[..., None]) / ((high - low) / (2**bits - 1)).where(high > low, 1.0)[..., None]")),
        "nearest-codes",
        "what is stored was rounded to float16; far from 0 the zero is off by several steps",
    ),
    WrongAnswer(
        "one scale a row",
        pack((RANGE, "low, high = (x.expand(out, wide // group).clone() for x in (weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)))")),
        "nearest-codes",
        "a large group makes the steps of all others coarse",
    ),
    WrongAnswer(
        "one scale for the matrix",
        pack((RANGE, "low, high = (x.expand(out, wide // group).clone() for x in (weight.min(), weight.max()))")),
        "nearest-codes",
        "per tensor",
    ),
    WrongAnswer(
        "symmetric",
        pack((RANGE, "high = blocks.abs().amax(dim=-1)\n    low = -high")),
        "nearest-codes",
        "half of the codes stay empty where all weights have one sign",
    ),
    WrongAnswer("scale from the largest", pack(("((high - low) / (2**bits - 1))", "(high / (2**bits - 1))")), "nearest-codes", "the range is largest − smallest"),
    WrongAnswer(
        "strided groups",
        pack(("weight.reshape(out, wide // group, group)", "weight.reshape(out, group, wide // group).transpose(1, 2)"),
             ("codes.to(torch.uint8).reshape(out, wide)", "codes.to(torch.uint8).transpose(1, 2).reshape(out, wide)"),
             ("codes.float().unflatten(1, (scale.shape[1], -1))", "codes.float().unflatten(1, (-1, scale.shape[1])).transpose(1, 2)"),
             (".flatten(1)\n", ".transpose(1, 2).flatten(1)\n")),
        "nearest-codes",
        "a group is a stretch of neighbours",
    ),
    WrongAnswer("2ᵇ steps", pack(("(high - low) / (2**bits - 1)", "(high - low) / 2**bits")), "nearest-codes", "2ᵇ codes have 2ᵇ − 1 steps between them"),
    WrongAnswer("zero forgotten", pack((" + zero.float()[..., None]).flatten(1)", ").flatten(1)")), "nearest-codes", "codes count from the zero"),
    WrongAnswer("zero taken off", pack((" + zero.float()[..., None]).flatten(1)", " - zero.float()[..., None]).flatten(1)")), "nearest-codes", "its sign"),
    WrongAnswer("scales in float32", pack((STORED_SCALE, "scale, zero = (high - low) / (2**bits - 1), low")), "nearest-codes", "right numbers, twice the bytes of scales"),
    WrongAnswer("codes as floats", pack(("codes.to(torch.uint8).reshape", "codes.reshape")), "nearest-codes", "four bytes a code"),
    WrongAnswer("in place", pack(("    blocks = weight.reshape", "    weight.clamp_(-2.0, 2.0)\n    blocks = weight.reshape")), "nearest-codes", "what was handed over is changed"),
    WrongAnswer(
        "a least scale and the middle",
        pack((STORED_SCALE, "scale = ((high - low) / (2**bits - 1)).clamp(min=1e-2).half()\n    zero = ((high + low) / 2 - scale.float() * (2**bits - 1) / 2).half()")),
        "equal-weights",
        "a constant group lies between two codes",
    ),
    WrongAnswer("equal weights become zero", pack((STORED_SCALE, STORED_SCALE + "\n    zero = zero.where(scale > 0, 0.0)")), "equal-weights", "a constant group comes back as 0"),
    WrongAnswer("equal weights become nan", pack((STEP, "step = scale.float()"), (STORED_SCALE, STORED_SCALE + "\n    scale = scale / (scale > 0)")), "equal-weights", "0 / 0 in the scale"),
    WrongAnswer("nibbles exchanged", pack((BYTE, "return second | (first << 4)"), ("(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)")), "two-a-byte", "consistent, and not the format"),
    WrongAnswer("neighbours in a byte", pack(("first, second = codes.chunk(2, dim=-1)", "first, second = codes[..., ::2], codes[..., 1::2]"),
                                             ("torch.cat((packed & 15, packed >> 4), dim=-1)", "torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)")), "two-a-byte", "consistent, and not the format"),
    WrongAnswer("not shifted", pack((BYTE, "return first | second")), "two-a-byte", "both codes in the same four bits"),
    WrongAnswer("added up", pack((BYTE, "return first + second")), "two-a-byte", "both codes in the same four bits"),
    WrongAnswer("unpacked in the other order", pack(("(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)")), "two-a-byte", "the halves come back exchanged"),
    WrongAnswer("upper half not cut off", pack(("(packed & 15, packed >> 4)", "(packed, packed >> 4)")), "two-a-byte", "the lower code keeps the upper one's bits"),
    WrongAnswer("always 4 bits", pack((STORED_SCALE, STORED_SCALE.replace("2**bits - 1", "15")), ("clamp(0, 2**bits - 1)", "clamp(0, 15)")), "other-widths", "bits is ignored"),
    WrongAnswer("zero never above 0", pack((RANGE, RANGE + "\n    high = high.clamp(min=0)")), "other-widths", "the range is made to hold 0, so most codes of a negative group stay empty"),
    WrongAnswer("large weights cut off", pack((RANGE, RANGE + "\n    high = high.clamp(max=30 * blocks.abs().median())")), "other-widths", "a clip that nobody asked for"),
    WrongAnswer("halves of the whole", pack(("    first, second = codes.chunk(2, dim=-1)\n    return first | (second << 4)\n",
                                             "    first, second = codes.flatten().chunk(2)\n    return (first | (second << 4)).view(*codes.shape[:-1], -1)\n"),
                                            ("return torch.cat((packed & 15, packed >> 4), dim=-1)", "return torch.cat(((packed & 15).flatten(), (packed >> 4).flatten())).view(*packed.shape[:-1], -1)")), "many-axes", "the halves are those of the last axis"),
    WrongAnswer("along the second axis", pack(("codes.chunk(2, dim=-1)", "codes.chunk(2, dim=1)"), ("packed >> 4), dim=-1)", "packed >> 4), dim=1)")), "many-axes", "right for a matrix alone"),
    WrongAnswer("nothing refused", pack((DIVIDES, "")), "refused", "the error comes from a reshape"),
    WrongAnswer("rest left out", pack((DIVIDES, "    wide = wide // group * group\n    weight = weight[:, :wide]\n")), "refused", "the last inputs are gone, without a word"),
    WrongAnswer("odd ones filled up", pack((EVEN, "    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))\n")), "refused", "a code that nobody gave"),
]  # fmt: skip

# --- quant-llm-int8 ---

INT8 = """
def outlier_columns(x, threshold):
    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]


def store(weight, columns):
    outliers = weight[:, columns].half()
    rest = weight.index_fill(1, columns, 0.0)
    scale = rest.abs().amax(dim=1, keepdim=True) / 127
    codes = (rest / scale.where(scale > 0, 1.0)).round()
    return codes.to(torch.int8), scale, outliers


def multiply(x, codes, scale, outliers, columns):
    beside = x[:, columns] @ outliers.float().T
    rest = x.index_fill(1, columns, 0.0)
    step = rest.abs().amax(dim=1, keepdim=True) / 127
    rounded = (rest / step.where(step > 0, 1.0)).round()
    product = rounded.int() @ codes.int().T
    return product * step * scale.T + beside


int8_product = {"outlier_columns": outlier_columns, "store": store, "multiply": multiply}
"""

INT8_ALTERNATIVE = """
def outlier_columns(x, threshold):
    passed = ((x > threshold) | (x < -threshold)).any(0)
    return torch.tensor([j for j in range(x.shape[1]) if passed[j]], dtype=torch.int64)


def codes_of(a):
    scale = torch.maximum(a.max(1).values, -a.min(1).values)[:, None] / 127
    ratio = torch.nan_to_num(a.double() / scale.double())
    return torch.floor(ratio + 0.5).to(torch.int8), scale


def store(weight, columns):
    ordinary = torch.ones(weight.shape[1])
    ordinary[columns] = 0
    codes, scale = codes_of(weight * ordinary)
    return codes, scale, weight.index_select(1, columns).to(torch.float16)


def multiply(x, codes, scale, outliers, columns):
    ordinary = [j for j in range(x.shape[1]) if j not in columns.tolist()]
    q, scale_x = codes_of(x[:, ordinary])  # the columns themselves are left out, not filled with 0
    y = (q.long() @ codes[:, ordinary].long().T).double() * (scale_x.double() @ scale.double().T)
    for place, j in enumerate(columns.tolist()):
        y = y + torch.outer(x[:, j], outliers[:, place].float())
    return y.float()


int8_product = dict(multiply=multiply, store=store, outlier_columns=outlier_columns)
"""


def int8(*replacements: tuple[str, str]) -> str:
    return changed(INT8, *replacements)


FOUND = "(x.abs().amax(dim=0) > threshold)"
W_REST = "rest = weight.index_fill(1, columns, 0.0)"
X_REST = "rest = x.index_fill(1, columns, 0.0)"
W_SCALE = "scale = rest.abs().amax(dim=1, keepdim=True) / 127"
X_STEP = "step = rest.abs().amax(dim=1, keepdim=True) / 127"
X_ROUND = "rounded = (rest / step.where(step > 0, 1.0)).round()"
Y = "return product * step * scale.T + beside"
QUANT_INT8 = [
    WrongAnswer("sign kept", int8(("x.abs().amax(dim=0)", "x.amax(dim=0)")), "columns", "a channel may be large and negative"),
    WrongAnswer("tokens in place of channels", int8(("x.abs().amax(dim=0)", "x.abs().amax(dim=1)")), "columns", "the wrong axis"),
    WrongAnswer("a mask", int8((".nonzero()[:, 0]", "")), "columns", "the columns' numbers were asked"),
    WrongAnswer("pairs", int8((".nonzero()[:, 0]", ".nonzero()")), "columns", "[n, 1]"),
    WrongAnswer("largest first", int8((FOUND + ".nonzero()[:, 0]", "x.abs().amax(dim=0).argsort(descending=True)[: int((x.abs().amax(dim=0) > threshold).sum())]")), "columns", "not in ascending order"),
    WrongAnswer("mean of a channel", int8(("x.abs().amax(dim=0) > threshold", "x.abs().mean(dim=0) > threshold")), "one-token", "one token is enough to spoil its own scale"),
    WrongAnswer("every token", int8(("x.abs().amax(dim=0) > threshold", "(x.abs() > threshold).all(dim=0)")), "one-token", "one token is enough"),
    WrongAnswer("never empty", int8((FOUND + ".nonzero()[:, 0]", "x.abs().amax(dim=0).clamp(max=1e9).topk(max(1, int((x.abs().amax(dim=0) > threshold).sum()))).indices.sort().values")), "one-token", "there may be none"),
    WrongAnswer("weight's scale with the outliers inside", int8((W_SCALE, "scale = weight.abs().amax(dim=1, keepdim=True) / 127")), "weights", "they take range from the others"),
    WrongAnswer("outlier codes stay", int8(("codes = (rest / scale.where(scale > 0, 1.0)).round()", "codes = (weight / scale.where(scale > 0, 1.0)).round().clamp(-127, 127)")), "weights", "kept twice, once in int8"),
    WrongAnswer("outliers in float32", int8(("weight[:, columns].half()", "weight[:, columns]")), "weights", "not 16 bits"),
    WrongAnswer("outlier rows", int8(("weight[:, columns].half()", "weight[columns % len(weight)].half().T")), "weights", "a channel is a column of W"),
    WrongAnswer("one scale for the weight", int8((W_SCALE, "scale = (rest.abs().max() / 127).expand(len(rest), 1).clone()")), "weights", "each output has its own"),
    WrongAnswer("a scale for each input", int8((W_SCALE, "scale = rest.abs().amax(dim=0, keepdim=True) / 127")), "weights", "it cannot come out of the sum"),
    WrongAnswer("/ 128", int8((W_SCALE, W_SCALE.replace("127", "128")), ("codes = (rest / scale.where(scale > 0, 1.0)).round()", "codes = (rest / scale.where(scale > 0, 1.0)).round().clamp(-128, 127)")), "weights", "−128 … 127 is not symmetric"),
    WrongAnswer("weight cut off", int8(("scale.where(scale > 0, 1.0)).round()\n    return codes", "scale.where(scale > 0, 1.0))\n    return codes")), "weights", "the cast drops the fraction"),
    WrongAnswer("weight changed", int8((W_REST, "rest = weight.index_fill_(1, columns, 0.0)")), "weights", "in place"),
    WrongAnswer("token's scale with the outliers inside", int8((X_REST, "rest = x")), "product", "all else of the token has few codes left; their codes of W are 0, so the sum looks right"),
    WrongAnswer("outlier columns counted twice", int8((Y, "return product * step * scale.T + 2 * beside")), "product", "once is enough"),
    WrongAnswer("outliers also in the integer product", int8((X_REST, "rest = x"), ("codes.int().T", "codes.int().index_copy(1, columns, (outliers.float() / scale.where(scale > 0, 1.0)).round().int()).T")), "product", "in both products"),
    WrongAnswer("outliers forgotten", int8((" + beside\n", "\n")), "product", "their columns are missing"),
    WrongAnswer("one scale for all tokens", int8((X_STEP, "step = (rest.abs().max() / 127).expand(len(rest), 1)")), "product", "each token has its own"),
    WrongAnswer("a scale for each channel of x", int8((X_STEP, "step = rest.abs().amax(dim=0, keepdim=True) / 127"), (Y, "return product * step.mean() * scale.T + beside")), "product", "it cannot come out of the sum"),
    WrongAnswer("weight's scale forgotten", int8((" * scale.T", "")), "product", "both scales come out of the sum"),
    WrongAnswer("inputs not rounded", int8((X_ROUND, X_ROUND.replace(".round()", "")), ("rounded.int() @ codes.int().T", "rounded @ codes.float().T")), "product", "no product of integers"),
    WrongAnswer("inputs cut off", int8((X_ROUND, X_ROUND.replace(".round()", ""))), "product", "the cast drops the fraction"),
    WrongAnswer("sums in 8 bits", int8(("rounded.int() @ codes.int().T", "rounded.to(torch.int8) @ codes.T")), "product", "they wrap around"),
    WrongAnswer("sums in 16 bits", int8(("rounded.int() @ codes.int().T", "rounded.short() @ codes.short().T")), "product", "they wrap around"),
    WrongAnswer("outliers of x in float16", int8(("x[:, columns] @ outliers.float().T", "x[:, columns].half().float() @ outliers.float().T")), "product", "they stay as they come"),
    WrongAnswer("x changed", int8((X_REST, "rest = x.index_fill_(1, columns, 0.0)")), "product", "in place; the residual still needs it"),
    WrongAnswer("refuses no outliers", int8(("    beside = x", "    assert len(columns)\n    beside = x")), "no-outliers", "most layers have none"),
    WrongAnswer("column 0 when there is none", int8(("    beside = x", "    columns = columns if len(columns) else torch.tensor([0])\n    outliers = outliers if outliers.shape[1] else torch.zeros(len(codes), 1)\n    beside = x")), "no-outliers", "channel 0 is lost"),
    WrongAnswer("a token of zeros", int8((X_ROUND, "rounded = (rest / step).round()"), ("rounded.int() @ codes.int().T", "rounded @ codes.float().T")), "zeros", "0 / 0"),
    WrongAnswer("an output of zeros", int8(("(rest / scale.where(scale > 0, 1.0)).round()\n    return", "(rest / scale).round()\n    return"), (W_SCALE, W_SCALE + "\n    scale = scale / (scale > 0)")), "zeros", "0 / 0"),
]  # fmt: skip

# --- quant-awq ---

AWQ = """
def output_error(weight, stands_in, second_moments):
    h = second_moments.double()
    lost, whole = (weight - stands_in).double(), weight.double()
    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())


def scale_for(inputs, alpha):
    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
    scale = mean**alpha
    return scale / (scale.max() * scale.min()).sqrt()


def search(weights, inputs, format, group, grid):
    together, found = torch.cat(list(weights)), []
    for index in range(grid):
        scale = scale_for(inputs, index / grid)
        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
    return found


def fold(gain, weights, scale):
    return gain / scale, [weight * scale for weight in weights]


awq = {"output_error": output_error, "scale_for": scale_for, "search": search, "fold": fold}
"""

AWQ_ALTERNATIVE = """
def energy(w, h):
    return torch.einsum("oi,ij,oj->", w.double(), h.double(), w.double()).item()


def output_error(weight, stands_in, second_moments):
    return energy(stands_in - weight, second_moments) / energy(weight, second_moments)


def scale_for(inputs, alpha):
    mean = torch.maximum(inputs.mean_abs, inputs.mean_abs.max() * 1e-4)
    exponents = alpha * mean.log()
    return (exponents - (exponents.max() + exponents.min()) / 2).exp()


def search(weights, inputs, format, group, grid):
    points, whole = [], sum(energy(w, inputs.second_moments) for w in weights)
    for step in range(grid):
        s, lost = scale_for(inputs, step / grid), 0.0
        divided = inputs.second_moments / torch.outer(s, s)  # the inputs as they are then, and W·s as it is
        for w in weights:
            scaled = w * s[None, :]
            lost += energy(scaled - quantize_tensor(scaled, format, over=1, group=group).dequantize(), divided)
        points.append((step / grid, lost / whole))
    return points


def fold(gain, weights, scale):
    return gain.div(scale), [torch.einsum("oi,i->oi", w, scale) for w in weights]


awq = {"search": search, "fold": fold, "scale_for": scale_for, "output_error": output_error}
"""


def awq(*replacements: tuple[str, str]) -> str:
    return changed(AWQ, *replacements)


SHARE = "return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())"
ROUNDED = "rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()"
FOUND_POINT = "found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))"
QUANT_AWQ = [
    WrongAnswer("not a share", awq((" / ((whole @ h) * whole).sum()", "")), "output-error", "errors of different layers cannot be compared"),
    WrongAnswer("square root", awq((SHARE, "return float((((lost @ h) * lost).sum() / ((whole @ h) * whole).sum()).sqrt())")), "output-error", "the squares were asked"),
    WrongAnswer("error of the weights", awq(("h = second_moments.double()", "h = torch.eye(len(second_moments), dtype=torch.float64)")), "output-error", "what comes in is ignored"),
    WrongAnswer("diagonal only", awq(("h = second_moments.double()", "h = torch.diag(second_moments.double().diagonal())")), "output-error", "channels go together"),
    WrongAnswer("H twice", awq((SHARE, "return float((lost @ h).square().sum() / (whole @ h).square().sum())")), "output-error", "Σ (δH)²"),
    WrongAnswer("a tensor", awq((SHARE, SHARE.replace("float(", "("))), "output-error", "a float was asked"),
    WrongAnswer("mean of the outputs' shares", awq((SHARE, "return float((((lost @ h) * lost).sum(1) / ((whole @ h) * whole).sum(1)).mean())")), "output-error", "small outputs count as much as large ones"),
    WrongAnswer("largest in place of mean", awq(("mean = inputs.mean_abs.clamp(", "mean = inputs.max_abs.clamp(")), "scale", "one token decides"),
    WrongAnswer("root mean square", awq(("mean = inputs.mean_abs.clamp(", "mean = (inputs.second_moments.diagonal() / inputs.rows).sqrt().clamp(")), "scale", "not the mean of |x|"),
    WrongAnswer("inverse", awq(("mean**alpha", "mean ** (-alpha)")), "scale", "large inputs must get large scales"),
    WrongAnswer("not normalized", awq(("return scale / (scale.max() * scale.min()).sqrt()", "return scale")), "scale", "the weights grow or shrink as a whole"),
    WrongAnswer("normalized by the largest", awq(("(scale.max() * scale.min()).sqrt()", "scale.max()")), "scale", "all scales below 1"),
    WrongAnswer("normalized by the mean", awq(("(scale.max() * scale.min()).sqrt()", "scale.mean()")), "scale", "√(largest · smallest) was asked"),
    WrongAnswer("no root", awq(("(scale.max() * scale.min()).sqrt()", "(scale.max() * scale.min())")), "scale", "right at α = 0 alone"),
    WrongAnswer("α ignored", awq(("scale = mean**alpha", "scale = mean")), "scale", "always α = 1"),
    WrongAnswer("a channel of zeros", awq((".clamp(min=1e-4 * float(inputs.mean_abs.max()))", "")), "unreached", "0 to a power is 0, and everything becomes inf"),
    WrongAnswer("least of 1", awq((".clamp(min=1e-4 * float(inputs.mean_abs.max()))", ".where(inputs.mean_abs > 0, 1.0)")), "unreached", "larger than all others maybe"),
    WrongAnswer("least not relative", awq((".clamp(min=1e-4 * float(inputs.mean_abs.max()))", ".clamp(min=1e-4)")), "unreached", "inputs may be as small as that"),
    WrongAnswer("not scaled", awq((ROUNDED, ROUNDED.replace("together * scale", "together")), (FOUND_POINT, FOUND_POINT.replace("rounded / scale", "rounded"))), "search", "every α gives RTN"),
    WrongAnswer("scaled after rounding", awq((ROUNDED, ROUNDED.replace("together * scale", "together"))), "search", "the rounding is as without"),
    WrongAnswer("not scaled back", awq((FOUND_POINT, FOUND_POINT.replace("rounded / scale", "rounded"))), "search", "the inputs are not divided, so the weight has to be"),
    WrongAnswer("the other way round", awq((ROUNDED, ROUNDED.replace("together * scale", "together / scale")), (FOUND_POINT, FOUND_POINT.replace("rounded / scale", "rounded * scale"))), "search", "what matters is scaled down"),
    WrongAnswer("H divided as well", awq((FOUND_POINT, FOUND_POINT.replace("inputs.second_moments", "inputs.second_moments / scale[:, None] / scale"))), "search", "divided twice"),
    WrongAnswer("weight error in the search", awq((FOUND_POINT, FOUND_POINT.replace("inputs.second_moments", "torch.eye(len(scale))"))), "search", "α = 0 always wins, nearly"),
    WrongAnswer("rows scaled", awq((ROUNDED, ROUNDED.replace("together * scale", "together * (scale[:, None] if len(together) == len(scale) else scale)")), (FOUND_POINT, FOUND_POINT.replace("rounded / scale", "rounded / (scale[:, None] if len(together) == len(scale) else scale)"))), "search", "s is one number an input channel; silently wrong for square weights"),
    WrongAnswer("α up to 1", awq((ROUNDED, ROUNDED), ("scale_for(inputs, index / grid)", "scale_for(inputs, index / max(1, grid - 1))"), ("found.append((index / grid,", "found.append((index / max(1, grid - 1),")), "search", "another grid"),
    WrongAnswer("begins after 0", awq(("for index in range(grid):", "for index in range(1, grid):")), "search", "plain rounding is one of the choices"),
    WrongAnswer("only the best", awq(("    return found\n", "    return min(found, key=lambda point: point[1])\n")), "search", "all points were asked"),
    WrongAnswer("one group a row", awq((ROUNDED, ROUNDED.replace("group=group", "group=together.shape[1]"))), "search", "the group is ignored"),
    WrongAnswer("first linear only", awq(("torch.cat(list(weights))", "weights[0]")), "shared-inputs", "the others share its scale and pay for it"),
    WrongAnswer("mean of the linears", awq(("    return found\n", "    if len(weights) > 1:\n        each = [search([w], inputs, format, group, grid) for w in weights]\n"
                                            "        return [(points[0][0], sum(p[1] for p in points) / len(points)) for points in zip(*each)]\n    return found\n")), "shared-inputs", "a small linear counts as much as a large one"),
    WrongAnswer("bits fixed", awq((ROUNDED, ROUNDED.replace("format, over", "IntegerFormat(max(3, min(4, format.bits))), over"))), "few-bits", "3 and 4 alone"),
    WrongAnswer("grid of at most 5", awq(("for index in range(grid):", "for index in range(min(grid, 5)):")), "few-bits", "the grid is ignored"),
    WrongAnswer("gain multiplied", awq(("return gain / scale,", "return gain * scale,")), "fold", "s² in place of 1"),
    WrongAnswer("weights only", awq(("return gain / scale,", "return gain,")), "fold", "the function changes"),
    WrongAnswer("weights divided", awq(("[weight * scale for weight in weights]", "[weight / scale for weight in weights]"), ("gain / scale,", "gain * scale,")), "fold", "still the same function, scaled the wrong way"),
    WrongAnswer("first weight only", awq(("[weight * scale for weight in weights]", "[weights[0] * scale, *weights[1:]]")), "fold", "the others get the divided inputs too"),
    WrongAnswer("folded in place", awq(("return gain / scale, [weight * scale for weight in weights]", "return gain.div_(scale), [weight.mul_(scale) for weight in weights]")), "fold", "the old model is changed"),
]  # fmt: skip

# --- quant-gptq ---

GPTQ = """
def inverse_factor(second_moments, damping):
    h = second_moments.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True)


def quantize_columns(weight, factor, scale, zero, highest):
    w = weight.double().clone()
    group = w.shape[1] // scale.shape[1]
    codes = torch.zeros(w.shape, dtype=torch.uint8)
    for j in range(w.shape[1]):
        step, offset = scale[:, j // group].double(), zero[:, j // group].double()
        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
        error = (w[:, j] - (code * step + offset)) / factor[j, j]
        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
        codes[:, j] = code.to(torch.uint8)
    return codes


gptq = {"inverse_factor": inverse_factor, "quantize_columns": quantize_columns}
"""

GPTQ_ALTERNATIVE = """
def inverse_factor(second_moments, damping):
    damped = second_moments.double() + torch.eye(len(second_moments)) * (damping * second_moments.double().trace() / len(second_moments))
    flipped = torch.linalg.cholesky(damped.flip(0, 1))  # H = A·Aᵀ with A upper triangular, so H⁻¹ = A⁻ᵀ·A⁻¹
    return torch.linalg.inv(flipped.flip(0, 1))


def quantize_columns(weight, factor, scale, zero, highest):
    out, wide = weight.shape
    ratio = factor / factor.diagonal()[:, None]  # row j over its diagonal
    where = torch.arange(wide) // (wide // scale.shape[1])
    step, offset = scale.double()[:, where], zero.double()[:, where]
    lost = torch.zeros(out, wide, dtype=torch.float64)
    codes = torch.zeros(out, wide, dtype=torch.float64)
    for j in range(wide):  # what has come in so far is added up when the column's turn comes
        now = weight[:, j].double() - lost[:, :j] @ ratio[:j, j]
        codes[:, j] = torch.clamp(torch.floor((now - offset[:, j]) / step[:, j] + 0.5), 0, highest)
        lost[:, j] = now - (codes[:, j] * step[:, j] + offset[:, j])
    return codes.byte()


gptq = dict(quantize_columns=quantize_columns, inverse_factor=inverse_factor)
"""


def gptq(*replacements: tuple[str, str]) -> str:
    return changed(GPTQ, *replacements)


DAMP = "    h.diagonal().add_(damping * h.diagonal().mean())\n"
INVERSE = "inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))"
UPPER = "return torch.linalg.cholesky(inverse, upper=True)"
ERROR = "error = (w[:, j] - (code * step + offset)) / factor[j, j]"
SPREAD = "w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]"
SCALES = "step, offset = scale[:, j // group].double(), zero[:, j // group].double()"
CODE = "code = ((w[:, j] - offset) / step).round().clamp(0, highest)"
QUANT_GPTQ = [
    WrongAnswer("lower triangle", gptq((UPPER, "return torch.linalg.cholesky(inverse)")), "factor", "L·Lᵀ; row j has the columns that are done"),
    WrongAnswer("factor of H", gptq((INVERSE, "inverse = h")), "factor", "not inverted"),
    WrongAnswer("inverse of the factor", gptq((UPPER, "return torch.linalg.inv(torch.linalg.cholesky(h, upper=True))")), "factor", "U⁻¹ is upper triangular as well, and U⁻¹·U⁻ᵀ the inverse: the other order"),
    WrongAnswer("no factor", gptq((UPPER, "return inverse")), "factor", "columns that are done are not taken out of it"),
    WrongAnswer("no damping", gptq((DAMP, "")), "factor", "an H without inverse breaks it"),
    WrongAnswer("absolute damping", gptq((DAMP, "    h.diagonal().add_(damping)\n")), "factor", "H grows with the number of inputs; the damping must, too"),
    WrongAnswer("damping of the largest", gptq(("h.diagonal().mean()", "h.diagonal().max()")), "factor", "the mean of the diagonal"),
    WrongAnswer("damping of all of H", gptq(("h.diagonal().mean()", "h.mean()")), "factor", "the mean of the diagonal"),
    WrongAnswer("damping everywhere", gptq((DAMP, "    h += damping * h.diagonal().mean()\n")), "factor", "only the diagonal makes it invertible"),
    WrongAnswer("damped inverse", gptq((DAMP, ""), (INVERSE, INVERSE + "\n    inverse.diagonal().add_(damping * h.diagonal().mean())")), "factor", "after inverting it is too late"),
    WrongAnswer("H changed", gptq(("second_moments.double().clone()", "second_moments"), (UPPER, UPPER.replace("(inverse,", "(inverse.double(),"))), "factor", "damped in place: the next linear that shares the inputs is damped twice"),
    WrongAnswer("float32", gptq((UPPER, UPPER + ".float()")), "factor", "float64 was asked"),
    WrongAnswer("damped when it has to be", gptq((DAMP, "    if torch.linalg.cholesky_ex(h).info:\n        h.diagonal().add_(1e-6)\n    else:\n        h.diagonal().add_(damping * h.diagonal().mean())\n")), "no-inverse", "a different model for the hard layers"),
    WrongAnswer("pseudo-inverse", gptq((DAMP, "    if not torch.linalg.cholesky_ex(h).info:\n        h.diagonal().add_(damping * h.diagonal().mean())\n"),
                                       (INVERSE, "inverse = torch.linalg.pinv(h, hermitian=True) + 1e-9 * torch.eye(len(h))")), "no-inverse", "directions that no input had must cost something"),
    WrongAnswer("each for itself", gptq(("        " + SPREAD + "\n", "")), "columns", "RTN"),
    WrongAnswer("not divided by the diagonal", gptq((" / factor[j, j]", "")), "columns", "err is the loss over U[j, j]"),
    WrongAnswer("divided twice", gptq((" / factor[j, j]", " / factor[j, j] ** 2")), "columns", "U[j, j]² is the diagonal of the inverse; row j has one of the two already"),
    WrongAnswer("wrong sign", gptq((SPREAD, SPREAD.replace("-=", "+="))), "columns", "the error doubles in place of being made up for"),
    WrongAnswer("column of the factor", gptq((SPREAD, SPREAD.replace("factor[j, j + 1 :]", "factor[j + 1 :, j]"))), "columns", "zeros: nothing moves"),
    WrongAnswer("row of the inverse", gptq((ERROR, "inverse = factor.T @ factor\n        error = (w[:, j] - (code * step + offset)) / inverse[j, j]"), (SPREAD, SPREAD.replace("factor[j,", "inverse[j,"))), "columns", "columns that are done are still in it"),
    WrongAnswer("next column alone", gptq((SPREAD, "w[:, j + 1 : j + 2] -= error[:, None] * factor[j, j + 1 : j + 2]")), "columns", "all columns to come move"),
    WrongAnswer("off by one column", gptq((SPREAD, "w[:, j + 2 :] -= error[:, None] * factor[j, j + 1 : -1]")), "columns", "U[j, j+1] belongs to column j + 1"),
    WrongAnswer("mean error of the outputs", gptq((SPREAD, SPREAD.replace("error[:, None]", "error.mean()"))), "columns", "each output by itself"),
    WrongAnswer("from the last column", gptq(("for j in range(w.shape[1]):", "for j in reversed(range(w.shape[1])):")), "columns", "errors go to columns that are done"),
    WrongAnswer("error of the first value", gptq((ERROR, ERROR.replace("(w[:, j] -", "(weight[:, j].double() -"))), "columns", "what is rounded is the column as it is now"),
    WrongAnswer("codes of the first value", gptq((CODE, CODE.replace("(w[:, j] -", "(weight[:, j].double() -"))), "columns", "columns move, and nobody looks"),
    WrongAnswer("scaled by the damped error", gptq((SPREAD, SPREAD.replace("error[:, None]", "0.5 * error[:, None]"))), "columns", "half of the correction"),
    WrongAnswer("codes cut off", gptq((CODE, CODE.replace(".round()", ""))), "columns", "the cast drops the fraction"),
    WrongAnswer("zero forgotten", gptq((CODE, CODE.replace("(w[:, j] - offset)", "w[:, j]")), (ERROR, ERROR.replace("(code * step + offset)", "code * step"))), "columns", "codes count from the zero"),
    WrongAnswer("weight changed", gptq(("w = weight.double().clone()", "w = weight")), "columns", "in place"),
    WrongAnswer("codes before them changed", gptq((SPREAD, SPREAD.replace("w[:, j + 1 :]", "w").replace("factor[j, j + 1 :]", "(factor + factor.T)[j]")), ("    return codes", "    each = scale.double().repeat_interleave(group, 1), zero.double().repeat_interleave(group, 1)\n    return ((w - each[1]) / each[0]).round().clamp(0, highest).to(torch.uint8)")), "columns", "columns before j are done"),
    WrongAnswer("first group's scales", gptq((SCALES, SCALES.replace("j // group", "0"))), "groups", "right for one group a row"),
    WrongAnswer("groups in turns", gptq((SCALES, SCALES.replace("j // group", "j % scale.shape[1]"))), "groups", "j mod groups in place of j // group"),
    WrongAnswer("stays inside its group", gptq((SPREAD, "end = (j // group + 1) * group\n        w[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]")), "groups", "all columns to come move"),
    WrongAnswer("scales taken anew", gptq((SCALES, "if j % group == 0 and j:\n            block = w[:, j : j + group]\n            scale, zero = scale.double().clone(), zero.double().clone()\n            zero[:, j // group] = block.amin(1)\n            scale[:, j // group] = ((block.amax(1) - block.amin(1)) / highest).clamp(min=1e-6)\n        " + SCALES)), "groups", "here they were fixed before anything moved"),
    WrongAnswer("not clamped", gptq((CODE, CODE.replace(".clamp(0, highest)", ".clamp(0, 255)"))), "last-codes", "a column that moved beyond the range has no code"),
    WrongAnswer("clamped too late", gptq((CODE, CODE.replace(".clamp(0, highest)", "")), ("code.to(torch.uint8)", "code.clamp(0, highest).to(torch.uint8)")), "last-codes", "the error of what was cut off is not spread"),
]  # fmt: skip

# --- quant-codebook ---

CODEBOOK = """
def assign(weight, levels):
    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)


def fit_levels(weight, sensitivity, levels, steps):
    for _ in range(steps):
        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
        mass = (taken * sensitivity[:, :, None]).sum(dim=1)
        total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)
        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
    return levels


def take_outliers(weight, count):
    places = weight.abs().flatten().topk(count).indices
    rows, columns = places // weight.shape[1], places % weight.shape[1]
    rest = weight.clone()
    rest[rows, columns] = 0.0
    return rest, rows, columns, weight[rows, columns]


codebook = {"assign": assign, "fit_levels": fit_levels, "take_outliers": take_outliers}
"""

CODEBOOK_ALTERNATIVE = """
def assign(weight, levels):
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for row, (w, own) in enumerate(zip(weight, levels)):  # between two neighbours lies their middle
        ordered, which = own.sort()
        middles = (ordered[1:] + ordered[:-1]) / 2
        codes[row] = which[torch.bucketize(w, middles)].to(torch.uint8)
    return codes


def fit_levels(weight, sensitivity, levels, steps):
    levels = levels.clone()
    for _ in range(steps):
        codes = assign(weight, levels).long()
        mass = torch.zeros_like(levels).scatter_add_(1, codes, sensitivity)
        total = torch.zeros_like(levels).scatter_add_(1, codes, sensitivity * weight)
        levels[mass > 0] = total[mass > 0] / mass[mass > 0]
    return levels


def take_outliers(weight, count):
    order = sorted(range(weight.numel()), key=lambda at: -abs(float(weight.view(-1)[at])))[:count]
    rows = torch.tensor([at // weight.shape[1] for at in reversed(order)])
    columns = torch.tensor([at % weight.shape[1] for at in reversed(order)])
    mask = torch.ones_like(weight)
    mask[rows, columns] = 0
    return weight * mask, rows, columns, weight[rows, columns].clone()


codebook = {"take_outliers": take_outliers, "assign": assign, "fit_levels": fit_levels}
"""


def codebook(*replacements: tuple[str, str]) -> str:
    return changed(CODEBOOK, *replacements)


NEAREST = "(weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1)"
MASS = "mass = (taken * sensitivity[:, :, None]).sum(dim=1)"
TOTAL = "total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)"
MOVE = "levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)"
PLACES = "places = weight.abs().flatten().topk(count).indices"
TAKEN = "taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])"
QUANT_CODEBOOK = [
    WrongAnswer("farthest", codebook((NEAREST, NEAREST.replace("argmin", "argmax"))), "nearest", "the wrong end"),
    WrongAnswer("distance with a sign", codebook((NEAREST, NEAREST.replace(".abs()", ""))), "nearest", "always the largest level"),
    WrongAnswer("levels of row 0", codebook((NEAREST, NEAREST.replace("levels[:, None, :]", "levels[:1, None, :]"))), "nearest", "each row has its own"),
    WrongAnswer("sorted numbers", codebook((NEAREST, NEAREST.replace("levels[:, None, :]", "levels.sort(dim=1).values[:, None, :]"))), "nearest", "the levels keep their order"),
    WrongAnswer("level below", codebook((NEAREST, "(weight[:, :, None] - levels[:, None, :]).where(weight[:, :, None] >= levels[:, None, :], torch.inf).argmin(dim=-1)")), "nearest", "rounded down"),
    WrongAnswer("codes of 64 bits", codebook((".to(torch.uint8)", "")), "nearest", "a code is a byte at most"),
    WrongAnswer("evenly spaced", codebook((NEAREST, "((weight - levels.amin(1, keepdim=True)) / (levels.amax(1, keepdim=True) - levels.amin(1, keepdim=True)) * (levels.shape[1] - 1)).round().clamp(0, levels.shape[1] - 1)")), "nearest", "as if the levels were multiples of a scale"),
    WrongAnswer("every weight the same", codebook((MASS, "mass = taken.sum(dim=1).float()"), (TOTAL, "total = (taken * weight[:, :, None]).sum(dim=1)")), "levels", "plain k-means"),
    WrongAnswer("divided by the number", codebook((MOVE, "number = taken.sum(dim=1)\n        levels = torch.where(mass > 0, total / number.where(number > 0, 1), levels)")), "levels", "weighted above, not below"),
    WrongAnswer("not divided", codebook((MOVE, "levels = torch.where(mass > 0, total, levels)")), "levels", "a sum is no mean"),
    WrongAnswer("sensitivity squared", codebook((MASS, "mass = (taken * (sensitivity**2)[:, :, None]).sum(dim=1)"), (TOTAL, TOTAL.replace("sensitivity * weight", "sensitivity**2 * weight"))), "levels", "it counts once"),
    WrongAnswer("sensitivity inversely", codebook((MASS, "mass = (taken / sensitivity[:, :, None]).sum(dim=1)"), (TOTAL, TOTAL.replace("sensitivity * weight", "weight / sensitivity"))), "levels", "what matters counts least"),
    WrongAnswer("one round", codebook(("for _ in range(steps):", "for _ in range(min(1, steps)):")), "levels", "steps is ignored"),
    WrongAnswer("one round too many", codebook(("for _ in range(steps):", "for _ in range(steps + 1):")), "levels", "off by one"),
    WrongAnswer("assigned once", codebook(("    for _ in range(steps):\n        " + TAKEN, "    " + TAKEN + "\n    for _ in range(steps):")), "levels", "weights choose anew in each round"),
    WrongAnswer("all rows alike", codebook((MASS, MASS + "\n        mass = mass.sum(dim=0, keepdim=True).expand_as(levels)"), (TOTAL, TOTAL + "\n        total = total.sum(dim=0, keepdim=True).expand_as(levels)")), "levels", "each row has its own levels"),
    WrongAnswer("median", codebook((MOVE, "codes = taken.argmax(-1)\n        levels = levels.clone()\n        for row in range(len(levels)):\n            for k in range(levels.shape[1]):\n                if (codes[row] == k).any():\n                    levels[row, k] = weight[row][codes[row] == k].median()")), "levels", "k-medians without weights"),
    WrongAnswer("levels in place", codebook((MOVE, "levels.copy_(torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels))")), "levels", "what was given is changed"),
    WrongAnswer("empty level becomes zero", codebook((MOVE, "levels = total / mass.where(mass > 0, 1.0)")), "empty-levels", "it stays where it is"),
    WrongAnswer("empty level becomes nan", codebook((MOVE, "levels = total / mass")), "empty-levels", "0 / 0"),
    WrongAnswer("empty level to the mean", codebook((MOVE, "levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), weight.mean(dim=1, keepdim=True))")), "empty-levels", "it stays where it is"),
    WrongAnswer("empty level to the largest weight", codebook((MOVE, "levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), weight.amax(dim=1, keepdim=True))")), "empty-levels", "a known repair, and not what was asked"),
    WrongAnswer("insensitive weights counted", codebook((MASS, "number = taken.sum(dim=1)\n        " + MASS), (MOVE, MOVE + "\n        plain = (taken * weight[:, :, None]).sum(dim=1) / number.where(number > 0, 1)\n        levels = torch.where((mass == 0) & (number > 0), plain, levels)")), "unreached", "a sensitivity of 0 counts nothing"),
    WrongAnswer("counted by number", codebook((MOVE, "levels = torch.where(taken.sum(dim=1) > 0, total / mass, levels)")), "unreached", "0 / 0 where all that took it have sensitivity 0"),
    WrongAnswer("at least one round", codebook(("for _ in range(steps):", "for _ in range(max(1, steps)):")), "unreached", "0 rounds change nothing"),
    WrongAnswer("largest with their sign", codebook((PLACES, PLACES.replace(".abs()", ""))), "kept-apart", "negative weights lie far out as well"),
    WrongAnswer("of each row", codebook((PLACES, "each = max(1, count // len(weight))\n    found = weight.abs().topk(each, dim=1).indices + weight.shape[1] * torch.arange(len(weight))[:, None]\n    places = torch.cat((found.flatten(), weight.abs().flatten().topk(weight.numel()).indices))[:count]")), "kept-apart", "of the whole matrix"),
    WrongAnswer("smallest", codebook((PLACES, PLACES.replace("topk(count)", "topk(count, largest=False)"))), "kept-apart", "the wrong end"),
    WrongAnswer("rows and columns exchanged", codebook(("return rest, rows, columns,", "return rest, columns, rows,")), "kept-apart", "the order of what is given back"),
    WrongAnswer("sizes of the values", codebook((", weight[rows, columns]\n", ", weight[rows, columns].abs()\n")), "kept-apart", "the signs are lost"),
    WrongAnswer("still in the rest", codebook(("    rest[rows, columns] = 0.0\n", "")), "kept-apart", "they would be in it twice"),
    WrongAnswer("taken out in place", codebook(("rest = weight.clone()", "values = weight[rows, columns]\n    rest = weight"), (", weight[rows, columns]\n", ", values\n")), "kept-apart", "the weight that was given is changed"),
]  # fmt: skip

# --- quant-recipe ---

RECIPE = """
def linear_bits(weights, stored):
    scales = 0 if stored.group is None else weights.linears * stored.scale_bits / stored.group
    return weights.linears * stored.bits + scales


def model_bytes(weights, stored):
    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
    return math.ceil(linear_bits(weights, stored) / 8) + 2 * wide


def step_bytes(weights, stored):
    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + weights.embedding)


def speed_up(weights, stored):
    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)


def step_seconds(weights, stored, tokens, machine):
    rate = machine.int8_per_s if stored.input_bits == 8 else machine.flops_per_s
    multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)
    return max(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)


def choose(weights, recipes, tokens, machine, budget, most_excess):
    fitting = []
    for stored in recipes:
        size = model_bytes(weights, stored)
        if size <= budget and stored.excess_nats <= most_excess:
            seconds = step_seconds(weights, stored, tokens, machine)
            fitting.append((seconds, stored.excess_nats, size, stored.name))
    return min(fitting)[3] if fitting else None


recipe_planner = {
    "model_bytes": model_bytes,
    "step_bytes": step_bytes,
    "speed_up": speed_up,
    "step_seconds": step_seconds,
    "choose": choose,
}
"""

RECIPE_ALTERNATIVE = """
class Planned:
    def __init__(self, weights, stored):
        self.weights, self.stored = weights, stored
        bits = stored.bits + (stored.scale_bits / stored.group if stored.group else 0)
        self.linears = int(-(-(weights.linears * bits) // 8))

    def step(self):
        return self.linears + (self.weights.embedding + self.weights.norms) * 2

    def model(self):
        return self.step() + (0 if self.weights.tied else 2 * self.weights.embedding)

    def seconds(self, tokens, machine):
        flops = 2 * tokens * self.weights.linears
        fast = flops if self.stored.input_bits <= 8 else 0
        slow = flops - fast + 2 * tokens * self.weights.embedding
        times = [fast / machine.int8_per_s + slow / machine.flops_per_s, self.step() / machine.bytes_per_s]
        return sorted(times)[-1]


def choose(weights, recipes, tokens, machine, budget, most_excess):
    best = None
    for one in recipes:
        plan = Planned(weights, one)
        if plan.model() > budget or one.excess_nats > most_excess:
            continue
        rank = (plan.seconds(tokens, machine), one.excess_nats, plan.model())
        if best is None or rank < best[0]:
            best = (rank, one.name)
    return best[1] if best else None


recipe_planner = {
    "model_bytes": lambda weights, stored: Planned(weights, stored).model(),
    "step_bytes": lambda weights, stored: Planned(weights, stored).step(),
    "speed_up": lambda weights, stored: Planned(weights, Stored("plain", 16)).step() / Planned(weights, stored).step(),
    "step_seconds": lambda weights, stored, tokens, machine: Planned(weights, stored).seconds(tokens, machine),
    "choose": choose,
}
"""


def recipe(*replacements: tuple[str, str]) -> str:
    return changed(RECIPE, *replacements)


LINEAR = "return weights.linears * stored.bits + scales"
SCALE_BITS = "weights.linears * stored.scale_bits / stored.group"
WIDE = "wide = weights.norms + weights.embedding * (1 if weights.tied else 2)"
STEP_BYTES = "return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + weights.embedding)"
SPEED = "return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)"
RATE = "rate = machine.int8_per_s if stored.input_bits == 8 else machine.flops_per_s"
MULTIPLYING = "multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)"
LONGER = "return max(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)"
RANKED = "fitting.append((seconds, stored.excess_nats, size, stored.name))"
FITS = "if size <= budget and stored.excess_nats <= most_excess:"
QUANT_RECIPE = [
    WrongAnswer("scales forgotten", recipe((LINEAR, "return weights.linears * stored.bits")), "bytes", "at 4 bits and groups of 64 they are an eighth on top"),
    WrongAnswer("scales twice", recipe((SCALE_BITS, "2 * " + SCALE_BITS)), "bytes", "scale_bits has the zero in it already"),
    WrongAnswer("scale bits as bytes", recipe((SCALE_BITS, "8 * " + SCALE_BITS)), "bytes", "bits"),
    WrongAnswer("one scale for all", recipe((SCALE_BITS, "stored.scale_bits")), "bytes", "one a group"),
    WrongAnswer("group times scale", recipe((SCALE_BITS, "weights.linears * stored.group / stored.scale_bits")), "bytes", "upside down"),
    WrongAnswer("bits as bytes", recipe(("math.ceil(linear_bits(weights, stored) / 8) + 2 * wide", "math.ceil(linear_bits(weights, stored)) + 2 * wide")), "bytes", "8 bits a byte"),
    WrongAnswer("head quantized", recipe((WIDE, "wide = weights.norms + weights.embedding\n    if not weights.tied:\n        return math.ceil((linear_bits(weights, stored) + weights.embedding * stored.bits) / 8) + 2 * wide")), "bytes", "it stays in 16 bits"),
    WrongAnswer("head forgotten", recipe((WIDE, "wide = weights.norms + weights.embedding")), "bytes", "one more matrix where it is not tied"),
    WrongAnswer("embedding forgotten", recipe((WIDE, "wide = weights.norms + weights.embedding * (0 if weights.tied else 1)")), "bytes", "it is stored, too"),
    WrongAnswer("norms forgotten", recipe((WIDE, WIDE.replace("weights.norms + ", ""))), "bytes", "few, but they count"),
    WrongAnswer("all else in float32", recipe(("+ 2 * wide", "+ 4 * wide")), "bytes", "16 bits"),
    WrongAnswer("step reads the embedding", recipe((STEP_BYTES, "return model_bytes(weights, stored)")), "bytes", "of the embedding a step needs a few rows"),
    WrongAnswer("step without the head", recipe((STEP_BYTES, STEP_BYTES.replace(" + weights.embedding", ""))), "bytes", "every step reads the head whole"),
    WrongAnswer("a float", recipe(("math.ceil(linear_bits(weights, stored) / 8) + 2 * wide", "linear_bits(weights, stored) / 8 + 2.0 * wide")), "bytes", "bytes are whole"),
    WrongAnswer("16 over bits", recipe((SPEED, "return 16 / stored.bits")), "speed-up", "4 times at 4 bits: neither scales nor head"),
    WrongAnswer("of the linears", recipe((SPEED, "return 16 * weights.linears / linear_bits(weights, stored)")), "speed-up", "the head is read as well"),
    WrongAnswer("of the models", recipe((SPEED, 'return model_bytes(weights, Stored("", 16)) / model_bytes(weights, stored)')), "speed-up", "a step does not read the embedding"),
    WrongAnswer("slow-down", recipe((SPEED, "return step_bytes(weights, stored) / (2 * (weights.linears + weights.norms + weights.embedding))")), "speed-up", "upside down"),
    WrongAnswer("against float32", recipe((SPEED, SPEED.replace("return 2 *", "return 4 *"))), "speed-up", "2 bytes a weight were asked"),
    WrongAnswer("times added", recipe((LONGER, "return step_bytes(weights, stored) / machine.bytes_per_s + multiplying")), "step-time", "side by side"),
    WrongAnswer("shorter time", recipe((LONGER, LONGER.replace("max(", "min("))), "step-time", "the longer one binds"),
    WrongAnswer("reading alone", recipe((LONGER, "return step_bytes(weights, stored) / machine.bytes_per_s")), "step-time", "with many tokens multiplying takes longer"),
    WrongAnswer("one token's operations", recipe((MULTIPLYING, MULTIPLYING.replace("2 * tokens *", "2 *"))), "step-time", "each token is multiplied"),
    WrongAnswer("one operation a multiply-add", recipe((MULTIPLYING, MULTIPLYING.replace("2 * tokens", "tokens"))), "step-time", "2"),
    WrongAnswer("int8 rate for int8 weights", recipe((RATE, RATE.replace("stored.input_bits == 8", "stored.bits <= 8"))), "step-time", "weight-only: the inputs are in 16 bits, and so is the product"),
    WrongAnswer("int8 rate never", recipe((RATE, "rate = machine.flops_per_s")), "step-time", "the integer product is faster"),
    WrongAnswer("head at the linears' rate", recipe((MULTIPLYING, "multiplying = 2 * tokens * (weights.linears + weights.embedding) / rate")), "step-time", "the head stays in 16 bits"),
    WrongAnswer("head not multiplied", recipe((MULTIPLYING, "multiplying = 2 * tokens * weights.linears / rate")), "step-time", "it is a matrix like the others"),
    WrongAnswer("fewest bytes", recipe((RANKED, RANKED.replace("(seconds, stored.excess_nats, size,", "(size, stored.excess_nats, seconds,"))), "choice", "where multiplying binds, that is not the fastest"),
    WrongAnswer("lowest excess", recipe((RANKED, RANKED.replace("(seconds, stored.excess_nats, size,", "(stored.excess_nats, seconds, size,"))), "choice", "good enough is enough; then speed counts"),
    WrongAnswer("slowest", recipe((RANKED, RANKED.replace("(seconds,", "(-seconds,"))), "choice", "the wrong end"),
    WrongAnswer("budget ignored", recipe((FITS, "if stored.excess_nats <= most_excess:")), "choice", "it has to fit"),
    WrongAnswer("quality ignored", recipe((FITS, "if size <= budget:")), "choice", "the fewest bits always win"),
    WrongAnswer("tied head stored twice", recipe((WIDE, "wide = weights.norms + weights.embedding * 2")), "tied-head", "one matrix"),
    WrongAnswer("tied head not read", recipe((STEP_BYTES, STEP_BYTES.replace("weights.embedding)", "(0 if weights.tied else weights.embedding))"))), "tied-head", "stored once, and read as the head"),
    WrongAnswer("first among equals", recipe((RANKED, RANKED.replace("(seconds, stored.excess_nats, size,", "(seconds, len(fitting), size,"))), "ties", "the lower excess"),
    WrongAnswer("larger excess among equals", recipe((RANKED, RANKED.replace("stored.excess_nats,", "-stored.excess_nats,"))), "ties", "lower is better"),
    WrongAnswer("bytes before quality among equals", recipe((RANKED, RANKED.replace("stored.excess_nats, size,", "size, stored.excess_nats,"))), "ties", "quality first"),
    WrongAnswer("more bytes among equals", recipe((RANKED, RANKED.replace("size,", "-size,"))), "ties", "the fewer bytes"),
    WrongAnswer("nothing fits, an error", recipe(("min(fitting)[3] if fitting else None", "min(fitting)[3]")), "nothing-fits", "min of nothing"),
    WrongAnswer("bounds not allowed", recipe((FITS, "if size < budget and stored.excess_nats < most_excess:")), "nothing-fits", "at most"),
    WrongAnswer("nothing fits, the smallest", recipe(("min(fitting)[3] if fitting else None", "min(fitting)[3] if fitting else (min(recipes, key=lambda s: s.bits).name if recipes else None)")), "nothing-fits", "it does not fit"),
    WrongAnswer("part of a byte dropped", recipe(("math.ceil(linear_bits(weights, stored) / 8) + 2 * wide", "int(linear_bits(weights, stored) / 8) + 2 * wide")), "nothing-fits", "it counts whole"),
]  # fmt: skip

WRONG: dict[str, list[WrongAnswer]] = {
    "quant-pack": QUANT_PACK,
    "quant-llm-int8": QUANT_INT8,
    "quant-awq": QUANT_AWQ,
    "quant-gptq": QUANT_GPTQ,
    "quant-codebook": QUANT_CODEBOOK,
    "quant-recipe": QUANT_RECIPE,
}

ALTERNATIVE: dict[str, str] = {
    "quant-pack": PACK_ALTERNATIVE,
    "quant-llm-int8": INT8_ALTERNATIVE,
    "quant-awq": AWQ_ALTERNATIVE,
    "quant-gptq": GPTQ_ALTERNATIVE,
    "quant-codebook": CODEBOOK_ALTERNATIVE,
    "quant-recipe": RECIPE_ALTERNATIVE,
}
