"""The catalogue of invalid inputs and failures, with the tests that cover each row.

A config, B text, C checkpoint, D sampling, E run. An entry is a pytest name or the beginning of
one, or the reason why there is no test.
"""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CONFIG = "test_config.py::test_an_invalid_config_is_rejected_in_one_line_that_names_the_file"
VALUE = "test_config.py::test_a_valid_value_is_converted_to_the_type_of_its_setting"
OPTION = "test_command_line.py::test_an_invalid_argument_of_train_is_rejected_in_one_line"
SAMPLE = "test_command_line.py::test_an_invalid_argument_of_sample_is_rejected_in_one_line"
SAMPLE_ROW = "test_sample.py::test_every_row_has_its_exit_code_and_one_line_on_stderr"
NO_TEXT = "test_data.py::test_an_invalid_source_is_an_error_even_if_another_source_follows"
DOWNLOAD = "test_data.py::test_a_failed_download_leaves_no_files_and_the_next_source_is_used"
FORGED = "test_file_format.py::test_a_forged_file_is_rejected_quickly_with_bounded_memory"
SIGNAL = "test_stop.py::test_a_signal_in_any_phase_stops_the_run_and_resuming_is_bit_exact"
TENSOR = "test_checkpoint.py::test_an_invalid_tensor_is_rejected_by_name"

