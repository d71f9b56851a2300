"""Patches that fairseq 0.12 needs today, for any of its models: one table, and one file for each topic.

A patch is here if fairseq does not work without it on today's Python, numpy and torch. It is also here if data or
checkpoints would be lost or silently wrong, or code would run from a file. It replaces one attribute of one fairseq
module, never a file.

    python -m fairseq_fwp.patches        prints the table of docs/fairseq_on_current_python.md
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq_fwp.patches import (
    batches,
    configuration,
    data,
    dictionaries,
    generation,
    legacy,
    messages,
    processes,
    reading,
    stack,
    training,
    writing,
)


class Patch(NamedTuple):
    """A patch of fairseq, unless another package is named.

    symbol: the attribute that patch(old value) replaces, or the subject of a patch without arguments;
    since: the version that made it necessary; test: the test that fails without it. The reason is its docstring.
    """

    symbol: str
    patch: Callable[..., Any]
    since: str
    test: str

    @property
    def reason(self) -> str:
        """The first paragraph of its docstring, in one line."""
        return " ".join((inspect.getdoc(self.patch) or "").split("\n\n")[0].split())


FAIRSEQ = "fairseq 0.12"
INDEXED = "fairseq.data.indexed_dataset.MMapIndexedDataset"
PATCHES = (
    Patch("numpy.compat", stack.restore_numpy_compat, "numpy 2.0", "tests/patches/test_stack.py::test_numpy_compat"),
    Patch(
        "torch.serialization",
        stack.allow_checkpoint_types,
        "torch 2.6",
        "tests/patches/test_stack.py::test_checkpoint_types_load",
    ),
    Patch(
        "fairseq.data.token_block_dataset.best_fitting_int_dtype",
        stack.count_below_zero,
        "numpy 2.0",
        "tests/patches/test_stack.py::test_blocks_of_one_token",
    ),
    Patch(
        "fairseq.distributed.utils.call_main",
        stack.forget_tpu,
        FAIRSEQ,
        "tests/patches/test_stack.py::test_bf16_is_not_taken_for_a_tpu",
    ),
    Patch(
        "bitarray.util.rindex",
        legacy.restore_rindex,
        "bitarray 3.0",
        "tests/patches/test_legacy.py::test_huffman_codes",
    ),
    Patch(
        "fairseq.data.legacy.masked_lm_dictionary.MaskedLMDictionary.load",
        legacy.load_masked_dictionary,
        "fairseq 0.12.3",
        "tests/patches/test_legacy.py::test_dictionaries_of_masked_models",
    ),
    Patch(
        "fairseq.models.hubert.hubert_asr.HubertEncoder.__init__",
        legacy.give_hubert_its_option,
        "fairseq 0.12.3",
        "tests/patches/test_stock_models.py::test_hubert_is_fine_tuned",
    ),
    Patch(
        "fairseq.utils.get_activation_fn",
        legacy.name_the_linear_activation,
        FAIRSEQ,
        "tests/models/test_language_model.py::test_a_pickled_model_is_the_same",
    ),
    Patch(
        "fairseq.search.DiverseBeamSearch.step",
        *(
            stack.count_diverse_beams_by_batch,
            FAIRSEQ,
            "tests/test_translation_commands.py::test_every_sentence_is_translated",
        ),
    ),
    Patch(
        "fairseq.data.data_utils.batch_by_size",
        batches.keep_last_batch,
        FAIRSEQ,
        "tests/patches/test_batches.py::test_every_index_is_in_one_batch",
    ),
    Patch(
        "fairseq.tasks.FairseqTask.get_batch_iterator",
        batches.keep_batches_of_first_epoch,
        FAIRSEQ,
        "tests/nightly/faults/test_resumed_batches.py::test_the_rest_of_an_epoch_and_the_next",
    ),
    Patch(
        "fairseq.tasks.language_modeling.LanguageModelingTask.eval_lm_dataloader",
        *(
            batches.refuse_unscored_tokens,
            FAIRSEQ,
            "tests/test_commands.py::test_text_longer_than_the_model_is_refused",
        ),
    ),
    Patch(
        "fairseq.sequence_scorer.SequenceScorer.generate",
        batches.refuse_impossible_tokens,
        FAIRSEQ,
        "tests/cli/test_eval_lm.py::test_an_impossible_token_is_named",
    ),
    Patch(
        "fairseq.data.lm_context_window_dataset.LMContextWindowDataset.collater",
        batches.read_context_from_the_text,
        FAIRSEQ,
        "tests/patches/test_batches.py::test_a_context_is_that_of_the_text",
    ),
    Patch(
        "fairseq.data.iterators.EpochBatchIterator.__init__",
        batches.copy_data_in_each_epoch,
        FAIRSEQ,
        "tests/tasks/test_sequence_problems.py::test_workers_make_the_samples_of_each_epoch",
    ),
    Patch(
        "fairseq.tasks.language_modeling.LanguageModelingTask.inference_step",
        generation.separate_prompts,
        FAIRSEQ,
        "tests/patches/test_generation.py::test_a_prompt_does_not_depend_on_its_batch",
    ),
    Patch(
        "fairseq.sequence_generator.SequenceGenerator._prefix_tokens",
        generation.forbid_in_each_sentence,
        FAIRSEQ,
        "tests/patches/test_generation.py::test_a_prompt_does_not_depend_on_its_batch",
    ),
    Patch(
        "fairseq.models.BaseFairseqModel.make_generation_fast_",
        generation.return_the_model,
        FAIRSEQ,
        "tests/patches/test_generation.py::test_a_model_prepared_for_inference_is_evaluated",
    ),
    Patch(
        "fairseq.distributed.utils.infer_init_method",
        processes.join_launched_processes,
        FAIRSEQ,
        "tests/nightly/faults/test_launchers.py::test_processes_of_torchrun_find_each_other",
    ),
    Patch(
        "fairseq.checkpoint_utils.save_checkpoint",
        processes.save_for_every_process,
        FAIRSEQ,
        "tests/nightly/faults/test_many_processes.py::test_states_in_mid_epoch_are_of_their_number_of_processes",
    ),
    Patch(
        "torch.load",
        reading.load_weights_only,
        "torch 2.4",
        "tests/nightly/faults/test_security.py::test_they_are_refused_where_torch_would_run_them",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
        reading.explain_other_files,
        FAIRSEQ,
        "tests/patches/test_reading.py::test_a_damaged_checkpoint_is_named_with_its_size",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
        reading.keep_saved_options,
        FAIRSEQ,
        "tests/test_translation_commands.py::test_weights_that_compute_something_else_are_told_of",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint",
        reading.show_what_a_model_refuses,
        FAIRSEQ,
        "tests/test_translation_commands.py::test_flags_that_a_checkpoint_does_not_fit_are_named",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint",
        reading.step_after_validation,
        FAIRSEQ,
        "tests/nightly/faults/test_kill_and_resume.py::test_a_finished_training_changes_nothing",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint",
        training.load_patience,
        FAIRSEQ,
        "tests/patches/test_training.py::test_a_resumed_training_counts_its_patience",
    ),
    Patch(
        "fairseq.trainer.Trainer.save_checkpoint",
        training.save_patience,
        FAIRSEQ,
        "tests/patches/test_training.py::test_a_resumed_training_counts_its_patience",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint",
        reading.end_what_is_finished,
        FAIRSEQ,
        "tests/nightly/faults/test_kill_and_resume.py::test_a_finished_training_changes_nothing",
    ),
    Patch(
        "fairseq.checkpoint_utils.torch_persistent_save",
        writing.save_whole,
        FAIRSEQ,
        "tests/nightly/faults/test_damaged_files.py::test_a_disk_that_is_full",
    ),
    Patch(
        "fairseq.file_io.PathManager.copy",
        writing.copy_whole,
        FAIRSEQ,
        "tests/nightly/faults/test_damaged_files.py::test_a_copy_on_a_full_disk_leaves_the_old_file",
    ),
    Patch(
        "fairseq.distributed.utils.call_main",
        writing.make_folder_of_log,
        FAIRSEQ,
        "tests/test_commands.py::trained",
    ),
    Patch(
        "fairseq.data.indexed_dataset.make_dataset",
        data.refuse_damaged_data,
        FAIRSEQ,
        "tests/nightly/faults/test_damaged_files.py::test_texts",
    ),
    Patch(
        "fairseq.data.Dictionary.encode_line",
        data.refuse_padding_in_text,
        FAIRSEQ,
        "tests/cli/test_eval_lm.py::test_padding_in_a_text_is_refused",
    ),
    Patch(
        f"{INDEXED}.__del__",
        data.close_what_is_open,
        FAIRSEQ,
        "tests/nightly/faults/test_damaged_files.py::test_texts",
    ),
    Patch(
        f"{INDEXED}.Index.__del__",
        data.close_what_is_open,
        FAIRSEQ,
        "tests/nightly/faults/test_damaged_files.py::test_texts",
    ),
    Patch(
        "fairseq.*.eval",
        configuration.evaluate_data_alone,
        FAIRSEQ,
        "tests/nightly/faults/test_security.py::test_a_configuration_is_no_code",
    ),
    Patch(
        "fairseq.data.fasta_dataset.FastaDataset._build_index",
        configuration.quote_path,
        FAIRSEQ,
        "tests/nightly/faults/test_security.py::test_the_name_of_a_text_is_no_command",
    ),
    Patch(
        "torch.hub.load",
        configuration.ask_before_code_of_hub,
        "torch 2.4",
        "tests/nightly/faults/test_security.py::test_a_data_folder_gets_no_code_of_a_repository",
    ),
    Patch(
        "fairseq.file_utils.tarfile",
        configuration.unpack_inside,
        FAIRSEQ,
        "tests/nightly/faults/test_security.py::test_a_model_is_unpacked_inside_its_folder",
    ),
    Patch(
        "fairseq.trainer.Trainer.state_dict",
        dictionaries.save_fingerprints,
        FAIRSEQ,
        "tests/nightly/faults/test_dictionaries.py::test_what_a_fingerprint_tells_apart",
    ),
    Patch(
        "fairseq.tasks.FairseqTask.load_state_dict",
        dictionaries.refuse_in_evaluation,
        FAIRSEQ,
        "tests/nightly/faults/test_dictionaries.py::test_nothing_is_evaluated_with_other_words",
    ),
    Patch(
        "fairseq.trainer.Trainer.load_checkpoint",
        dictionaries.refuse_at_resume,
        FAIRSEQ,
        "tests/nightly/faults/test_dictionaries.py::test_a_training_does_not_go_on_with_other_words",
    ),
    Patch(
        "fairseq.trainer.Trainer.load_checkpoint",
        training.average_from_loaded_weights,
        FAIRSEQ,
        "tests/patches/test_training.py::test_an_average_starts_from_the_weights_of_a_checkpoint",
    ),
    Patch(
        "fairseq.models.ema.ema.EMA._step_internal",
        training.average_each_tensor_once,
        FAIRSEQ,
        "tests/patches/test_training.py::test_averages_of_a_training",
    ),
    Patch(
        "fairseq.optim.lr_scheduler.reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule.state_dict",
        training.save_bad_epochs,
        FAIRSEQ,
        "tests/patches/test_training.py::test_a_resumed_training_counts_epochs_without_progress",
    ),
    Patch(
        "fairseq.optim.lr_scheduler.reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule.load_state_dict",
        training.load_bad_epochs,
        FAIRSEQ,
        "tests/patches/test_training.py::test_a_resumed_training_counts_epochs_without_progress",
    ),
    Patch(
        "fairseq.criterions.label_smoothed_cross_entropy.label_smoothed_nll_loss",
        training.smooth_over_possible_words,
        FAIRSEQ,
        "tests/patches/test_training.py::test_labels_are_smoothed_over_possible_words",
    ),
    Patch(
        "fairseq.models.transformer.TransformerDecoderBase.upgrade_state_dict_named",
        reading.add_no_projection,
        FAIRSEQ,
        "tests/models/test_fwp_transformer.py::test_tied_embeddings_with_an_adaptive_softmax",
    ),
    Patch(
        "warnings.filters",
        messages.silence_known_warnings,
        "torch 2.4, hydra 1.1",
        "tests/patches/test_messages.py::test_only_known_warnings_are_silenced",
    ),
    Patch(
        "logging.getLogger",
        messages.shorten_settings,
        FAIRSEQ,
        "tests/test_commands.py::test_training_learns_and_says_nothing_alarming",
    ),
    Patch(
        "fairseq.trainer._catalog_shared_params",
        messages.name_shared_weights,
        FAIRSEQ,
        "tests/test_commands.py::test_training_learns_and_says_nothing_alarming",
    ),
    Patch(
        "logging.root.level",
        *(
            messages.hide_debugging,
            FAIRSEQ,
            "tests/patches/test_messages.py::test_debugging_messages_of_libraries_are_hidden",
        ),
    ),
)


def apply() -> None:
    """Run every patch; a second call changes nothing."""
    for entry in PATCHES:
        if inspect.signature(entry.patch).parameters:
            _replace(entry)
        else:
            entry.patch()


def find(symbol: str) -> tuple[Any, str]:
    """Return the module or class that has the symbol, and its name there."""
    *path, name = symbol.split(".")
    owner: Any = None
    for index, part in enumerate(path):
        try:
            owner = importlib.import_module(".".join(path[: index + 1]))
        except ModuleNotFoundError:
            owner = getattr(owner, part)
    return owner, name


def _replace(entry: Patch) -> None:
    owner, name = find(entry.symbol)
    original = getattr(owner, name)
    patches = getattr(original, "patches", ())
    if entry.patch.__name__ in patches:
        return
    replacement = entry.patch(original)
    function = getattr(replacement, "__func__", replacement)
    functools.update_wrapper(function, original)
    function.patches = (*patches, entry.patch.__name__)
    setattr(owner, name, replacement)


def table() -> str:
    """Return the table of patches in Markdown."""
    rows = (f"| `{entry.symbol}` | {entry.reason} | {entry.since} |" for entry in PATCHES)
    return "\n".join(("| symbol | reason | needed since |", "| --- | --- | --- |", *rows)) + "\n"
