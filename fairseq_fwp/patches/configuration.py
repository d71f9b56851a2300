"""Configurations in checkpoints: they are read as data, and never run as code."""

import ast
import sys
from typing import Any

REMEDY = "write the value itself into the configuration"


def evaluate_data_alone() -> None:
    """fairseq runs some strings of a checkpoint's configuration as Python code: lists and pairs of numbers."""
    import fairseq.models  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name == "fairseq.utils" or name.startswith(("fairseq.models.", "fairseq.optim.", "fairseq.criterions.")):
            module.eval = evaluate  # type: ignore[attr-defined]  # a module's own name comes before Python's


def evaluate(text: str) -> Any:
    """Return the value of numbers, strings, lists, tuples and dictionaries, their sums and multiples: "[(512, 3)] * 4".

    Raises ValueError for anything else, and, as `eval`, TypeError for an argument that is not a string. fairseq uses
    the TypeError to find out whether an option has been evaluated.
    """
    if not isinstance(text, str):
        raise TypeError(f"the argument of evaluate must be a string, got {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(
            f"the value of an option must be a number, a string, a list or a dictionary of them, got {text!r}: {REMEDY}"
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
