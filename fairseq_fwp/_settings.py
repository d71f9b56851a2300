"""What a checkpoint was trained with goes to the model along with its weights: `TrainedModel` compares."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq_fwp._compat import replace
from fairseq_fwp._options import plain


class Saved(NamedTuple):
    """Of a checkpoint: where it lies, the options of its model, and whether others were asked for in evaluation."""

    path: str
    options: dict[str, Any]
    overridden: bool


def apply() -> None:
    """Run every patch; a second call changes nothing."""
    keep_saved_options()
    show_what_a_model_refuses()


def keep_saved_options() -> None:
    """fairseq gives a model weights alone: with other options they are loaded all the same, into another function."""
    from fairseq import checkpoint_utils

    def patch(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_with_options(path: str, arg_overrides: dict[str, Any] | None = None, *args: Any, **kw: Any) -> Any:
            state = load(path, arg_overrides, *args, **kw)
            trained = load(path, None, *args, **kw) if arg_overrides else state
            options = getattr(trained.get("cfg"), "model", None)
            if options is not None and isinstance(state.get("model"), OrderedDict):
                state["model"].saved = Saved(path, plain(options), bool(arg_overrides))
            return state

        return load_with_options

    replace(checkpoint_utils, "load_checkpoint_to_cpu", patch)


def show_what_a_model_refuses() -> None:
    """In training fairseq says of every error that the architectures do not match, and not what the model says."""
    from fairseq import checkpoint_utils

    def patch(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_or_explain(*args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            except Exception as error:
                if isinstance(error.__context__, ValueError):
                    raise error.__context__ from None
                raise

        return load_or_explain

    replace(checkpoint_utils, "load_checkpoint", patch)
