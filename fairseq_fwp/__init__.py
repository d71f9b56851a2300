"""Fast weight programmers for fairseq: `fairseq-train --user-dir fairseq_fwp --arch delta_lm_wt103 ...`.

Importing the package mends what today's torch, numpy and Python break in fairseq (`_compat`), what faults do to its
files (`_files`), how it mistakes dictionaries (`_dictionaries`) and what it says of flags that do not fit a checkpoint
(`_settings`), and registers the models, tasks and criterions.
"""

from fairseq_fwp import _compat, _dictionaries, _files, _settings

_compat.apply()
_files.apply()
_dictionaries.apply()
_settings.apply()

from fairseq_fwp import criterions, models, ops, tasks  # noqa: E402  (fairseq must be mended before it is imported further)

__version__ = "0.1.0"
__all__ = ["criterions", "models", "ops", "tasks"]
