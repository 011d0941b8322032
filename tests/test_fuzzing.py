"""Files, arguments, texts and characters at random: all are answered. The short forms of four
campaigns.
"""

from tests.campaigns import fuzz_command, fuzz_config, fuzz_text, terminal


def test_any_config_file_is_printed_complete_or_refused_in_one_line():
    fuzz_config.run(400)


def test_any_command_line_is_understood_or_refused_in_one_line():
    fuzz_command.run(800)


def test_any_text_is_read_exactly_or_refused_in_one_line():
    fuzz_text.run(140)


def test_a_terminal_obeys_nothing_from_outside_and_a_pipe_gets_every_byte():
    terminal.run(20)
