"""Say which flags fairseq-train refuses, before any work: python recipes/train_flags.py FLAGS..."""

import contextlib
import io
import logging
import sys


def refusal(flags: list[str]) -> str | None:
    """What fairseq-train says of its flags where it refuses them, without its usage; None where it takes them."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # advises a package that is not needed
    from fairseq import options

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            options.parse_args_and_arch(options.get_training_parser(), flags)
        except SystemExit:
            return said.getvalue().splitlines()[-1].split("error: ")[-1].split(" (choose from")[0]
    return None


if __name__ == "__main__":
    if reason := refusal(sys.argv[1:]):
        sys.exit(f"run.sh: fairseq-train refuses the flags: {reason}.")
