"""Checkpoints store which dictionaries they were trained with.

With another dictionary of the same size, each number would be another word.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)
KEY = "dictionary_fingerprints"
OLD_KEY = "dictionaries"  # where HuBERT keeps its dictionaries, as a list
Original = Callable[..., Any]


def fingerprints(task: Any) -> dict[str, str]:
    """Return the size of each dictionary of a task, and a digest of its words in their order."""
    from fairseq.data import Dictionary

    found = {}
    for name, dictionary in _dictionaries(task).items():
        if isinstance(dictionary, Dictionary):
            digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()
            found[name] = f"{len(dictionary):,} words, {digest[:12]}"
    return found


def _dictionaries(task: Any) -> dict[str, Any]:
    """Return a task's dictionaries; for a multilingual task by language, since source and target depend on the pair."""
    if by_language := getattr(task, "dicts", None):
        return {f"dictionary of {language}": dictionary for language, dictionary in by_language.items()}
    found = {}
    for name in ("source_dictionary", "target_dictionary"):
        with contextlib.suppress(AttributeError, NotImplementedError):
            found[name] = getattr(task, name)
    return found


def take_fingerprints(state: dict[str, Any]) -> dict[str, str]:
    """Remove the fingerprints from a saved state and return them; {} if there are none."""
    key = KEY if KEY in state else OLD_KEY
    return state.pop(key) if isinstance(state.get(key), dict) else {}


def _saved_fingerprints(filename: str) -> dict[str, str]:
    """Return the fingerprints in a checkpoint that could not be loaded; {} if it cannot be read or has none."""
    from fairseq import checkpoint_utils

    with contextlib.suppress(Exception):
        return take_fingerprints(checkpoint_utils.load_checkpoint_to_cpu(filename)["extra_state"])
    return {}


def difference(task: Any, saved: dict[str, str]) -> str:
    """Return the error message for a model trained with other dictionaries; "" for the same or unknown ones."""
    now = fingerprints(task) if saved else {}
    different = [name for name in saved.keys() & now.keys() if saved[name] != now[name]]
    if not different:
        return ""
    name = max(different)  # the target's, if both differ
    data = getattr(task.args if task.cfg is None else task.cfg, "data", None)
    return (
        f"{data} must have the {name.replace('_', ' ')} of the model's training ({saved[name]}), got another "
        f"({now[name]}): pass the data folder of the training, or preprocess the text with the dictionary from there "
        "(fairseq-preprocess --srcdict, --tgtdict)"
    )


def save_fingerprints(state_dict: Original) -> Any:
    """fairseq does not save which words a model was trained with.

    They are saved in two places: evaluation reads one, resumed training the other.
    """

    def state_with_fingerprints(self: Any) -> Any:
        state = state_dict(self)
        for place in ("task_state", "extra_state"):
            state[place] = {**state[place], KEY: fingerprints(self.task)}
        return state

    return state_with_fingerprints


def refuse_in_evaluation(load: Original) -> Any:
    """fairseq evaluates with another dictionary of the same size: only another size is an error."""

    def load_or_refuse(self: Any, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        saved = take_fingerprints(rest)
        load(self, rest)  # it may hold the task's dictionaries
        if sentence := difference(self, saved):
            raise ValueError(sentence)

    return load_or_refuse


def refuse_at_resume(load: Original) -> Any:
    """fairseq resumes a training with another dictionary of the same size.

    With a new optimizer another training begins, which may replace words: that is a warning, not an error.
    A dictionary of another size never fits the weights. fairseq reports this as another architecture.
    """

    def load_or_refuse(self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any) -> Any:
        loaded = False
        try:
            extra_state = load(self, filename, reset_optimizer, *args, **kwargs)
            loaded = True
            sentence = difference(self.task, take_fingerprints(extra_state or {}))
        except Exception:
            sentence = difference(self.task, _saved_fingerprints(filename))
            if not sentence:
                raise
        if sentence and not reset_optimizer:
            raise ValueError(f"{filename} cannot be resumed: {sentence}, or give a new training another --save-dir")
        if not loaded:
            raise ValueError(f"{filename} cannot be loaded: {sentence}")
        if sentence:
            logger.warning("%s: %s", filename, sentence)
        return extra_state

    return load_or_refuse
