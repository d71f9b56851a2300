"""The ledgers, RESULTS.md of every recipe: a command stands next to all numbers, and a program writes each picture."""

import re
import sys

import made_up
import pytest

sys.path.append(str(made_up.RECIPES))
import check_numbers

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


# Numbers.


def changed(number):
    """Return a number with another last digit."""
    place = max(place for place, sign in enumerate(number.partition("e")[0]) if sign.isdigit())
    return number[:place] + str((int(number[place]) + 1) % 10) + number[place + 1 :]


@pytest.mark.parametrize("ledger", LEDGERS, ids=lambda path: path.parent.name)
def test_every_number_of_a_table_has_a_record_or_a_rule(ledger):
    assert check_numbers.wrong(ledger) == []


@pytest.mark.parametrize("recipe", ["fwl", "decay_finetune", "recurrent", "quickstart"])
def test_a_changed_digit_is_found(recipe):
    """Nearly always: another run of the same rows may have the number by chance."""
    ledger = made_up.RECIPES / recipe / "RESULTS.md"
    records, tried, unseen = check_numbers.Records(ledger), 0, []
    for row in (row for table in check_numbers.tables(ledger) for row in check_numbers.rows(table)):
        numbers = [number for head, number in row.numbers if not check_numbers.rule_of(recipe, row, head)]
        for place, number in enumerate(numbers):
            tried += 1
            if records.have(row, [*numbers[:place], changed(number), *numbers[place + 1 :]]):
                unseen.append(number)
    assert tried > 25 and len(unseen) < 0.05 * tried


def test_what_a_record_is(tmp_path):
    """A number to its last digit, the mean and deviation of seeds; lines together; not words, papers and settings."""
    (tmp_path / "results").mkdir()
    lines = ["model,seed,valid,test", "a,1,10.04,20.0", "a,2,12.04,22.0", "b,1,31.5,42.25"]
    (tmp_path / "results" / "x.csv").write_text("\n".join(lines) + "\n")
    heads = "| model 7 | step | valid | test | paper | note |\n| --- | --- | --- | --- | --- | --- |\n"

    def wrong(*cells):
        (tmp_path / "RESULTS.md").write_text(heads + f"| {' | '.join(cells)} |\n")
        return check_numbers.wrong(tmp_path / "RESULTS.md")

    assert wrong("a 5", "9", "11.04 ± 1.41", "21.0", "99", "of 3 seeds") == []
    assert wrong("", "", "**31.5**", "42.2", "", "") == wrong("", "", "12.0", "not run", "", "-") == []
    for cells in (("11.05 ± 1.41", "21.0"), ("31.5", "42.4"), ("10.04", "42.2"), ("11.04 ± 1.40", "21.0")):
        (said,) = wrong("a", "", *cells, "", "")
        assert said.endswith(f"{cells[1]} in row 'a': no record has them together")
