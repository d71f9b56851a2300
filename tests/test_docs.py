"""The examples of docs/: Python that runs, commands and flags that exist, and commands that print what a page shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.test_eval_lm import train_model
from convert.conftest import WORDS, read_vector
from fairseq import options
from pairwise import looped
from small_text import write_text
from test_contributing import environment

from fairseq_fwp.cli import add_layer, convert, eval_lm, info, plot
from fairseq_fwp.evaluation import Protocol, Text, evaluate
from fairseq_fwp.models.fwp_lm import FwpLanguageModel

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PARSERS = {
    "fwp-add-layer": add_layer,
    "fwp-convert": convert,
    "fwp-eval-lm": eval_lm,
    "fwp-info": info,
    "fwp-plot": plot,
}
FAIRSEQ = {
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": lambda: options.get_generation_parser(interactive=True),
    "fairseq-train": options.get_training_parser,
    "fairseq-validate": options.get_validation_parser,
}
# Programs of others, whose flags are not ours; `torchrun` starts a command of fairseq.
OTHERS = {"echo", "fairseq-hydra-train", "mkdir", "pip", "python", "source", "torchrun"}
# What the flags that `fwp-convert` writes begin with, in place of $(cat FOLDER/flags.txt).
CONVERTED = "--task language_modeling --arch fwp_lm"
# The order in which pages build on each other: one trains what another evaluates.
PAGES_THAT_PRINT = (
    "language_models", "evaluation", "export", "fast_weight_layers", "conversion", "translation", "retrieval",
    "fairseq", "library", "checkpoints", "architecture", "determinism",
)  # fmt: skip


def blocks(page, language):
    return [text for found, text in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


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
        source = words[words.index("--source") + 1 :][:1] if program == "fwp-convert" and "--source" in words else []
        actions = PARSERS[program].parser(*source)._actions
        known = {flag for action in actions for flag in action.option_strings}
        return [word for word in words if word.startswith("--") and word not in known]
    if program == "fairseq-preprocess":
        _, rest = options.get_preprocessing_parser().parse_known_args(words)
    else:
        if program == "fairseq-train" and "..." in words and "--arch" not in words:
            words = [*CONVERTED.split(), *words]
        words = [word for word in words if word != "..."]
        _, rest = options.parse_args_and_arch(FAIRSEQ[program](), input_args=words, parse_known=True)
    return [word for word in rest if word.startswith("--")]


@looped("page", PAGES)
def test_commands_and_their_flags_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for program, *words in (command for block in blocks(page, "bash") for command in commands(block)):
        if program in PARSERS or program in FAIRSEQ or program == "fairseq-preprocess":
            assert not unknown_flags(program, words), shlex.join([program, *words])
        elif program == "bash":
            assert (ROOT / words[0]).exists(), words[0]
        else:
            assert program in OTHERS, program


def test_a_wrong_flag_is_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    (words,) = commands(
        "A=1 fairseq-train DATA --user-dir fairseq_fwp --arch fwp_lm \\\n  --cpu --adam-eps 1 --fwp-nothing"
    )
    assert unknown_flags(words[0], words[1:]) == ["--adam-eps", "--fwp-nothing"]
    assert unknown_flags("fwp-eval-lm", ["DATA", "--path", "x", "--nothing"]) == ["--nothing"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and the checkpoint of a small model of it."""
    folder = write_text(tmp_path_factory.mktemp("docs"))
    train_model(
        folder, "--task", "language_modeling", "--arch", "delta_lm_wt103", "--cpu", "--decoder-layers", 1,
        "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--tokens-per-sample", 64, "--batch-size", 4,
        "--optimizer", "adam", "--lr", 0.01, "--max-update", 1, "--disable-validation", "--no-epoch-checkpoints",
        "--save-dir", folder, "--log-format", "none", "--num-workers", 0,
    )  # fmt: skip
    return folder


def test_the_python_of_the_library_page(trained):
    """Each block by itself, as it stands there."""
    examples = blocks(DOCS / "library.md", "python")
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


def pattern(line):
    """Return a pattern for a line of output on a page: any numbers, and anything for three dots."""
    parts = re.split(r"(\.\.\.|[-+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[-+]?\d+)?|\s+)", line.strip())
    return "".join(
        ".*"
        if part == "..."
        else r"[-+\d][-+\d.,e]*"
        if part[-1:].isdigit()
        else r"\s+"
        if part.isspace()
        else re.escape(part)
        for part in parts
    )


def test_a_page_may_print_other_numbers_but_not_other_words():
    assert re.search(pattern("... | valid | loss 10.3, ppl  1e-3 | ..."), "x | valid | loss 9, ppl 2.0 | y")
    assert not re.search(pattern("... | valid | loss 10.3"), "x | train | loss 9")


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
    """Each block of shell or Python that a block of output follows, with the sources of the package for DATA.

    At most a sentence is between the two blocks.
    A fast weight layer has nothing to learn from random words: its gradients overflow.
    """
    lines = [line for path in sorted(ROOT.glob("fairseq_fwp/**/*.py")) for line in path.read_text().splitlines()]
    preprocess = ["fairseq-preprocess", "--only-source", "--thresholdsrc", "5", "--destdir", "DATA", "--workers", "1"]
    for split, part in (("train", lines[1000:]), ("valid", lines[:500]), ("test", lines[500:1000])):
        (tmp_path / f"{split}.txt").write_text("\n".join(part) + "\n")
        preprocess += [f"--{split}pref", f"{split}.txt"]
    subprocess.run(preprocess, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    (tmp_path / "fairseq_fwp").symlink_to(ROOT / "fairseq_fwp")
    write_public_checkpoint(tmp_path / "WORK_DIR", tmp_path / "words.txt")
    shown = re.compile(
        r"^```(bash|python)\n((?:(?!```).)*?)^```\n\n(?:[^`\n]+:\n\n)?```text\n(.*?)^```", re.MULTILINE | re.DOTALL
    )
    for page in PAGES_THAT_PRINT:
        found = shown.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
        assert found, page
        for language, block, output in found:
            result = subprocess.run(
                ["bash", "-e", "-c", block] if language == "bash" else [sys.executable, "-c", block],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert result.returncode == 0, result.stdout
            position = 0
            for line in filter(None, output.splitlines()):
                match = re.compile(pattern(line)).search(result.stdout, position)
                assert match, f"{page}: {line}\n{result.stdout[-20000:]}"
                position = match.end()
