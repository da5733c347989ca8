"""Plausible wrong answers to lab 05, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

QUANT_PACK = """
# nearest-codes
cut off: codes were cut off; round to the nearest (a cast to uint8 drops the fraction)
-    codes = codes.round().clamp(0, 2**bits - 1)
+    codes = codes.clamp(0, 2**bits - 1)

rounded up: codes were rounded up, up to a whole step away; round to the nearest
-    codes = codes.round().clamp(0, 2**bits - 1)
+    codes = codes.ceil().clamp(0, 2**bits - 1)

codes for the unrounded scale: the code was chosen for the scale and zero before they were rounded to float16; take the
stored ones
-    codes = (blocks - zero.float()[..., None]) / step[..., None]
+    codes = (blocks - low[..., None]) / ((high - low) / (2**bits - 1)).where(high > low, 1.0)[..., None]

one scale a row: that is the range of the whole row; each group has its own
-    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
+    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
+    low, high = (x.expand(out, wide // group).clone() for x in (low, high))

one scale for the matrix: that is the range of the whole matrix; each group has its own
-    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
+    low, high = (x.expand(out, wide // group).clone() for x in (weight.min(), weight.max()))

symmetric: that is symmetric, from −max |w| to max |w|; the codes span smallest … largest
-    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
+    high = blocks.abs().amax(dim=-1)
+    low = -high

scale from the largest: that is the largest over the steps; the codes span smallest … largest
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = (high / (2**bits - 1)).half(), low.half()

scale from the largest size: that is max |w| over the steps; the codes span smallest … largest
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = (blocks.abs().amax(dim=-1) / (2**bits - 1)).half(), low.half()

half of the codes: that is symmetric, max |w| over half of the codes; they span smallest … largest
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = (blocks.abs().amax(dim=-1) / (2 ** (bits - 1) - 1)).half(), low.half()

always 8 bits: that is for 8 bits, whatever bits says
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = ((high - low) / 255).half(), low.half()

strided groups: a group is a stretch of neighbouring inputs of one output
-    blocks = weight.reshape(out, wide // group, group)
+    blocks = weight.reshape(out, group, wide // group).transpose(1, 2)
@@
-    return codes.to(torch.uint8).reshape(out, wide), scale, zero
+    return codes.to(torch.uint8).transpose(1, 2).reshape(out, wide), scale, zero
@@
-    blocks = codes.float().unflatten(1, (scale.shape[1], -1))
-    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
+    blocks = codes.float().unflatten(1, (-1, scale.shape[1])).transpose(1, 2)
+    return (blocks * scale.float()[..., None] + zero.float()[..., None]).transpose(1, 2).flatten(1)

2ᵇ steps: 2ᵇ codes have 2ᵇ − 1 steps between them
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = ((high - low) / 2**bits).half(), low.half()

zero forgotten: the zero of the group is missing
-    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
+    return (blocks * scale.float()[..., None]).flatten(1)

zero taken off: the zero is the number that code 0 stands for: it is added
-    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
+    return (blocks * scale.float()[..., None] - zero.float()[..., None]).flatten(1)

zero multiplied: zero is a weight, not a code: it is not multiplied with the scale
-    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
+    return ((blocks + zero.float()[..., None]) * scale.float()[..., None]).flatten(1)

scales in float32
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = (high - low) / (2**bits - 1), low

codes as floats
-    return codes.to(torch.uint8).reshape(out, wide), scale, zero
+    return codes.reshape(out, wide), scale, zero

in place
         raise WorkbenchError(f"groups of {group} do not divide {wide} inputs")
+    weight.clamp_(-2.0, 2.0)

# equal-weights
a least scale and the middle: a constant group lies between two codes here; code 0 and the zero alone have to give it
back
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-2).half()
+    zero = ((high + low) / 2 - scale.float() * (2**bits - 1) / 2).half()

equal weights become zero: the zero of a constant group is lost; code 0 and the zero alone have to give it back
     scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    zero = zero.where(scale > 0, 0.0)

equal weights become nan: that is 0 / 0: the range of a constant group is 0, and nothing may be divided by it
-    step = scale.float().where(scale > 0, 1.0)
+    scale = scale / (scale > 0)
+    step = scale.float()

# two-a-byte
nibbles exchanged: the upper and lower four bits are exchanged: the first half of the codes goes into the lower ones
-    return first | (second << 4)
+    return second | (first << 4)
@@
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.cat((packed >> 4, packed & 15), dim=-1)

neighbours in a byte: neighbours share a byte here
-    first, second = codes.chunk(2, dim=-1)
+    first, second = codes[..., ::2], codes[..., 1::2]
@@
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

neighbours in the other order: neighbours share a byte here, and in the other order
-    first, second = codes.chunk(2, dim=-1)
+    first, second = codes[..., 1::2], codes[..., ::2]
@@
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)

first half only: only the first half was kept
-    return first | (second << 4)
+    return first

not shifted: the second half is not shifted up by four bits: both codes lie in the same place
-    return first | (second << 4)
+    return first | second

added up: both codes were added up in the same four bits; the second goes up by four: << 4
-    return first | (second << 4)
+    return first + second

unpacked in the other order: the halves came back exchanged
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.cat((packed >> 4, packed & 15), dim=-1)

upper half not cut off: the lower code keeps the bits of the upper one: & 15
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.cat((packed, packed >> 4), dim=-1)

# other-widths
always 4 bits: that is for 4 bits, whatever bits says
-    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
+    scale, zero = ((high - low) / (15)).half(), low.half()
@@
-    codes = codes.round().clamp(0, 2**bits - 1)
+    codes = codes.round().clamp(0, 15)

zero never above 0: the range was made to hold 0, so most codes of a negative group stay empty
     low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
+    high = high.clamp(min=0)

large weights cut off: large weights were cut off; the codes span smallest … largest
     low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
+    high = high.clamp(max=30 * blocks.abs().median())

# many-axes
halves of the whole: the halves are those of the whole tensor; they are those of the last axis
-    first, second = codes.chunk(2, dim=-1)
-    return first | (second << 4)
+    first, second = codes.flatten().chunk(2)
+    return (first | (second << 4)).view(*codes.shape[:-1], -1)
@@
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.cat(((packed & 15).flatten(), (packed >> 4).flatten())).view(*packed.shape[:-1], -1)

along the second axis: the halves are those of the last axis, which is the second of a matrix alone
-    first, second = codes.chunk(2, dim=-1)
+    first, second = codes.chunk(2, dim=1)
@@
-    return torch.cat((packed & 15, packed >> 4), dim=-1)
+    return torch.cat((packed & 15, packed >> 4), dim=1)

# refused
nothing refused
-    if wide % group:
-        raise WorkbenchError(f"groups of {group} do not divide {wide} inputs")

rest left out: the last inputs are gone
-    if wide % group:
-        raise WorkbenchError(f"groups of {group} do not divide {wide} inputs")
+    wide = wide // group * group
+    weight = weight[:, :wide]

odd ones filled up: a code was added that nobody gave
-    if codes.shape[-1] % 2:
-        raise WorkbenchError(f"two codes fill a byte; {codes.shape[-1]} is odd")
+    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
"""

QUANT_LLM_INT8 = """
# columns
sign kept: what counts is |x|
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return (x.amax(dim=0) > threshold).nonzero()[:, 0]

tokens in place of channels: those are tokens; reduce over the tokens, so that a column is left
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return (x.abs().amax(dim=1) > threshold).nonzero()[:, 0]

a mask: nonzero gives the numbers [n, 1] of a mask
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return (x.abs().amax(dim=0) > threshold)

pairs: nonzero gives [n, 1]; take [:, 0]
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return (x.abs().amax(dim=0) > threshold).nonzero()

largest first
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return x.abs().amax(dim=0).argsort(descending=True)[: int((x.abs().amax(dim=0) > threshold).sum())]

# one-token
mean of a channel: neither the mean of a channel nor every token has to pass; one token is enough
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return (x.abs().mean(dim=0) > threshold).nonzero()[:, 0]

every token: neither the mean of a channel nor every token has to pass; one token is enough
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    return ((x.abs() > threshold).all(dim=0)).nonzero()[:, 0]

never empty: there may be none
-    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
+    largest = x.abs().amax(dim=0)
+    return largest.topk(max(1, int((largest > threshold).sum()))).indices.sort().values

# weights
weight's scale with the outliers inside: the outlier columns are inside; they are gone when the scale is taken
-    scale = rest.abs().amax(dim=1, keepdim=True) / 127
+    scale = weight.abs().amax(dim=1, keepdim=True) / 127

outlier codes stay
-    codes = (rest / scale.where(scale > 0, 1.0)).round()
+    codes = (weight / scale.where(scale > 0, 1.0)).round().clamp(-127, 127)

outliers in float32
-    outliers = weight[:, columns].half()
+    outliers = weight[:, columns]

outlier rows: a channel is a column of W, not a row
-    outliers = weight[:, columns].half()
+    outliers = weight[columns % len(weight)].half().T

one scale for the weight: that is one scale for the whole matrix; each output has its own
-    scale = rest.abs().amax(dim=1, keepdim=True) / 127
+    scale = (rest.abs().max() / 127).expand(len(rest), 1).clone()

one scale with the outliers inside: that is one scale for the whole matrix, outliers and all; each output has its own
-    scale = rest.abs().amax(dim=1, keepdim=True) / 127
+    scale = (weight.abs().max() / 127).expand(len(rest), 1).clone()

/ 255: codes on both sides of 0 are 127, not 255
-    scale = rest.abs().amax(dim=1, keepdim=True) / 127
-    codes = (rest / scale.where(scale > 0, 1.0)).round()
+    scale = rest.abs().amax(dim=1, keepdim=True) / 255
+    codes = (rest / scale.where(scale > 0, 1.0)).round().clamp(-127, 127)

a scale for each input: that is a scale for each input, which does not come out of the sum; each output has its own
-    scale = rest.abs().amax(dim=1, keepdim=True) / 127
+    scale = rest.abs().amax(dim=0, keepdim=True) / 127

/ 128: the codes go from −127 to 127, so that 0 is in the middle: / 127
-    scale = rest.abs().amax(dim=1, keepdim=True) / 127
-    codes = (rest / scale.where(scale > 0, 1.0)).round()
+    scale = rest.abs().amax(dim=1, keepdim=True) / 128
+    codes = (rest / scale.where(scale > 0, 1.0)).round().clamp(-128, 127)

weight cut off: codes were cut off; round to the nearest
-    codes = (rest / scale.where(scale > 0, 1.0)).round()
+    codes = (rest / scale.where(scale > 0, 1.0))

weight changed
-    rest = weight.index_fill(1, columns, 0.0)
+    rest = weight.index_fill_(1, columns, 0.0)

# product
token's scale with the outliers inside: the scale of a token was taken with its outliers inside, so all else has few
codes left
-    rest = x.index_fill(1, columns, 0.0)
+    rest = x

outlier columns counted twice: the outlier columns are in it twice
-    return product * step * scale.T + beside
+    return product * step * scale.T + 2 * beside

outliers also in the integer product: the outlier columns are in the integer product as well
-    rest = x.index_fill(1, columns, 0.0)
+    rest = x
@@
-    product = rounded.int() @ codes.int().T
+    again = (outliers.float() / scale.where(scale > 0, 1.0)).round().int()
+    product = rounded.int() @ codes.int().index_copy(1, columns, again).T

outliers forgotten: the outlier columns are missing: x[:, columns] · W[:, columns]ᵀ is added to the integer product
-    return product * step * scale.T + beside
+    return product * step * scale.T

one scale for all tokens: one scale was taken for all tokens; each token has its own
-    step = rest.abs().amax(dim=1, keepdim=True) / 127
+    step = (rest.abs().max() / 127).expand(len(rest), 1)

a scale for each channel of x: x has a scale for each channel here; one for each token comes out of the sum, one a
channel does not
-    step = rest.abs().amax(dim=1, keepdim=True) / 127
+    step = rest.abs().amax(dim=0, keepdim=True) / 127
@@
-    return product * step * scale.T + beside
+    return product * step.mean() * scale.T + beside

weight's scale forgotten: the scales of the weight are missing
-    return product * step * scale.T + beside
+    return product * step + beside

inputs not rounded: x was not rounded to int8 codes
-    rounded = (rest / step.where(step > 0, 1.0)).round()
-    product = rounded.int() @ codes.int().T
+    rounded = (rest / step.where(step > 0, 1.0))
+    product = rounded @ codes.float().T

inputs cut off: the codes of x were cut off; round to the nearest
-    rounded = (rest / step.where(step > 0, 1.0)).round()
+    rounded = (rest / step.where(step > 0, 1.0))

sums in 8 bits: sums of products of int8 were kept in 8 bits and wrapped around: multiply with .int()
-    product = rounded.int() @ codes.int().T
+    product = rounded.to(torch.int8) @ codes.T

sums in 16 bits: sums of products of int8 were kept in 16 bits and wrapped around: multiply with .int()
-    product = rounded.int() @ codes.int().T
+    product = rounded.short() @ codes.short().T

outliers of x in float16: the outliers of x were rounded to float16; here they stay in float32
-    beside = x[:, columns] @ outliers.float().T
+    beside = x[:, columns].half().float() @ outliers.float().T

x changed
-    rest = x.index_fill(1, columns, 0.0)
+    rest = x.index_fill_(1, columns, 0.0)

# no-outliers
refuses no outliers: there may be no outlier columns; most layers have none
 def multiply(x, codes, scale, outliers, columns):
+    assert len(columns)

column 0 when there is none: without outlier columns, column 0 was taken out
 def multiply(x, codes, scale, outliers, columns):
+    columns = columns if len(columns) else torch.tensor([0])
+    outliers = outliers if outliers.shape[1] else torch.zeros(len(codes), 1)

# zeros
a token of zeros: a token of zeros has range 0, and 0 / 0 is nan; its codes are 0
-    rounded = (rest / step.where(step > 0, 1.0)).round()
-    product = rounded.int() @ codes.int().T
+    rounded = (rest / step).round()
+    product = rounded @ codes.float().T

an output of zeros: an output without weights has range 0, and 0 / 0 is nan
-    codes = (rest / scale.where(scale > 0, 1.0)).round()
+    scale = scale / (scale > 0)
+    codes = (rest / scale).round()
"""

QUANT_AWQ = """
# output-error
not a share: that is the error itself; divide by the same for W
-    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
+    return float(((lost @ h) * lost).sum())

square root: that is its square root; the squares were asked
-    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
+    return float((((lost @ h) * lost).sum() / ((whole @ h) * whole).sum()).sqrt())

error of the weights: that is the error of the weights, whatever comes in; weigh it with H
-    h = second_moments.double()
+    h = torch.eye(len(second_moments), dtype=torch.float64)

diagonal only: only the diagonal of H was used; channels go together, and H[i, j] says how far
-    h = second_moments.double()
+    h = torch.diag(second_moments.double().diagonal())

diagonal for the error: only the diagonal of H was used for the error
-    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
+    return float((lost**2 * h.diagonal()).sum() / ((whole @ h) * whole).sum())

share of the weights: divided by ‖W‖² in place of ‖XWᵀ‖²
-    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
+    return float(((lost @ h) * lost).sum() / (whole**2).sum())

H twice: that is Σ (δH)²; it is Σ (δH)·δ
-    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
+    return float((lost @ h).square().sum() / (whole @ h).square().sum())

mean of the outputs' shares: the mean over the outputs of each one's share is not the share of all together
-    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
+    return float((((lost @ h) * lost).sum(1) / ((whole @ h) * whole).sum(1)).mean())

# scale
largest in place of mean: that is the largest |x| of each channel; the mean says what usually comes
-    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
+    mean = inputs.max_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))

root mean square: that is the root mean square; the mean of |x| was asked
-    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
+    mean = (inputs.second_moments.diagonal() / inputs.rows).sqrt().clamp(min=1e-4 * float(inputs.mean_abs.max()))

inverse: the exponent has the wrong sign: channels with large inputs get large scales
-    scale = mean**alpha
+    scale = mean ** (-alpha)

not normalized: divide by √(largest s · smallest s), so that largest times smallest is 1
-    return scale / (scale.max() * scale.min()).sqrt()
+    return scale

normalized by the largest: divided by the largest; it is √(largest · smallest)
-    return scale / (scale.max() * scale.min()).sqrt()
+    return scale / scale.max()

normalized by the mean: divided by the mean; it is √(largest · smallest)
-    return scale / (scale.max() * scale.min()).sqrt()
+    return scale / scale.mean()

no root: divided by largest · smallest, without the root
-    return scale / (scale.max() * scale.min()).sqrt()
+    return scale / (scale.max() * scale.min())

root of the largest: the root was taken of the largest alone
-    return scale / (scale.max() * scale.min()).sqrt()
+    return scale / scale.max().sqrt()

α ignored: that is the scale at α = 1; α is the exponent
-    scale = mean**alpha
+    scale = mean

# unreached
a channel of zeros: a channel that no input reached has mean 0, and 0 to any power but 0 is 0: take 1e-4 of the largest
mean at least
-    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
+    mean = inputs.mean_abs

least of 1: a channel that no input reached got 1; take 1e-4 of the largest mean at least
-    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
+    mean = inputs.mean_abs.where(inputs.mean_abs > 0, 1.0)

least not relative: the least mean is 1e-4 of the largest, not 1e-4
-    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
+    mean = inputs.mean_abs.clamp(min=1e-4)

# search
not scaled: s was not used: every α gives what plain rounding gives
-        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        rounded = quantize_tensor(together, format, over=1, group=group).dequantize()
+        found.append((index / grid, output_error(together, rounded, inputs.second_moments)))

scaled after rounding: the columns were not multiplied by s before rounding
-        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
+        rounded = quantize_tensor(together, format, over=1, group=group).dequantize()

not scaled back: the rounded weight stands for W·s; divide it by s before it is compared with W
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        found.append((index / grid, output_error(together, rounded, inputs.second_moments)))

the other way round: the columns were divided by s and the weight multiplied afterwards; it is the other way round
-        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        rounded = quantize_tensor(together / scale, format, over=1, group=group).dequantize()
+        found.append((index / grid, output_error(together, rounded * scale, inputs.second_moments)))

H divided as well: H was divided by s as well; Ŵ is divided by s already, so it meets the inputs as they are
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        divided = inputs.second_moments / scale[:, None] / scale
+        found.append((index / grid, output_error(together, rounded / scale, divided)))

weight error in the search: that is the error of the weights; it is the outputs' that counts
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        found.append((index / grid, output_error(together, rounded / scale, torch.eye(len(scale)))))

diagonal in the search: only the diagonal of H was used
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        diagonal = torch.diag(inputs.second_moments.diagonal())
+        found.append((index / grid, output_error(together, rounded / scale, diagonal)))

rows scaled: the rows were scaled; s is one number an input channel, a column
         scale = scale_for(inputs, index / grid)
+        scale = scale[:, None] if len(together) == len(scale) else scale

α up to 1: the last α is 1 here; divide by grid
-        scale = scale_for(inputs, index / grid)
+        scale = scale_for(inputs, index / max(1, grid - 1))
@@
-        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+        found.append((index / max(1, grid - 1), output_error(together, rounded / scale, inputs.second_moments)))

begins after 0: α = 0, plain rounding, is one of the choices
-    for index in range(grid):
+    for index in range(1, grid):

only the best: that is the best point alone; all of them were asked
-    return found
+    return min(found, key=lambda point: point[1])

one group a row: the whole row had one scale; groups have their own
-        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
+        rounded = quantize_tensor(together * scale, format, over=1, group=together.shape[1]).dequantize()

# shared-inputs
first linear only: only the first of the linears was searched; those that share inputs share s
-    together, found = torch.cat(list(weights)), []
+    together, found = weights[0], []

last linear only: only the last of the linears was searched; those that share inputs share s
-    together, found = torch.cat(list(weights)), []
+    together, found = weights[-1], []

mean of the linears: the mean of the linears' errors was taken; the error is that of all of them together
         found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
+    if len(weights) > 1:
+        each = [search([w], inputs, format, group, grid) for w in weights]
+        return [(points[0][0], sum(p[1] for p in points) / len(points)) for points in zip(*each)]

# few-bits
bits fixed: the format is given; use it as it is
-        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
+        fixed = IntegerFormat(max(3, min(4, format.bits)))
+        rounded = quantize_tensor(together * scale, fixed, over=1, group=group).dequantize()

grid of at most 5: grid is how many points there are
-    for index in range(grid):
+    for index in range(min(grid, 5)):

# fold
gain multiplied: that is gain · s; the inputs are divided by s, the columns multiplied
-    return gain / scale, [weight * scale for weight in weights]
+    return gain * scale, [weight * scale for weight in weights]

weights only: it was left as it is; the inputs are divided by s there
-    return gain / scale, [weight * scale for weight in weights]
+    return gain, [weight * scale for weight in weights]

weights divided: that is gain · s; the inputs are divided by s, the columns multiplied
-    return gain / scale, [weight * scale for weight in weights]
+    return gain * scale, [weight / scale for weight in weights]

first weight only: it was left as it is; all of these get the divided inputs
-    return gain / scale, [weight * scale for weight in weights]
+    return gain / scale, [weights[0] * scale, *weights[1:]]

folded in place
-    return gain / scale, [weight * scale for weight in weights]
+    return gain.div_(scale), [weight.mul_(scale) for weight in weights]
"""

QUANT_GPTQ = """
# factor
lower triangle: that is the lower factor, L·Lᵀ; take the upper one, Uᵀ·U (upper=True)
-    return torch.linalg.cholesky(inverse, upper=True)
+    return torch.linalg.cholesky(inverse)

factor of H: that is the factor of H; it is to be that of its inverse
-    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
+    inverse = h

inverse of the factor: U·Uᵀ is the inverse here, as of the factor of H turned round; it is to be Uᵀ·U
-    return torch.linalg.cholesky(inverse, upper=True)
+    return torch.linalg.inv(torch.linalg.cholesky(h, upper=True))

no factor: that is the inverse itself; take its Cholesky factor
-    return torch.linalg.cholesky(inverse, upper=True)
+    return inverse

no damping: the damping was not added
-    h.diagonal().add_(damping * h.diagonal().mean())

absolute damping: the damping itself was added; it is a share of the mean of H's diagonal
-    h.diagonal().add_(damping * h.diagonal().mean())
+    h.diagonal().add_(damping)

damping of the largest: the damping is a share of the mean of the diagonal, not of its largest
-    h.diagonal().add_(damping * h.diagonal().mean())
+    h.diagonal().add_(damping * h.diagonal().max())

damping of all of H: the damping is a share of the mean of the diagonal, not of all of H
-    h.diagonal().add_(damping * h.diagonal().mean())
+    h.diagonal().add_(damping * h.mean())

damping everywhere: the damping goes on the diagonal only
-    h.diagonal().add_(damping * h.diagonal().mean())
+    h += damping * h.diagonal().mean()

damped inverse: the damping was added to the inverse; it goes to H
-    h.diagonal().add_(damping * h.diagonal().mean())
@@
     inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
+    inverse.diagonal().add_(damping * h.diagonal().mean())

H changed: the next linear that shares these inputs would be damped twice
-    h = second_moments.double().clone()
+    h = second_moments
@@
-    return torch.linalg.cholesky(inverse, upper=True)
+    return torch.linalg.cholesky(inverse.double(), upper=True)

float32
-    return torch.linalg.cholesky(inverse, upper=True)
+    return torch.linalg.cholesky(inverse, upper=True).float()

# no-inverse
damped when it has to be: the damping is added always, not only where there is no inverse
-    h.diagonal().add_(damping * h.diagonal().mean())
+    if torch.linalg.cholesky_ex(h).info:
+        h.diagonal().add_(1e-6)
+    else:
+        h.diagonal().add_(damping * h.diagonal().mean())

pseudo-inverse: the damping is added always; directions that no input had must cost something
-    h.diagonal().add_(damping * h.diagonal().mean())
-    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
+    if not torch.linalg.cholesky_ex(h).info:
+        h.diagonal().add_(damping * h.diagonal().mean())
+    inverse = torch.linalg.pinv(h, hermitian=True) + 1e-9 * torch.eye(len(h))

# columns
each for itself: each weight was rounded for itself; the error of column j moves those to come, by row j of U
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]

not divided by the diagonal: the error was not divided by U[j, j]
-        error = (w[:, j] - (code * step + offset)) / factor[j, j]
+        error = (w[:, j] - (code * step + offset))

divided twice: the error was divided by U[j, j] twice
-        error = (w[:, j] - (code * step + offset)) / factor[j, j]
+        error = (w[:, j] - (code * step + offset)) / factor[j, j] ** 2

wrong sign: the error was added; what was lost is taken off the columns to come
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w[:, j + 1 :] += error[:, None] * factor[j, j + 1 :]

column of the factor: each weight was rounded for itself; the error of column j moves those to come, by row j of U
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w[:, j + 1 :] -= error[:, None] * factor[j + 1 :, j]

row of the inverse: row j of the inverse UᵀU was taken; columns that are done must be out of it, so it is row j of U
-        error = (w[:, j] - (code * step + offset)) / factor[j, j]
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        inverse = factor.T @ factor
+        error = (w[:, j] - (code * step + offset)) / inverse[j, j]
+        w[:, j + 1 :] -= error[:, None] * inverse[j, j + 1 :]

next column alone: the error moved column j + 1 alone; all columns to come move
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w[:, j + 1 : j + 2] -= error[:, None] * factor[j, j + 1 : j + 2]

off by one column: U[j, j+1] belongs to column j + 1; the errors went one column too far
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w[:, j + 2 :] -= error[:, None] * factor[j, j + 1 : -1]

mean error of the outputs: the error of one output moved the others too; each output by itself
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w[:, j + 1 :] -= error.mean() * factor[j, j + 1 :]

from the last column: each weight was rounded for itself; the error of column j moves those to come, by row j of U
-    for j in range(w.shape[1]):
+    for j in reversed(range(w.shape[1])):

error of the first value: the error is that of the column as it is now, not of the weight as it was given
-        error = (w[:, j] - (code * step + offset)) / factor[j, j]
+        error = (weight[:, j].double() - (code * step + offset)) / factor[j, j]

codes of the first value: each weight was rounded for itself; the error of column j moves those to come, by row j of U
-        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
+        code = ((weight[:, j].double() - offset) / step).round().clamp(0, highest)

scaled by the damped error: half of the error was spread
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w[:, j + 1 :] -= 0.5 * error[:, None] * factor[j, j + 1 :]

codes cut off: codes were cut off (a cast to uint8 drops the fraction), so no error was left to spread
-        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
+        code = ((w[:, j] - offset) / step).clamp(0, highest)

zero forgotten: the zero is missing
-        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
-        error = (w[:, j] - (code * step + offset)) / factor[j, j]
+        code = (w[:, j] / step).round().clamp(0, highest)
+        error = (w[:, j] - code * step) / factor[j, j]

weight changed
-    w = weight.double().clone()
+    w = weight

codes before them changed: columns before j are done; their codes stay
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        w -= error[:, None] * (factor + factor.T)[j]
@@
-    return codes
+    each = scale.double().repeat_interleave(group, 1), zero.double().repeat_interleave(group, 1)
+    return ((w - each[1]) / each[0]).round().clamp(0, highest).to(torch.uint8)

# groups
first group's scales: the scales of the first group were taken for all columns
-        step, offset = scale[:, j // group].double(), zero[:, j // group].double()
+        step, offset = scale[:, 0].double(), zero[:, 0].double()

groups in turns: column j is in group j // group; the scales of another group were taken
-        step, offset = scale[:, j // group].double(), zero[:, j // group].double()
+        step, offset = scale[:, j % scale.shape[1]].double(), zero[:, j % scale.shape[1]].double()

stays inside its group: the error moved the columns of its own group alone; all columns to come move
-        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
+        end = (j // group + 1) * group
+        w[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]

scales taken anew: scales were taken anew for the columns as they moved; here they are given
     for j in range(w.shape[1]):
+        if j % group == 0 and j:
+            block = w[:, j : j + group]
+            scale, zero = scale.double().clone(), zero.double().clone()
+            zero[:, j // group] = block.amin(1)
+            scale[:, j // group] = ((block.amax(1) - block.amin(1)) / highest).clamp(min=1e-6)

# last-codes
not clamped: a weight beyond the range takes the last code: .clamp(0, highest)
-        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
+        code = ((w[:, j] - offset) / step).round().clamp(0, 255)

clamped too late: the error is that of the code that is stored: clamp it first
-        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
+        code = ((w[:, j] - offset) / step).round()
@@
-        codes[:, j] = code.to(torch.uint8)
+        codes[:, j] = code.clamp(0, highest).to(torch.uint8)
"""

QUANT_CODEBOOK = """
# nearest
farthest: the farthest was taken
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    return (weight[:, :, None] - levels[:, None, :]).abs().argmax(dim=-1).to(torch.uint8)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

distance with a sign: distance has no sign: (w − level) without | |
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    return (weight[:, :, None] - levels[:, None, :]).argmin(dim=-1).to(torch.uint8)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

levels of row 0: the levels of row 0 were taken for all rows
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    return (weight[:, :, None] - levels[:1, None, :]).abs().argmin(dim=-1).to(torch.uint8)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

sorted numbers: the numbers are those of sorted levels; the levels keep their order
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    return (weight[:, :, None] - levels.sort(dim=1).values[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

level below: the level below was taken; take the nearest
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    above = weight[:, :, None] - levels[:, None, :]
+    return above.where(above >= 0, torch.inf).argmin(dim=-1).to(torch.uint8)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

codes of 64 bits
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

evenly spaced: that is as if the levels were evenly spaced; they are where they are
-    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
+    low, high, last = levels.amin(1, keepdim=True), levels.amax(1, keepdim=True), levels.shape[1] - 1
+    return ((weight - low) / (high - low) * last).round().clamp(0, last).to(torch.uint8)
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

# levels
every weight the same: each weight counted the same; it counts as its sensitivity says
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
-        mass = (taken * sensitivity[:, :, None]).sum(dim=1)
-        total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
+        mass = taken.sum(dim=1).float()
+        total = (taken * weight[:, :, None]).sum(dim=1)

divided by the number: the sum of sensitivity · w was divided by how many weights took the level, not by the sum of
their sensitivities
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        number = taken.sum(dim=1)
+        levels = torch.where(mass > 0, total / number.where(number > 0, 1), levels)

not divided: the sum was not divided by the sensitivities' sum
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels = torch.where(mass > 0, total, levels)

sensitivity squared: each weight counted as the square of its sensitivity
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
-        mass = (taken * sensitivity[:, :, None]).sum(dim=1)
-        total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
+        mass = (taken * (sensitivity**2)[:, :, None]).sum(dim=1)
+        total = (taken * (sensitivity**2 * weight)[:, :, None]).sum(dim=1)

sensitivity inversely: sensitivity was taken inversely: it says how much a weight matters
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
-        mass = (taken * sensitivity[:, :, None]).sum(dim=1)
-        total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
+        mass = (taken / sensitivity[:, :, None]).sum(dim=1)
+        total = (taken * (weight / sensitivity)[:, :, None]).sum(dim=1)

one round: only one round was made, or the first assignment kept; weights choose anew in each round
-    for _ in range(steps):
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+    for _ in range(min(1, steps)):
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

one round too many: one round too many
-    for _ in range(steps):
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+    for _ in range(steps + 1):
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

one round too few: one round too few
-    for _ in range(steps):
+    for _ in range(steps - 1):

assigned once: only one round was made, or the first assignment kept; weights choose anew in each round
 def fit_levels(weight, sensitivity, levels, steps):
+    taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]

all rows alike: all rows got the same levels; each row has its own
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
         mass = (taken * sensitivity[:, :, None]).sum(dim=1)
+        mass = mass.sum(dim=0, keepdim=True).expand_as(levels)
@@
         total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)
+        total = total.sum(dim=0, keepdim=True).expand_as(levels)

median: the median was taken; k-means takes the mean, with sensitivities
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        codes = taken.argmax(-1)
+        levels = levels.clone()
+        for row in range(len(levels)):
+            for k in range(levels.shape[1]):
+                if (codes[row] == k).any():
+                    levels[row, k] = weight[row][codes[row] == k].median()

levels in place
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels.copy_(torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels))

# empty-levels
empty level becomes zero: a level that no weight took became 0; it stays where it is
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels = total / mass.where(mass > 0, 1.0)

empty level becomes nan: a level that no weight took became nan (0 / 0); it stays where it is
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels = total / mass

empty level to the mean: a level that no weight took went to the mean of the row; it stays where it is
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), weight.mean(dim=1, keepdim=True))

empty level to the largest weight: a level that no weight took went to the largest weight; it stays where it is
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), weight.amax(dim=1, keepdim=True))

# unreached
insensitive weights counted: a sensitivity of 0 counts nothing
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
+        number = taken.sum(dim=1)
@@
         levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        plain = (taken * weight[:, :, None]).sum(dim=1) / number.where(number > 0, 1)
+        levels = torch.where((mass == 0) & (number > 0), plain, levels)

counted by number: a level whose weights all have sensitivity 0 stays where it is
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
+        levels = torch.where(taken.sum(dim=1) > 0, total / mass, levels)

at least one round: 0 rounds change nothing
-    for _ in range(steps):
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+    for _ in range(max(1, steps)):
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])

