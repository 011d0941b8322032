"""The catalogue of bad inputs and faults: every row has a test that shows it, or says why it has
none.

A config, B text, C checkpoint, D sampling, E run. A test is named as pytest does, or by the
beginning of that; what is left to an issue that is still open says so, and so does what cannot be
here.
"""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CONFIG = "test_config.py::test_a_wrong_config_is_answered_in_one_line_that_names_the_file"
VALUE = "test_config.py::test_a_value_means_what_the_schema_says"
OPTION = "test_command_line.py::test_a_wrong_argument_of_train_is_answered_in_one_line"
SAMPLE = "test_command_line.py::test_a_wrong_argument_of_sample_is_answered_in_one_line"
SPOKEN = "test_sample.py::test_every_row_has_its_exit_code_and_its_line"
NO_TEXT = (
    "test_data.py::test_what_is_there_but_no_text_is_an_error_even_where_another_source_follows"
)
DOWNLOAD = "test_data.py::test_a_download_that_fails_leaves_nothing_and_the_next_source_is_taken"
FORGED = "test_file_format.py::test_a_forged_file_is_refused_at_once_with_bounded_memory"
SIGNAL = "test_stop.py::test_in_each_phase_a_signal_ends_the_run_and_the_rest_is_as_if_it_had_not"
WEIGHT = "test_checkpoint.py::test_a_wrong_tensor_is_refused_by_name"

