"""The recipes' driver is a program, not a package: its folder is added to the path, as Python does for programs."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import made_up
import pytest
from support.command_server import shared

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "driver"))
import commands


@pytest.fixture(autouse=True)
def forked(monkeypatch, tmp_path_factory):
    """Run the programs of Python that the driver starts in forks, which have their imports."""

    def run(command, stdout=None, **options):
        if not entry_points(group="console_scripts", name=command[0]):
            return subprocess.run(command, stdout=stdout, **options)
        log = Path(stdout.name) if stdout else tmp_path_factory.getbasetemp() / "driver.log"
        return SimpleNamespace(returncode=shared().run(*command, log=log, folder=Path.cwd(), user_dir=None))

    monkeypatch.setattr(commands, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))


@pytest.fixture
def text(tmp_path):
    """A folder with a text of one's own."""
    folder = tmp_path / "text"
    folder.mkdir()
    for split, lines in (("train", 200), ("valid", 20), ("test", 20)):
        (folder / f"{split}.txt").write_text(made_up.LINE * lines)
    return folder