# kept-apart
largest with their sign: what counts is |w|, without its sign
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    places = weight.abs().flatten().topk(count).indices
+    places = weight.flatten().topk(count).indices

of each row: as many were taken of each row; it is the largest of the whole matrix
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    places = weight.abs().flatten().topk(count).indices
+    each = max(1, count // len(weight))
+    found = weight.abs().topk(each, dim=1).indices + weight.shape[1] * torch.arange(len(weight))[:, None]
+    places = torch.cat((found.flatten(), weight.abs().flatten().topk(weight.numel()).indices))[:count]

smallest: the smallest were taken
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    places = weight.abs().flatten().topk(count).indices
+    places = weight.abs().flatten().topk(count, largest=False).indices

rows and columns exchanged: rows and columns are exchanged
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    return rest, rows, columns, weight[rows, columns]
+    return rest, columns, rows, weight[rows, columns]

sizes of the values: the sign is lost
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    return rest, rows, columns, weight[rows, columns]
+    return rest, rows, columns, weight[rows, columns].abs()

still in the rest: what was taken is still in the rest, so it would be in it twice
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    rest[rows, columns] = 0.0

taken out in place
-        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
+        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])
@@
-    rest = weight.clone()
+    values = weight[rows, columns]
+    rest = weight
@@
-    return rest, rows, columns, weight[rows, columns]
+    return rest, rows, columns, values
"""

QUANT_RECIPE = """
# bytes
scales forgotten: the scales are stored and read as well: weights / group · scale_bits / 8
-    return weights.linears * stored.bits + scales
+    return weights.linears * stored.bits

