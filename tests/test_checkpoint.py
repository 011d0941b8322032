"""Checkpoints: exact round trips, errors that name the invalid part, and fall-back to an older
checkpoint of the folder.
"""

import dataclasses
import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpointing import checkpoint as checkpoints
from checkpointing import file_format
from common.console import escape
from common.errors import CheckpointError, NonFiniteError
from common.files import write_atomic
from configs.schema import Config, ModelConfig, TrainConfig
from data.tokenizer import CharTokenizer
from model.attention import LAYOUTS
from model.gpt import GPT
from model.runtime import select_runtime
from tests.commands import sample_main, train_main
from tests.conftest import ROOT, printed
from tests.runs import contents, write_checkpoint
from training.state import Run

VOCABULARY = "\n abc"
CONFIG = Config(model=ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=4, bias=True))
MUON = dataclasses.replace(CONFIG, train=TrainConfig(optimizer="muon"))
SMALLEST = Config(model=ModelConfig(n_layer=1, n_head=2, n_embd=4, block_size=4), train=MUON.train)
CORPUS = SimpleNamespace(
    tokenizer=CharTokenizer(VOCABULARY),
    name="plays",
    sha256="0" * 64,
    val_sha256=None,
    characters=1000,
)
RUNTIME = select_runtime("cpu", "float32")
EVENTS = checkpoints.EventPosition(1_700_000_000, 1234)


def new_run(config=CONFIG, seed=0):
    return Run(GPT(config.model, len(VOCABULARY), seed), config, CORPUS, RUNTIME)


