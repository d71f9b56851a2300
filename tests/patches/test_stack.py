"""Parts of fairseq that today's packages break: blocks of one token, checkpoints, Huffman codes, old dictionaries."""

import argparse
import importlib
import importlib.util
import io
import pickle
import sys
import warnings
from pathlib import Path

import fairseq
import numpy as np
import pytest
import torch
from fairseq import utils
from fairseq.data import TokenBlockDataset
from fairseq.data.huffman import HuffmanCodeBuilder
from fairseq.data.legacy import BertDictionary, MaskedLMDictionary
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf
from support.pairwise import looped

import fairseq_fwp
from fairseq_fwp.patches.checkpoints import show_what_a_model_refuses
from fairseq_fwp.patches.messages import silence_known_warnings


@pytest.mark.filterwarnings("error")
def test_blocks_of_one_token():
    text = [torch.tensor([5]), torch.tensor([6, 7])]
    blocks = TokenBlockDataset(text, [1, 2], 1, pad=1, eos=2, include_targets=True)
    assert [part.tolist() for part in blocks[0]] == [[2], [5], [1, 2]]


def test_the_set_up_leaves_no_broken_package():
    """fairseq's extensions, built by recipes/setup.sh; a broken torchaudio would break `import transformers`, too."""
    names = ("fairseq.libbase", "fairseq.libnat", "alignment_train_cpu_binding")
    libbase, libnat, alignment = map(importlib.import_module, names)
    assert libnat.compute_ed2([[1, 2, 3], [4]], [[1, 3], [4]]) == [1, 0]
    assert libbase.balanced_assignment(torch.tensor([[3.0, 1], [2, 0], [0, 5], [1, 4]])).tolist() == [0, 1, 2, 3]
    aligned = torch.zeros(1, 1, 2)
    alignment.alignment_train_cpu(torch.full((1, 1, 2), 0.5), aligned, 1e-6)
    assert aligned.tolist() == [[[0.5, 0.25]]]
    if importlib.util.find_spec("torchaudio"):
        importlib.import_module("torchaudio")


def test_a_plugin_is_the_same_by_any_path(tmp_path, monkeypatch):
    """This package by a link, by its name next to fairseq, and another plug-in; a second of that name is refused."""
    package = Path(fairseq_fwp.__file__).parent
    (tmp_path / "links").mkdir()
    (tmp_path / "links/fairseq_fwp").symlink_to(package)
    (tmp_path / "a_plugin").mkdir()
    (tmp_path / "a_plugin/__init__.py").touch()
    (tmp_path / "links/a_plugin").symlink_to(tmp_path / "a_plugin")
    (tmp_path / "other/a_plugin").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(fairseq, "__path__", [str(tmp_path / "links/fairseq")])
    monkeypatch.chdir(tmp_path)
    for user_dir in ("links/fairseq_fwp", "fairseq_fwp", str(package), "a_plugin", "links/a_plugin/", None):
        utils.import_user_module(argparse.Namespace(user_dir=user_dir))
    assert sys.modules["a_plugin"].__path__ == [str(tmp_path / "a_plugin")]
    with pytest.raises(ImportError, match="not globally unique"):
        utils.import_user_module(argparse.Namespace(user_dir="other/a_plugin"))
    del sys.modules["a_plugin"]


def test_numpy_compat():
    assert np.compat.long is int


def load(value, **options):
    """Save and load a value as in a checkpoint."""
    file = io.BytesIO()
    torch.save({"value": value}, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=True)["value"]


@looped("value", [argparse.Namespace(arch="x"), OmegaConf.create({"a": {"b": [1, 0.5, "c", True, None]}})])
def test_checkpoint_types_load(value):
    assert load(value) == value


@looped("value", [np.float64(27.7), np.float32(0.5), np.int64(3), np.array([12, 7, 4, 2]), np.array([1.5])])
def test_numbers_of_numpy_load_and_no_other_objects(value):
    """They are in checkpoints of `--eval-bleu --best-checkpoint-metric bleu`."""
    loaded = load(value, pickle_protocol=2)
    assert type(loaded) is type(value) and loaded.dtype == value.dtype and np.array_equal(loaded, value)
    with pytest.raises(pickle.UnpicklingError):
        load(np.array([print], dtype=object))


@looped("bf16, expected", [(True, False), (False, True)])
def test_bf16_is_not_taken_for_a_tpu(monkeypatch, bf16, expected):
    alone = {"distributed_init_method": None, "distributed_world_size": 1, "ddp_backend": "legacy_ddp", "tpu": True}
    config = OmegaConf.create({"common": {"tpu": True, "bf16": bf16}, "distributed_training": alone})
    seen = []
    monkeypatch.setattr(distributed_utils, "infer_init_method", lambda *_: None)
    distributed_utils.call_main(config, lambda cfg: seen.append((cfg.common.tpu, cfg.distributed_training.tpu)))
    assert seen == [(expected, expected)]


def test_huffman_codes():
    builder, words = HuffmanCodeBuilder(), ["a", "b", "a", "c", "a"]
    builder.add_symbols(*words)
    coder = builder.build_code()
    assert [node.symbol for node in coder.decode(coder.encode(words))] == words


@looped("kind", [MaskedLMDictionary, BertDictionary])
def test_dictionaries_of_masked_models(kind, tmp_path):
    dictionary = kind()
    dictionary.add_symbol("word", 3)
    dictionary.save(str(tmp_path / "dict.txt"))
    loaded = kind.load(str(tmp_path / "dict.txt"))
    assert loaded.symbols == dictionary.symbols and loaded.count[loaded.index("word")] == 3


# Messages that hide more important ones.


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
