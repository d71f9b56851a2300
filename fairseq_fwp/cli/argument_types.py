"""What arguments of the commands may be: each function reads one, or says what it should have been."""

import argparse
import ast
import math
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in a folder that exists")
    return path


def dictionary_of_settings(text: str) -> dict[str, Any]:
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no dictionary of settings like {{'max_target_positions': 512}}")
    return found


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def non_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number
