"""Messages that bury others."""

import logging
import subprocess
import sys
import warnings

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


def test_debugging_messages_of_libraries_are_hidden():
    code = "import fairseq_cli.train, logging; logging.root.setLevel(10); import fairseq_fwp; print(logging.root.level)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(logging.INFO)
