"""fwp-harness: the tasks of EleutherAI's lm-evaluation-harness, with language models of this package.

    fwp-harness run --model fwp --model_args path=checkpoint_best.pt,dictionary=DATA --tasks lambada_openai,hellaswag

This is the harness's own command, with one more model. Its --model_args are the arguments of `interop.harness.Harness`.

Needs `pip install ".[harness]"`.
"""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

from fairseq_fwp.cli import one_sentence
from fairseq_fwp.outputs import system_reason

MISSING = 'the package {} must be installed: pip install ".[harness]"'

try:
    from lm_eval.__main__ import cli_evaluate
except ImportError as missing:
    sys.exit(f"fwp-harness: {MISSING.format(missing.name)}")


class SavingLog(logging.LoggerAdapter):
    """The log of what saves results, with the first error for which one was not saved."""

    reason: BaseException | None = None

    def warning(self, *args: object, **options: Any) -> None:  # called also where --verbosity hides it
        self.reason = self.reason or sys.exc_info()[1]
        super().warning(*args, **options)


@contextlib.contextmanager
def nothing_unsaved() -> Iterator[None]:
    """Raise OSError after results that were not saved: the harness itself only warns, and its status is 0."""
    from lm_eval.loggers import evaluation_tracker

    log = evaluation_tracker.eval_logger
    evaluation_tracker.eval_logger = saving = SavingLog(log, {})
    try:
        yield
    finally:
        evaluation_tracker.eval_logger = log
    if saving.reason is not None:
        reason = system_reason(saving.reason)
        remedy = "free some space or give another, and do not read a file there, which may be cut short"
        raise OSError(f"results in --output_path could not be saved ({reason}): {remedy}")


def main() -> None:
    with one_sentence("fwp-harness"):
        if {"-h", "--help"} & {*sys.argv}:  # of the harness itself, without the model
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:
                cli_evaluate()
            print(text.getvalue(), end="")  # argparse itself exits with 0 where its help cannot be written
            return
        try:
            from fairseq_fwp.cli.harness_model import Harness
        except ImportError as missing:
            raise ValueError(MISSING.format(missing.name)) from missing
        try:
            with nothing_unsaved():
                cli_evaluate()
        except TypeError as error:
            if Harness.__name__ not in str(error):
                raise
            expected = "the arguments of Harness, path at least, but for batch_size and device, which are flags"
            raise ValueError(f"--model_args must be {expected}: {error}") from error


if __name__ == "__main__":
    main()
