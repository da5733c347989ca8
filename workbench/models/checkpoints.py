"""Models in and out: `load` finds a model by name, folder or hub id; `save_checkpoint` writes one.

Weights are read from safetensors only. Nothing here ever opens a pickle, which can run code when opened.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.errors import WorkbenchError, check_path, is_whole, unknown
from workbench.files import finish_saving, read_json_object, replacing_files, resolved, write_tensors, write_text
from workbench.models.assembly import check_fits, fill, hollow_decoder, random_tensors
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.expert_layout import is_predicting, joined_experts
from workbench.models.layout import config_from_hf, config_to_hf, generation_to_hf
from workbench.models.recipes import RECIPES, TOKENIZER_NAME
from workbench.models.shapes import HUB_IDS, PUBLIC_SHAPES, TIMING_SHAPES, public_name, public_shape
from workbench.models.tensor_layout import StoredTensor, bare_name, full_name, is_derived, stored_tensors
from workbench.models.tokenizer import Tokenizer

ZOO = Path(__file__).parent / "zoo"

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STORED_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]
_HUB_SMALL = ["config.json", "generation_config.json", *_TOKENIZER_FILES]


# -- finding a model ---------------------------------------------------------------------------------------


def load(
    name_or_path: str | os.PathLike[str],
    *,
    weights: str = "trained",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Decoder:
    """A model ready to run: eval mode, weights that ask for no gradient, its tokenizer beside it.

    name_or_path, the first that fits: a shipped model ("stdlib-10m"); an existing folder in Hugging Face
      layout; a public model ("llama-3.1-8b", with weights="random"); a hub id "org/name" (downloaded).
    weights: "trained", or "random" for the shape alone, the same for the same seed, device and dtype.
    dtype: default float32 for shipped models; for all others what the file holds, or bfloat16 when the
      weights are random.
    Raises WorkbenchError for an unknown name, a file that is not what it should be (naming the tensor, with
    the expected and the found shape), and for weights that do not fit the device, before allocating them.
    """
    if weights not in ("trained", "random"):
        raise unknown("weights", weights, ("trained", "random"))
    dtype, device = _as_dtype(dtype), _as_device(device)
    if not is_whole(seed) or not -(2**63) <= seed < 2**64:
        raise WorkbenchError(f"seed must be a whole number of 64 bits, got {seed!r:.80}")
    check_path("name_or_path", name_or_path)
    name = os.fspath(name_or_path)
    if name in zoo_names():
        if weights == "random":
            return _random(name, zoo_config(name), _zoo_tokenizer(name), dtype or torch.float32, device, seed)
        if not (ZOO / name / "config.json").is_file():
            raise WorkbenchError(
                f"the trained weights of {name!r} are not here ({ZOO / name}); `workbench train {name}` makes "
                'them, and weights="random" gives the shape without them'
            )
        model = _from_folder(name, ZOO / name, weights, dtype or torch.float32, device, seed)
        model.tokenizer = model.tokenizer or _zoo_tokenizer(name)
        return model
    if os.path.isfile(name):
        raise _not_a_folder(Path(name))
    if os.path.isdir(name):
        return _from_folder(resolved(name).name, Path(name), weights, dtype, device, seed)
    ours = public_name(name)
    if ours is not None and weights == "random":
        return _random(ours, public_shape(ours), None, dtype or torch.bfloat16, device, seed)
    if ours in TIMING_SHAPES:
        raise WorkbenchError(f'{ours!r} is a shape for timing, it has no trained weights; use weights="random"')
    if _is_hub_id(name):
        folder = _from_hub(name, _HUB_SMALL)
        if weights == "trained":
            config = read_config(folder)  # refuse before a long download what could not be loaded after it
            check_fits(name, config, dtype or torch.bfloat16, device)
            folder = _from_hub(name, [*_HUB_SMALL, "model*.safetensors", INDEX])
        return _from_folder(name, folder, weights, dtype, device, seed)
    if ours is not None:
        raise WorkbenchError(
            f"the trained weights of {ours!r} do not ship with the workbench. "
            f'Use weights="random" for its shape (its times are the same), a folder that holds it, or its hub id, '
            f"load({HUB_IDS[ours]!r}), to download it"
        )
    if os.sep in name or name.startswith((".", "~")):
        raise WorkbenchError(f"there is no folder {name!r}")
    raise unknown("model", name, [*zoo_names(), *PUBLIC_SHAPES, *TIMING_SHAPES])


def zoo_names() -> list[str]:
    """The models that ship, and those that a recipe makes."""
    found = (config.parent.name for config in ZOO.glob("*/config.json"))
    return sorted({*RECIPES, *found})


def shipped_names(*, states: bool = True, experts: bool = True) -> list[str]:
    """Those of them whose weights are here. states=False: without those that have layers with a state, for what counts
    keys and values alone. experts=False: without those whose step reads the weights that its rows choose."""
    here = [name for name in zoo_names() if (ZOO / name / "config.json").is_file()]
    shapes = {name: zoo_config(name) for name in here}
    return [
        name
        for name, shape in shapes.items()
        if (states or not shape.state_layers) and (experts or shape.experts is None)
    ]


def zoo_config(name: str) -> ModelConfig:
    """The shape of a zoo model, whether or not its weights are here."""
    if (ZOO / name / "config.json").is_file():
        return read_config(ZOO / name)
    return RECIPES[name].config


def shipped_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(ZOO / TOKENIZER_NAME)
    if tokenizer is None:
        raise WorkbenchError(f"the shipped tokenizer is missing; make it again with `workbench train {TOKENIZER_NAME}`")
    return tokenizer


def _zoo_tokenizer(name: str) -> Tokenizer | None:
    return Tokenizer.from_folder(ZOO / name) or Tokenizer.from_folder(ZOO / TOKENIZER_NAME)


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    names = {str(t).removeprefix("torch."): t for t in FLOAT_TYPES}
    if dtype is None or dtype in FLOAT_TYPES:
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise unknown("dtype", name, names)
    return names[name]


def _as_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        torch.Generator(found)
    except Exception as error:  # torch has a different class for each kind of device that is not there
        reason = str(error).splitlines()[0]
        raise WorkbenchError(f"device {str(device)!r} cannot be used here: {reason}") from error
    return found


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~")) and "\\" not in name


def _from_hub(name: str, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # not found, gated, offline, no disk: the library's words say which
        reason = " ".join(str(error).split())[:300]
        raise WorkbenchError(
            f"{name!r} is no folder here and could not be had from the Hugging Face hub "
            f"({type(error).__name__}: {reason}). Check the name and the network; a gated model needs "
            "`hf auth login`; on a machine without network give the folder of a copy"
        ) from error


def _random(
    name: str, config: ModelConfig, tokenizer: Tokenizer | None, dtype: torch.dtype, device: torch.device, seed: int
) -> Decoder:
    check_fits(name, config, dtype, device)
    model = hollow_decoder(config, name=name, tokenizer=tokenizer)
    return fill(model, random_tensors(model, dtype, device, seed), device)


# -- reading a folder --------------------------------------------------------------------------------------


def read_config(folder: Path) -> ModelConfig:
    """The shape of the checkpoint in a folder, from its config.json and generation_config.json."""
    finish_saving(folder)
    if not (folder / "config.json").is_file():
        raise WorkbenchError(f"{folder} has no config.json: it is not a checkpoint in Hugging Face layout")
    generation = folder / "generation_config.json"
    try:
        return config_from_hf(
            read_json_object(folder / "config.json"), read_json_object(generation) if generation.is_file() else None
        )
    except (WorkbenchError, TypeError, ValueError) as error:
        raise WorkbenchError(f"{folder}: {error}") from error


def _from_folder(
    name: str, folder: Path, weights: str, dtype: torch.dtype | None, device: torch.device, seed: int
) -> Decoder:
    config = read_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is not None and tokenizer.end_of_text is None and config.eos_token_ids:
        tokenizer.end_of_text = config.eos_token_ids[0]
    if weights == "random":
        return _random(name, config, tokenizer, dtype or torch.bfloat16, device, seed)
    model = hollow_decoder(config, name=name, tokenizer=tokenizer)
    with _opened(folder, model) as (plan, stored, own):
        check_fits(name, config, dtype or own, device)
        return fill(model, _read_tensors(plan, stored, dtype or own, device), device)


@contextlib.contextmanager
def _opened(folder: Path, model: Decoder) -> Iterator[tuple[list[StoredTensor], dict[str, Any], torch.dtype]]:
    """The checkpoint of a (hollow) model, its headers checked: what to read, where it lies, and its type."""
    plan = stored_tensors(model.config, {n: tuple(p.shape) for n, p in model.named_parameters()})
    with contextlib.ExitStack() as stack:
        stored = _open_all(stack, folder, _weight_files(folder))
        _check_tensors(folder, model.config, plan, stored)
        opened, key = stored[plan[0].name]
        yield plan, stored, _STORED_FLOATS[opened.get_slice(key).get_dtype()]


def stored_parameters(
    folder: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of the checkpoint in a folder, one after the other: whoever keeps parts of them
    never holds more than one whole. dtype: default as stored. Raises WorkbenchError as `load` does."""
    folder = check_path("folder", folder)
    model = hollow_decoder(read_config(folder), name=folder.name)
    with _opened(folder, model) as (plan, stored, own):
        yield from _read_tensors(plan, stored, dtype or own, torch.device("cpu"))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise WorkbenchError(f"{folder / INDEX} has no weight_map of tensor names to files")
        for tensor, name in names.items():
            if Path(name).name != name or not (folder / name).is_file():
                raise WorkbenchError(
                    f"{folder / INDEX} puts tensor {tensor!r} into {name!r}, and {folder} has no such file; "
                    "fetch it, the checkpoint is incomplete"
                )
        return [folder / name for name in sorted(set(names.values()))]
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    if pickles:
        raise _pickle_refused(folder, pickles[0])
    others = sorted(f.name for f in folder.glob("*.safetensors"))
    raise WorkbenchError(
        f"{folder} has no weights: expected {WEIGHTS}, or {INDEX} and the shards it names"
        + (f"; found {', '.join(others)}" if others else "")
    )


