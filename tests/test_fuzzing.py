"""Short forms of four fuzzing campaigns: random configs, arguments, texts and characters."""

from tests.campaigns import fuzz_command, fuzz_config, fuzz_text, terminal


def test_any_config_file_is_printed_completely_or_rejected_in_one_line():
    fuzz_config.run(400)


def test_any_command_line_is_accepted_or_rejected_in_one_line():
    fuzz_command.run(800)


def test_any_text_is_read_exactly_or_rejected_in_one_line():
    fuzz_text.run(140)


def test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_byte():
    terminal.run(20)
