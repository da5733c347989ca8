"""A model as a GGUF file, llama.cpp's own format, so that llama.cpp can run the very same weights beside ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attention, Decoder
from workbench.models.layers import SwiGLU

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


def write_gguf(model: Decoder, path: Path, dtype: torch.dtype) -> Path:
    """Write a Llama-family Decoder with its weights in float32 or bfloat16; norms stay float32, as llama.cpp wants.

    One thing differs from Hugging Face's layout: rows of q and k are reordered, because llama.cpp turns
    neighbouring pairs where we turn the two halves of a head. The tokenizer does not travel along.
    Raises WorkbenchError for a shape that is not plain Llama, and without the `gguf` package.
    """
    c = model.config
    plain = ModelConfig("llama", **{field: getattr(c, field) for field in PLAIN})
    if c != plain:
        more = [f.name for f in dataclasses.fields(c) if getattr(c, f.name) != getattr(plain, f.name)]
        raise WorkbenchError(
            f"only plain Llama shapes are written as GGUF here, and {model.name} ({c.family}) has its own "
            f"{', '.join(more)}"
        )
    try:
        import gguf
    except ImportError:
        raise WorkbenchError(f"writing GGUF files needs the package gguf: {INSTALL}") from None
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
    for name, tensor in _tensors(model):
        if tensor.dim() > 1 and dtype == torch.bfloat16:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
            writer.add_tensor(name, raw.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Decoder):
    """(llama.cpp's name, tensor) of every weight."""
    c = model.config
    yield "token_embd.weight", model.embed.weight.detach()
    yield "output_norm.weight", model.norm.weight.detach()
    if not c.tie_embeddings:
        yield "output.weight", model.head.weight.detach()
    for index, layer in enumerate(model.layers):
        a, mlp, at = layer.attention, layer.mlp, f"blk.{index}"
        assert isinstance(a, Attention) and isinstance(mlp, SwiGLU), "llama's layers"
        yield f"{at}.attn_norm.weight", layer.attention_norm.weight.detach()
        yield f"{at}.attn_q.weight", _neighbours(a.q.weight.detach(), c.num_heads)
        yield f"{at}.attn_k.weight", _neighbours(a.k.weight.detach(), c.num_kv_heads)
        yield f"{at}.attn_v.weight", a.v.weight.detach()
        yield f"{at}.attn_output.weight", a.o.weight.detach()
        yield f"{at}.ffn_norm.weight", layer.mlp_norm.weight.detach()
        yield f"{at}.ffn_gate.weight", mlp.gate.weight.detach()
        yield f"{at}.ffn_up.weight", mlp.up.weight.detach()
        yield f"{at}.ffn_down.weight", mlp.down.weight.detach()


def _neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (first half, second half) to pairs: 0, D/2, 1, D/2 + 1, …"""
    out, width = weight.shape
    return weight.view(heads, 2, out // heads // 2, width).transpose(1, 2).reshape(out, width)


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
