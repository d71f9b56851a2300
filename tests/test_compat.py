"""Every mend of fairseq: what breaks without it works with it, and a second call changes nothing."""

import argparse
import io
import logging
import pickle
import warnings

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, trainer
from fairseq.data import TokenBlockDataset, data_utils, indexed_dataset, token_block_dataset
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.modules import AdaptiveInput
from fairseq.search import DiverseBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf

from fairseq_fwp import _compat, _dictionaries, _files, _log, _settings

MENDED = [
    (data_utils, "batch_by_size"),
    (FairseqTask, "get_batch_iterator"),
    (token_block_dataset, "best_fitting_int_dtype"),
    (distributed_utils, "call_main"),
    (distributed_utils, "infer_init_method"),
    (AdaptiveInput, "__init__"),
    (trainer, "_catalog_shared_params"),
    (checkpoint_utils, "load_checkpoint_to_cpu"),
    (checkpoint_utils, "save_checkpoint"),
    (checkpoint_utils, "load_checkpoint"),
    (LanguageModelingTask, "setup_dictionary"),
    (LanguageModelingTask, "eval_lm_dataloader"),
    (DiverseBeamSearch, "step"),
    (checkpoint_utils, "torch_persistent_save"),
    (checkpoint_utils, "verify_checkpoint_directory"),
    (PathManager, "copy"),
    (trainer.Trainer, "state_dict"),
    (trainer.Trainer, "load_checkpoint"),
    (FairseqTask, "load_state_dict"),
    (indexed_dataset, "make_dataset"),
    (indexed_dataset.MMapIndexedDataset, "__del__"),
]


def test_a_second_call_changes_nothing():
    before = [getattr(owner, name) for owner, name in MENDED]
    assert all(function.mended_by for function in before)
    _compat.apply()
    _files.apply()
    _dictionaries.apply()
    _settings.apply()
    filters = logging.getLogger("fairseq_cli.train").filters[:]
    _log.apply()
    assert filters and logging.getLogger("fairseq_cli.train").filters == filters
    assert [getattr(owner, name) for owner, name in MENDED] == before


@pytest.mark.filterwarnings("error")
def test_blocks_of_one_token():
    text = [torch.tensor([5]), torch.tensor([6, 7])]
    blocks = TokenBlockDataset(text, [1, 2], 1, pad=1, eos=2, include_targets=True)
    assert [part.tolist() for part in blocks[0]] == [[2], [5], [1, 2]]


def test_numpy_compat():
    assert np.compat.long is int


@pytest.mark.parametrize(
    "value", [argparse.Namespace(arch="x"), OmegaConf.create({"a": {"b": [1, 0.5, "c", True, None]}})], ids=type
)
def test_checkpoint_types_load(value):
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["value"] == value


@pytest.mark.parametrize(
    "value", [np.float64(27.7), np.float32(0.5), np.int64(3), np.array([12, 7, 4, 2]), np.array([1.5])], ids=repr
)
def test_numbers_of_numpy_load(value):
    """Those that `--eval-bleu --best-checkpoint-metric bleu` leaves in a checkpoint."""
    file = io.BytesIO()
    torch.save({"best": value}, file, pickle_protocol=2)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["best"]
    assert type(loaded) is type(value) and loaded.dtype == value.dtype and np.array_equal(loaded, value)


def test_other_objects_of_numpy_do_not_load():
    file = io.BytesIO()
    torch.save({"best": np.array([print], dtype=object)}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 16, 60])
def test_every_index_is_in_one_batch(multiple, count):
    sizes = np.random.randint(1, 9, count)
    for arguments in ({"max_sentences": 8}, {"max_tokens": 50}):
        batches = data_utils.batch_by_size(
            np.arange(count), lambda index: sizes[index], required_batch_size_multiple=multiple, **arguments
        )
        assert [index for batch in batches for index in batch] == list(range(count))


@pytest.mark.parametrize("bf16, expected", [(True, False), (False, True)])
def test_bf16_is_not_taken_for_a_tpu(monkeypatch, bf16, expected):
    config = OmegaConf.create(
        {
            "common": {"tpu": True, "bf16": bf16},
            "distributed_training": {
                "distributed_init_method": None, "distributed_world_size": 1, "ddp_backend": "legacy_ddp",
            },
        }
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(distributed_utils, "infer_init_method", lambda *_: None)
    distributed_utils.call_main(config, lambda cfg: seen.append(cfg.common.tpu))
    assert seen == [expected]


def test_layers_without_bias_share_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    assert trainer._catalog_shared_params(model) == []
    model[1].weight = model[0].weight
    assert trainer._catalog_shared_params(model) == [["0.weight", "1.weight"]]


def test_only_known_warnings_are_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _compat.silence_known_warnings()
        warnings.warn("hydra.experimental.compose() is no longer experimental. Use hydra.compose()", stacklevel=1)
        warnings.warn("\nThe strict flag in the compose API is deprecated.\nSee https://hydra.cc", stacklevel=1)
        assert not caught
        warnings.warn("something about hydra.experimental", stacklevel=1)
        warnings.warn("The strict flag in the compose API is deprecated", FutureWarning, stacklevel=1)
        assert len(caught) == 2


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut short"])
def test_a_damaged_checkpoint_is_named_with_its_size(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"checkpoint.pt \({len(content)} bytes\) is not a complete checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
