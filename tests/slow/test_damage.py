"""Damage at every byte of a checkpoint, and headers of every length."""

from common.files import write_atomic
from configs.schema import Config
from storage.checkpoint import load_checkpoint, to_bytes
from tests.test_checkpoint import assert_flipped_bits_are_refused, error_message, write_small


def test_a_flipped_bit_in_any_byte_is_refused(tmp_path):
    assert_flipped_bits_are_refused(write_small(tmp_path), every=1)


def test_every_cut_is_refused(tmp_path):
    file = write_small(tmp_path)
    content = file.read_bytes()
    for length in range(0, len(content), 3):
        file.write_bytes(content[:length])
        assert error_message(load_checkpoint, file).startswith(f"{file}: ")


def test_a_header_of_any_length_is_read(tmp_path):
    """Its length is at the beginning of the file, where a pickle has 0x80, and a zip PK."""
    file = write_small(tmp_path)
    saved, first_bytes = load_checkpoint(file), set()
    for length in range(1, 257):
        saved.settings = Config(out_dir="x" * length)
        write_atomic(file, to_bytes(saved))
        first_bytes.add(file.read_bytes()[0])
        assert load_checkpoint(file).settings == saved.settings
    assert 0x80 in first_bytes
