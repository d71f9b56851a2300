"""Settings, names and archives from others: they are read as data, never run as code."""

import ast
import functools
import os
import shlex
import sys
import tarfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

REMEDY = "write the value itself into the configuration"
Original = Callable[..., Any]


def evaluate_data_alone() -> None:
    """fairseq runs some strings of checkpoints and data folders as Python code: lists, numbers and dictionaries."""
    import fairseq.tasks  # noqa: F401  (and with it all models, criterions, optimizers and data sets)

    evaluating = ("fairseq.utils", "fairseq.models.", "fairseq.optim.", "fairseq.criterions.", "fairseq.data.")
    for name, module in list(sys.modules.items()):
        if name.startswith(evaluating):
            module.eval = evaluate  # type: ignore[attr-defined]  # a module's own name comes before Python's


def quote_path(build: Original) -> Any:
    """fairseq gives the path of a FASTA file to a shell: a file name in a data folder can be a command."""
    return lambda self, path: build(self, shlex.quote(os.path.abspath(path)))


def ask_before_code_of_hub(load: Original) -> Any:
    """A data folder can name a GitHub repository whose code fairseq runs; torch 2.4 does not ask first."""
    return functools.partial(load, trust_repo="check")


def unpack_inside() -> None:
    """fairseq unpacks a model's archive wherever its names lead, such as `../.bashrc`."""
    import fairseq.file_utils

    fairseq.file_utils.tarfile = INSIDE


def open_inside(path: str, mode: str) -> tarfile.TarFile:
    """Open an archive. Raises ValueError if it has links, devices, or names of places outside its folder."""
    archive = tarfile.open(path, mode)  # type: ignore[call-overload]  # noqa: SIM115  (the caller closes it)
    for member in archive.getmembers():
        inside = not os.path.isabs(member.name) and ".." not in member.name.split("/")
        if not inside or not (member.isfile() or member.isdir()):
            raise ValueError(
                f"the archive {path} must have only files and folders below its own, got {member.name!r}: it was not "
                "unpacked; unpack it yourself if you trust its source"
            )
    return archive


INSIDE = SimpleNamespace(open=open_inside)


def evaluate(text: str) -> Any:
    """Return the value of numbers, strings, lists, tuples and dictionaries, their sums and multiples: "[(512, 3)] * 4".

    Raises ValueError for anything else, and, as `eval`, TypeError for an argument that is not a string. fairseq uses
    the TypeError to find out whether an option has been evaluated.
    """
    if not isinstance(text, str):
        raise TypeError(f"the argument of evaluate must be a string, got {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"the value of an option must be a number, a string, a list or a dictionary of them, got {text[:80]!r}: "
            f"{REMEDY}"
        ) from error


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List():
            return (tuple if isinstance(node, ast.Tuple) else list)(map(_value, node.elts))
        case ast.Dict() if None not in node.keys:
            return dict(zip(map(_value, filter(None, node.keys)), map(_value, node.values), strict=True))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left) + _value(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _value(node.left) * _value(node.right)
    raise ValueError(
        "the value of an option must be a number, a string, a list or a dictionary of them, got the code "
        f"{ast.unparse(node)!r}, which is not run: {REMEDY}"
    )
