"""The table of patches is complete, and each patch has a test and a reason."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_fwp import patches
from fairseq_fwp.patches.__main__ import table, what_runs
from fairseq_fwp.patches.patch import PATCHES, find

ROOT = Path(__file__).parents[2]
# For each patch, the test that fails without it.
TESTS = {
    "restore_numpy_compat": "test_stack::test_numpy_compat",
    "allow_checkpoint_types": "test_stack::test_checkpoint_types_load",
    "count_below_zero": "test_stack::test_blocks_of_one_token",
    "forget_tpu": "test_stack::test_bf16_is_not_taken_for_a_tpu",
    "import_once": "test_stack::test_a_plugin_is_the_same_by_any_path",
    "join_processes_on_cpus": "test_launchers::test_processes_on_cpus_train_by_each_backend",
    "restore_rindex": "test_stack::test_huffman_codes",
    "load_masked_dictionary": "test_stack::test_dictionaries_of_masked_models",
    "give_hubert_its_option": "test_stock_models::test_hubert_is_fine_tuned",
    "keep_last_batch": "test_samples::test_every_index_is_in_one_batch",
    "read_context_from_the_text": "test_samples::test_a_context_is_that_of_the_text",
    "separate_prompts forbid_in_each_sentence": "test_samples::test_a_prompt_does_not_depend_on_its_batch",
    "refuse_empty_blocks": "test_samples::test_blocks_have_a_token",
    "save_division refuse_other_division": "test_samples::test_an_epoch_goes_on_with_its_own_batches",
    "return_the_model": "test_samples::test_a_model_prepared_for_inference_is_evaluated",
    "keep_batches_of_first_epoch": "test_samples::test_the_rest_of_an_epoch_and_the_next",
    "autocast_on_a_cpu": "test_training::test_amp_computes_in_bfloat16_on_a_cpu",
    "warn_of_slow_bfloat16": "test_training::test_slow_bfloat16_is_warned_of",
    "average_each_tensor_once": "test_training::test_averages_of_a_training",
    "average_from_loaded_weights": "test_training::test_an_average_starts_from_the_weights_of_a_checkpoint",
    "smooth_over_possible_words": "test_training::test_labels_are_smoothed_over_possible_words",
    "save_precise_weights load_precise_weights": "test_training::test_a_resumed_training_has_all_its_numbers",
    "save_overflows load_overflows": "test_training::test_the_scale_of_the_loss_is_resumed",
    "save_bad_epochs load_bad_epochs": "test_training::test_a_resumed_training_counts_epochs_without_progress",
    "save_patience load_patience": "test_training::test_a_resumed_training_counts_its_patience",
    "fuse_adam": "test_updates::test_fused_adam_is_fairseqs_to_rounding",
    "copy_gradients_together round_weights_together": "test_updates::test_copies_of_all_parameters_are_made_together",
    "clear_gradients_together": "test_updates::test_copies_of_all_parameters_are_made_together",
    "have_norms_together take_norms_together": "test_updates::test_norms_of_all_gradients_are_taken_together",
    "seed_the_cpu_alone": "test_updates::test_seeds_are_those_of_torch",
    "keep_freed_memory": "test_updates::test_an_update_does_not_fetch_memory_again",
    "leave_the_compiler_out": "test_updates::test_optimizers_do_without_the_compiler",
    "silence_known_warnings": "test_stack::test_only_known_warnings_are_silenced",
    "stop_without_log": "test_damaged_files::test_a_log_on_a_full_disk_ends_a_training",
    "cut_typed_words cut_given_words": "test_dictionaries::test_typed_words_are_cut_by_codes_next_to_the_dictionary",
    "hide_debugging": "test_table::test_the_table_is_what_is_patched",
    "join_launched_processes": "test_launchers::test_processes_of_torchrun_find_each_other",
    "explain_other_files": "test_damaged_files::test_a_checkpoint_cut_anywhere",
    "save_whole": "test_damaged_files::test_a_disk_that_is_full",
    "copy_whole": "test_damaged_files::test_a_copy_on_a_full_disk_leaves_the_old_file",
    "refuse_damaged_data close_what_is_open": "test_damaged_files::test_a_damaged_text_is_refused",
    "load_weights_only": "test_security::test_they_are_refused_where_torch_would_run_them",
    "evaluate_data_alone": "test_security::test_a_configuration_is_no_code",
    "index_without_a_shell": "test_security::test_the_name_of_a_text_is_no_command",
    "ask_before_code_of_hub": "test_security::test_a_data_folder_gets_no_code_of_a_repository",
    "unpack_inside": "test_security::test_a_model_is_unpacked_inside_its_folder",
    "save_fingerprints": "test_dictionaries::test_what_a_fingerprint_tells_apart",
    "save_repeated_words": "test_dictionaries::test_words_that_come_again_are_saved_so",
    "refuse_in_evaluation refuse_at_resume": "test_dictionaries::test_other_words_are_refused",
    "name_the_linear_activation": "test_language_model::test_a_pickled_model_is_the_same",
    "refuse_other_numbers": "test_pretrained::test_weights_and_buffers_that_are_not_of_the_model",
    "add_no_projection": "test_fwp_transformer::test_tied_embeddings_with_an_adaptive_softmax",
    "copy_data_in_each_epoch": "test_tasks::test_workers_make_the_samples_of_each_epoch",
    "refuse_impossible_tokens": "test_eval_lm::test_an_impossible_token_is_named",
    "refuse_padding_in_text": "test_eval_lm::test_padding_in_a_text_is_refused",
    "refuse_unscored_tokens": "test_commands::test_text_longer_than_the_model_is_refused",
    "warn_of_another_beginning": "test_lines::test_another_task_is_named",
    "train_alone free_folder": "test_training::test_a_folder_has_one_training",
    "refuse_what_needs_a_gpu": "test_training::test_graphs_are_refused_where_there_are_none",
    "make_folder_of_log": "test_commands::trained",
    "name_shared_weights": "test_commands::test_training_learns_and_says_nothing_alarming",
    "count_diverse_beams_by_batch": "test_commands::test_every_sentence_is_translated",
    "keep_saved_options": "test_add_layer::test_weights_that_compute_something_else_are_told_of",
    "show_what_a_model_refuses": "test_add_layer::test_flags_that_were_forgotten_are_named",
    "save_for_every_process": "test_many_processes::test_states_in_mid_epoch_are_of_their_number_of_processes",
    "step_after_validation end_what_is_finished": "test_kill_and_resume::test_a_finished_training_changes_nothing",
}


def test_each_patch_has_a_test_that_is_there():
    for file, _, test in (test.partition("::") for test in TESTS.values()):
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), file
    assert {*" ".join(TESTS).split()} == {entry.name for entry in PATCHES}


def test_each_patch_has_a_reason():
    assert [entry.name for entry in PATCHES if not (entry.reason.endswith(".") and entry.since)] == []


def attributes():
    """Return all attributes of fairseq's modules and their classes by full name, without modules."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in ("fairseq", "fairseq_cli") and module.__name__ == module_name:
            owners = [(module_name, module)]
            for path, owner in owners:
                for name, value in list(vars(owner).items()):
                    if inspect.isclass(value) and value.__module__ == module_name:
                        owners += [(f"{path}.{name}", value)] * (value not in dict(owners).values())
                    if not inspect.ismodule(value):
                        found[f"{path}.{name}"] = value
    return found


