"""Read and check the header of a GGUF file, without reading any tensor data."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

# Items and bytes of one block of the tensor types that MLX takes over bit for bit. Its reader
# turns other types (Q6_K, ...) silently into float16, which is not what was asked for.
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}
# Names by type number, for reading and for saying what was refused.
_IN_ORDER = """
F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS
IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16
"""
TYPE_NAMES = dict(enumerate(_IN_ORDER.split()))
TYPE_NAMES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """A GGUF file that cannot be imported; the message is one sentence for the user."""


class Tensor(NamedTuple):
    """One entry of the tensor table; `shape` has the row length last, as MLX orders it."""

    type: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """What a GGUF file says of itself."""

    metadata: dict[str, object]
    tensors: dict[str, Tensor]


class _Reader:
    """Little-endian fields from an open file, none of them past the end of the file."""

    def __init__(self, file, size: int):
        self.file, self.size, self.position = file, size, 0

    def need(self, count: int) -> None:
        if count > self.size - self.position:
            raise GgufError(
                f"the file has {self.size} bytes, but its header needs at least "
                f"{self.position + count}: it is truncated or damaged"
            )

    def take(self, count: int) -> bytes:
        self.need(count)
        self.position += count
        return self.file.read(count)

    def number(self, code: str):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int):
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise GgufError(f"metadata of type {kind} was given, but GGUF has types 0 to 12 only")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            self.need(8 * count)
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise GgufError(f"an array of type {kind} was given, but MLX reads flat arrays only")
        width = struct.calcsize("<" + _SCALARS[kind])
        self.need(width * count)
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(width * count)))


def read_header(path: Path) -> Header:
    """Return the header of the GGUF file at `path`, after checking it against the file's size.

    Raises:
        GgufError: no GGUF file of version 2 or 3, truncated, or with tensors of another type than
            those in `BLOCKS`.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        magic = file.read(4)
        if magic != b"GGUF":
            raise GgufError(f"the file starts with {magic!r}, but a GGUF file starts with b'GGUF'")
        reader.position = 4
        version = reader.number("I")
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version} was given, but only 2 and 3 are readable")
        tensor_count, value_count = reader.number("Q"), reader.number("Q")
        metadata = {}
        for _ in range(value_count):
            key = reader.string()
            metadata[key] = reader.value(reader.number("I"))
        table = [_read_tensor(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufError(f"an alignment of {alignment} was given, but a positive number is needed")
    _check_data(table, reader.position + -reader.position % alignment, reader.size)
    tensors = {name: tensor for name, tensor, _ in table}
    if len(tensors) != len(table):
        raise GgufError("the file lists a tensor twice, but tensor names must differ")
    return Header(metadata, tensors)


def _read_tensor(reader: _Reader) -> tuple[str, Tensor, int]:
    """Return name, type and shape, and data offset of the next entry of the tensor table."""
    name, ndim = reader.string(), reader.number("I")
    if not 1 <= ndim <= 4:
        raise GgufError(f"tensor '{name}' has {ndim} dimensions, but 1 to 4 are possible")
    shape = tuple(reader.number("Q") for _ in range(ndim))[::-1]
    number = reader.number("I")
    kind = TYPE_NAMES.get(number, f"number {number}")
    if kind not in BLOCKS:
        raise GgufError(
            f"tensor '{name}' has type {kind}, but only {', '.join(BLOCKS)} can be taken over"
        )
    return name, Tensor(kind, shape), reader.number("Q")


def _check_data(table: list[tuple[str, Tensor, int]], start: int, size: int) -> None:
    """Raise GgufError unless every tensor lies whole between `start` and the file's `size`."""
    for name, tensor, offset in table:
        items, block_bytes = BLOCKS[tensor.type]
        if tensor.shape[-1] % items:
            raise GgufError(f"tensor '{name}' has rows of {tensor.shape[-1]}, not whole blocks")
        end = start + offset + math.prod(tensor.shape) // items * block_bytes
        if end > size:
            raise GgufError(
                f"the file has {size} bytes, but tensor '{name}' ends at byte {end}: "
                f"it is truncated or damaged"
            )
