"""A checkpoint is complete in itself, and what is wrong in one is refused by name; a folder falls
back, with a word.
"""

import dataclasses
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointing import checkpoint as checkpoints
from checkpointing import file_format
from checkpointing.checkpoint import Checkpoint
from common.errors import CheckpointError
from configs.schema import Config, ModelConfig, TrainConfig
from model.gpt import GPT
from training import optimizers

VOCABULARY = "\n abc"
CONFIG = Config(model=ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=4, bias=True))
MUON = dataclasses.replace(CONFIG, train=TrainConfig(optimizer="muon"))
SMALLEST = Config(model=ModelConfig(n_layer=1, n_head=2, n_embd=4, block_size=4), train=MUON.train)
STORED = Path(__file__).parent / "stored"
STORED_NORM = 0.462392  # of the logits of the model in it


def fresh(config=CONFIG, seed=0):
    model = GPT(config.model, len(VOCABULARY), seed)
    return model, optimizers.build(model, config.train, torch.float32)


def train(model, opts, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(len(VOCABULARY), (3, 5), generator=generator)
        torch.nn.functional.cross_entropy(
            model(ids[:, :4]).flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad()


def checkpoint_of(model, opts, config=CONFIG, step=3, ema=None):
    return Checkpoint(
        config=config,
        vocabulary=VOCABULARY,
        data={"name": "plays", "sha256": "0" * 64, "characters": 1000},
        model=model.state_dict(),
        ema=ema,
        optimizers=[optimizer.state_dict() for optimizer in opts],
        progress={
            "step": step,
            "best_loss": float("inf"),
            "recent": [1.5, 2.5],
            "told": False,
            "note": None,
        },
        environment={"torch": "2.13.0", "threads": 1, "compiled": False},
    )


def made(config=CONFIG, step=3, ema=True):
    """A checkpoint after `step` steps, with its own tensors."""
    model, opts = fresh(config)
    train(model, opts, step, seed=1)
    average = {name: tensor + 1 for name, tensor in model.state_dict().items()} if ema else None
    return checkpoint_of(model, opts, config, step, average)


def refusal(call, *arguments, **options):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    assert (
        caught.value.exit_code == 4
        and "\n" not in str(caught.value)
        and "\x1b" not in str(caught.value)
    )
    return str(caught.value)


def same_tensors(a, b):
    return list(a) == list(b) and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


# ----------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
def test_everything_comes_back_to_the_last_bit(config, tmp_path):
    before = made(config)
    file_format.write(tmp_path / "best.pt", checkpoints.seal(before))
    after = checkpoints.load(tmp_path / "best.pt")
    for name in ("config", "vocabulary", "data", "progress", "environment"):
        assert getattr(after, name) == getattr(before, name)
    assert same_tensors(after.model, before.model) and same_tensors(after.ema, before.ema)
    for theirs, ours in zip(after.optimizers, before.optimizers, strict=True):
        assert theirs["param_groups"] == ours["param_groups"]
        for i, state in ours["state"].items():
            assert same_tensors(theirs["state"][i], state)
    assert after.origin == str(tmp_path / "best.pt")


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_run_that_stops_and_goes_on_ends_with_the_same_weights(config, step, tmp_path):
    model, opts = fresh(config)
    train(model, opts, step, seed=1)
    file_format.write(
        tmp_path / "last.pt", checkpoints.seal(checkpoint_of(model, opts, config, step))
    )
    train(model, opts, 4, seed=2)

    saved = checkpoints.load(tmp_path / "last.pt")
    resumed = checkpoints.build_model(saved, ema=False)
    resumed_opts = optimizers.build(resumed, config.train, torch.float32)
    checkpoints.load_optimizers(saved, resumed_opts)
    assert same_tensors(
        resumed.state_dict(), saved.model
    )  # to look at the optimizers moved no weight
    assert all(parameter.grad is None for parameter in resumed.parameters())
    train(resumed, resumed_opts, 4, seed=2)
    assert same_tensors(resumed.state_dict(), model.state_dict())


def test_rates_are_settings_and_stay_as_they_were_made():
    saved = made()
    saved.optimizers[0]["param_groups"][0]["lr"] = 7.0
    _, opts = fresh()
    checkpoints.load_optimizers(saved, opts)
    assert opts[0].param_groups[0]["lr"] == CONFIG.train.learning_rate


def test_the_average_is_built_where_it_is_asked_for():
    saved = made()
    for ema, weights in ((False, saved.model), (True, saved.ema)):
        assert same_tensors(checkpoints.build_model(saved, ema=ema).state_dict(), weights)


def test_every_honest_model_is_built_whatever_its_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checkpoints, "MAX_EXCESS", 0
    )  # so that the size implied must never be above the real one
    norms, mlps, sizes = ("layernorm", "rmsnorm"), ("gelu", "swiglu"), (4, 20)
    for choice in itertools.product(
        ("learned", "rope"), norms, mlps, (False, True), (False, True), sizes
    ):
        names = ("positions", "norm", "mlp", "bias", "tied", "n_embd")
        model = ModelConfig(
            n_layer=1, n_head=2, block_size=3, **dict(zip(names, choice, strict=True))
        )
        saved = checkpoint_of(
            GPT(model, len(VOCABULARY)), [], dataclasses.replace(CONFIG, model=model)
        )
        assert same_tensors(checkpoints.build_model(saved, ema=False).state_dict(), saved.model)


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_a_compiled_or_distributed_model_is_saved_as_what_it_wraps(prefix, tmp_path):
    plain = made()
    wrapped = dataclasses.replace(
        plain, model={prefix + name: tensor for name, tensor in plain.model.items()}
    )
    file_format.write(tmp_path / "last.pt", checkpoints.seal(wrapped))
    assert same_tensors(torch.load(tmp_path / "last.pt", weights_only=True)["model"], plain.model)


def test_a_file_of_the_first_format_is_read_for_ever():
    """stored/format_1.pt is what `save(path, made(SMALLEST))` wrote then."""
    saved = checkpoints.load(STORED / "format_1.pt")
    model = checkpoints.build_model(saved, ema=True)
    checkpoints.load_optimizers(saved, optimizers.build(model, saved.config.train, torch.float32))
    assert (saved.vocabulary, saved.progress["step"]) == (VOCABULARY, 3)
    assert model(torch.arange(4)[None]).norm().item() == pytest.approx(STORED_NORM, rel=1e-5)


# ------------------------------------------------------------------------------- which file is read


@pytest.fixture
def run(tmp_path):
    """A folder with prev.pt of step 1, last.pt of step 2 and best.pt of step 1."""
    folder = tmp_path / "out" / "plays"
    folder.mkdir(parents=True)
    for step in (1, 2):
        file_format.write(
            folder / "last.pt", checkpoints.seal(made(step=step)), previous=folder / "prev.pt"
        )
    file_format.write(folder / "best.pt", checkpoints.seal(made(step=1)))
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
    "prefer, damaged, stands_in",
    [
        ("last", ["last.pt"], "prev.pt"),
        ("best", ["best.pt"], "last.pt"),
        ("best", ["best.pt", "last.pt"], "prev.pt"),
        ("last", ["best.pt"], None),
        ("best", ["last.pt", "prev.pt"], None),
    ],
)
def test_a_folder_falls_back_and_says_so_in_one_line(run, damage, prefer, damaged, stands_in):
    for name in damaged:
        DAMAGE[damage](run / name)
    path, note = checkpoints.resolve(run, prefer)
    assert path == run / (stands_in or f"{prefer}.pt")
    assert checkpoints.load(path).progress["step"] == (2 if path.name == "last.pt" else 1)
    if stands_in is None:
        assert note is None
    else:
        assert note.startswith(f"{run / damaged[0]}: ") and note.endswith(
            f"; reading {path} instead"
        )


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_was_named_is_read_or_refused_with_the_good_ones_nearby(run, damage):
    for age, name in enumerate(("last.pt", "best.pt", "prev.pt")):
        os.utime(run / name, (10**9 - age, 10**9 - age))
    assert checkpoints.resolve(run / "last.pt", "last") == (run / "last.pt", None)
    DAMAGE[damage](run / "last.pt")
    message = refusal(checkpoints.resolve, run / "last.pt", "last")
    assert message.startswith(f"{run / 'last.pt'}: ")
    assert message.endswith(
        f"; good ones nearby, newest first: {run / 'best.pt'}, {run / 'prev.pt'}"
    )


