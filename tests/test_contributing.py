"""The examples of CONTRIBUTING.md, executed as they stand there: a plugin outside the package, and an experiment."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
COMMANDS = [command for kind, text in BLOCKS if kind == "bash" for command in text.replace("\\\n", " ").splitlines()]
LINE = "the memory is a matrix that every token reads and writes once\n"


def environment(**more):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", **more}


def write_files(folder, kind):
    """The examples of one language, each to the file that its first line names."""
    for language, text in BLOCKS:
        if language == kind:
            name = re.match(r"# ([\w/.]+)(, continued)?\n", text)[1]
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the plugin of the examples and a small text, binarised."""
    folder = tmp_path_factory.mktemp("work")
    write_files(folder, "python")
    (folder / "text").mkdir()
    for split, lines in (("train", 200), ("valid", 30), ("test", 30)):
        (folder / "text" / f"{split}.txt").write_text(LINE * lines)
    preprocess = ["fairseq-preprocess", "--only-source", "--destdir", "DATA", "--workers", "1"]
    for split in ("train", "valid", "test"):
        preprocess += [f"--{split}pref", f"text/{split}.txt"]
    subprocess.run(preprocess, cwd=folder, env=environment(), check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_plugin_examples(work):
    commands = [command for command in COMMANDS if "--user-dir my_plugin" in command]
    assert len(commands) == 6
    for command in commands:
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=work,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert result.returncode == 0, result.stdout
        if command.startswith("fairseq-train"):
            assert re.search(r"num_updates(=|\W+)4\b", result.stdout) and "done training" in result.stdout
        elif command.startswith("fwp-info"):
            assert re.search(r"^  leaky +W_t = keep_t W", result.stdout, re.M)
        elif command.startswith("echo"):
            assert re.search(r"^H-0\t", result.stdout, re.M)
        else:
            assert "Evaluated 390 tokens" in result.stdout  # 12 words and an end of line, 30 times


def test_a_rule_from_outside_is_a_choice_and_others_are_refused(work):
    command = next(command for command in COMMANDS if command.startswith("fairseq-train"))
    result = subprocess.run(
        shlex.split(command.replace("leaky", "leeky")), cwd=work, env=environment(), capture_output=True, text=True
    )
    assert result.returncode != 0
    assert re.search(r"invalid choice: 'leeky' \(choose from .*leaky", result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mine", "peps"])
def test_the_experiment_and_the_recipe(work, recipe):
    """With the recipes in a folder of the test, in the environment of the tests, and a small text."""
    (command,) = (command for command in COMMANDS if f"recipes/{recipe}/run.sh" in command and "FOLDER" in command)
    recipes = work / "recipes"
    shutil.copytree(
        ROOT / "recipes", recipes, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    driver = shlex.join([sys.executable, str(ROOT / "recipes" / "driver")])
    (recipes / "env.sh").write_text(
        f'here=$(dirname -- "${{BASH_SOURCE[1]}}")\nrecipe() {{ {driver} "$1" --recipe "$here" "${{@:2}}"; }}\n'
    )
    write_files(work, "yaml")
    (script,) = (text for kind, text in BLOCKS if kind == "bash" and text.startswith("#!"))
    (recipes / "mine" / "run.sh").write_text(script)
    arguments = shlex.split(command.replace("FOLDER", "text"))
    small = ["--merges", "60", "--decoder-layers", "1", "--cpu", "--out", "out"]
    small += ["--warmup-updates", "1"] if recipe == "peps" else []
    result = subprocess.run([*arguments, *small], cwd=work, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list((work / "out").glob("del*/checkpoint_best.pt"))
    shutil.rmtree(work / "out")


def test_the_guide_names_no_conf_that_is_there():
    assert not (ROOT / "recipes" / "peps" / "conf" / "delta_without_positions.yaml").exists()
    assert not (ROOT / "recipes" / "mine").exists()
