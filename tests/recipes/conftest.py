"""The recipes' driver is a program, not a package: its folder is put on the path, as Python does for a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "driver"))