def _not_a_folder(file: Path) -> WorkbenchError:
    if file.suffix in _PICKLES:
        return _pickle_refused(file.parent, file.name)
    return WorkbenchError(f"{file} is a file; give the folder that holds config.json and {WEIGHTS}")


def _pickle_refused(folder: Path, name: str) -> WorkbenchError:
    return WorkbenchError(
        f"{folder / name} is a pickle, which can run code when it is opened; weights are read from safetensors "
        "only. If you trust where it came from, convert it: "
        "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('"
        f"{folder}').save_pretrained('NEW_FOLDER')\", and copy the tokenizer files"
    )


def _open_all(stack: contextlib.ExitStack, folder: Path, files: list[Path]) -> dict[str, Any]:
    """Bare tensor name -> (open file, name in that file)."""
    stored: dict[str, tuple[Any, ...]] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WorkbenchError(
                f"{file} ({file.stat().st_size:,} bytes) is damaged or cut short: {error}; fetch it again"
            ) from error
        for key in opened.keys():  # noqa: SIM118 - not a dict
            if is_derived(key):
                continue
            if bare_name(key) in stored:
                raise WorkbenchError(f"{folder}: tensor {bare_name(key)!r} is there twice")
            stored[bare_name(key)] = (opened, key)
    return stored