def train(run, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(len(VOCABULARY), (3, 5), generator=generator)
        logits = run.model(ids[:, :4])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.progress.record_step(1.5)


def trained_checkpoint(config=CONFIG, step=3):
    """Return the checkpoint of a run after `step` steps."""
    run = new_run(config)
    train(run, step, seed=1)
    return checkpoints.capture(run, EVENTS)


def write(path, checkpoint, **options):
    write_atomic(path, checkpoints.to_bytes(checkpoint), **options)


def restore(saved, config=None):
    config = config or saved.config
    checkpoints.check_fixed_settings(saved, config)
    return checkpoints.restore(saved, config, CORPUS, RUNTIME)


def error_message(call, *arguments, **options):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    assert caught.value.exit_code == 4
    return printed(caught.value)


def same_tensors(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
def test_saving_and_loading_is_bit_exact(config, tmp_path):
    before = trained_checkpoint(config)
    write(tmp_path / "best.safetensors", before)
    after = checkpoints.load(tmp_path / "best.safetensors")
    for part in (*checkpoints.SECTIONS, "vocabulary"):
        assert getattr(after, part) == getattr(before, part)
    assert same_tensors(after.tensors, before.tensors)
    assert after.path == tmp_path / "best.safetensors"


def test_before_the_first_evaluation_the_best_loss_is_null_in_the_file(tmp_path):
    write(tmp_path / "last.safetensors", trained_checkpoint())
    metadata, _ = file_format.read(tmp_path / "last.safetensors")
    assert json.loads(metadata["progress"])["best_loss"] is None
    assert "Infinity" not in str(metadata)
    assert checkpoints.load(tmp_path / "last.safetensors").progress.best_loss is None


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_resumed_run_ends_with_the_same_state(config, step, tmp_path):
    run = new_run(config)
    train(run, step, seed=1)
    write(tmp_path / "last.safetensors", checkpoints.capture(run, EVENTS))
    train(run, 4, seed=2)

    saved = checkpoints.load(tmp_path / "last.safetensors")
    resumed = restore(saved)
    assert same_tensors(checkpoints.capture(resumed, EVENTS).tensors, saved.tensors)
    assert all(parameter.grad is None for parameter in resumed.model.parameters())
    train(resumed, 4, seed=2)
    final = [checkpoints.capture(each, EVENTS) for each in (run, resumed)]
    assert same_tensors(final[0].tensors, final[1].tensors)
    assert final[0].progress == final[1].progress


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
def test_the_tensors_of_a_checkpoint_do_not_depend_on_the_layout(config):
    """Restore a run in each layout and capture it again; the tensors must be the same."""
    saved = trained_checkpoint(config)
    for layout in LAYOUTS:
        model = dataclasses.replace(config.model, attention=layout)
        run = restore(saved, dataclasses.replace(config, model=model))
        assert run.model.config.attention == layout
        assert same_tensors(checkpoints.capture(run, EVENTS).tensors, saved.tensors)


def test_tensors_are_named_by_role_and_parameter():
    adamw, muon = trained_checkpoint().tensors, trained_checkpoint(MUON).tensors
    for name in ("model", "exp_avg", "exp_avg_sq"):
        assert adamw[f"{name}.blocks.1.attention.query"].shape == (8, 8)
        assert adamw[f"{name}.blocks.1.attention.query.bias"].shape == (8,)
        assert adamw[f"{name}.token_embedding"].shape == (5, 8)
    assert muon["momentum.blocks.0.mlp.up"].shape == (32, 8)
    assert "momentum.token_embedding" not in muon and "exp_avg.blocks.0.mlp.up" not in muon
    assert "exp_avg.blocks.0.mlp.up.bias" in muon
    assert adamw["adamw_steps"] == 3


def test_learning_rates_come_from_the_config_and_are_not_restored():
    run = new_run()
    run.optimizers[0].param_groups[0]["lr"] = 7.0
    resumed = restore(checkpoints.capture(run, EVENTS))
    assert resumed.optimizers[0].param_groups[0]["lr"] == CONFIG.train.learning_rate


def test_build_model_returns_the_weights_of_the_run():
    run = new_run()
    train(run, 3, seed=1)
    model = checkpoints.build_model(checkpoints.capture(run, EVENTS))
    assert same_tensors(dict(model.named_parameters()), dict(run.model.named_parameters()))


def test_a_compiled_model_is_saved_under_the_names_of_the_original_one():
    run = new_run()
    names = list(checkpoints.capture(run, EVENTS).tensors)
    compiled = torch.compile(run.model)
    assert any("_orig_mod" in name for name in compiled.state_dict())
    assert list(checkpoints.capture(run, EVENTS).tensors) == names
    assert not any("_orig_mod" in name or "module" in name for name in names)


def test_the_size_check_accepts_every_valid_model(monkeypatch):
    # with no margin, the size that the config implies must not exceed the actual size
    monkeypatch.setattr(checkpoints, "MAX_EXCESS_BYTES", 0)
    norms, mlps, sizes = ("layernorm", "rmsnorm"), ("gelu", "swiglu"), (4, 20)
    for choice in itertools.product(
        ("learned", "rope"), norms, mlps, (False, True), (False, True), sizes
    ):
        names = ("positions", "norm", "mlp", "bias", "tied", "n_embd")
        model = ModelConfig(
            n_layer=1, n_head=2, block_size=3, **dict(zip(names, choice, strict=True))
        )
        saved = checkpoints.capture(new_run(Config(model=model)), EVENTS)
        rows = checkpoints.build_model(saved).named_slices()
        actual = {name: torch.cat(views) for name, views in rows.items()}
        assert same_tensors(actual, saved.role("model"))


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("role", ["model", "moment"])
def test_non_finite_tensors_are_never_captured(config, role):
    run = new_run(config)
    moments = next(iter(run.optimizers[-1].state.values()))
    tensor = {
        "model": run.model.blocks[1].mlp.up.weight,
        "moment": moments[run.optimizers[-1].moments[0]],
    }[role]
    checkpoints.capture(run, EVENTS)
    tensor.data.view(-1)[3] = math.nan if role == "model" else -math.inf
    with pytest.raises(NonFiniteError, match="the weights are no longer finite"):
        checkpoints.capture(run, EVENTS)


# ---------------------------------------------------------------------------- choosing a checkpoint


@pytest.fixture
def plays(tmp_path):
    """Create a run folder with prev at step 1, last at step 2 and best at step 1."""
    folder = tmp_path / "out" / "plays"
    folder.mkdir(parents=True)
    for step in (1, 2):
        write(
            folder / "last.safetensors",
            trained_checkpoint(step=step),
            previous=folder / "prev.safetensors",
        )
    write(folder / "best.safetensors", trained_checkpoint(step=1))
    return folder


DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"n_layer", b"n_lay\xe5r")),
    "foreign": lambda path: torch.save({"model": {}}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "prefer, damaged, replacement",
    [
        ("last", ["last.safetensors"], "prev.safetensors"),
        ("best", ["best.safetensors"], "last.safetensors"),
        ("best", ["best.safetensors", "last.safetensors"], "prev.safetensors"),
        ("last", ["last.safetensors", "prev.safetensors"], "best.safetensors"),
        ("last", ["best.safetensors"], None),
        ("best", ["last.safetensors", "prev.safetensors"], None),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_another_one_with_one_line(
    plays, damage, prefer, damaged, replacement
):
    for name in damaged:
        DAMAGE[damage](plays / name)
    saved, note = checkpoints.find(plays, prefer)
    path = saved.path
    assert path == plays / (replacement or f"{prefer}.safetensors")
    assert saved.progress.step == (2 if path.name == "last.safetensors" else 1)
    if replacement is None:
        assert note is None
    else:
        assert note.startswith(f"{plays / damaged[0]}: ") and note.endswith(
            f"; using {path} instead"
        )


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_given_by_name_is_rejected_with_the_newest_undamaged_one(plays, damage):
    for age, name in enumerate(("last.safetensors", "best.safetensors", "prev.safetensors")):
        os.utime(plays / name, (10**9 - age, 10**9 - age))
    saved, note = checkpoints.find(plays / "last.safetensors", "last")
    assert (saved.path, note) == (plays / "last.safetensors", None)
    DAMAGE[damage](plays / "last.safetensors")
    message = error_message(checkpoints.find, plays / "last.safetensors", "last")
    assert message.startswith(f"{plays / 'last.safetensors'}: ")
    newest = plays / "best.safetensors"
    assert message.endswith(f"; the newest undamaged checkpoint there is {newest}")


def test_a_missing_checkpoint_is_rejected(plays, tmp_path):
    empty = tmp_path / "out" / "empty"
    empty.mkdir()
    for path in (empty, tmp_path / "out" / "typo", tmp_path / "out" / "typo" / "last.safetensors"):
        message = error_message(checkpoints.find, path, "last")
        assert message.startswith(str(path)) and message.endswith(": no such file or directory")
    message = error_message(checkpoints.find, plays / "lost.safetensors", "last")
    newest = plays / "best.safetensors"
    assert message.endswith(
        f"no such file or directory; the newest undamaged checkpoint there is {newest}"
    )


def test_a_run_whose_checkpoints_are_all_damaged_is_rejected(plays):
    for name in ("last.safetensors", "prev.safetensors", "best.safetensors"):
        (plays / name).write_bytes(b"")
    message = error_message(checkpoints.find, plays, "last")
    for name in ("last", "prev", "best"):
        assert f"{plays / name}.safetensors: empty file (interrupted save?)" in message
    write(plays / "copy.safetensors", trained_checkpoint())
    newest = plays / "copy.safetensors"
    message = error_message(checkpoints.find, plays, "last")
    assert message.endswith(f"; the newest undamaged checkpoint there is {newest}")


def test_control_characters_in_paths_are_escaped_where_they_are_printed(tmp_path):
    folder = tmp_path / "a\nb\x1b[2J"
    folder.mkdir()
    assert r"a\nb\x1b[2J" in error_message(checkpoints.find, folder, "last")
    write(folder / "last.safetensors", trained_checkpoint(step=1))
    assert checkpoints.find(folder, "best")[1].startswith(f"{folder / 'best.safetensors'}: ")
    saved = checkpoints.load(folder / "last.safetensors")
    saved.tensors.pop("model.final_norm")
    assert r"a\nb\x1b[2J" in error_message(checkpoints.build_model, saved)


def test_no_path_or_url_in_a_checkpoint_is_opened_and_its_text_is_printed_escaped(
    smoke, tmp_path, capsys, monkeypatch
):
    folder, canary = shutil.copytree(smoke, tmp_path / "run"), tmp_path / "canary.txt"
    canary.write_text("never read " * 100)
    url = f"https://canary.invalid/a/b#sha256={'0' * 64}"
    for path in folder.glob("*.safetensors"):
        forged = contents(path)
        forged["config"]["out_dir"] = str(canary.with_name("canary"))
        forged["config"]["data"]["sources"] = [str(canary), url]
        forged["data"]["name"] = forged["environment"]["device_name"] = f"{canary}\x1b[2J\u202e"
        forged["environment"] |= {"cpu_capability": str(canary), "python": f"../{canary.name}"}
        write_checkpoint(path, forged)

    opened, recording = [], True

    def record(event, arguments):  # every file opened, connection, subprocess and import
        if recording:
            opened.append(f"{event} {arguments}")

    sys.addaudithook(record)
    monkeypatch.chdir(ROOT)
    words = ["configs/smoke.yaml", "--dtype=float32"]
    new = [f"--out_dir={tmp_path / 'new'}", "--max_iters=1", "--warmup_iters=0"]
    try:
        assert sample_main([f"--ckpt={folder}", "--max-new-tokens=5"]) == 0
        assert train_main([*words, f"--out_dir={folder}", "--max_iters=61", "--resume"]) == 0
        assert train_main([*words, *new, f"--init_from={folder}"]) == 0
    finally:
        recording = False
    assert any("last.safetensors" in event for event in opened)
    assert [event for event in opened if "canary" in event] == []
    output = "".join(capsys.readouterr())
    assert "canary.txt" in output and escape(output, keep="\n\t") == output


# ------------------------------------------------------------------------------ invalid checkpoints


WRONG_PARTS = {
    "no config": (lambda c: c.pop("config"), "its content is invalid (KeyError: 'config')"),
    "no events": (lambda c: c.pop("events"), "its content is invalid (KeyError: 'events')"),
    "config is text": (lambda c: c.update(config="x"), "config: must be a mapping of names to"),
    "unknown setting": (
        lambda c: c["config"]["model"].update(n_heads=2),
        "config: unknown key 'n_heads'; did you mean n_head?",
    ),
    "wrong setting": (
        lambda c: c["config"]["model"].update(n_layer=-1),
        "config: n_layer must be an integer in [1, 512], but is -1",
    ),
    "unknown layout": (
        lambda c: c["config"]["model"].update(attention="../x"),
        "config: attention must be one of",
    ),
    "a character twice": (lambda c: c.update(vocabulary="aba"), "its content is invalid (V"),
    "vocabulary empty": (lambda c: c.update(vocabulary=""), "its content is invalid (V"),
    "half a character": (lambda c: c.update(vocabulary="a\ud800"), "its content is invalid (U"),
    "hash is a number": (lambda c: c["data"].update(sha256=7), "data: sha256 must be a string, "),
    "data is a list": (lambda c: c.update(data=[]), "data: must be a mapping of names to values"),
    "unknown progress": (lambda c: c["progress"].update(x=1), "progress: unknown key 'x'; allowed"),
    "negative step": (
        lambda c: c["progress"].update(step=-1),
        "progress: step must be an integer in [0, 1e15], but is -1",
    ),
    "nested losses": (
        lambda c: c["progress"].update(recent_losses=[[1]]),
        "progress: recent_losses must be a list of numbers in [0, inf), but is [a list]",
    ),
    "a loss of NaN": (
        lambda c: c["progress"].update(recent_losses=[math.nan]),
        "progress: recent_losses must be a list of numbers in [0, inf), but is [nan, which is not",
    ),
    "unknown warning": (
        lambda c: c["progress"].update(warnings_given=["x"]),
        "progress: warnings_given must be a list of any of first loss, exploding, ",
    ),
    "steps out of order": (
        lambda c: c["progress"].update(best_step=2),
        "progress: best_step 2, last_eval_step 0 and step 3 contradict each other",
    ),
    "environment is none": (
        lambda c: c.update(environment=None),
        "environment: must be a mapping of names to values, but is none",
    ),
    "event size is text": (
        lambda c: c["events"].update(size="9"),
        "events: size must be an integer in [0, 1e15], but is '9'",
    ),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_an_invalid_part_is_rejected_by_name(case, tmp_path):
    path = tmp_path / "last.safetensors"
    write(path, trained_checkpoint())
    changed = contents(path)
    change, expected = WRONG_PARTS[case]
    change(changed)
    write_checkpoint(path, changed)
    message = error_message(checkpoints.load, path)
    assert message.startswith(f"{path}: ") and expected in message


@pytest.mark.parametrize("part", list(checkpoints.SECTIONS))
@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": 1, "a": 2}', "[" * 10_000], ids=repr)
def test_a_part_with_invalid_json_is_rejected(part, text, tmp_path):
    path = tmp_path / "last.safetensors"
    write(path, trained_checkpoint())
    metadata, tensors = file_format.read(path)
    del metadata["sha256"], metadata["hornbook_format"]
    write_atomic(path, file_format.to_bytes(metadata | {part: text}, tensors))
    message = error_message(checkpoints.load, path)
    assert message.startswith(f"{path}: ") and len(message) < 400


def test_a_field_that_is_missing_takes_its_default(tmp_path):
    """Files of an earlier program lack the settings and fields that were added since."""
    path = tmp_path / "last.safetensors"
    write(path, trained_checkpoint())
    changed = contents(path)
    for section in ("config", "data", "progress", "environment", "events"):
        changed[section].clear()
    write_checkpoint(path, changed)
    saved = checkpoints.load(path)
    for name, section in checkpoints.SECTIONS.items():
        assert getattr(saved, name) == section()


NAME = "blocks.1.mlp.up"  # float32 (32, 8)
WRONG_TENSORS = {
    "missing": (lambda t, n: t.pop(n), "missing: {n}; unknown: none"),
    "unknown": (lambda t, n: t.update({n + "x": torch.zeros(1)}), "missing: none; unknown: {n}x"),
    "shape": (
        lambda t, n: t.update({n: torch.zeros(8, 32)}),
        "{n} is float32 (8, 32), its config describes float32 (32, 8)",
    ),
    "flat": (lambda t, n: t.update({n: torch.zeros(256)}), "{n} is float32 (256,), its config"),
    "int": (lambda t, n: t.update({n: t[n].long()}), "{n} is int64 (32, 8), its config describes"),
    "double": (lambda t, n: t.update({n: t[n].double()}), "{n} is float64 (32, 8)"),
    "half": (lambda t, n: t.update({n: t[n].bfloat16()}), "{n} is bfloat16 (32, 8)"),
    "complex": (lambda t, n: t.update({n: t[n].cfloat()}), "{n} is complex64 (32, 8)"),
    "NaN": (lambda t, n: t[n][3, 4].fill_(math.nan), "not finite: {n}"),
    "infinite": (lambda t, n: t[n][0, 0].fill_(-math.inf), "not finite: {n}"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
@pytest.mark.parametrize("role", ["model", "exp_avg", "exp_avg_sq"])
def test_an_invalid_tensor_is_rejected_by_name(case, role):
    saved, name = trained_checkpoint(), f"{role}.{NAME}"
    change, expected = WRONG_TENSORS[case]
    change(saved.tensors, name)
    calls = [restore] + ([checkpoints.build_model] if role == "model" else [])
    for call in calls:
        message = error_message(call, saved)
        assert message.startswith("checkpoint: ") and expected.format(n=name) in message


def test_the_names_of_unknown_tensors_are_escaped_and_long_lists_are_shortened():
    saved = trained_checkpoint()
    saved.tensors["model.\x1b[2J"] = torch.zeros(1)
    assert r"unknown: model.\x1b[2J" in error_message(checkpoints.build_model, saved)
    saved = trained_checkpoint()
    for name in list(saved.role("model")):
        del saved.tensors[f"model.{name}"]
    saved.tensors["model.x"] = torch.zeros(1)
    assert "more; unknown: model.x" in error_message(checkpoints.build_model, saved)


def test_an_invalid_adamw_step_count_is_rejected():
    for wrong in (torch.tensor([math.nan]), torch.tensor(3.0), torch.tensor([3])):
        saved = trained_checkpoint()
        saved.tensors["adamw_steps"] = wrong
        assert "adamw_steps" in error_message(restore, saved)


def test_a_config_that_contradicts_the_weights_is_rejected_with_the_difference():
    embedding = "token_embedding is float32 (5, 8), its config describes float32"
    for changes, expected in {
        ("n_embd", 16): f"{embedding} (5, 16)",
        ("n_embd", 4): f"{embedding} (5, 4)",
        ("n_layer", 3): "missing: model.blocks.2.attn_norm",
        ("n_layer", 1): "unknown: model.blocks.1.attn_norm",
        (
            "block_size",
            9,
        ): "position_embedding is float32 (4, 8), its config describes float32 (9, 8)",
    }.items():
        model = dataclasses.replace(CONFIG.model, **dict([changes]))
        saved = dataclasses.replace(
            trained_checkpoint(), config=dataclasses.replace(CONFIG, model=model)
        )
        for call in (checkpoints.build_model, restore):
            assert expected in error_message(call, saved)
    saved = dataclasses.replace(trained_checkpoint(), vocabulary=VOCABULARY + "d")
    assert f"{embedding} (6, 8)" in error_message(checkpoints.build_model, saved)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"n_layer": 512, "n_embd": 4096}, "its config describes a model of 412,"),
        ({"block_size": 2**20}, "bytes, but its config describes a model of 33,"),
        (
            {"n_embd": 65536, "n_head": 65536, "attention": "heads"},
            "bytes, but its config describes a model of 412,",
        ),
    ],
)
def test_a_small_file_never_allocates_a_large_model(changes, expected, monkeypatch):
    saved = trained_checkpoint()
    model = dataclasses.replace(CONFIG.model, **changes)
    saved = dataclasses.replace(saved, config=dataclasses.replace(CONFIG, model=model))
    monkeypatch.setattr(checkpoints, "GPT", None)
    for call in (checkpoints.build_model, restore):
        assert expected in error_message(call, saved)


def test_resume_with_another_optimizer_is_rejected_and_suggests_init_from():
    for saved, wanted in ((CONFIG, MUON), (MUON, CONFIG)):
        message = error_message(restore, trained_checkpoint(saved), wanted)
        assert f"train.optimizer {saved.train.optimizer}, the config has" in message
        assert "--init_from" in message


def test_a_folder_that_disappears_while_others_are_looked_for_changes_no_answer(
    tmp_path, monkeypatch
):
    def gone(*_):
        raise FileNotFoundError(2, "No such file or directory", "gone")

    monkeypatch.setattr(Path, "glob", gone)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        checkpoints.find(tmp_path / "last.safetensors", "last")
