"""README.md, CONTRIBUTING.md and docs/: what they show runs, the flags and links exist, the tables are complete."""

import contextlib
import csv
import io
import itertools
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints.convert.conftest import WORDS, read_vector
from fairseq import options
from support import jobs
from support.command_server import run
from support.pairwise import looped
from support.small_text import write_text

from fairseq_fwp.cli import add_layer, convert, eval_lm, export, info, linearize, plot
from fairseq_fwp.evaluation import Protocol, Text, evaluate
from fairseq_fwp.models.attentions import rule_choices
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules import update_rules
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README, CONTRIBUTING = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text, language):
    return [block for found, block in FENCE.findall(text) if found == language]


def shell(script, folder):
    """Run a script of bash in a folder with the programs of this environment, and return its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = script if isinstance(script, list) else ["bash", "-euo", "pipefail", "-c", script]
    how = {"env": os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}, "text": True}
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    assert done.returncode == 0, done.stdout
    return done.stdout


# Links and tables.

FOLDERS = ("docs", "fairseq_fwp", "cuda_ext", "recipes", "tests")
PAGES = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def test_pages_name_tests_that_exist_and_have_lost_no_list():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in code]
        assert (page.name, named, re.findall(r"(.*):\n\n\n", text)) == (page.name, [], [])


def anchors(text):
    """Return the names that headings get: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@looped("path", PAGES)
def test_links_lead_to_what_is_there(path):
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        other = path.parent / target if target else path
        assert other.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{target} has no heading #{anchor}"


def expanded(pattern):
    """Return all that `{a,b}_c[_d]` stands for."""
    choices = (
        part[1:-1].split(",") if part[:1] == "{" else ["", part[1:-1]] if part[:1] == "[" else [part]
        for part in re.split(r"(\{[^}]*\}|\[[^\]]*\])", pattern)
    )  # fmt: skip
    return {"".join(choice) for choice in itertools.product(*choices)}


def test_the_front_page_is_one_page():
    """Words are counted, not code and the bars of tables."""
    assert len(FENCE.sub("", README).replace("|", " ").split()) <= 750


def test_the_page_of_language_models_names_every_rule_map_and_architecture():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "language_models.md").read_text(encoding="utf-8"), re.MULTILINE)
    values = [value for row in rows for value in re.findall(r"`([^`]*)`", row)]
    named = {name for value in values for name in expanded(value.removeprefix("--arch "))}
    words = set(" ".join(values).split())
    assert not {name for presets in PRESETS_OF_MODELS.values() for name in presets} - named
    assert not {*rule_choices(), *FEATURE_MAPS} - words


# Commands and their flags.

PARSERS = {f"fwp-{module.__name__.rpartition('.')[2].replace('_', '-')}": module for module in (
    add_layer, convert, eval_lm, export, info, linearize, plot,
)}  # fmt: skip
FAIRSEQ = {
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": lambda: options.get_generation_parser(interactive=True),
    "fairseq-train": options.get_training_parser,
    "fairseq-validate": options.get_validation_parser,
}
# Programs of others, whose flags are not ours; `torchrun` starts a command of fairseq.
OTHERS = {
    "cd", "cut", "echo", "fairseq-hydra-train", "fwp-harness", "git", "grep", "mkdir", "pip", "python", "source",
    "torchrun",
}  # fmt: skip
# What the flags that `fwp-convert` writes begin with, in place of $(cat FOLDER/flags.txt).
CONVERTED = "--task language_modeling --arch fwp_lm"