scales twice: scale_bits is the scale and the zero of a group together already
-    scales = 0 if stored.group is None else weights.linears * stored.scale_bits / stored.group
+    scales = 0 if stored.group is None else 2 * weights.linears * stored.scale_bits / stored.group

scale bits as bytes: a group has scale_bits bits, not bytes
-    scales = 0 if stored.group is None else weights.linears * stored.scale_bits / stored.group
+    scales = 0 if stored.group is None else 8 * weights.linears * stored.scale_bits / stored.group

one scale for all: that is one scale for all; there are weights / group groups
-    scales = 0 if stored.group is None else weights.linears * stored.scale_bits / stored.group
+    scales = 0 if stored.group is None else stored.scale_bits

group times scale: that is group / scale_bits; it is upside down
-    scales = 0 if stored.group is None else weights.linears * stored.scale_bits / stored.group
+    scales = 0 if stored.group is None else weights.linears * stored.group / stored.scale_bits

bits as bytes: bits / 8 are bytes
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * wide
+    return math.ceil(linear_bits(weights, stored)) + 2 * wide

head quantized: the head stays in 16 bits, 2 bytes a number
-    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
+    wide = weights.norms + weights.embedding
+    if not weights.tied:
+        return math.ceil((linear_bits(weights, stored) + weights.embedding * stored.bits) / 8) + 2 * wide

