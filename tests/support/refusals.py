"""The law of refusals: a command ends with one sentence that names what is wrong, and writes nothing."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_fwp.patches.messages import silence_known_warnings


def refused(main: Callable, *arguments: object, says: str, out: Path | None = None) -> str:
    """Check a refusal by a command, and return its sentence.

    says: words of it, a regular expression. out: a file or folder that must not be made.
    """
    silence_known_warnings()  # as importing the package does, before pytest sets its filters
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    misused = stopped.value.code == 2  # the last line after how the command is used
    sentence = errors.getvalue().splitlines()[-1] if misused else str(stopped.value.code)
    assert re.fullmatch(rf"fwp-[a-z-]+: {'error: ' if misused else ''}[^\n]+", sentence), sentence
    assert re.search(says, sentence), sentence
    assert out is None or not out.exists()
    return sentence
