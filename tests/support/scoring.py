"""The loss of a binarised text by fwp-eval-lm and by fairseq-eval-lm, in this process."""

import json
from pathlib import Path
from typing import Any

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm as fairseq_eval_lm

from fairseq_fwp.cli import eval_lm


def evaluate(folder: Path, *arguments: object, data: str = "data", path: str = "delta.pt") -> dict[str, Any]:
    """Return the JSON of fwp-eval-lm for data and a checkpoint in a folder."""
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    eval_lm.main([*map(str, [folder / data, "--path", folder / path, "--cpu", "--json", out, *arguments])])
    return json.loads(out.read_text())


def fairseqs_bits(data: Path, path: Path, *arguments: object) -> float:
    """Return the loss (base 2) of fairseq-eval-lm."""
    given = [data, "--path", path, "--cpu", "--gen-subset", "test", "--batch-size", 3, "--log-format", "none"]
    words = [*map(str, [*given, "--num-workers", 0, *arguments])]
    args = options.parse_args_and_arch(options.get_eval_lm_parser(), input_args=words)
    return float(fairseq_eval_lm.main(convert_namespace_to_omegaconf(args))["loss"])