head forgotten: the embedding and the head are both stored, where they are not one matrix
-    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
+    wide = weights.norms + weights.embedding

embedding forgotten: the embedding and the head are both stored, where they are not one matrix
-    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
+    wide = weights.norms + weights.embedding * (0 if weights.tied else 1)

norms forgotten: the norms are missing; they have 2 bytes each
-    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
+    wide = weights.embedding * (1 if weights.tied else 2)

all else in float32: what is not quantized has 2 bytes a number, not 4
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * wide
+    return math.ceil(linear_bits(weights, stored) / 8) + 4 * wide

step reads the embedding: of the embedding a step needs a few rows; only the head is read whole
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + weights.embedding)
+    return model_bytes(weights, stored)

step without the head: the head is missing; every step reads it whole
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + weights.embedding)
+    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms)

a float
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * wide
+    return linear_bits(weights, stored) / 8 + 2.0 * wide

# speed-up
16 over bits: that is 16 / bits; the head and the scales are read as well
-    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)
+    return 16 / stored.bits

of the linears: that is for the linears alone; the head stays in 16 bits and is read as well
-    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)
+    return 16 * weights.linears / linear_bits(weights, stored)

of the models: that compares whole models; a step does not read the embedding
-    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)
+    return model_bytes(weights, Stored("", 16)) / model_bytes(weights, stored)

