"""The output of a command is complete or not there, where links lead, and named by one sentence if it cannot be."""

import argparse
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pairwise import looped

from fairseq_fwp import outputs
from fairseq_fwp.checkpoints.convert.checkpoint import new_folder
from fairseq_fwp.cli import arguments, make_parser, plot, write_whole
from fairseq_fwp.cli.logs import Run


def fill(path):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_on_a_full_disk_stays_as_it_was(tmp_path):
    file = tmp_path / "file"
    for before in ([], [file]):
        with pytest.raises(OSError, match=r"file could not be written \(No space left on device\)"):
            write_whole(file, fill)
        assert list(tmp_path.iterdir()) == before
        file.write_text("old")
    assert file.read_text() == "old"


def test_tables_on_a_full_disk(tmp_path, monkeypatch):
    """Those of fwp-plot."""
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **how: fill(path))
    run = Run("a", valid={1: 2.0}, hours={1: 0.1})
    for write in (plot.write_csv, plot.write_markdown):
        with pytest.raises(OSError, match="table could not be written"):
            write([run], tmp_path / "table")
        assert list(tmp_path.iterdir()) == []


def test_a_link_stays_and_a_device_is_not_replaced(tmp_path):
    for name, target in (("file", tmp_path / "target"), ("device", Path(os.devnull))):
        link = tmp_path / name
        link.symlink_to(target)
        write_whole(link, lambda path: path.write_text("new"))
        assert link.is_symlink() and link.readlink() == target
    assert (tmp_path / "target").read_text() == "new" and not Path(os.devnull).is_file()


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_is_made_where_its_link_leads(tmp_path, made):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    if made:
        target.mkdir()
    with new_folder(link) as folder:
        (folder / "file").write_text("new")
    assert link.is_symlink() and (target / "file").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "target"}


def test_a_folder_on_a_full_disk_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"out could not be written \(No space left on device\)"):  # noqa: SIM117
        with new_folder(tmp_path / "out") as folder:
            fill(folder / "file")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from fairseq_fwp.outputs import unfinished
with unfinished(Path(sys.argv[1])) as work:
    work.mkdir()
    (work / "half").write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_leftovers_of_killed_processes_alone_are_removed(tmp_path, monkeypatch):
    """Each attempt has a folder of its own, also in two containers, where processes have the same number."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    out, old = tmp_path / "out", tmp_path / ".out-7"
    old.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, out], check=False)
    (leftover,) = set(tmp_path.iterdir()) - {old}
    (tmp_path / f"{outputs.PREFIX}of a process that wrote nothing").mkdir()
    with new_folder(out) as folder:
        (folder / "file").write_text("first")
        with new_folder(tmp_path / "other"):
            write_whole(tmp_path / "table", lambda path: path.write_text("whole"))
    assert folder.parent != leftover and (out / "file").read_text() == "first"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other", "table", old.name}
    umask = os.umask(0o027)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_folder_that_is_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Another process removes it in the moment before it is locked."""
    locked = outputs._locked

    def locked_late(folder, wait):
        monkeypatch.setattr(outputs, "_locked", locked)
        folder.rmdir()
        return locked(folder, wait)

    monkeypatch.setattr(outputs, "_locked", locked_late)
    write_whole(tmp_path / "table", lambda path: path.write_text("whole"))
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_a_place_without_permission_is_refused_at_once(tmp_path, monkeypatch):
    """Where root may write, a read-only disk is such a place."""
    assert arguments.output_file(str(tmp_path / "file")) == tmp_path / "file"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for kind in (arguments.output_file, arguments.output_folder):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be where this user can write, got .*/new"):
            kind(str(tmp_path / "new"))


REASONS = {"/dev/full": "No space left on device", "a pipe that nobody reads": "Broken pipe", "": "it is closed"}
PATCHES = "python -u -m fairseq_fwp.patches"
COMMANDS = [("fwp-info --hydra delta_lm_wt103", "a pipe that nobody reads"), (PATCHES, "/dev/full"), (PATCHES, "")]


@looped("command, output", [*COMMANDS, *(("fwp-plot --help", output) for output in REASONS)])
def test_output_that_cannot_be_written(command, output):
    program, *arguments = command.split()
    reader, writer = os.pipe()
    os.close(reader)
    stdout = os.open(output, os.O_WRONLY) if output == "/dev/full" else writer
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    shell = ["bash", "-c", f'"$@"{"" if output else " >&-"}', "-", Path(sys.executable).with_name(program)]
    how = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "env": environment, "check": False}
    done = subprocess.run([*shell, *arguments], **how)
    name = program if program.startswith("fwp") else "fairseq_fwp.patches"
    assert done.stderr == f"{name}: standard output cannot be written: {REASONS[output]}\n" and done.returncode == 1


def test_a_parser_without_a_documentation():
    """As with `python -OO`."""
    assert re.match(r"usage: \S+ \[-h\]", make_parser(None).format_help())


@looped("command", ["fwp-convert --help", "fwp-plot --dpfp"])
def test_a_current_folder_that_was_removed(tmp_path, command):
    """Where it is, torch imports a library that ends the process."""
    folder, (program, flag) = tmp_path / "folder", command.split()
    folder.mkdir()
    script = [sys.executable, Path(sys.executable).with_name(program), flag]
    shell = ["bash", "-c", 'rmdir "$PWD" && exec "$@"', "-", *script]
    done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=False)
    sentence = "the current folder must exist, got one that was removed: go to another one"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{program}: {sentence}\n")


def test_a_device_that_is_full_is_named():
    """Not standard output, which has room."""
    with pytest.raises(OSError, match=r"^/dev/full could not be written \(No space left on device\)$"):
        write_whole(Path("/dev/full"), lambda path: path.write_text("table"))


def test_a_folder_that_another_command_has_made_is_named(tmp_path):
    with (
        pytest.raises(ValueError, match=r"must be a new or empty folder, got .*, which holds files"),
        new_folder(tmp_path / "out") as folder,
    ):
        (folder / "own").touch()
        with new_folder(tmp_path / "out") as other:
            (other / "file").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
