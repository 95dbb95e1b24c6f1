"""Loads a model folder with mlx_lm or mlx_vlm, and says in one sentence what is wrong with one."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path


class ModelError(ValueError):
    """A model folder that cannot be used; the text is one sentence."""


def load_model(path):
    """-> (model, tokenizer or processor) of a folder in mlx_lm's form.

    Raises ModelError naming the file or field that is missing, cut short or not known.
    """
    folder = Path(path)
    config = check_folder(folder)
    try:
        if "vision_config" in config:
            from mlx_vlm import load
        else:
            from mlx_lm import load
        return load(str(folder))
    except ImportError as e:
        raise ModelError(f"[load_model] {folder} needs a package that is missing: {e}") from e
    except (ValueError, KeyError, RuntimeError, OSError) as e:
        raise ModelError(f"[load_model] {folder} does not load: {e}") from e


def check_folder(folder: Path) -> dict:
    """The folder's config, after checking that its files are there and whole."""
    if not folder.is_dir():
        raise ModelError(f"[load_model] got {folder} and needs a model folder with config.json")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"[load_model] {folder} has no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ModelError(f"[load_model] {folder / 'config.json'} is no JSON: {e}") from e
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"[load_model] {folder / 'config.json'} has no field model_type")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"[load_model] {folder} has no .safetensors file")
    for shard in shards:
        check_safetensors(shard)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        for name in sorted(set(json.loads(index.read_text()).get("weight_map", {}).values())):
            if not (folder / name).exists():
                raise ModelError(f"[load_model] {folder} lacks {name}, which {index.name} names")
    return config


def check_safetensors(file: Path) -> None:
    """Raises ModelError when a file is shorter than its header says, which mx.load may not notice."""
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ModelError(
                f"[load_model] {file} is cut short: {size} bytes do not hold its header"
            )
        try:
            header = json.loads(f.read(length))
            ends = [t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise ModelError(f"[load_model] {file} is no safetensors file") from None
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelError(f"[load_model] {file} is cut short: it has {size} bytes of {needed}")


def encode(tokenizer, text: str) -> list:
    """Token ids of a text, by a tokenizer or a processor that has one."""
    return list(getattr(tokenizer, "tokenizer", tokenizer).encode(text))


def decode(tokenizer, ids) -> str:
    return getattr(tokenizer, "tokenizer", tokenizer).decode(list(ids))


def text_model(model: nn.Module) -> nn.Module:
    """The part that maps token ids to logits: the model itself, or a vision model's language model."""
    return getattr(model, "language_model", model)


def logits_of(output) -> mx.array:
    """The logits, where mlx_vlm wraps them in a structure."""
    return getattr(output, "logits", output)


def unpack_to_fp32(model: nn.Module) -> None:
    """Replaces, in place, packed layers by dense float32 ones of the same values, and all else by fp32."""

    def dense(_, layer):
        if not isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            return layer
        weight = mx.dequantize(
            layer["weight"],
            layer["scales"],
            layer.get("biases"),
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        ).astype(mx.float32)
        if isinstance(layer, nn.QuantizedEmbedding):
            new = nn.Embedding(1, 1)
        else:
            new = nn.Linear(1, 1, bias="bias" in layer)
            if "bias" in layer:
                new.bias = layer.bias
        new.weight = weight
        return new

    leaves = tree_map_with_path(dense, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