def test_where_there_is_nothing_the_good_ones_nearby_are_listed(run, tmp_path):
    empty = tmp_path / "out" / "empty"
    empty.mkdir()
    for path in (
        empty,
        tmp_path / "out" / "typo",
        tmp_path / "out" / "typo" / "last.pt",
        tmp_path / "out",
    ):
        message = refusal(checkpoints.resolve, path, "last")
        assert message.startswith(str(path)) and "no such file" in message
        assert all(str(run / name) in message for name in ("last.pt", "prev.pt", "best.pt"))
    assert "there is no good one nearby" in refusal(
        checkpoints.resolve, tmp_path / "a" / "b" / "c", "last"
    )


def test_a_run_whose_files_are_all_damaged_is_refused(run):
    for name in ("last.pt", "prev.pt"):
        (run / name).write_bytes(b"")
    message = refusal(checkpoints.resolve, run, "last")
    assert (
        f"{run / 'last.pt'}: empty file (interrupted save?); {run / 'prev.pt'}: empty file"
        in message
    )
    assert message.endswith(f"good ones nearby, newest first: {run / 'best.pt'}")


def test_names_with_control_characters_are_shown_escaped(tmp_path):
    folder = tmp_path / "a\nb\x1b[2J"
    folder.mkdir()
    assert r"a\nb\x1b[2J" in refusal(checkpoints.resolve, folder, "last")
    file_format.write(folder / "last.pt", checkpoints.seal(made(step=1)))
    note = checkpoints.resolve(folder, "best")[1]
    assert "\n" not in note and "\x1b" not in note
    saved = checkpoints.load(folder / "last.pt")
    saved.model.pop("norm.weight")
    assert r"a\nb\x1b[2J" in refusal(checkpoints.build_model, saved, ema=False)