def commands(block):
    """Yield each command of a block of shell as words, without the settings of the environment before it."""
    block = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\(cat [^)]*\)", CONVERTED, line)
        for command in re.split(r" (?:&&|\|) ", line):
            words = shlex.split(command, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield words


def unknown_flags(program, words):
    """Return the flags among the words that the program does not have with this task, architecture and criterion."""
    if program in PARSERS:
        actions = PARSERS[program].parser()._actions
        known = {flag for action in actions for flag in action.option_strings}
        return [word for word in words if word.startswith("--") and word not in known]
    if program == "fairseq-preprocess":
        _, rest = options.get_preprocessing_parser().parse_known_args(words)
    else:
        _, rest = options.parse_args_and_arch(FAIRSEQ[program](), input_args=words, parse_known=True)
    return [word for word in rest if word.startswith("--")]


@looped("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))])
def test_commands_and_their_flags_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in blocks(page.read_text(encoding="utf-8"), "bash"):
        for program, *words in commands(block):
            if program in PARSERS or program in FAIRSEQ or program == "fairseq-preprocess":
                assert not unknown_flags(program, words), shlex.join([program, *words])
            elif program == "bash":
                assert (ROOT / words[0]).exists(), words[0]
            else:
                assert program in OTHERS, program


def test_a_wrong_flag_is_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    (words,) = commands("A=1 fairseq-train DATA --arch fwp_lm \\\n  --cpu --adam-eps 1 --fwp-nothing")
    assert unknown_flags(words[0], words[1:]) == ["--adam-eps", "--fwp-nothing"]
    assert unknown_flags("fwp-eval-lm", ["DATA", "--path", "x", "--nothing"]) == ["--nothing"]


# The front page and the library.


def test_the_lines_of_python_print_what_they_say(monkeypatch):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(next(block for block in blocks(README, "python") if block.startswith("import torch")), given := {})
    assert f"# {said.getvalue().strip()}\n" in README
    monkeypatch.setattr(update_rules, "UPDATE_RULES", {})
    exec(next(block for block in blocks(README, "python") if "def step" in block), given)
    assert [*update_rules.UPDATE_RULES] == ["leaky"]


def test_the_front_page_shows_what_the_quick_start_printed():
    with (ROOT / "recipes/quickstart/results/models.csv").open() as file:
        *_, last = runs = [*csv.DictReader(file)]
    rows = [[run[name] for name in ("conf", "parameters", "test")] for run in runs]
    shown = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d.]+) \| \.\.\.$", README, re.MULTILINE)
    assert [[cell.replace(",", "") for cell in row] for row in shown] == rows[-3:]
    assert f"{last['updates']} updates each" in README


