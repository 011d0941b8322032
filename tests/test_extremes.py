"""Files at the limits: all that is written can be read, and only our own files are replaced."""

import pytest
import torch

from checkpointing import checkpoint as checkpoints
from checkpointing import file_format
from common import files
from common.errors import CheckpointError
from configs.schema import Config, ModelConfig
from model.gpt import GPT
from tests.commands import sample_main
from tests.conftest import ROOT
from tests.runs import contents, train, write_checkpoint

SMALL = {"n_embd": 2, "n_head": 1, "block_size": 1}
RUN = [ROOT / "configs/smoke.yaml", "--dtype=float32", "--device=cpu"]
# what makes the header long: many tensors with long names, and many characters
LONG_HEADERS = {
    "layers": ({"n_layer": 512, "bias": True, "mlp": "swiglu", **SMALL}, 2),
    "vocabulary": ({"n_layer": 1, "n_embd": 1, "n_head": 1, "block_size": 1}, 300_000),
}


@pytest.mark.parametrize("name", LONG_HEADERS)
def test_a_checkpoint_with_the_longest_header_that_settings_allow_can_be_read(name, tmp_path):
    settings, size = LONG_HEADERS[name]
    model = GPT(ModelConfig(**settings), size)
    tensors = {}
    for role in ("model", "exp_avg", "exp_avg_sq", "momentum"):  # more than a run ever has
        for parameter, slices in model.named_slices().items():
            tensors[f"{role}.{parameter}"] = torch.cat(slices).detach()
    saved = checkpoints.Checkpoint(
        config=Config(model=model.config),
        vocabulary="".join(chr(0x10000 + i) for i in range(size)),
        tensors=tensors,
    )
    path = tmp_path / "best.safetensors"
    path.write_bytes(checkpoints.to_bytes(saved))
    again = checkpoints.load(path)
    assert again.vocabulary == saved.vocabulary and list(again.tensors) == list(tensors)


def test_what_could_not_be_read_is_not_written():
    vocabulary = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    with pytest.raises(CheckpointError, match="use fewer distinct characters"):
        file_format.to_bytes({"vocabulary": vocabulary}, {})


FORGED = {
    "a step beyond all": {"progress": {"step": 2**63}},
    "a tensor more": {"tensors": {"model.more": torch.zeros(1)}},
    "a role more": {"tensors": {"ema.token_embedding": torch.zeros(1)}},
    "a moment of no parameter": {"tensors": {"exp_avg.more": torch.zeros(1)}},
}


@pytest.mark.parametrize("name", FORGED)
def test_nonsense_with_a_right_digest_is_refused_in_one_line_by_every_command(
    name, smoke, tmp_path
):
    path, forged = tmp_path / "last.safetensors", contents(smoke / "last.safetensors")
    for part, change in FORGED[name].items():
        forged[part] |= change
    write_checkpoint(path, forged)
    options = [*RUN, f"--out_dir={tmp_path / 'new'}"]
    for option in (f"--resume={path}", f"--init_from={path}"):
        code, output = train(*options, option)
        assert code == 4 and output.count("\n") == 1 and str(path) in output, output
        assert "newest undamaged" not in output  # it is the only one
    with pytest.raises(CheckpointError, match=f"^{path}: "):
        sample_main([f"--ckpt={path}"])


def test_a_large_file_that_is_no_checkpoint_is_refused_by_its_first_bytes(tmp_path, monkeypatch):
    path = tmp_path / "zeros.safetensors"
    with path.open("wb") as file:
        file.truncate(2**32)
    sizes, read = [], file_format.read_regular

    def recorded(*arguments, **options):
        content = read(*arguments, **options)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(file_format, "read_regular", recorded)
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        checkpoints.load(path)
    assert sizes == [2**20]


def test_a_file_of_another_program_is_never_replaced_by_overwrite(smoke, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    options = [*RUN, "--max_iters=10", "--eval_interval=10", f"--out_dir={folder}", "--overwrite"]
    mine = folder / "best.safetensors"
    mine.write_bytes(b"not yours")
    code, output = train(*options)
    assert code == 2 and "best.safetensors is not a checkpoint of this program" in output, output
    assert mine.read_bytes() == b"not yours"

    def unreadable(*_, **__):
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:  # as root, who may read every file
        patch.setattr(files, "read_regular", unreadable)
        assert train(*options)[0] == 2
    # a damaged checkpoint of ours, and an empty file, may be replaced
    for content in ((smoke / "best.safetensors").read_bytes()[:5000], b""):
        mine.write_bytes(content)
        assert train(*options)[0] == 0


def test_a_page_replaces_only_a_page(smoke, tmp_path):
    copy = tmp_path / "best.safetensors"
    content = (smoke / "best.safetensors").read_bytes()
    copy.write_bytes(content)
    words = [f"--ckpt={copy}", f"--html={copy}", "--overwrite"]
    with pytest.raises(Exception, match="not a page of this program") as caught:
        sample_main(words)
    assert caught.value.exit_code == 2 and copy.read_bytes() == content
    page = tmp_path / "page.html"
    stale = tmp_path / "page.html.tmp"  # of a process that was killed
    for _ in range(2):
        stale.write_bytes(b"half")
        assert sample_main([f"--ckpt={smoke}", f"--html={page}", "--overwrite"]) == 0
        assert not stale.exists()
    assert page.stat().st_size > 10_000