CATALOGUE = {
    # config
    "A1 a missing file": [
        "test_config.py::test_a1_a_missing_file_is_rejected_with_the_most_similar_name"
    ],
    "A2 a folder": ["test_config.py::test_a2_a_folder_is_rejected_with_a_config_in_it"],
    "A3 no permission to read": ["test_config.py::test_a3_an_unreadable_file_is_rejected"],
    "A4 empty, or nothing but comments": [f"{CONFIG}[A4-"],
    "A5 not a mapping": [f"{CONFIG}[A5-"],
    "A6 no space after a colon": [f"{CONFIG}[A6-"],
    "A7 an unknown key": [
        f"{CONFIG}[A7-",
        f"{OPTION}[A7-",
        "test_command_line.py::test_the_error_for_a_mistyped_setting_suggests_the_right_one",
    ],
    "A8 an unknown name": [f"{CONFIG}[A8-", f"{OPTION}[A8-"],
    "A9 a number in quotes": [f"{CONFIG}[A9-"],
    "A10 an integer written as 6.0": [f"{VALUE}[A10-", f"{CONFIG}[A10-"],
    "A11 a number written as 1e-3": [
        f"{VALUE}[A11-",
        "test_command_line.py::test_every_form_of_an_option_of_train_sets_its_setting",
    ],
    "A12 an integer written as 1e4": [
        f"{VALUE}[A12-",
        "test_command_line.py::test_every_form_of_an_option_of_train_sets_its_setting",
    ],
    "A13 a leading zero": [f"{CONFIG}[A13-", f"{OPTION}[A13-"],
    "A14 a time of day for a number": [f"{CONFIG}[A14-"],
    "A15 on or true for a number": [f"{CONFIG}[A15-", f"{OPTION}[A15-"],
    "A16 no value": [f"{CONFIG}[A16-", f"{OPTION}[A16-"],
    "A17 nan or infinity": [f"{CONFIG}[A17-", f"{OPTION}[A17-"],
    "A18 zero or negative sizes": [f"{CONFIG}[A18-", f"{OPTION}[A18-"],
    "A19 n_embd not divisible by n_head": [f"{CONFIG}[A19-", f"{OPTION}[A19-"],
    "A20 a key twice": [f"{CONFIG}[A20-"],
    "A21 a tab for indentation": [f"{CONFIG}[A21-"],
    "A22 two documents": [f"{CONFIG}[A22-"],
    "A23 not UTF-8": [f"{CONFIG}[A23-"],
    "A24 a byte order mark, UTF-16": [f"{VALUE}[A24-"],
    "A25 a raw control character": [f"{CONFIG}[A25-"],
    "A26 an escaped control character": [
        f"{CONFIG}[A26-",
        "test_fuzzing.py::test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_byte",
    ],
    "A27 a tag": [f"{CONFIG}[A27-"],
    "A28 a tag or date with an invalid value": [f"{CONFIG}[A28-"],
    "A29 nested too deeply": [f"{CONFIG}[A29-"],
    "A30 aliases": [f"{CONFIG}[A30-", f"{OPTION}[A30-"],
    "A31 numbers of thousands of digits": [f"{CONFIG}[A31-", f"{OPTION}[A31-"],
    "A32 too large, or not a regular file": [
        "test_config.py::test_a32_only_a_regular_file_of_at_most_1_mb_is_read",
        f"{CONFIG}[A32-",
    ],
    "A33 settings that contradict each other": [
        f"{CONFIG}[A33-",
        f"{OPTION}[A33-",
        "test_train.py::test_settings_help_and_config_errors_need_no_torch_import",
    ],
    "A34 an unavailable device or dtype": [
        "test_train.py::test_an_unavailable_device_is_rejected_with_the_available_ones",
        "test_runtime.py::test_an_unavailable_device_is_rejected_with_the_available_ones",
        "test_runtime.py::test_float16_on_a_cpu_is_rejected_with_the_allowed_dtypes",
        "test_ranks.py::test_more_ranks_than_gpus_are_rejected_with_the_number_of_gpus",
    ],
    "A35 resumed with other settings": [
        "test_train.py::test_resume_with_another_architecture_is_rejected_with_the_difference",
        "test_train.py::test_resume_with_another_layout_and_kernel_converts_the_weights",
        "test_train.py::test_resume_prints_a_changed_learning_rate_in_one_line",
    ],
    # text
    "B1 missing, without text, no permission": [
        "test_data.py::test_without_any_available_source_the_error_lists_each_with_its_reason",
        "test_data.py::test_a_text_without_read_permission_is_an_error",
        f"{NO_TEXT}[make_folder_without_text",
    ],
    "B2 empty": ["test_data.py::test_an_empty_text_is_an_error_even_if_another_source_follows"],
    "B3 shorter than block_size + 1": [
        "test_data.py::test_both_splits_must_contain_a_window",
        "test_data.py::test_a_text_too_short_for_any_block_size_is_rejected_as_such",
        "test_fuzzing.py::test_any_text_is_read_exactly_or_rejected_in_one_line",
    ],
    "B4 long enough for training, too short for validation": [
        "test_data.py::test_both_splits_must_contain_a_window"
    ],
    "B5 a single distinct character": [
        "test_data.py::test_a_text_with_one_distinct_character_is_rejected"
    ],
    "B6 not UTF-8": ["test_data.py::test_undecodable_bytes_are_reported_with_offset_and_line"],
    "B7 a UTF-8 byte order mark": [
        "test_data.py::test_a_byte_order_mark_selects_the_encoding_and_is_removed[utf-8-sig]",
        "test_data.py::test_byte_order_marks_get_one_note_and_only_the_first_of_a_file_is_removed",
    ],
    "B8 UTF-16": [
        "test_data.py::test_a_byte_order_mark_selects_the_encoding_and_is_removed[utf-16",
        "test_data.py::test_utf16_without_a_byte_order_mark_is_detected",
        "test_data.py::test_data_encoding_applies_to_files_without_a_byte_order_mark",
        f"{OPTION}[B8-",
    ],
    "B9 Windows line ends": [
        "test_data.py::test_line_ends_are_preserved_exactly",
        "test_data.py::test_windows_line_ends_get_a_note",
    ],
    "B10 control characters": [
        "test_data.py::test_control_characters_are_preserved_and_counted",
        "test_fuzzing.py::test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_byte",
    ],
    "B11 larger than memory": [
        "test_large_text.py::test_memory_does_not_grow_with_the_text",
        "test_large_text.py::test_batches_are_read_from_the_file_without_a_copy_of_the_corpus",
        "test_large_text.py::test_a_full_disk_leaves_no_cache_files_and_has_exit_code_5",
        "test_large_text.py::test_too_little_disk_space_is_reported_before_encoding",
    ],
    "B12 a pipe, a socket, a device": [
        f"{NO_TEXT}[make_fifo",
        f"{NO_TEXT}[make_socket",
        f"{NO_TEXT}[make_link_to_device",
    ],
    "B13 a link to itself": [f"{NO_TEXT}[make_loop"],
    "B14 changed since the checkpoint": [
        "test_data.py::test_a_changed_text_is_rejected_on_resume_with_all_digests",
        "test_train.py::test_resume_with_a_changed_text_is_rejected",
        "test_train.py::test_allow_data_change_resumes_with_a_changed_text_in_the_same_vocabulary",
        "test_train.py::test_resume_with_a_changed_validation_text_is_rejected",
        "test_large_text.py::test_another_text_or_other_settings_get_their_own_cache",
    ],
    "B15 cut short while it is read": [
        "test_large_text.py::test_a_text_that_changes_between_the_passes_is_rejected",
        "test_large_text.py::test_truncating_or_removing_the_text_during_training_does_not_change_the_batches",
        "test_large_text.py::test_a_damaged_cache_entry_is_rebuilt",
        "test_large_text.py::test_a_cache_that_is_cut_short_while_it_is_used_is_one_line_and_exit_5",
    ],
    "B16 characters that occur only in the validation split": [
        "test_data.py::test_the_vocabulary_comes_from_the_whole_text",
        "test_data.py::test_characters_that_occur_only_in_the_validation_text_are_counted",
    ],
    "B17 more characters than uint16 ids": [
        "test_data.py::test_more_than_65535_characters_do_not_overflow",
        "test_tokenizer.py::test_ids_have_the_smallest_dtype_that_holds_the_vocabulary",
    ],
    "B18 a download that fails": [
        f"{DOWNLOAD}[missing]",
        f"{DOWNLOAD}[portal]",
        f"{DOWNLOAD}[partial]",
        f"{DOWNLOAD}[insecure]",
        f"{DOWNLOAD}[endless]",
        "test_data.py::test_a_wrong_digest_is_reported_even_without_another_source",
        "test_data.py::test_a_hanging_name_lookup_times_out",
        "test_data.py::test_a_download_is_renamed_into_place_when_complete",
    ],
    # checkpoint
    "C1 missing": [
        "test_checkpoint.py::test_a_missing_checkpoint_is_rejected",
        "test_file_format.py::test_unreadable_paths_are_rejected",
        f"{SAMPLE}[C1-",
    ],
    "C2 zero bytes": [
        "test_file_format.py::test_every_truncation_is_rejected",
        "test_checkpoint.py::test_a_damaged_file_given_by_name_is_rejected_with_the_newest_undamaged_one[empty]",
    ],
    "C3 truncated": ["test_file_format.py::test_every_truncation_is_rejected"],
    "C4 a flipped bit": ["test_file_format.py::test_any_flipped_bit_is_detected"],
    "C5 a file of another kind": ["test_file_format.py::test_a_file_of_another_kind_is_rejected"],
    "C6 another program's checkpoint": [
        "test_file_format.py::test_a_checkpoint_of_another_program_is_rejected",
        "test_nanogpt.py::test_sample_names_the_command_that_imports_a_checkpoint_of_nanogpt",
    ],
    "C7 a malicious header": [
        f"{FORGED}[a duplicate tensor]",
        f"{FORGED}[a gap]",
        f"{FORGED}[an overlap]",
        f"{FORGED}[unsorted]",
        f"{FORGED}[negative offset]",
        f"{FORGED}[offset of 2^63]",
        f"{FORGED}[unknown dtype]",
        f"{FORGED}[metadata is a number]",
        f"{FORGED}[bytes after the last tensor]",
    ],
    "C8 a header that needs much memory": [
        f"{FORGED}[a header of 100 MB]",
        f"{FORGED}[nested deeply]",
        f"{FORGED}[shape of 2^60]",
        "test_file_format.py::test_memory_is_bounded_for_the_header_with_the_most_objects",
    ],
    "C9 a tensor larger than its data": [
        f"{FORGED}[shape larger than the data]",
        f"{FORGED}[beyond the file]",
        "test_checkpoint.py::test_a_small_file_never_allocates_a_large_model",
    ],
    "C10 a newer format": [
        "test_file_format.py::test_another_format_is_rejected_before_its_header_is_parsed[2]"
    ],
    "C11 an older format": [
        "test_stored.py::test_a_stored_checkpoint_is_read_and_resumed_with_the_same_losses[fast]",
        "test_file_format.py::test_another_format_is_rejected_before_its_header_is_parsed[2]",
    ],
    "C12 missing or unknown parts": [
        f"{TENSOR}[model-missing]",
        "test_checkpoint.py::test_the_names_of_unknown_tensors_are_escaped_and_long_lists_are_shortened",
        f"{TENSOR}[model-unknown]",
        "test_checkpoint.py::test_an_invalid_part_is_rejected_by_name",
    ],
    "C13 a vocabulary that differs from the text's": [
        "test_data.py::test_characters_missing_from_the_vocabulary_of_a_checkpoint_are_listed",
        "test_train.py::test_init_from_a_vocabulary_that_lacks_characters_is_rejected_with_their_names",
    ],
    "C14 a config that differs from the weights": [
        "test_checkpoint.py::test_a_config_that_contradicts_the_weights_is_rejected_with_the_difference"
    ],
    "C15 weights that are not finite, or of another type": [
        f"{TENSOR}[model-NaN]",
        f"{TENSOR}[model-infinite]",
        f"{TENSOR}[model-int]",
        f"{TENSOR}[model-complex]",
    ],
    "C16 saved on a GPU, read on a CPU": [
        "test_file_format.py::test_every_tensor_is_moved_to_the_cpu_and_no_device_is_saved"
    ],
    "C17 saved from a compiled or distributed model": [
        "test_checkpoint.py::test_a_compiled_model_is_saved_under_the_names_of_the_original_one",
        "test_ranks.py::test_a_checkpoint_does_not_depend_on_the_number_of_ranks",
    ],
    "C18 an unwritable folder": [
        "test_failures.py::test_an_unwritable_folder_is_reported_before_training"
    ],
    "C19 a disk that fills up during a save": [
        "test_failures.py::test_a_disk_too_small_for_the_checkpoints_is_reported_before_training",
        "test_failures.py::test_a_failed_save_is_a_warning_and_the_next_save_retries",
        "test_failures.py::test_if_the_final_save_fails_the_exit_code_is_5_and_the_old_checkpoint_is_intact",
        "test_files.py::test_a_disk_full_at_any_byte_leaves_the_old_file",
        "test_campaigns.py::test_the_short_form_of_a_campaign_passes[disk]",
    ],
    "C20 killed during a save": [
        "test_files.py::test_a_process_killed_at_any_call_of_a_save_leaves_an_intact_file"
    ],
    "C21 a power cut after a save": [
        "test_files.py::test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards"
    ],
    "C22 last.safetensors missing or damaged": [
        "test_checkpoint.py::test_a_damaged_checkpoint_falls_back_to_another_one_with_one_line"
    ],
    "C23 names with control characters or ../": [
        "test_checkpoint.py::test_control_characters_in_paths_are_escaped_where_they_are_printed",
        "test_security.py::test_no_path_or_url_in_a_checkpoint_is_opened_and_its_text_is_printed_escaped",
    ],
    "C24 read while it is replaced": [
        "test_files.py::test_a_concurrent_reader_sees_only_intact_files"
    ],
    # sampling
    "D1 a character that is not in the vocabulary": [
        "test_tokenizer.py::test_the_error_names_the_first_unknown_character_and_its_position",
        "test_tokenizer.py::test_a_long_vocabulary_is_shortened_and_escaped_in_the_message",
        f"{SAMPLE_ROW}[D1-",
    ],
    "D2 an empty prompt": [
        "test_tokenizer.py::test_generation_without_a_prompt_starts_with_a_newline_if_possible",
        f"{SAMPLE_ROW}[D2-",
        "test_sample.py::test_an_empty_prompt_gives_the_same_text_as_a_newline",
    ],
    "D3 a prompt longer than the context": [
        "test_generation.py::test_generated_text_equals_a_plain_loop_over_gpt_forward",
        f"{SAMPLE_ROW}[D3-",
    ],
    "D4 temperature 0": [
        "test_generation.py::test_temperature_zero_is_greedy",
        f"{SAMPLE_ROW}[D4-",
    ],
    "D5 a negative temperature": [f"{SAMPLE}[D5-", f"{SAMPLE_ROW}[D5-"],
    "D6 a temperature of nan, infinity or nearly 0": [
        f"{SAMPLE}[D6-",
        "test_generation.py::test_filters_always_leave_a_character_and_only_those_left_are_sampled",
        f"{SAMPLE_ROW}[D6-",
    ],
    "D7 a negative top-k": [f"{SAMPLE}[D7-", f"{SAMPLE_ROW}[D7-"],
    "D8 top-k larger than the vocabulary": [
        "test_generation.py::test_filters_equal_their_step_by_step_reference",
        f"{SAMPLE_ROW}[D8-",
    ],
    "D9 top-p of 0, above 1, nan": [f"{SAMPLE}[D9-", f"{SAMPLE_ROW}[D9-"],
    "D10 filters that together leave nothing": [
        "test_generation.py::test_filters_always_leave_a_character_and_only_those_left_are_sampled",
        f"{SAMPLE_ROW}[D10-",
    ],
    "D11 ties at the k-th logit": [
        "test_generation.py::test_top_k_includes_all_ties_at_the_kth_logit",
        f"{SAMPLE_ROW}[D11-",
    ],
    "D12 negative and endless lengths": [
        f"{SAMPLE}[D12-",
        "test_generation.py::test_zero_new_tokens_give_an_empty_text",
        "test_generation.py::test_memory_does_not_grow_with_the_text",
        f"{SAMPLE_ROW}[D12-",
    ],
    "D13 no samples, or very many": [
        f"{SAMPLE}[D13-",
        f"{SAMPLE_ROW}[D13-",
        "test_sample.py::test_samples_have_separators_and_do_not_depend_on_the_batch_size",
    ],
    "D14 a seed out of range": [f"{SAMPLE}[D14-", f"{SAMPLE_ROW}[D14-"],
    "D15 an abbreviated option": [f"{SAMPLE}[D15-", f"{SAMPLE_ROW}[D15-"],
    "D16 a closed pipe": ["test_sample.py::test_a_closed_pipe_ends_sampling_silently"],
    "D17 Ctrl-C during generation": ["test_sample.py::test_ctrl_c_ends_the_line_and_exits"],
    "D18 an output encoding without the characters": [
        "test_sample.py::test_a_pipe_gets_the_exact_characters_and_an_ascii_pipe_gets_escapes"
    ],
    "D19 control characters generated on a terminal": [
        "test_fuzzing.py::test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_byte",
        "test_sample.py::test_control_characters_are_escaped_on_a_terminal",
    ],
    "D20 a prompt that is not UTF-8": [f"{SAMPLE}[D20-", f"{SAMPLE_ROW}[D20-"],
    # run
    "E1 a non-finite loss": [
        "test_failures.py::test_a_non_finite_loss_ends_the_run_before_the_update",
        "test_failures.py::test_weights_made_non_finite_by_an_update_are_not_saved",
    ],
    "E2 a non-finite gradient": [
        "test_failures.py::test_a_non_finite_gradient_ends_the_run_before_the_update",
        "test_failures.py::test_an_overflow_that_lowers_the_loss_scale_is_no_error",
        "test_failures.py::test_an_overflow_at_a_loss_scale_of_1_ends_the_run",
    ],
    "E3 a loss spike": [
        "test_failures.py::test_a_loss_spike_is_counted_and_printed",
        "test_failures.py::test_a_spike_is_six_standard_deviations_above_the_mean_of_a_full_window",
    ],
    "E4 a non-finite validation loss": [
        "test_failures.py::test_a_non_finite_validation_loss_is_reported_and_never_the_best"
    ],
    "E5 out of GPU memory at the first step": [
        "test_failures.py::test_out_of_memory_at_the_first_step_suggests_a_smaller_batch"
    ],
    "E6 out of GPU memory later": [
        "test_failures.py::test_after_out_of_memory_the_suggested_smaller_batches_train_on_the_same_windows"
    ],
    "E7 killed for lack of memory": [
        "test_campaigns.py::test_the_short_form_of_a_campaign_passes[kills]"
    ],
    "E8 Ctrl-C": [
        f"{SIGNAL}[step-SIGINT",
        "test_stop.py::test_a_signal_sets_a_flag_and_prints_one_line_at_once[SIGINT]",
        "test_stop.py::test_after_a_signal_the_current_step_is_finished_and_saved",
    ],
    "E9 Ctrl-C twice": [
        "test_stop.py::test_a_second_ctrl_c_exits_at_once",
        f"{SIGNAL}[save-SIGINT twice",
    ],
    "E10 SIGTERM": [f"{SIGNAL}[step-SIGTERM"],
    "E11 SIGTERM during a save or an evaluation": [
        f"{SIGNAL}[save-SIGTERM",
        f"{SIGNAL}[evaluate-SIGTERM",
        "test_stop.py::test_an_interrupted_evaluation_is_repeated_on_resume",
    ],
    "E12 SIGHUP": [
        f"{SIGNAL}[step-SIGHUP",
        "test_stop.py::test_a_signal_that_nohup_ignores_stays_ignored",
    ],
    "E13 SIGKILL": [
        "test_campaigns.py::test_the_short_form_of_a_campaign_passes[kills]",
        "test_lock.py::test_a_killed_process_releases_its_lock_at_once",
    ],
    "E14 stopped and continued": ["test_stop.py::test_a_suspended_process_continues_bit_identical"],
    "E15 a clock that jumps": [
        "test_stop.py::test_the_time_limit_does_not_depend_on_the_system_clock",
        "test_events.py::test_a_new_file_sorts_after_all_others_even_if_the_clock_was_set_back",
        "test_events.py::test_files_of_other_programs_are_never_modified",
    ],
    "E16 no disk space for the log": [
        "test_failures.py::test_an_unwritable_event_file_is_one_warning_and_does_not_affect_training",
        "test_events.py::test_a_full_disk_delays_records_and_loses_none",
    ],
    "E17 an unwritable log folder": [
        "test_failures.py::test_an_unwritable_folder_is_reported_before_training"
    ],
    "E18 killed with scalars unwritten": [
        "test_events.py::test_events_after_the_checkpoint_are_removed",
        "test_events.py::test_a_partial_record_is_removed_wherever_it_ends",
        "test_campaigns.py::test_the_short_form_of_a_campaign_passes[kills]",
    ],
    "E19 two runs in one folder": [
        "test_lock.py::test_a_second_writer_gets_the_pid_and_start_time_of_the_first",
        "test_campaigns.py::test_the_short_form_of_a_campaign_passes[starts]",
    ],
    "E20 a folder that holds a run": [
        "test_train.py::test_an_existing_run_is_never_overwritten_without_a_flag",
        "test_failures.py::test_a_folder_with_a_run_is_not_overwritten_without_a_flag",
    ],
    "E21 a folder that is removed under a run": [
        "test_failures.py::test_a_run_folder_removed_during_training_is_reported"
    ],
    "E22 a file system that fails temporarily": [
        "test_files.py::test_if_any_call_of_a_save_fails_the_old_or_new_file_is_intact",
        "test_failures.py::test_a_failed_save_is_a_warning_and_the_next_save_retries",
    ],
    "E23 one of several devices dies": [
        "test_ranks.py::test_after_a_killed_rank_the_other_exits_and_resuming_is_bit_exact",
        "test_campaigns.py::test_the_short_form_of_a_campaign_passes[ranks]",
    ],
    "E24 several devices that disagree": [
        "test_ranks.py::test_an_error_on_any_rank_is_printed_once_and_ends_all_ranks[changes2-"
    ],
    "E25 resumed on another number of devices": [
        "test_ranks.py::test_sigterm_to_torchrun_stops_all_ranks_and_one_process_can_resume"
    ],
    "E26 no terminal": [
        "test_failures.py::test_a_closed_stdout_does_not_end_a_run",
        "test_failures.py::test_a_closed_terminal_does_not_raise_in_the_progress_bar",
        "test_train.py::test_a_run_prints_its_data_model_and_results",
    ],
}
PARTS = {"A": 35, "B": 18, "C": 24, "D": 20, "E": 26}
TEST = re.compile(r"test_\w+\.py::test_\w+(\[.*)?")
REASON = re.compile(r"does not apply: .*")


@pytest.fixture(scope="module")
def tests():
    """Return the names of all tests that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line.removeprefix("tests/") for line in output.splitlines() if "::" in line]


def test_the_catalogue_has_every_row_in_order():
    rows = [f"{part}{number}" for part, count in PARTS.items() for number in range(1, count + 1)]
    assert [row.split()[0] for row in CATALOGUE] == rows


def test_every_row_names_existing_tests_or_a_reason(tests):
    for row, entries in CATALOGUE.items():
        assert entries, row
        for entry in entries:
            named = TEST.fullmatch(entry) and any(name.startswith(entry) for name in tests)
            assert named or REASON.fullmatch(entry), f"{row}: {entry}"