CATALOGUE = {
    # config
    "A1 no such file": ["test_config.py::test_a1_a_missing_file_names_the_nearest"],
    "A2 a folder": ["test_config.py::test_a2_a_folder_names_the_configs_in_it"],
    "A3 no permission to read": ["test_config.py::test_a3_an_unreadable_file_is_refused"],
    "A4 empty, or nothing but comments": [f"{CONFIG}[A4-"],
    "A5 no mapping": [f"{CONFIG}[A5-"],
    "A6 no space after a colon": [f"{CONFIG}[A6-"],
    "A7 an unknown key": [
        f"{CONFIG}[A7-",
        f"{OPTION}[A7-",
        "test_command_line.py::test_every_typo_in_the_name_of_a_setting_is_led_back",
    ],
    "A8 an unknown name": [f"{CONFIG}[A8-", f"{OPTION}[A8-"],
    "A9 a number in quotes": [f"{CONFIG}[A9-"],
    "A10 an integer written as 6.0": [f"{VALUE}[A10-", f"{CONFIG}[A10-"],
    "A11 a number written as 1e-3": [
        f"{VALUE}[A11-",
        "test_command_line.py::test_every_spelling_of_an_option_sets_its_setting",
    ],
    "A12 an integer written as 1e4": [
        f"{VALUE}[A12-",
        "test_command_line.py::test_every_spelling_of_an_option_sets_its_setting",
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
        "test_fuzzing.py::test_a_terminal_obeys_nothing_from_outside",
    ],
    "A27 a tag": [f"{CONFIG}[A27-"],
    "A28 a tag or date that YAML cannot make": [f"{CONFIG}[A28-"],
    "A29 nested too deep": [f"{CONFIG}[A29-"],
    "A30 aliases": [f"{CONFIG}[A30-", f"{OPTION}[A30-"],
    "A31 numbers of thousands of digits": [f"{CONFIG}[A31-", f"{OPTION}[A31-"],
    "A32 too large, or no regular file": [
        "test_config.py::test_a32_only_a_regular_file_of_at_most_1_mb_is_read",
        f"{CONFIG}[A32-",
    ],
    "A33 settings that contradict each other": [
        f"{CONFIG}[A33-",
        f"{OPTION}[A33-",
        "test_train.py::test_settings_are_answered_before_torch_is_imported",
    ],
    "A34 a device or precision that is not there": [
        "test_train.py::test_a_wrong_device_is_named_with_what_there_is",
        "test_runtime.py::test_a_device_that_is_not_there_is_refused_with_those_that_are",
        "test_runtime.py::test_float16_on_a_cpu_is_refused_with_what_fits",
        "test_ranks.py::test_more_ranks_than_gpus_are_refused_with_their_number",
    ],
    "A35 resumed with other settings": [
        "test_train.py::test_resume_with_another_architecture_is_refused_with_the_difference",
        "test_train.py::test_resume_into_another_layout_and_kernel_converts",
        "test_train.py::test_resume_names_a_changed_rate_in_one_line",
    ],
    # text
    "B1 missing, without text, no permission": [
        "test_data.py::test_no_source_left_names_each_and_why",
        "test_data.py::test_a_text_without_permission_is_an_error",
        f"{NO_TEXT}[make_folder_without_text",
    ],
    "B2 empty": ["test_data.py::test_an_empty_text_is_an_error_even_where_another_source_follows"],
    "B3 shorter than block_size + 1": [
        "test_data.py::test_both_splits_must_hold_a_window",
        "test_data.py::test_a_text_too_short_for_any_block_size_is_said_to_be",
        "test_fuzzing.py::test_any_text_is_read_exactly_or_refused_in_one_line",
    ],
    "B4 long enough to train on, too short to validate": [
        "test_data.py::test_both_splits_must_hold_a_window"
    ],
    "B5 one character over and over": [
        "test_data.py::test_one_distinct_character_is_nothing_to_learn"
    ],
    "B6 not UTF-8": ["test_data.py::test_undecodable_bytes_are_named_with_offset_and_line"],
    "B7 a UTF-8 byte order mark": [
        "test_data.py::test_a_byte_order_mark_tells_the_encoding_and_is_no_text[utf-8-sig]",
        "test_data.py::test_a_byte_order_mark_is_noted_once_and_only_the_first_is_left_out",
    ],
    "B8 UTF-16": [
        "test_data.py::test_a_byte_order_mark_tells_the_encoding_and_is_no_text[utf-16",
        "test_data.py::test_utf16_without_a_byte_order_mark_is_recognised",
        "test_data.py::test_the_encoding_of_files_without_a_mark_can_be_told",
        f"{OPTION}[B8-",
    ],
    "B9 Windows line ends": [
        "test_data.py::test_line_ends_are_kept_exactly",
        "test_data.py::test_windows_line_ends_are_noted",
    ],
    "B10 control characters": [
        "test_data.py::test_control_characters_are_kept_and_counted",
        "test_fuzzing.py::test_a_terminal_obeys_nothing_from_outside",
    ],
    "B11 larger than memory": [
        "test_large_text.py::test_memory_is_bounded_whatever_the_size",
        "test_large_text.py::test_batches_are_read_from_the_file_without_a_copy_of_the_corpus",
        "test_large_text.py::test_a_disk_that_fills_leaves_nothing_and_is_told_with_5",
        "test_large_text.py::test_a_disk_too_small_is_found_before_anything_is_encoded",
    ],
    "B12 a pipe, a socket, a device": [
        f"{NO_TEXT}[make_fifo",
        f"{NO_TEXT}[make_socket",
        f"{NO_TEXT}[make_link_to_device",
    ],
    "B13 a link to itself": [f"{NO_TEXT}[make_loop"],
    "B14 changed since the checkpoint": [
        "test_data.py::test_a_changed_text_is_refused_on_resume_with_both_digests",
        "test_train.py::test_resuming_on_a_changed_text_is_refused",
        "test_train.py::test_a_changed_text_is_gone_on_with_where_that_is_asked_for",
        "test_train.py::test_a_changed_text_to_validate_on_is_refused_too",
        "test_large_text.py::test_another_text_or_other_settings_are_made_anew",
    ],
    "B15 cut short while it is read": [
        "test_large_text.py::test_a_text_that_changes_between_the_passes_is_refused",
        "test_large_text.py::test_a_text_that_is_cut_short_or_removed_during_training_changes_nothing",
        "test_large_text.py::test_a_cache_entry_that_is_not_intact_is_made_again",
    ],
    "B16 characters only in the validation part": [
        "test_data.py::test_the_vocabulary_comes_from_the_whole_text",
        "test_data.py::test_characters_that_only_the_validation_text_has_are_counted",
    ],
    "B17 more characters than two bytes tell apart": [
        "test_data.py::test_more_than_65535_characters_do_not_overflow",
        "test_tokenizer.py::test_ids_are_of_the_smallest_type_that_holds_them_all",
    ],
    "B18 a download that fails": [
        f"{DOWNLOAD}[missing]",
        f"{DOWNLOAD}[portal]",
        f"{DOWNLOAD}[partial]",
        f"{DOWNLOAD}[insecure]",
        f"{DOWNLOAD}[endless]",
        "test_data.py::test_a_wrong_digest_is_reported_even_where_no_text_is_found",
        "test_data.py::test_a_name_lookup_that_hangs_is_given_up",
        "test_data.py::test_a_download_appears_in_one_step",
    ],
    # checkpoint
    "C1 missing": [
        "test_checkpoint.py::test_where_there_is_nothing_the_good_ones_nearby_are_listed",
        "test_file_format.py::test_what_is_no_readable_file_is_refused",
        f"{SAMPLE}[C1-",
    ],
    "C2 zero bytes": [
        "test_file_format.py::test_every_truncation_is_refused",
        "test_checkpoint.py::test_a_file_that_was_named_is_read_or_refused_with_the_good_ones_nearby[empty]",
    ],
    "C3 cut short": ["test_file_format.py::test_every_truncation_is_refused"],
    "C4 a flipped bit": [
        "test_file_format.py::test_every_flipped_bit_of_header_and_tensors_is_refused"
    ],
    "C5 another kind of file": ["test_file_format.py::test_a_foreign_file_is_refused"],
    "C6 another program's checkpoint": [
        "test_file_format.py::test_another_programs_checkpoint_is_refused"
    ],
    "C7 a hostile header": [
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
    "C8 a header that grows": [
        f"{FORGED}[a header of 100 MB]",
        f"{FORGED}[nested deeply]",
        f"{FORGED}[shape of 2^60]",
        "test_file_format.py::test_the_memory_of_the_costliest_header_is_bounded",
    ],
    "C9 a tensor that only claims to be large": [
        f"{FORGED}[shape larger than the data]",
        f"{FORGED}[beyond the file]",
        "test_checkpoint.py::test_a_small_file_never_makes_a_large_model",
    ],
    "C10 a newer format": [
        "test_file_format.py::test_a_newer_format_is_named_before_anything_of_it_is_parsed"
    ],
    "C11 an older format": [
        "test_checkpoint.py::test_a_file_of_format_2_is_read_for_ever",
        "test_file_format.py::test_format_1_gets_one_line",
        "test_checkpoint.py::test_the_name_of_the_old_format_is_answered_with_the_new_one",
    ],
    "C12 parts missing, or too many": [
        f"{WEIGHT}[model-missing]",
        "test_checkpoint.py::test_names_of_wrong_tensors_are_escaped_and_counted",
        f"{WEIGHT}[model-unknown]",
        "test_checkpoint.py::test_a_part_of_the_wrong_kind_is_refused_by_name",
    ],
    "C13 a vocabulary that differs from the text's": [
        "test_data.py::test_characters_that_a_given_vocabulary_lacks_are_named",
        "test_train.py::test_a_new_run_from_weights_that_lack_a_character_is_refused_by_name",
    ],
    "C14 a config that differs from the weights": [
        "test_checkpoint.py::test_a_config_that_differs_from_the_weights_is_refused_with_the_difference"
    ],
    "C15 weights that are not finite, or of another type": [
        f"{WEIGHT}[model-NaN]",
        f"{WEIGHT}[model-infinite]",
        f"{WEIGHT}[model-int]",
        f"{WEIGHT}[model-complex]",
    ],
    "C16 saved on a GPU, read on a CPU": [
        "test_file_format.py::test_every_tensor_is_brought_to_the_cpu_and_no_device_is_written"
    ],
    "C17 saved from a compiled or distributed model": [
        "test_checkpoint.py::test_a_compiled_model_is_saved_as_what_it_wraps",
        "test_ranks.py::test_a_checkpoint_does_not_tell_the_number_of_ranks",
    ],
    "C18 a folder that cannot be written": [
        "test_faults.py::test_a_folder_that_cannot_be_written_is_found_before_training",
    ],
    "C19 a disk that fills up during a save": [
        "test_faults.py::test_a_disk_too_small_for_the_checkpoints_is_found_before_training",
        "test_faults.py::test_a_save_that_fails_is_told_and_made_up_for_by_the_next",
        "test_faults.py::test_where_the_last_save_fails_the_run_ends_with_5_and_the_old_one_is_whole",
        "test_files.py::test_a_disk_that_fills_at_any_byte_leaves_the_old_file",
        "test_campaigns.py::test_a_campaign_keeps_its_promise_in_the_short_form[disk]",
    ],
    "C20 killed during a save": [
        "test_files.py::test_killed_at_any_call_of_a_save_a_run_has_a_whole_file"
    ],
    "C21 a power cut after a save": [
        "test_files.py::test_a_save_syncs_the_file_before_it_is_renamed_and_the_folder_after"
    ],
    "C22 last.safetensors missing or damaged": [
        "test_checkpoint.py::test_a_folder_falls_back_and_says_so_in_one_line"
    ],
    "C23 names with control characters or ../": [
        "test_checkpoint.py::test_names_with_control_characters_are_shown_escaped",
        "test_security.py::test_no_path_or_address_in_a_checkpoint_is_followed_and_nothing_in_it_is_obeyed",
    ],
    "C24 read while it is replaced": [
        "test_files.py::test_a_reader_beside_a_trainer_sees_only_whole_files"
    ],
    # sampling
    "D1 a character that is not in the vocabulary": [
        "test_tokenizer.py::test_the_first_unknown_character_is_named_with_its_place",
        "test_tokenizer.py::test_a_long_vocabulary_is_shortened_and_escaped_in_the_message",
        f"{SPOKEN}[D1-",
    ],
    "D2 an empty prompt": [
        "test_tokenizer.py::test_a_text_without_a_prompt_starts_on_a_new_line_where_it_can",
        f"{SPOKEN}[D2-",
        "test_sample.py::test_an_empty_prompt_is_begun_as_a_new_line_is",
    ],
    "D3 a prompt longer than the context": [
        "test_generation.py::test_a_text_is_what_the_rule_says_written_out",
        f"{SPOKEN}[D3-",
    ],
    "D4 temperature 0": ["test_generation.py::test_temperature_zero_is_greedy", f"{SPOKEN}[D4-"],
    "D5 a negative temperature": [f"{SAMPLE}[D5-", f"{SPOKEN}[D5-"],
    "D6 a temperature of nan, infinity or nearly 0": [
        f"{SAMPLE}[D6-",
        "test_generation.py::test_whatever_the_filters_there_is_a_choice_and_it_is_one_that_they_leave",
        f"{SPOKEN}[D6-",
    ],
    "D7 a negative top-k": [f"{SAMPLE}[D7-", f"{SPOKEN}[D7-"],
    "D8 top-k larger than the vocabulary": [
        "test_generation.py::test_filters_mean_what_the_written_out_ones_mean",
        f"{SPOKEN}[D8-",
    ],
    "D9 top-p of 0, above 1, nan": [f"{SAMPLE}[D9-", f"{SPOKEN}[D9-"],
    "D10 filters that together leave nothing": [
        "test_generation.py::test_whatever_the_filters_there_is_a_choice_and_it_is_one_that_they_leave",
        f"{SPOKEN}[D10-",
    ],
    "D11 ties at the k-th logit": [
        "test_generation.py::test_ties_at_the_kth_logit_are_all_kept",
        f"{SPOKEN}[D11-",
    ],
    "D12 lengths that are none, or without end": [
        f"{SAMPLE}[D12-",
        "test_generation.py::test_nothing_more_than_the_prompt_is_an_empty_text",
        "test_generation.py::test_nothing_grows_with_the_text",
        f"{SPOKEN}[D12-",
    ],
    "D13 no samples, or very many": [
        f"{SAMPLE}[D13-",
        f"{SPOKEN}[D13-",
        "test_sample.py::test_several_samples_are_separated_and_each_is_that_of_its_number",
    ],
    "D14 a seed out of range": [f"{SAMPLE}[D14-", f"{SPOKEN}[D14-"],
    "D15 an abbreviated option": [f"{SAMPLE}[D15-", f"{SPOKEN}[D15-"],
    "D16 a reader that leaves": ["test_sample.py::test_a_reader_that_goes_ends_it_silently"],
    "D17 Ctrl-C amid the text": ["test_sample.py::test_ctrl_c_ends_the_line_and_leaves"],
    "D18 an output that lacks the characters": [
        "test_sample.py::test_a_pipe_gets_every_character_exactly_and_ascii_gets"
    ],
    "D19 control characters generated on a terminal": [
        "test_fuzzing.py::test_a_terminal_obeys_nothing_from_outside",
        "test_sample.py::test_a_terminal_is_not_steered",
    ],
    "D20 a prompt that is not UTF-8": [f"{SAMPLE}[D20-", f"{SPOKEN}[D20-"],
    # run
    "E1 a loss that is not finite": [
        "test_faults.py::test_a_loss_that_is_not_finite_ends_the_run_before_the_update",
        "test_faults.py::test_weights_that_an_update_has_spoilt_are_not_saved",
    ],
    "E2 a gradient that is not finite": [
        "test_faults.py::test_a_gradient_that_is_not_finite_does_so_too",
        "test_faults.py::test_an_overflow_that_the_scaler_answers_is_no_fault",
        "test_faults.py::test_a_scale_below_1_is_no_answer",
    ],
    "E3 a spike of the loss": [
        "test_faults.py::test_a_spike_is_counted_and_told",
        "test_faults.py::test_six_sigmas_of_a_full_window_are_a_spike",
    ],
    "E4 a validation loss that is not finite": [
        "test_faults.py::test_a_validation_loss_that_is_not_finite_is_reported_and_never_the_best",
    ],
    "E5 out of GPU memory at the first step": [
        "test_faults.py::test_out_of_memory_at_the_first_step_proposes_smaller_batches",
    ],
    "E6 out of GPU memory later": [
        "test_faults.py::test_out_of_memory_later_names_the_last_checkpoint_and_goes_on_with_the_same_windows",
    ],
    "E7 killed for lack of memory": [
        "test_campaigns.py::test_a_campaign_keeps_its_promise_in_the_short_form[kills]"
    ],
    "E8 Ctrl-C": [
        f"{SIGNAL}[step-SIGINT",
        "test_stop.py::test_a_signal_sets_a_flag_and_says_so_at_once[SIGINT]",
        "test_stop.py::test_a_signal_finishes_the_step_and_saves_it",
    ],
    "E9 Ctrl-C twice": [
        "test_stop.py::test_the_second_ctrl_c_leaves_at_once",
        f"{SIGNAL}[save-SIGINT twice",
    ],
    "E10 SIGTERM": [f"{SIGNAL}[step-SIGTERM"],
    "E11 SIGTERM during a save or an evaluation": [
        f"{SIGNAL}[save-SIGTERM",
        f"{SIGNAL}[evaluate-SIGTERM",
        "test_stop.py::test_an_evaluation_is_left_and_made_when_the_run_goes_on",
    ],
    "E12 SIGHUP": [
        f"{SIGNAL}[step-SIGHUP",
        "test_stop.py::test_a_signal_that_nohup_ignores_stays_ignored",
    ],
    "E13 SIGKILL": [
        "test_campaigns.py::test_a_campaign_keeps_its_promise_in_the_short_form[kills]",
        "test_lock.py::test_the_lock_of_a_killed_process_is_free_at_once",
    ],
    "E14 stopped and continued": ["test_stop.py::test_a_laptop_that_sleeps_loses_nothing"],
    "E15 a clock that jumps": [
        "test_stop.py::test_time_does_not_go_by_the_clock_on_the_wall",
        "test_events.py::test_a_new_file_comes_after_all_others_even_if_the_clock_was_set_back",
        "test_events.py::test_files_of_other_programs_are_never_touched",
    ],
    "E16 no room for the log": [
        "test_faults.py::test_a_log_that_cannot_be_written_is_one_warning_and_nothing_else",
        "test_events.py::test_a_full_disk_delays_the_records_and_loses_none",
    ],
    "E17 a log folder that cannot be written": [
        "test_faults.py::test_a_folder_that_cannot_be_written_is_found_before_training",
    ],
    "E18 killed with scalars unwritten": [
        "test_events.py::test_what_came_after_the_checkpoint_is_gone",
        "test_events.py::test_a_record_torn_by_a_kill_is_gone_wherever_it_is_torn",
        "test_campaigns.py::test_a_campaign_keeps_its_promise_in_the_short_form[kills]",
    ],
    "E19 two runs in one folder": [
        "test_lock.py::test_the_second_is_told_who_the_first_is_and_since_when",
        "test_campaigns.py::test_a_campaign_keeps_its_promise_in_the_short_form[starts]",
    ],
    "E20 a folder that holds a run": [
        "test_train.py::test_an_existing_run_is_never_overwritten_unasked",
        "test_faults.py::test_a_folder_with_a_run_is_not_begun_anew_unasked",
    ],
    "E21 a folder that is removed under a run": [
        "test_faults.py::test_a_folder_that_is_removed_under_a_run_is_never_silent",
    ],
    "E22 a file system that fails for a moment": [
        "test_files.py::test_whichever_call_of_a_save_fails_the_old_or_the_new_is_whole",
        "test_faults.py::test_a_save_that_fails_is_told_and_made_up_for_by_the_next",
    ],
    "E23 one of several devices dies": [
        "test_ranks.py::test_when_a_rank_is_killed_the_other_ends_and_the_run_goes_on_to_the_same_end",
        "test_campaigns.py::test_a_campaign_keeps_its_promise_in_the_short_form[ranks]",
    ],
    "E24 several devices that disagree": [
        "test_ranks.py::test_what_is_wrong_is_said_once_and_ends_all[changes2-"
    ],
    "E25 resumed on another number of devices": [
        "test_ranks.py::test_torchrun_passes_sigterm_on_and_one_process_goes_on_with_what_two_have_begun"
    ],
    "E26 no terminal": [
        "test_faults.py::test_a_reader_of_the_output_who_leaves_ends_nothing",
        "test_faults.py::test_a_terminal_that_has_gone_ends_nothing",
        "test_train.py::test_a_run_says_what_a_person_wants_to_know",
    ],
}
PARTS = {"A": 35, "B": 18, "C": 24, "D": 20, "E": 26}
TEST = re.compile(r"test_\w+\.py::test_\w+(\[.*)?")
REASON = re.compile(r"does not apply: .*")


@pytest.fixture(scope="module")
def tests():
    """Every test that pytest finds, by its name."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line.removeprefix("tests/") for line in found.splitlines() if "::" in line]


def test_no_row_is_missing():
    rows = [f"{part}{number}" for part, count in PARTS.items() for number in range(1, count + 1)]
    assert [row.split()[0] for row in CATALOGUE] == rows


def test_every_row_names_tests_that_exist_or_a_reason(tests):
    for row, entries in CATALOGUE.items():
        assert entries, row
        for entry in entries:
            shown = TEST.fullmatch(entry) and any(name.startswith(entry) for name in tests)
            assert shown or REASON.fullmatch(entry), f"{row}: {entry}"
