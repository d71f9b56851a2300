"""Types of the commands' arguments: each function parses one, or says what it must be."""

import argparse
import ast
import math
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"it must be a file in a folder that exists, got {text}")
    return path


def dictionary_of_settings(text: str) -> dict[str, Any]:
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise argparse.ArgumentTypeError(
            f"it must be a dictionary of settings like {{'max_target_positions': 512}}, got {text!r}"
        )
    return found


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be an integer above 0, got {text!r}")
    return int(text)


def non_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a number of at least 0, got {text!r}")
    return number