slow-down: that is the other way round
-    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)
+    return step_bytes(weights, stored) / (2 * (weights.linears + weights.norms + weights.embedding))

against float32: it is compared with 4 bytes per weight; with 2
-    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)
+    return 4 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)

# step-time
times added: the times were added; reading and multiplying go on side by side, so the longer one counts
-    return max(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)
+    return step_bytes(weights, stored) / machine.bytes_per_s + multiplying

shorter time: the shorter of the two was taken; the longer one binds
-    return max(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)
+    return min(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)

reading alone: that is the time to read, or to multiply one token; with many tokens multiplying takes longer
-    return max(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)
+    return step_bytes(weights, stored) / machine.bytes_per_s

one token's operations: that is the time to read, or to multiply one token; with many tokens multiplying takes longer
-    multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)
+    multiplying = 2 * (weights.linears / rate + weights.embedding / machine.flops_per_s)

one operation a multiply-add: a multiply-add is 2 operations
-    multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)
+    multiplying = tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)

int8 rate for int8 weights: int8_per_s is for inputs in 8 bits; weights that are stored in few bits are multiplied in
16
-    rate = machine.int8_per_s if stored.input_bits == 8 else machine.flops_per_s
+    rate = machine.int8_per_s if stored.bits <= 8 else machine.flops_per_s

