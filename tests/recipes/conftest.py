"""The recipes' Python files are scripts, not a package: their folders are put on the path."""

import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path[:0] = [str(RECIPES), str(RECIPES / "quickstart")]
