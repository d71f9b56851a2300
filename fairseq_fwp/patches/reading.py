"""Checkpoints that fairseq reads: no code runs, errors name damaged files, and training options are kept."""

import errno
import logging
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fairseq_fwp.options import plain

TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # the environment variable of torch 2.6 and later
Original = Callable[..., Any]
logger = logging.getLogger(__name__)


def load_weights_only(load: Original) -> Any:
    """torch 2.4 and 2.5 run code that is pickled in a file; fairseq never asks for weights only."""

    def load_or_trust(f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is None and pickle_module is None:
            kwargs["weights_only"] = os.environ.get(TRUST, "").lower() not in ("1", "y", "yes", "true")  # torch's words
        return load(f, map_location, pickle_module, **kwargs)

    return load_or_trust


def explain_other_files(load: Original) -> Any:
    """A file that is cut short, or no checkpoint, ends in an error of the zip or pickle reader."""

    def load_or_explain(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, *args, **kwargs)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            # In a truncated zip archive, the reader seeks to places before the beginning.
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR):
                raise
            # Complete, but with objects that are not tensors.
            if untrusted := re.search(r"GLOBAL (\S+)|unrecognized|only build", str(error)):
                raise RuntimeError(
                    f"{path} holds pickled objects ({untrusted[1] or 'of unknown types'}), which could run any "
                    f"code: if you trust its source, set {TRUST}=1"
                ) from error
            size = os.path.getsize(path) if os.path.exists(path) else 0
            raise RuntimeError(
                f"{path} must be a complete checkpoint, got a truncated or different file of {size:,} bytes: copy it "
                "again, or use another checkpoint of the same folder"
            ) from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if not _holds_model(path):
                raise RuntimeError(
                    f"{path} must be a checkpoint of fairseq, got another file: give one that fairseq-train wrote, or "
                    "convert it with fwp-convert"
                ) from error
            if isinstance(error, KeyError):
                raise RuntimeError(
                    f"{path} must have everything that fairseq saves with a model, got a file without {error}: it is "
                    "damaged, or from another program; copy it again, or use another checkpoint of the same folder"
                ) from error
            raise

    return load_or_explain


def _holds_model(path: str) -> bool:
    """Return whether a file seems to be a checkpoint of fairseq."""
    try:
        found = torch.load(path, map_location="cpu")
    except Exception:  # a damaged pickle may raise anything
        return False
    return isinstance(found, dict) and "model" in found


class Saved(NamedTuple):
    """A checkpoint's path, the options of its model, and whether other options were given in evaluation."""

    path: str
    options: dict[str, Any]
    overridden: bool


def keep_saved_options(load: Original) -> Any:
    """fairseq gives a model only the weights: they also load with other options, but then compute something else."""

    def load_with_options(path: str, arg_overrides: dict[str, Any] | None = None, *args: Any, **kw: Any) -> Any:
        state = load(path, arg_overrides, *args, **kw)
        trained = load(path, None, *args, **kw) if arg_overrides else state
        options = getattr(trained.get("cfg"), "model", None)
        if options is not None and isinstance(state.get("model"), OrderedDict):
            state["model"].saved = Saved(path, plain(options), bool(arg_overrides))
        return state

    return load_with_options


def show_what_a_model_refuses(load: Original) -> Any:
    """In training, fairseq reports every loading error as a different architecture, and hides the model's message."""

    def load_or_explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except Exception as error:
            # Errors that already explain themselves may also have such a cause.
            if isinstance(error.__context__, ValueError) and not isinstance(error, ValueError):
                raise error.__context__ from None
            raise

    return load_or_explain


def add_no_projection(upgrade: Original) -> Any:
    """fairseq adds shared output vectors to checkpoints of models that have an adaptive softmax instead."""

    def upgrade_without_projection(self: Any, state_dict: dict[str, Any], name: str) -> Any:
        upgrade(self, state_dict, name)
        if self.output_projection is None:
            state_dict.pop(f"{name}.output_projection.weight", None)
        return state_dict

    return upgrade_without_projection


def end_what_is_finished(load: Original) -> Any:
    """fairseq looks at the limits of a training only after an update: a finished one trains on when started again."""

    def load_or_end(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        from fairseq_cli.train import should_stop_early

        extra_state, batches = load(cfg, trainer, **kwargs)
        if not trainer.get_num_updates():  # a new training from the weights of another one, whose hours do not count
            trainer._previous_training_time = 0
        limits, hours = trainer.cfg.optimization, trainer._previous_training_time / 3600
        without_progress = vars(should_stop_early).get("num_runs", 0)
        for flag, reached, limit in (
            ("--max-update", trainer.get_num_updates(), limits.max_update),
            ("--max-epoch", batches.next_epoch_idx - 1, limits.max_epoch),
            ("--stop-time-hours", hours, limits.stop_time_hours),
            ("--patience", without_progress, cfg.patience),
        ):
            if 0 < (limit or 0) <= reached:
                logger.info(f"training is finished with {flag} {limit}, nothing is changed: a larger value trains on")
                return extra_state, SimpleNamespace(next_epoch_idx=math.nan)  # no epoch, so that none begins
        return extra_state, batches

    return load_or_end


def step_after_validation(load: Original) -> Any:
    """fairseq saves before --lr-scheduler reduce_lr_on_plateau changes the rate, and a resumed run lacks the change."""

    def load_and_step(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        extra_state, batches = load(cfg, trainer, **kwargs)
        if extra_state is not None and trainer.get_num_updates() and not cfg.reset_lr_scheduler:
            ended = extra_state["train_iterator"].get("iterations_in_epoch") == 0
            if ended and extra_state.get("val_loss") is not None:
                trainer.lr_step(extra_state["train_iterator"]["epoch"] - 1, extra_state["val_loss"])
        return extra_state, batches

    return load_and_step