int8 rate never: all was taken at the rate of 16 bits; inputs in 8 bits go at int8_per_s
-    rate = machine.int8_per_s if stored.input_bits == 8 else machine.flops_per_s
+    rate = machine.flops_per_s

head at the linears' rate: the head is multiplied in 16 bits always
-    multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)
+    multiplying = 2 * tokens * (weights.linears + weights.embedding) / rate

head not multiplied: the head's operations are missing
-    multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)
+    multiplying = 2 * tokens * weights.linears / rate

# choice
fewest bytes: the fewest bytes are not the fastest where multiplying binds
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((size, stored.excess_nats, seconds, stored.name))

lowest excess: of what fits and is good enough, the fastest step is chosen
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((stored.excess_nats, seconds, size, stored.name))

slowest: of what fits and is good enough, the fastest step is chosen
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((-seconds, stored.excess_nats, size, stored.name))

budget ignored: it has to fit
-        if size <= budget and stored.excess_nats <= max_excess:
+        if stored.excess_nats <= max_excess:

quality ignored: its excess has to be within the bound
-        if size <= budget and stored.excess_nats <= max_excess:
+        if size <= budget:

# tied-head
tied head stored twice: a tied head is the embedding's matrix: it is stored once
-    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
+    wide = weights.norms + weights.embedding * 2