# ---------------------------------------------------------------------------------- what is refused


def payload_of(path):
    return torch.load(path, weights_only=True)


WRONG_PARTS = {
    "no config": (
        lambda p: p.pop("config"),
        "not a checkpoint of this program, which holds config, vocabulary",
    ),
    "something more": (lambda p: p.update(other=1), "not a checkpoint of this program"),
    "config is text": (
        lambda p: p.update(config="x"),
        "the config in it is wrong: a config must be a mapping",
    ),
    "unknown setting": (
        lambda p: p["config"]["model"].update(n_heads=2),
        "unknown key 'n_heads'; did you mean n_head?",
    ),
    "wrong setting": (
        lambda p: p["config"]["model"].update(n_layer=-1),
        "the config in it is wrong: n_layer must be",
    ),
    "unknown layout": (
        lambda p: p["config"]["model"].update(attention="../x"),
        "attention must be one of",
    ),
    "vocabulary is a list": (lambda p: p.update(vocabulary=["a"]), "vocabulary must be text"),
    "vocabulary unsorted": (lambda p: p.update(vocabulary="ba"), "the vocabulary is none: "),
    "vocabulary empty": (lambda p: p.update(vocabulary=""), "the vocabulary is none: "),
    "half a character": (lambda p: p.update(vocabulary="a\ud800"), "the vocabulary is none: "),
    "no hash": (lambda p: p["data"].pop("sha256"), "data.sha256 must be of type str, but is none"),
    "data is a list": (lambda p: p.update(data=[]), "data must be a mapping, but is a list"),
    "model is a list": (lambda p: p.update(model=[]), "model must be a mapping"),
    "no tensor": (lambda p: p["model"].update(x=1), "model must be tensors by name, but is 1"),
    "no name": (lambda p: p["model"].update({7: torch.zeros(1)}), "model must be tensors by name"),
    "ema is text": (lambda p: p.update(ema="x"), "ema must be a mapping"),
    "optimizers is a mapping": (lambda p: p.update(optimizers={}), "optimizers must be a list"),
    "progress nested": (
        lambda p: p["progress"].update(x={}),
        "progress must be numbers and texts by name",
    ),
    "progress nested in a list": (
        lambda p: p["progress"].update(x=[[1]]),
        "progress must be numbers and texts",
    ),
    "progress holds a tensor": (
        lambda p: p["progress"].update(x=torch.ones(1)),
        "progress must be numbers and texts",
    ),
    "environment is none": (
        lambda p: p.update(environment=None),
        "environment must be a mapping, but is none",
    ),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_a_part_of_the_wrong_kind_is_refused_by_name(case, tmp_path):
    path = tmp_path / "last.pt"
    file_format.write(path, checkpoints.seal(made()))
    payload = payload_of(path)
    change, words = WRONG_PARTS[case]
    change(payload)
    file_format.write(path, file_format.seal(payload))
    message = refusal(checkpoints.load, path)
    assert message.startswith(f"{path}: ") and words in message


@pytest.mark.parametrize("payload", [None, 7, "text", [1, 2], torch.zeros(3), {}, {1: 2}], ids=repr)
def test_a_sealed_file_with_another_payload_is_refused(payload, tmp_path):
    file_format.write(tmp_path / "last.pt", file_format.seal(payload))
    assert "not a checkpoint of this program" in refusal(checkpoints.load, tmp_path / "last.pt")


@pytest.mark.parametrize(
    "value", [np.float64(1.0), np.int64(1), torch.ones(1), torch.__version__, (1,)], ids=type
)
def test_only_plain_values_enter_a_checkpoint(value):
    for name in ("progress", "environment"):
        assert f"{name} must be numbers and texts by name" in refusal(
            dataclasses.replace, made(), **{name: {"x": value}}
        )


NAME = "blocks.1.mlp.up.weight"  # float32 (32, 8)
WRONG_TENSORS = {
    "missing": (lambda t: t.pop(NAME), f"missing: {NAME}; unknown: none"),
    "unknown": (lambda t: t.update(extra=torch.zeros(1)), "missing: none; unknown: extra"),
    "escape": (lambda t: t.update({"\x1b[2J": torch.zeros(1)}), r"unknown: \x1b[2J"),
    "all missing": (dict.clear, "and 24 more; unknown: none"),
    "shape": (
        lambda t: t.update({NAME: torch.zeros(8, 32)}),
        f"{NAME} is float32 (8, 32), its config makes float32 (32, 8)",
    ),
    "flat": (
        lambda t: t.update({NAME: torch.zeros(256)}),
        f"{NAME} is float32 (256,), its config makes",
    ),
    "int": (
        lambda t: t.update({NAME: t[NAME].long()}),
        f"{NAME} is int64 (32, 8), its config makes float32 (32, 8)",
    ),
    "double": (lambda t: t.update({NAME: t[NAME].double()}), f"{NAME} is float64 (32, 8)"),
    "half": (lambda t: t.update({NAME: t[NAME].bfloat16()}), f"{NAME} is bfloat16 (32, 8)"),
    "complex": (lambda t: t.update({NAME: t[NAME].cfloat()}), f"{NAME} is complex64 (32, 8)"),
    "stride 0": (
        lambda t: t.update({NAME: torch.zeros(1, 1).expand(32, 8)}),
        f"{NAME} is float32 (32, 8), not dense",
    ),
    "a view": (
        lambda t: t.update({NAME: torch.zeros(33, 8)[1:]}),
        f"{NAME} is float32 (32, 8), not dense",
    ),
    "huge": (
        lambda t: t.update({NAME: torch.zeros(1, 1).expand(10**6, 10**6)}),
        "(1000000, 1000000), not dense",
    ),
    "NaN": (lambda t: t[NAME][3, 4].fill_(float("nan")), f"numbers that are not finite in {NAME}"),
    "infinite": (
        lambda t: t[NAME][0, 0].fill_(float("-inf")),
        f"numbers that are not finite in {NAME}",
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
@pytest.mark.parametrize("part", ["model", "ema"])
def test_a_wrong_weight_is_refused_by_name(case, part):
    saved = made()
    change, words = WRONG_TENSORS[case]
    change(getattr(saved, part))
    for ema in (False, True):
        message = refusal(checkpoints.build_model, saved, ema=ema)
        assert message.startswith(f"checkpoint: {part}: ") and words in message


def test_a_config_that_differs_from_the_weights_is_refused_with_the_difference(tmp_path):
    for changes, words in {
        (
            "n_embd",
            16,
        ): "token_embedding.weight is float32 (5, 8), its config makes float32 (5, 16)",
        ("n_embd", 4): "token_embedding.weight is float32 (5, 8), its config makes float32 (5, 4)",
        ("n_layer", 3): "missing: blocks.2.norm_1.weight",
        ("n_layer", 1): "unknown: blocks.1.norm_1.weight",
        (
            "block_size",
            9,
        ): "position_embedding.weight is float32 (4, 8), its config makes float32 (9, 8)",
        ("attention", "separate"): "unknown: blocks.0.attention",
    }.items():
        model = dataclasses.replace(CONFIG.model, **dict([changes]))
        saved = dataclasses.replace(made(), config=dataclasses.replace(CONFIG, model=model))
        assert words in refusal(checkpoints.build_model, saved, ema=False)
    saved = dataclasses.replace(made(), vocabulary=VOCABULARY + "d")
    assert "token_embedding.weight is float32 (5, 8), its config makes float32 (6, 8)" in refusal(
        checkpoints.build_model, saved, ema=False
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"n_layer": 1000, "n_embd": 4096}, "its config makes 805,"),
        ({"block_size": 2**20}, "bytes, its config makes 33,"),
        ({"n_embd": 65536, "n_head": 65536, "attention": "heads"}, "bytes, its config makes 412,"),
    ],
)
def test_a_small_file_never_makes_a_large_model(changes, words, monkeypatch):
    saved = made()
    saved.config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **changes))
    broad = torch.zeros(1, 1).expand(10**6, 10**6)
    saved.model |= {f"broad {i}": broad for i in range(10)}  # shapes alone make no file large
    monkeypatch.setattr(checkpoints, "GPT", None)
    assert words in refusal(checkpoints.build_model, saved, ema=False)