def test_the_commands_of_the_front_page_have_their_flags():
    found = re.findall(r"`bash (recipes/[^\s`]+)([^`]*)`", README)
    assert len(found) == 6
    for script, words in found:
        assert {*re.findall(r"--[\w-]+", words)} <= {*re.findall(r"--[\w-]+", shell(["bash", script, "--help"], ROOT))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and the checkpoint of a small model of it."""
    folder = write_text(tmp_path_factory.mktemp("docs"))
    flags = [*jobs.BLOCKS, *jobs.SIZE, "--arch", "delta_lm_wt103", "--tokens-per-sample", 64, "--disable-validation"]
    jobs.train(folder, folder, *flags, updates=1)
    return folder


def test_the_python_of_the_library_page(trained):
    """Each block by itself, as it stands there."""
    examples = blocks((DOCS / "library.md").read_text(encoding="utf-8"), "python")
    assert len(examples) == 6
    for number, example in enumerate(examples):
        given = {"__name__": "__main__", "CHECKPOINT": str(trained / "checkpoint_last.pt"), "DATA": str(trained)}
        exec(compile(example, f"library.md, block {number}", "exec"), given)


def test_the_score_of_a_line_has_no_end_of_the_line(trained):
    """`evaluate` takes the model that `from_pretrained` has prepared for inference, and scores the end too."""
    lm = FwpLanguageModel.from_pretrained(str(trained), "checkpoint_last.pt", data_name_or_path=str(trained))
    tokens = lm.encode("w1 w2 w3")
    scores = evaluate(lm.models[0], Text.after(2, tokens), Protocol(64)).log_probs
    assert len(scores) == 4
    assert lm.score("w1 w2 w3")["positional_scores"].tolist() == pytest.approx(scores[:3].tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="a text to score must have at least one token, got none"):
        lm.score("")


# Commands that print what a page shows.

# The order in which pages build on each other: one trains what another evaluates.
PAGES_THAT_PRINT = (
    "language_models", "evaluation", "export", "fast_weight_layers", "conversion", "translation", "retrieval",
    "fairseq", "library", "checkpoints", "architecture", "determinism",
)  # fmt: skip
NUMBER = re.compile(r"([-+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[-+]?\d+)?)")
# What is before a number: settings are equal everywhere. A perplexity of another text is compared as a loss, its
# logarithm. A time or a speed is of this machine.
OF_SETTINGS = re.compile(r"(num_updates\W+|lr=|epoch |windows of |after at least |state size: |beam=)$")
PERPLEXITY = re.compile(r"(ppl|erplexity)\W+$")
OF_THIS_MACHINE = re.compile(r"(\bin |\ds \(|(wps|ups|wall)\W*)$")


def pattern(line):
    """Return a pattern for a line of output on a page: numbers as groups, and anything for three dots."""

    def of(part):
        if NUMBER.fullmatch(part):
            return r"([-+\d][-+\d.,e]*)"
        return ".*" if part == "..." else r"\s+" if part.isspace() else re.escape(part)

    return "".join(map(of, re.split(rf"(\.\.\.|{NUMBER.pattern[1:-1]}|\s+)", line.strip())))


def size(number):
    """Return the absolute value of a printed number, or None for a date and the like."""
    with contextlib.suppress(ValueError):
        return abs(float(re.sub(r"[,.]+$|,", "", number)))


def fits(before, shown, printed):
    """Return whether a printed number may stand for the one on the page, after the same words."""
    here, there = size(shown), size(printed)
    if here == there or not here or there is None or OF_THIS_MACHINE.search(before):
        return True
    if PERPLEXITY.search(before):
        here, there = math.log(here), math.log(there)
    return not OF_SETTINGS.search(before) and there and 0.1 <= there / here <= 10


def find(line, output, start=0):
    """Return the end of a line of a page in an output, or None.

    Settings are the same. Other numbers are at most ten times as large or small: the text is another one.
    """
    line = line.strip()
    for match in re.compile(pattern(line)).finditer(output, start):
        numbers = zip(NUMBER.finditer(line), match.groups(), strict=True)
        if all(fits(line[: shown.start()], shown[0], printed) for shown, printed in numbers):
            return match.end()
    return None


def test_a_page_may_print_close_numbers_but_no_others_and_no_other_words():
    assert find("... | valid | loss 10.3, ppl  1e-3 | ...", "x | valid | loss 9, ppl 2.0e-3 | y")
    assert find("3 tokens in 20.9s (2484.25 tokens/s), wps 1,200", "3 tokens in 1.0s (1.5 tokens/s), wps 3")
    assert not find("loss 1,200", "loss 3") and not find("loss 5", "loss 0")
    assert find("ppl 1000, num_updates=3", "ppl 20.5, num_updates=3") and not find("num_updates=3", "num_updates=4")
    assert find("loss 5, num_updates=30", "loss 9, num_updates=10\nloss 7, num_updates=30") == 45
    assert not find("... | valid | loss 10.3", "x | train | loss 9")


def write_public_checkpoint(folder, words):
    """Write a state dict of Schlag's public code, the log of its training, and its words."""
    vector = read_vector("schlag-lm/type24")
    folder.mkdir()
    torch.save(vector.tensors, folder / "state_dict.pt")
    options = {"cutoffs": "'12,20'", **vector.options}
    (folder / "log.txt").write_text("".join(f"    - {name} : {value}\n" for name, value in options.items()))
    words.write_text("\n".join(WORDS) + "\n")


@pytest.mark.slow
def test_commands_print_what_a_page_shows(tmp_path):
    """Each block of shell or Python that a block of output follows, with the sources of package and tests for DATA.

    At most a sentence is between the two blocks.
    A fast weight layer has nothing to learn from random words: its gradients overflow.
    """
    paths = sorted(path for folder in ("fairseq_fwp", "tests") for path in (ROOT / folder).glob("**/*.py"))
    lines = [line for path in paths for line in path.read_text().splitlines() if "<pad>" not in line]
    preprocess = ["fairseq-preprocess", "--only-source", "--thresholdsrc", "2", "--destdir", "DATA", "--workers", "1"]
    for split, part in (("train", lines[1500:]), ("valid", lines[:500]), ("test", lines[500:1500])):
        (tmp_path / f"{split}.txt").write_text("\n".join(part) + "\n")
        preprocess += [f"--{split}pref", f"{split}.txt"]
    shell(shlex.join(preprocess), tmp_path)
    (tmp_path / "fairseq_fwp").symlink_to(ROOT / "fairseq_fwp")
    write_public_checkpoint(tmp_path / "WORK_DIR", tmp_path / "words.txt")
    block, sentence = r"^```(bash|python)\n((?:(?!```).)*?)^```\n\n", r"(?:[^`\n]+:\n\n)?"
    shown, missing = re.compile(rf"{block}{sentence}```text\n(.*?)^```", re.MULTILINE | re.DOTALL), []
    for page in PAGES_THAT_PRINT:
        found = shown.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
        assert found, page
        for language, block, output in found:
            said = shell(block if language == "bash" else [sys.executable, "-c", block], tmp_path)
            position = 0
            for line in filter(None, output.splitlines()):
                end = find(line, said, position)
                missing += [] if end else [f"{page}: {line}\n{said[-20000:]}"]
                position = end or position
    assert not missing, "\n\n".join(missing)


# CONTRIBUTING.md: a plugin outside the package, an experiment and a recipe.

COMMANDS = [line for block in blocks(CONTRIBUTING, "bash") for line in block.replace("\\\n", " ").splitlines()]
LINE = "the memory is a matrix that every token reads and writes once\n"


MY_RULE = runpy.run_path(str(ROOT / "recipes/quickstart/my_rule.py"))


def write_files(folder, ending):
    """Write the examples whose names end so."""
    for name, text in MY_RULE["examples"](CONTRIBUTING).items():
        if name.endswith(ending):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the plugin of the examples and a small text, binarised."""
    folder = tmp_path_factory.mktemp("work")
    write_files(folder, ".py")
    (folder / "text").mkdir()
    preprocess = ["--only-source", "--destdir", "DATA", "--workers", "1"]
    for split, lines in (("train", 200), ("valid", 30), ("test", 30)):
        (folder / "text" / f"{split}.txt").write_text(LINE * lines)
        preprocess += [f"--{split}pref", f"text/{split}.txt"]
    run("fairseq-preprocess", *preprocess, cwd=folder)
    return folder


def test_the_files_of_a_rule_are_written_once(tmp_path, work):
    """By the command of the front page."""
    MY_RULE["main"](tmp_path)
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    confs = (f"recipes/quickstart/conf/{name}.yaml" for name in ("leaky", "leaky_delta"))
    assert {*map(str, written)} == {"my_plugin/leaky.py", "my_plugin/__init__.py", *confs}
    assert (work / "my_plugin/leaky.py").read_text() == (tmp_path / "my_plugin/leaky.py").read_text()
    with pytest.raises(SystemExit, match="must not exist yet, got one"):
        MY_RULE["main"](tmp_path)


@pytest.mark.slow
def test_the_plugin_examples(work):
    found = [command for command in COMMANDS if "--user-dir my_plugin" in command]
    assert len(found) == 6
    for command in found:
        said = shell(command, work)
        if command.startswith("fairseq-train"):
            assert re.search(r"num_updates(=|\W+)4\b", said) and "done training" in said
        elif command.startswith("fwp-info"):
            assert re.search(r"^  leaky +W_t = keep_t W", said, re.M)
        elif command.startswith("echo"):
            assert re.search(r"^H-0\t", said, re.M)
        else:
            assert "Evaluated 390 tokens" in said  # 12 words and an end of line, 30 times


def test_a_rule_from_outside_is_a_choice_and_others_are_refused(work):
    command = next(command for command in COMMANDS if command.startswith("fairseq-train"))
    words = shlex.split(command.replace("leaky", "leeky").replace("--user-dir my_plugin", ""))
    said = run(*words, user_dir="my_plugin", cwd=work, status=1)
    assert re.search(r"invalid choice: 'leeky' \(choose from .*leaky", said)


@pytest.mark.slow
@looped("recipe", ["mine", "peps", "quickstart"])
def test_the_experiment_and_the_recipe(work, recipe):
    """With the recipes in a folder of the test, in the environment of the tests, and a small text."""
    (command,) = (command for command in COMMANDS if command.startswith(f"bash recipes/{recipe}/run.sh "))
    recipes = work / "recipes"
    assert not [
        path
        for path in ("peps/conf/delta_without_positions.yaml", "mine", "quickstart/conf/leaky.yaml")
        if (ROOT / "recipes" / path).exists()
    ]
    shutil.rmtree(recipes, ignore_errors=True)
    shutil.copytree(ROOT / "recipes", recipes, ignore=shutil.ignore_patterns("results", "__pycache__"))
    driver = shlex.join([sys.executable, str(ROOT / "recipes" / "driver")])
    (recipes / "env.sh").write_text(
        f'here=$(dirname -- "${{BASH_SOURCE[1]}}")\nrecipe() {{ {driver} "$1" --recipe "$here" "${{@:2}}"; }}\n'
    )
    write_files(work, ".yaml")
    (script,) = (text for text in blocks(CONTRIBUTING, "bash") if text.startswith("#!"))
    (recipes / "mine" / "run.sh").write_text(script)
    small = ["--merges", "60", "--decoder-layers", "1", "--cpu", "--out", "out"]
    small += ["--warmup-updates", "1"] if recipe != "mine" else []
    small += ["--data", "text", "--max-update", "4"] if recipe == "quickstart" else []
    shell(f"{command.replace('FOLDER', 'text')} {shlex.join(small)}", work)
    assert list((work / "out").glob("del*/checkpoint_best.pt"))
    assert recipe != "quickstart" or "| leaky |" in (work / "out" / "table.md").read_text()
    shutil.rmtree(work / "out")