tied head not read: a tied head is stored once, and read as the head
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + weights.embedding)
+    head = 0 if weights.tied else weights.embedding
+    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + head)

# ties
first among equals: the first of equals was taken; the lower excess decides
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((seconds, len(fitting), size, stored.name))

larger excess among equals: lower excess is better
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((seconds, -stored.excess_nats, size, stored.name))

bytes before quality among equals: among equals quality decides before bytes
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((seconds, size, stored.excess_nats, stored.name))

more bytes among equals: among equals, the fewer bytes
-            fitting.append((seconds, stored.excess_nats, size, stored.name))
+            fitting.append((seconds, stored.excess_nats, -size, stored.name))

# nothing-fits
nothing fits, an error: min of nothing; then it is None
-    return min(fitting)[3] if fitting else None
+    return min(fitting)[3]

bounds not allowed: a bound that is met exactly is met: at most, <=
-        if size <= budget and stored.excess_nats <= max_excess:
+        if size < budget and stored.excess_nats < max_excess:

nothing fits, the smallest: the smallest does not fit either
-    return min(fitting)[3] if fitting else None
+    return min(fitting)[3] if fitting else (min(recipes, key=lambda s: s.bits).name if recipes else None)

part of a byte dropped: a part of a byte counts whole: round up
-    return math.ceil(linear_bits(weights, stored) / 8) + 2 * wide
+    return int(linear_bits(weights, stored) / 8) + 2 * wide
"""

WRONG = read_mistakes(
    __file__,
    {
        "quant-pack": QUANT_PACK,
        "quant-llm-int8": QUANT_LLM_INT8,
        "quant-awq": QUANT_AWQ,
        "quant-gptq": QUANT_GPTQ,
        "quant-codebook": QUANT_CODEBOOK,
        "quant-recipe": QUANT_RECIPE,
    },
)

ALTERNATIVE: dict[str, str] = {
    "quant-pack": """
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
""",
    "quant-llm-int8": """
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
""",
    "quant-awq": """
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
""",
    "quant-gptq": """
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
""",
    "quant-codebook": """
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
""",
    "quant-recipe": """
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


def choose(weights, recipes, tokens, machine, budget, max_excess):
    best = None
    for one in recipes:
        plan = Planned(weights, one)
        if plan.model() > budget or one.excess_nats > max_excess:
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
""",
}