def first(state):
    return state["state"][0]


WRONG_STATES = {
    "no mapping": (
        lambda o: o.__setitem__(0, [1]),
        "optimizer 0: it is no state of the parameters",
    ),
    "no state": (lambda o: o[0].pop("state"), "optimizer 0: it is no state of the parameters"),
    "state is a list": (lambda o: o[0].update(state=[]), "it is no state of the parameters"),
    "state of a text": (
        lambda o: o[0]["state"].update({0: "x"}),
        "it is no state of the parameters",
    ),
    "state by text": (
        lambda o: o[0]["state"].update({"0": o[0]["state"].pop(0)}),
        "it is no state of the parameters",
    ),
    "groups are text": (
        lambda o: o[0].update(param_groups="x"),
        "it is no state of the parameters",
    ),
    "a group is text": (
        lambda o: o[0].update(param_groups=["x"] * 2),
        "it is no state of the parameters",
    ),
    "a group less": (lambda o: o[0]["param_groups"].pop(), "it is no state of the parameters"),
    "another order": (
        lambda o: o[0]["param_groups"][0]["params"].reverse(),
        "it is no state of the parameters",
    ),
    "no optimizer": (list.clear, "it has 0 optimizers, its config makes 1"),
    "one more": (lambda o: o.append(o[0]), "it has 2 optimizers, its config makes 1"),
    "emptied": (lambda o: o[0]["state"].clear(), "more; unknown: none"),
    "a parameter less": (
        lambda o: o[0]["state"].pop(2),
        "missing: 2.step, 2.exp_avg, 2.exp_avg_sq; unknown: none",
    ),
    "a parameter more": (
        lambda o: o[0]["state"].update({99: {"step": torch.ones(())}}),
        "unknown: 99.step",
    ),
    "a moment less": (lambda o: first(o[0]).pop("exp_avg"), "missing: 0.exp_avg; unknown: none"),
    "a moment more": (lambda o: first(o[0]).update(x=torch.ones(())), "unknown: 0.x"),
    "a moment turned": (
        lambda o: first(o[0]).update(exp_avg=first(o[0])["exp_avg"].T.contiguous()),
        "0.exp_avg is float32",
    ),
    "a moment of int": (
        lambda o: first(o[0]).update(exp_avg=first(o[0])["exp_avg"].int()),
        "0.exp_avg is int32",
    ),
    "a moment of stride 0": (
        lambda o: first(o[0]).update(
            exp_avg=torch.zeros(1, 1).expand(first(o[0])["exp_avg"].shape)
        ),
        "not dense, its config makes float32",
    ),
    "no tensor": (
        lambda o: first(o[0]).update(step=3),
        "0.step is a int, its config makes float32 ()",
    ),
    "NaN": (
        lambda o: first(o[0])["exp_avg_sq"].view(-1)[0].fill_(float("nan")),
        "not finite in 0.exp_avg_sq",
    ),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_a_wrong_optimizer_state_is_refused_by_name(case):
    saved = made()
    change, words = WRONG_STATES[case]
    change(saved.optimizers)
    model, opts = fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = refusal(checkpoints.load_optimizers, saved, opts)
    assert message.startswith("checkpoint: ") and words in message
    assert same_tensors(model.state_dict(), before)


def test_the_state_of_another_optimizer_is_refused():
    for theirs, ours in ((CONFIG, MUON), (MUON, CONFIG)):
        refusal(checkpoints.load_optimizers, made(theirs), fresh(ours)[1])
