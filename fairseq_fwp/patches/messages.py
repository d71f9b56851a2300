"""Messages that a user of fairseq can do nothing about."""

import logging
import os
import sys
import warnings

# Warnings of fairseq's own imports and calls that a user of this plugin can do nothing about.
KNOWN_WARNINGS = (
    (r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", UserWarning),
    (r"\s*'config' is validated against ConfigStore schema with the same name", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning),
    (r"\s*The version_base parameter is not specified", UserWarning),
    (r"`torch\.cuda\.amp\.(custom_fwd|custom_bwd|autocast|GradScaler)\(.*\)` is deprecated", FutureWarning),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning),
)


def silence_known_warnings() -> None:
    """fairseq's own imports and calls warn of themselves at each start, and a speech task of tensorboardX."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


def hide_debugging() -> None:
    """A model of fairseq's sets the root logger to DEBUG when it is imported, before most commands set it."""
    if "fairseq_cli" in sys.modules and logging.root.level == logging.DEBUG:
        logging.root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
