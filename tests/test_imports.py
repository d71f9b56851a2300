"""What is imported when: a start takes no time for what is not used."""

import importlib.metadata
import subprocess
import sys

import pytest

from fairseq_fwp.cli import eval_lm
from fairseq_fwp.evaluation.dynamic import KINDS
from fairseq_fwp.modules.decoding import STARTS

COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
COMMANDS = {
    entry.name: entry.value
    for entry in importlib.metadata.entry_points(group="console_scripts")
    if entry.value.startswith("fairseq_fwp.")
}
# They print the flags of models, which only fairseq can list.
WITH_FAIRSEQ = {"fwp-convert", "fwp-linearize"}
HELP = """
import sys
from importlib import import_module
module, function = sys.argv.pop(1).split(":")
try:
    getattr(import_module(module), function)()
except SystemExit as end:
    assert not end.code, end.code
"""
FIRST_CALLS = """
import sys, torch
from fairseq_fwp import ops
from fairseq_fwp.ops.convolution import causal_conv1d
x, gate = torch.rand(1, 2, 5, 4, requires_grad=True), torch.rand(1, 2, 5)
ops.delta_rule(x, x, x, gate)[0].sum().backward()
causal_conv1d(x[0], torch.rand(4, 3)).sum().backward()
ops.fwm_rule(x, x, x, gate)
"""
MODULES = "print('\\n', *sorted(sys.modules), sep='\\n')"


def imported(script, *words):
    """Return the modules that a script leaves in a new Python."""
    done = subprocess.run([sys.executable, "-c", script + MODULES, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split("\n\n")[-1].split()}


def of_packages(modules, *packages):
    return sorted(name for name in modules if name.startswith(packages))


def test_first_calls_of_operators_import_no_compiler():
    """With a kernel, also backward, and without one. Without, the backward pass is by torch.func, which imports it."""
    assert of_packages(imported(FIRST_CALLS), *COMPILER) == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_only_what_it_prints(command):
    modules = imported(HELP, COMMANDS[command], "--help")
    assert of_packages(modules, *COMPILER, "sklearn", "scipy.stats", "pandas") == []
    assert "fairseq_fwp.cli" in modules
    assert (command in WITH_FAIRSEQ) == ("fairseq.models" in modules) == ("torch" in modules)


def test_choices_that_help_repeats_are_those_of_the_library():
    choices = {action.dest: action.choices for action in eval_lm.parser()._actions}
    assert choices["dynamic"] == list(KINDS) and choices["line_start"] == list(STARTS)


RARE = """
import importlib.util, sys, fairseq_fwp, fairseq
assert not {"sklearn", "sklearn.metrics", "scipy.stats"} & sys.modules.keys()
from fairseq.criterions import sentence_prediction
from fairseq.tasks import audio_classification
assert sentence_prediction.f1_score([0, 1, 1], [0, 1, 0]) == 2 / 3
assert sentence_prediction.pearsonr([1, 2, 3], [2, 4, 6])[0] > 0.999
assert list(audio_classification.sklearn_metrics.roc_curve([0, 1], [0.1, 0.9])[0]) == [0, 0, 1]
import scipy.stats, sklearn.metrics
assert scipy.stats.__file__ and sklearn.metrics.__file__ and importlib.util.find_spec("sklearn").origin
"""


def test_packages_of_rare_tasks_are_imported_when_they_are_used():
    assert "sklearn.metrics" in imported(RARE)
