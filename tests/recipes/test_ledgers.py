"""The ledgers, RESULTS.md of every recipe: a command stands next to all numbers, and a program writes each picture."""

import re

import made_up

LEDGERS = sorted(made_up.RECIPES.glob("*/RESULTS.md"))
CODE = re.compile(r"```bash\n(.*?)```|^    (\S.*?)$|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\b(?!test_)\w+\.(?:sh|py)\b|fwp-[a-z-]+ |fairseq-[a-z]+ ")
NUMBERS = re.compile(r"^\|.*\d.*\|$|\(results/[\w.]+\)", re.MULTILINE)
PICTURE = re.compile(r"results/(\w+)\.png")


def code_of(text):
    """Return the code of a part of a page: blocks, indented lines, and words in backticks."""
    return "\n".join("".join(found) for found in CODE.findall(text))


def without_command(ledger):
    """Return the headings of a ledger under which there are numbers or pictures, and no command."""
    parts = re.split(r"^(#+ .*)$", ledger, flags=re.MULTILINE)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return [head for head, body in sections if NUMBERS.search(body) and not COMMAND.search(code_of(body))]


def unwritten(ledger, programs):
    """Return the pictures of a ledger that neither a program nor a command on it names."""
    return [name for name in PICTURE.findall(ledger) if not re.search(rf"\b{name}\b", programs + code_of(ledger))]


def strings(path):
    return " ".join(re.findall(r'"[^"\n]*"', path.read_text(encoding="utf-8")))


def test_every_number_and_picture_of_a_ledger_has_a_command():
    assert len(LEDGERS) > 12
    driver = " ".join(map(strings, (made_up.RECIPES / "driver").rglob("*.py")))
    missing = []
    for path in LEDGERS:
        ledger, programs = path.read_text(encoding="utf-8"), " ".join(map(strings, path.parent.glob("*.py")))
        missing += [f"{path.parent.name}: {head}: no command" for head in without_command(ledger)]
        missing += [f"{path.parent.name}: {name}.png: no program" for name in unwritten(ledger, driver + programs)]
    assert not missing, "\n".join(missing)


def test_every_stored_picture_is_on_a_page():
    pages = [*LEDGERS, made_up.ROOT / "README.md", *(made_up.ROOT / "docs").glob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\(([^()\s]+\.png)\)", page.read_text())
    }
    assert sorted(set(made_up.RECIPES.glob("*/results/*.png")) - shown) == []


def test_what_has_no_command_is_named():
    sections = "# A\n\n    bash run.sh\n\n| 1 |\n\n", "## B\n\n| 2 |\n\n", "## C\n\n[all](results/c.csv), `x.py`\n\n"
    ledger = "".join(sections) + "![](results/d.png)\n"
    assert without_command(ledger) == ["## B"]
    assert unwritten(ledger, '"c"') == ["d"] and unwritten(ledger + "`--out d.png`", "") == []
