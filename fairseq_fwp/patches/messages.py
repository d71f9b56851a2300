"""Messages of fairseq that its users cannot act on."""

import logging
import os
import sys
import warnings
from operator import attrgetter
from typing import Any

from fairseq_fwp.patches.patch import patch

# Warnings of fairseq's own imports and calls, which users of this plugin cannot act on.
KNOWN_WARNINGS = (
    (r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", UserWarning),
    (r"\s*'config' is validated against ConfigStore schema with the same name", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning),
    (r"\s*The version_base parameter is not specified", UserWarning),
    (r"`torch\.cuda\.amp\.(custom_fwd|custom_bwd|autocast|GradScaler)\(.*\)` is deprecated", FutureWarning),
    (r"`torch\.jit\.script` is deprecated", FutureWarning),
    (r"invalid escape sequence '\\d'|\"\\d\" is an invalid escape sequence", SyntaxWarning),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning),
)


@patch("warnings.filters", since="torch 2.4, hydra 1.1")
def silence_known_warnings() -> None:
    """Hide warnings of fairseq's own imports and calls at each start, and that a speech task lacks tensorboardX."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


@patch("fairseq.trainer._catalog_shared_params")
def name_shared_weights(find_shared, module, *args):
    """Leave out biases that layers do not have: fairseq's trainer logs each of them as one shared parameter."""
    shared = find_shared(module, *args)
    return shared and [names for names in shared if attrgetter(names[0])(module) is not None]


@patch("fairseq.distributed.utils.call_main")
def stop_without_log(call_main, cfg, main, **kwargs):
    """Stop where no log can be written, on a full disk or after `| head`: fairseq goes on, with a traceback a line."""
    logging.StreamHandler.handleError = _stop  # type: ignore[assignment]
    return call_main(cfg, main, **kwargs)


def _stop(handler: Any, record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    if not isinstance(error, OSError):
        logging.Handler.handleError(handler, record)
        return
    if not isinstance(handler, logging.FileHandler):
        os.dup2(os.open(os.devnull, os.O_WRONLY), handler.stream.fileno())  # or Python tries once more at its end
    remedy = "free some space, or keep its reader open, and run the same command to resume"
    raise OSError(f"the log cannot be written to {handler.stream.name} ({error.strerror}): {remedy}") from None


@patch("logging.root.level")
def hide_debugging() -> None:
    """Undo the level DEBUG of the root logger, which a model of fairseq sets when it is imported."""
    if "fairseq_cli" in sys.modules and logging.root.level == logging.DEBUG:
        logging.root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
