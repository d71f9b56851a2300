"""What patches ask of other parts of a program, and what these may ask of them: types, and what is saved with a model.

An epoch iterator may have states that a checkpoint must hold, and a name for its division into batches. Weights know
the options of their training, and checkpoints the dictionaries.
"""

import contextlib
import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fairseq_fwp.patches.options import plain

KEY = "dictionary_fingerprints"
OLD_KEY = "dictionaries"  # where HuBERT keeps its dictionaries, as a list


@runtime_checkable
class SavesStates(Protocol):
    """An epoch iterator with a state in each process."""

    def collect_states(self, group: Any) -> None:
        """Send the states to the first process, which saves them; every process of the group calls it."""


@runtime_checkable
class Divided(Protocol):
    """An epoch iterator that checks itself whether it is divided as before; others have a digest of their batches.

    division: what it calls its parts.
    """

    division: str


class Saved(NamedTuple):
    """A checkpoint's path, the options of its model, and whether other options were given in evaluation."""

    path: str
    options: dict[str, Any]
    overridden: bool


def remember_options(state: dict[str, Any], cfg: Any, path: str, overridden: bool = False) -> None:
    """Attach the options of the training to the weights of a checkpoint, where the model's loading looks for them."""
    options = getattr(cfg, "model", None)
    if options is not None and isinstance(state.get("model"), OrderedDict):
        state["model"].saved = Saved(path, plain(options), overridden)


def fingerprints(task: Any) -> dict[str, str]:
    """Return the size of each dictionary of a task, of a multilingual one by language, and a digest of its words."""
    from fairseq.data import Dictionary

    dictionaries = {
        f"dictionary of {language}": found for language, found in (getattr(task, "dicts", None) or {}).items()
    }
    for name in () if dictionaries else ("source_dictionary", "target_dictionary"):
        with contextlib.suppress(AttributeError, NotImplementedError):
            dictionaries[name] = getattr(task, name)
    digests = {}
    for name, dictionary in dictionaries.items():
        if isinstance(dictionary, Dictionary):
            digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()
            digests[name] = f"{len(dictionary):,} words, {digest[:12]}"
    return digests


def take_fingerprints(state: dict[str, Any]) -> dict[str, str]:
    """Remove the fingerprints from a saved state and return them; {} if there are none."""
    key = KEY if KEY in state else OLD_KEY
    return state.pop(key) if isinstance(state.get(key), dict) else {}


def other_words(task: Any, saved: dict[str, str]) -> str:
    """Return which dictionary of the training differs from the task's, and how; "" for the same or unknown ones."""
    now = fingerprints(task) if saved else {}
    different = [name for name in saved.keys() & now.keys() if saved[name] != now[name]]
    if not different:
        return ""
    name = max(different)  # the target's, if both differ
    return f"the {name.replace('_', ' ')} of the model's training ({saved[name]}), got another ({now[name]})"
