"""The recipes' driver is a program, not a package: its folder is added to the path, as Python does for programs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "driver"))
