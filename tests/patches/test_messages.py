"""Messages that hide more important ones."""

import warnings

import pytest

from fairseq_fwp.patches.checkpoints import show_what_a_model_refuses
from fairseq_fwp.patches.messages import silence_known_warnings


def test_only_known_warnings_are_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_known_warnings()
        warnings.warn("hydra.experimental.compose() is no longer experimental. Use hydra.compose()", stacklevel=1)
        warnings.warn("\nThe strict flag in the compose API is deprecated.\nSee https://hydra.cc", stacklevel=1)
        assert not caught
        warnings.warn("something about hydra.experimental", stacklevel=1)
        warnings.warn("The strict flag in the compose API is deprecated", FutureWarning, stacklevel=1)
        assert len(caught) == 2


def test_an_error_that_says_what_is_wrong_is_not_replaced_by_its_cause():
    """Only fairseq's own error is replaced by the reason that a model gives."""

    def load(kind):
        try:
            raise ValueError("the model says why")
        except ValueError as error:
            raise kind("what is reported") from error

    for kind, said in ((Exception, "the model says why"), (ValueError, "what is reported")):
        with pytest.raises(ValueError, match=said):
            show_what_a_model_refuses(load, kind)
