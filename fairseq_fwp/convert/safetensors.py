"""Reads the format `safetensors` (huggingface/safetensors, README): a header in JSON, then the tensors' bytes."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The header begins with its own length, eight bytes with the least significant first.
LENGTH = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises ValueError for one that is not whole, or not of this format."""
    try:
        content = bytearray(path.read_bytes())
        end = LENGTH + int.from_bytes(content[:LENGTH], "little")
        header = json.loads(content[LENGTH:end])
        header.pop("__metadata__", None)
        return {name: _tensor(about, memoryview(content)[end:]) for name, about in header.items()}
    except OSError as error:
        raise ValueError(f"the weights {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a whole file of safetensors: it was cut short or is another kind") from error


def _tensor(about: dict[str, Any], data: memoryview) -> Tensor:
    """A tensor as the header describes it, in the data. Raises ValueError for bytes that are not there."""
    start, stop = about["data_offsets"]
    dtype, shape = DTYPES[about["dtype"]], about["shape"]
    if not 0 <= start <= stop <= len(data) or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("the offsets do not fit")
    return (
        torch.frombuffer(data[start:stop], dtype=dtype).reshape(shape)
        if stop > start
        else torch.empty(shape, dtype=dtype)
    )
