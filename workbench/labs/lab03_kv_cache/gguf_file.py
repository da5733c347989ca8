"""A model as a GGUF file, llama.cpp's own format, so that llama.cpp can run the very same weights beside ours.

In few bits a matrix is stored in blocks of 32 weights of a row with a scale in float16: 8 bits each in q8_0 (8.5 bits
per weight in all), 4 in q4_0 (4.5). What is stored how is what llama.cpp's own quantizer does: norms stay float32, and
the matrix of the output is q8_0 in both. Where the output has no matrix of its own that is the embedding; else the
embedding, of which a step needs one row, is q4_0 in a file of q4_0. Two things its quantizer would do otherwise are
missing, because the package gguf cannot write them: q6_K for the output of a file of q4_0, where its rows are multiples
of 256 (6.6 bits per weight, here 8.5), and q4_K, which has the 4.5 bits of q4_0 and wants such rows too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.errors import WorkbenchError, unknown
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attention, Decoder
from workbench.models.layers import SwiGLU
from workbench.quantization.pipeline import copy_of

PLAIN = (  # what a plain Llama shape may choose; all else is as ModelConfig has it
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "context_length",
    "norm_eps",
    "rope_theta",
    "tie_embeddings",
    "bos_token_id",
    "eos_token_ids",
)
INSTALL = "pip install 'inference-workbench[peers]'"
FEW_BITS = ("q8_0", "q4_0")
BLOCK = 32  # weights of a row that share a scale, in both


def write_gguf(model: Decoder, path: Path, weights: torch.dtype | str) -> Path:
    """Write a Llama-family Decoder with its matrices in float32, bfloat16, "q8_0" or "q4_0"; see the module.

    One thing differs from Hugging Face's layout: rows of q and k are reordered, because llama.cpp turns
    neighbouring pairs where we turn the two halves of a head. The tokenizer does not travel along.
    Raises WorkbenchError for a shape that is not plain Llama, rows that few bits do not divide, other weights, and
    without the `gguf` package.
    """
    c = model.config
    plain = ModelConfig("llama", **{field: getattr(c, field) for field in PLAIN})
    if c != plain:
        more = [f.name for f in dataclasses.fields(c) if getattr(c, f.name) != getattr(plain, f.name)]
        raise WorkbenchError(
            f"only plain Llama shapes are written as GGUF here, and {model.name} ({c.family}) has its own "
            f"{', '.join(more)}"
        )
    if weights not in (torch.float32, torch.bfloat16, *FEW_BITS):
        raise unknown("weights of a GGUF file", str(weights).removeprefix("torch."), ("float32", "bfloat16", *FEW_BITS))
    odd = {width for _, one, _ in _places(model) if (width := _weight(one).shape[-1]) % BLOCK}
    if weights in FEW_BITS and odd:
        raise WorkbenchError(
            f"{weights} stores rows in blocks of {BLOCK} weights, and {model.name} has rows of {min(odd)}"
        )
    gguf = _package()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_vocab_size(c.vocab_size)
    _add_vocabulary(writer, c.vocab_size)
    for name, module, heads in _places(model):
        tensor = _weight(module)
        tensor = _neighbours(tensor, heads) if heads else tensor
        stored = _type_of(name, tensor, weights, tied=c.tie_embeddings)
        if stored == "BF16":
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view("uint8")
        else:
            raw = tensor.float().contiguous().numpy()
            raw = raw if stored == "F32" else gguf.quants.quantize(raw, gguf.GGMLQuantizationType[stored])
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoder_of(path: Path, model: Decoder) -> Decoder:
    """The plain Decoder in float32 with the numbers that the file stands for. model: whose file it is."""
    gguf = _package()
    stored = {one.name: one for one in gguf.GGUFReader(str(path)).tensors}
    new = copy_of(model)
    for name, module, heads in _places(new):
        one = stored[name]
        weight = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
        weight = _halves(weight, heads) if heads else weight
        module.weight = nn.Parameter(weight, requires_grad=False)
    if model.config.tie_embeddings:
        new.head.weight = new.embed.weight
    new.name = f"{model.name} in {path.name}"
    return new


def bytes_of_a_step(path: Path) -> int:
    """Bytes of the file's tensors that a step of one token reads: of the embedding a row, of all else everything."""
    tensors = {one.name: one for one in _package().GGUFReader(str(path)).tensors}
    embedding = tensors["token_embd.weight"]
    row = int(embedding.n_bytes) // int(embedding.shape[1])
    whole = [one for name, one in tensors.items() if name != "token_embd.weight" or "output.weight" not in tensors]
    return row + sum(int(one.n_bytes) for one in whole)


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise WorkbenchError(f"GGUF files need the package gguf: {INSTALL}") from None
    return gguf


def _type_of(name: str, tensor: torch.Tensor, weights: torch.dtype | str, *, tied: bool) -> str:
    """ggml's name for what a tensor is stored as."""
    if tensor.dim() < 2 or weights == torch.float32:
        return "F32"
    if weights == torch.bfloat16:
        return "BF16"
    is_output = name == ("token_embd.weight" if tied else "output.weight")
    return "Q8_0" if is_output or weights == "q8_0" else "Q4_0"


def _places(model: Decoder) -> Iterator[tuple[str, nn.Module, int]]:
    """(llama.cpp's name, the module whose weight it is, heads whose rows are reordered or 0) of every weight."""
    c = model.config
    yield "token_embd.weight", model.embed, 0
    yield "output_norm.weight", model.norm, 0
    if not c.tie_embeddings:
        yield "output.weight", model.head, 0
    for index, layer in enumerate(model.layers):
        a, mlp, at = layer.attention, layer.mlp, f"blk.{index}"
        assert isinstance(a, Attention) and isinstance(mlp, SwiGLU), "llama's layers"
        yield f"{at}.attn_norm.weight", layer.attention_norm, 0
        yield f"{at}.attn_q.weight", a.q, c.num_heads
        yield f"{at}.attn_k.weight", a.k, c.num_kv_heads
        yield f"{at}.attn_v.weight", a.v, 0
        yield f"{at}.attn_output.weight", a.o, 0
        yield f"{at}.ffn_norm.weight", layer.mlp_norm, 0
        yield f"{at}.ffn_gate.weight", mlp.gate, 0
        yield f"{at}.ffn_up.weight", mlp.up, 0
        yield f"{at}.ffn_down.weight", mlp.down, 0


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def _neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (first half, second half) to pairs: 0, D/2, 1, D/2 + 1, …"""
    out, width = weight.shape
    return weight.view(heads, 2, out // heads // 2, width).transpose(1, 2).reshape(out, width)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `_neighbours`."""
    out, width = weight.shape
    return weight.view(heads, out // heads // 2, 2, width).transpose(1, 2).reshape(out, width)


def _add_vocabulary(writer, size: int) -> None:
    """A name for each id and nothing more: ids go in and ids come out, no text ever passes through it."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
