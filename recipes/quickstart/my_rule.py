"""Write the files of CONTRIBUTING.md, "A rule": a plug-in with a rule, and its configuration of the quick start.

    python recipes/quickstart/my_rule.py

They lie in the root of the checkout, to be changed. No file is overwritten.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"^```(?:python|yaml)\n# ([\w/.]+)(?:, continued)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples(page: str) -> dict[str, str]:
    """Return the files of a page, by the name that the first line of each block says."""
    files: dict[str, str] = {}
    for name, text in EXAMPLE.findall(page):
        files[name] = files.get(name, "") + text
    return files


def main(root: Path = ROOT) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## A rule\n")[2].partition("\n## ")[0]
    files = {root / name: text for name, text in examples(section).items()}
    if there := [path for path in files if path.exists()]:
        sys.exit(f"my_rule.py: {there[0]} must not exist yet, got one: remove it, or change it as it is")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(str(path.relative_to(root)) for path in files)}")


if __name__ == "__main__":
    main()