def full_name(symbol):
    owner, name = find(symbol)
    return f"{owner.__name__ if inspect.ismodule(owner) else f'{owner.__module__}.{owner.__qualname__}'}.{name}"


def test_the_table_is_what_is_patched():
    """In fairseq's modules, the package replaces only the symbols of the table. Debugging messages are hidden."""
    code = f"""
import inspect, logging, sys
import fairseq_cli.train, fairseq_cli.eval_lm, fairseq
logging.root.setLevel(logging.DEBUG)
{inspect.getsource(attributes)}
before = attributes()
owners = before.keys() | sys.modules.keys()
import fairseq_fwp
for name, value in attributes().items():
    if before.get(name, before) is not value and name.rpartition(".")[0] in owners:
        print(name)
print(logging.getLevelName(logging.root.level))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("fairseq")]
    assert done.stdout.splitlines()[-1] == "INFO"
    evaluated = {name for name in found if name.endswith(".eval")}
    assert {"fairseq.utils.eval", "fairseq.models.transformer_lm.eval"} <= evaluated
    symbols = [entry.symbol for entry in PATCHES if entry.symbol.startswith("fairseq.") and "*" not in entry.symbol]
    assert set(found) - evaluated == set(map(full_name, symbols))


def test_what_runs_at_a_name():
    """From the outside to fairseq's own; a method also by the name of a class that inherits it."""
    from fairseq import checkpoint_utils

    lines = what_runs("fairseq.checkpoint_utils.load_checkpoint").splitlines()
    names = [re.search(r":\d+ +(\w+)", line)[1] for line in lines]
    assert names == [*reversed(checkpoint_utils.load_checkpoint.patches), "load_checkpoint"]
    assert all("/patches/" in line for line in lines[:-1]) and "checkpoint_utils.py:" in lines[-1]
    inherited = what_runs("fairseq.tasks.language_modeling.LanguageModelingTask.train_step").splitlines()
    assert len(inherited) == 2 and "autocast_on_a_cpu: Compute the loss in bfloat16" in inherited[0]
    assert len(what_runs("fairseq.tasks.FairseqTask.begin_epoch").splitlines()) == 1
    for symbol in ("fairseq.checkpoint_utils.load", "fairseq.nothing.load", "load"):
        with pytest.raises(ValueError, match=f"the symbol must be a name of fairseq, such as .*, got {symbol}$"):
            what_runs(symbol)


def test_a_second_call_changes_nothing():
    import fairseq_cli.train  # noqa: F401

    patches.apply()  # of modules that other tests have imported since the first call
    before = attributes()
    patches.apply()
    after = attributes()
    assert len(before) > 1000 and after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "fairseq_on_current_python.md").read_text(encoding="utf-8")
    assert table() in page, "python -m fairseq_fwp.patches prints what belongs there"
