"""Short forms of five campaigns: random and hostile configs, arguments, texts and characters."""

from tests.campaigns import fuzz_command, fuzz_config, fuzz_text, suites, terminal
from tests.conftest import ROOT


def test_any_config_file_is_printed_completely_or_rejected_in_a_line_for_each_fault():
    fuzz_config.run(400)


def test_any_command_line_is_accepted_or_rejected_in_one_line():
    fuzz_command.run(800)


def test_any_text_is_read_exactly_or_rejected_in_one_line():
    fuzz_text.run(140)


def test_no_control_character_reaches_a_terminal_and_a_pipe_gets_every_byte():
    terminal.run(20)


def test_hostile_yaml_is_refused_in_one_line():
    tally = suites.check_yaml(suites.OUR_YAML)
    assert tally.counts.total() == 2 * len(suites.OUR_YAML)
    assert tally.counts["alone", 0] == 2  # those with nothing but a seed


def test_hostile_strings_are_taken_as_they_are_or_refused_in_one_line(monkeypatch):
    monkeypatch.chdir(ROOT)
    suites.check_strings(suites.OUR_STRINGS)


def test_hostile_pickles_are_refused_and_nothing_in_them_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tally = suites.check_pickles(suites.our_pickles(tmp_path))
    assert tally.counts["as ours", 4] == 15 and not (tmp_path / "pwned").exists()
