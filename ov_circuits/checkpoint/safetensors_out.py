"""safetensors files written one tensor at a time.

The library's own writer wants all tensors in memory at once. The format is simple enough to stream: eight bytes of header
length (little endian), a JSON header with each tensor's dtype, shape and place, padded with spaces to a multiple of eight,
then the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

_FLOAT32_BYTES = 4


def write_float32(
    file: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors as float32; only the one being written is in memory.

    Args:
        file: where to; write to a temporary path and rename (see :mod:`ov_circuits.files`).
        shapes: name -> shape, in the file's order.
        read: name -> the tensor, of exactly that shape.
        metadata: free text, kept in the header.

    Raises:
        ValueError: a tensor does not have the shape that was announced.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * _FLOAT32_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name, shape in shapes.items():
            tensor = read(name)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, announced as {list(shape)}")
            values = tensor.detach().float().contiguous().numpy()
            out.write((values if sys.byteorder == "little" else values.byteswap()).data)
