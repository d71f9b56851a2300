"""Compute the size of a model before it is trained."""

import contextlib
import io
import logging

MEGABYTE = 2**20


def describe(arguments: list[str]) -> str:
    """Return the number of parameters, the size of the state and the least memory of training, in words.

    arguments: those of fairseq-train. The memory is that of weights, gradients and Adam's two moments in float32,
    without activations. Raises RecipeError for flags that fairseq-train refuses.
    """
    from commands import RecipeError

    try:
        parameters, state, length = measure(arguments)
    except (AssertionError, ValueError, KeyError) as error:  # fairseq's errors for impossible settings
        raise RecipeError(f"the model cannot be built: {error}.") from error
    words = f"{parameters:,} parameters"
    if state is not None:
        words += f", a state of {state:,} numbers for {length:,} tokens"
    return f"{words}, at least {16 * parameters / MEGABYTE:,.0f} MB to train without activations"


def measure(arguments: list[str]) -> tuple[int, int | None, int]:
    """Return the parameters, the numbers kept of a sequence (None: the model does not count them) and its length."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(
        logging.WARNING
    )  # recommends a package that is not needed
    import torch
    from commands import RecipeError
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from flags import refusal

    if reason := refusal(arguments):
        raise RecipeError(f"fairseq-train refuses the flags: {reason}.")
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    with quiet(), torch.random.fork_rng():
        config = convert_namespace_to_omegaconf(args)
        model = tasks.setup_task(config.task).build_model(config.model)
    length = getattr(args, "tokens_per_sample", None) or 256
    count = getattr(getattr(model, "decoder", None), "state_size", None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, count(length) if count else None, length


@contextlib.contextmanager
def quiet():
    """Suppress what fairseq logs and prints while it builds a model; training prints it again."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
