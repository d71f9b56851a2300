"""Effects of importing the package: layers need only torch, and models are registered whoever comes first."""

import subprocess
import sys

REGISTERED = """
import sys
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
assert ARCH_MODEL_REGISTRY["delta_lm_wt103"] is FwpLanguageModel and "fwp_language_modeling" in TASK_REGISTRY
assert checkpoint_utils.load_checkpoint_to_cpu.patches == ("explain_other_files", "keep_saved_options")
assert len([finder for finder in sys.meta_path if type(finder).__module__ == "fairseq_fwp.registration"]) == 0
"""
WITHOUT_FAIRSEQ = """
import importlib, logging, pkgutil, sys
import fairseq_fwp.modules, fairseq_fwp.ops
for module in pkgutil.walk_packages(fairseq_fwp.modules.__path__, "fairseq_fwp.modules."):
    importlib.import_module(module.name)
assert not {"fairseq", "hydra", "omegaconf", "sklearn", "torch._dynamo"} & sys.modules.keys()
assert importlib.util.find_spec("fairseq")
import fairseq
assert logging.root.level == logging.WARNING and not logging.root.handlers
"""
FIRST = [
    "import fairseq, fairseq_fwp",
    "import fairseq_fwp; assert fairseq_fwp.tasks.streams",
    "import fairseq_fwp.models.presets",
    "import fairseq_fwp.tasks.synthetic.memory",
    "import argparse, fairseq_fwp.ops; from fairseq.utils import import_user_module; "
    "import_user_module(argparse.Namespace(user_dir=fairseq_fwp.__path__[0]))",
]


def run(preloaded, scripts):
    """Run scripts in forks of a Python that has imported packages of others, and return what they print as errors."""
    code = f"""
import os, {preloaded}
for script in {scripts!r}:
    child = os.fork()
    if not child:
        exec(script, {{"__name__": "__main__"}})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, script
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_operators_and_layers_need_no_fairseq():
    assert run("torch", [WITHOUT_FAIRSEQ + REGISTERED]) == ""


def test_models_are_registered_and_fairseq_is_patched_whatever_is_imported_first():
    said = run("torch._dynamo, hydra, sacrebleu, sklearn.metrics", [f"{first}\n{REGISTERED}" for first in FIRST])
    assert "Traceback" not in said