def _check_tensors(folder: Path, config: ModelConfig, plan: list[StoredTensor], stored: dict[str, Any]) -> None:
    """Every tensor there, none too many, each with its shape and a floating type. Reads headers only."""
    for tensor in plan:
        if tensor.name not in stored:
            if config.experts is not None and (joined := joined_experts(stored)):
                raise WorkbenchError(
                    f"{folder}: {joined!r} holds all experts of a layer in one tensor, as transformers does in memory;"
                    " here each has its own, as published checkpoints have them: save_pretrained writes them so by"
                    " default"
                )
            raise WorkbenchError(f"{folder}: tensor {tensor.name!r} is missing; expected shape {list(tensor.shape)}")
        opened, key = stored[tensor.name]
        found = opened.get_slice(key)
        if tuple(found.get_shape()) != tensor.shape:
            raise WorkbenchError(
                f"{folder}: tensor {key!r} has shape {list(found.get_shape())}, "
                f"config.json makes it {list(tensor.shape)}"
            )
        if found.get_dtype() not in _STORED_FLOATS:
            raise WorkbenchError(
                f"{folder}: tensor {key!r} has type {found.get_dtype()}; supported: {', '.join(_STORED_FLOATS)}"
            )
    behind = read_json_object(folder / "config.json").get("num_nextn_predict_layers")
    extra = sorted(n for n in stored.keys() - {t.name for t in plan} if not is_predicting(config, n, behind))
    if config.tie_embeddings and "lm_head.weight" in extra:
        both = (stored[plan[0].name], stored["lm_head.weight"])
        embed, head = (opened.get_tensor(key) for opened, key in both)
        if embed.dtype != head.dtype or not torch.equal(embed, head):
            raise WorkbenchError(
                f"{folder}: lm_head.weight differs from the embedding, and config.json ties them; "
                "set tie_word_embeddings to false if the head is its own"
            )
        extra.remove("lm_head.weight")
    if extra:
        opened, key = stored[extra[0]]
        raise WorkbenchError(
            f"{folder}: tensor {key!r} with shape {opened.get_slice(key).get_shape()} has no place in a "
            f"{config.family} of {config.num_layers} layers"
            + (f" ({len(extra)} such tensors)" if len(extra) > 1 else "")
        )


