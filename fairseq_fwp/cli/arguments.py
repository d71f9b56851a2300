"""Types of arguments, which argparse calls: each returns a value, or raises an error that says what it must be."""

import argparse
import ast
import math
import os
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"it must be a file, got the folder {text}")
    return output_folder(text)


def output_folder(text: str) -> Path:
    """Return a path that can be written, also if it is a device: an evaluation may take hours before it is."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"it must be in a folder that exists, got {text}")
    special = path.exists() and not path.is_file()
    if not os.access(path if special else path.resolve().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"it must be where this user can write, got {path}")
    return path


def dictionary_of_settings(text: str) -> dict[str, Any]:
    try:
        settings = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        settings = None
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        expected = "a dictionary of settings like {'max_target_positions': 512}"
        raise argparse.ArgumentTypeError(f"it must be {expected}, got {text!r}")
    return settings


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