def _read_tensors(
    plan: list[StoredTensor], stored: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter in a copy of its own: the file may change or go once the model is there."""
    for tensor in plan:
        opened, key = stored[tensor.name]
        for name, part in tensor.split(opened.get_tensor(key)):
            yield name, part.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


# -- writing a folder --------------------------------------------------------------------------------------


def save_checkpoint(model: Decoder, folder: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer, as transformers reads them.

    A shape that none of transformers' families has (shared layers, attention sinks, …) is written in the same files
    under model_type "workbench", which `load` reads and transformers does not.
    dtype: what the weights are stored in (default: as they are). A checkpoint already in the folder is replaced whole;
    other files there stay. However it is interrupted, `load` gives the old checkpoint or the new one, never a mixture
    (`workbench.files.replacing_files`). Raises WorkbenchError, and changes nothing, for a model that is quantized or
    prepared or whose parameters are not those of its config, for a shape that goes by one family and that only another
    one can say, and for a folder whose config.json is something else's.
    """
    _check_savable(model)
    folder, dtype = check_path("folder", folder), _as_dtype(dtype) or model.dtype
    values = config_to_hf(model.config, dtype)
    if folder.exists() and not folder.is_dir():
        raise WorkbenchError(f"{folder} is a file; give a folder to save into")
    if (folder / "config.json").exists() and "model_type" not in read_json_object(folder / "config.json"):
        raise WorkbenchError(f"{folder} has a config.json that is not a model's; choose another folder")
    with replacing_files(folder, [INDEX, "model-*-of-*.safetensors", *_TOKENIZER_FILES]) as fresh:
        _write_files(model, values, fresh, dtype)


def _check_savable(model: Decoder) -> None:
    """Only a plain Decoder with each parameter of its config has the files that `save_checkpoint` writes."""
    if not isinstance(model, Decoder):
        raise WorkbenchError(
            f"save_checkpoint writes a Decoder, got {type(model).__name__}; "
            "of a prepared model save the model that it was prepared from"
        )
    if getattr(model, "quantization", None) is not None:
        raise WorkbenchError(
            f"{model.name} is quantized and save_checkpoint writes plain models; "
            "use workbench.quantization.save_quantized, or save the model that it was quantized from"
        )
    wanted = {name: tuple(p.shape) for name, p in hollow_decoder(model.config, name=model.name).named_parameters()}
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            expected, came = (f"shape {list(shapes[name])}" if name in shapes else "none" for shapes in (wanted, found))
            raise WorkbenchError(
                f"{model.name} cannot be saved: of parameter {name!r} its config makes {expected}, the model has {came}"
            )


def _write_files(model: Decoder, values: dict[str, Any], fresh: Path, dtype: torch.dtype) -> None:
    parameters = dict(model.named_parameters())
    plan = stored_tensors(model.config, {n: tuple(p.shape) for n, p in parameters.items()})
    tensors = {full_name(model.config, t.name): t.join(parameters).to(dtype) for t in plan}
    write_tensors(fresh / WEIGHTS, tensors, {"format": "pt"})
    generation = generation_to_hf(model.config)
    for name, content in (("config.json", values), ("generation_config.json", generation)):
        write_text(fresh / name, json.dumps(content, indent=2) + "\n")
    if model.tokenizer is not None:
        model.tokenizer.save(fresh)
