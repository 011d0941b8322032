"""Models for Hugging Face's transformers: the same logits, ids and text there, and bit for bit the
same model after the way back.
"""

import json
import os

import pytest
import safetensors.torch
import torch

from checkpointing import checkpoint as checkpoints
from checkpointing import huggingface, run_dir
from checkpointing.gpt2 import write_run
from common.errors import UserError
from configs.cli import load
from configs.schema import LAYOUTS, Config, ModelConfig
from data.tokenizer import CharTokenizer
from model.generate import Generation, Sampler
from model.gpt import GPT
from tests.variants import CHOICES, concatenated

# controls, line ends, U+2028, spaces, combining marks, concatenated emoji, a byte order mark, what
# normalization changes, and what looks like a token of other tokenizers
TEXT = (
    "\0\x1b\x7f\x85\t\r\n\n\r a  b\u2028\u2029\xa0\u3000e\u0301\xe9\u200d\u200f"
    "\U0001f469\u200d\U0001f4bb\U0001f600\ufeff\ufb01\u0130\u0131\xdf\u1e9e\u01c5\u212b"
    "<|endoftext|>\u0120\u2581##"
)
SPACED = "e . t , n ! b ? do n't"  # spaces that other tokenizers remove when they decode
VOCABULARY = "".join(sorted(set(TEXT + SPACED)))
SHAPES = [  # n_layer, n_head, n_embd, block_size, bias, tied
    (1, 1, 8, 64, False, True),
    (2, 4, 16, 64, True, True),
    (3, 2, 12, 80, False, False),
    (2, 3, 24, 64, True, False),
]


@pytest.fixture(scope="module")
def transformers():
    """The library, imported when a test needs it: that takes seconds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def make_checkpoint(n_layer=2, n_head=2, n_embd=16, block_size=64, **others):
    """Return the checkpoint of a model with random weights, large enough to matter."""
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
    config = Config(model=ModelConfig(**sizes, **others))
    model, generator = GPT(config.model, len(VOCABULARY)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return checkpoints.Checkpoint(
        config=config,
        vocabulary=VOCABULARY,
        data={"name": "text", "sha256": "", "characters": 0},
        progress={},
        environment={},
        events={"number": 0, "size": 0},
        tensors={
            f"model.{name}": each for name, each in concatenated(model.named_slices()).items()
        },
    )


def export(folder, saved):
    """Write the run of a checkpoint, export it and return the folder of the exported model."""
    write_run(folder / "run", saved)
    return bridge(folder / "run", folder / "hf")


def bridge(source, folder):
    assert huggingface.main([str(source), f"--out_dir={folder}"]) == 0
    return folder


def refusal(source, folder, exit_code):
    """Return the one line of a command that must be refused and write nothing."""
    with pytest.raises(UserError) as caught:
        bridge(source, folder)
    assert caught.value.exit_code == exit_code, caught.value
    assert str(caught.value).isprintable() and not folder.exists()
    return str(caught.value)


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------- there, and back


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_the_same_in_transformers(shape, transformers, tmp_path):
    *sizes, bias, tied = shape
    layout = LAYOUTS[sum(sizes) % len(LAYOUTS)]
    saved = make_checkpoint(*sizes, bias=bias, tied=tied, attention=layout)
    folder = export(tmp_path, saved)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.from_numpy(CharTokenizer(VOCABULARY).encode(TEXT)).long()
    with torch.no_grad():
        ours = checkpoints.build_model(saved).eval()(ids[None])
        logits = theirs(**tokenizer(TEXT, return_tensors="pt")).logits
    assert (logits - ours).abs().max() < 1e-5 * max(1, ours.abs().max())
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert theirs.config.bos_token_id is theirs.config.eos_token_id is None
    assert theirs.generation_config.bos_token_id is theirs.generation_config.eos_token_id is None


def test_the_ids_of_every_character_are_the_same_in_transformers(transformers, tmp_path):
    folder = export(tmp_path, make_checkpoint())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = CharTokenizer(VOCABULARY)
    for text in (*VOCABULARY, VOCABULARY, TEXT, TEXT[::-1], 3 * TEXT, SPACED, "a\r\nb\n\r\n e "):
        ids = tokenizer(text)["input_ids"]
        assert ids == ours.encode(text).tolist(), repr(text)
        assert tokenizer.decode(ids) == text == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(tokenizer) == len(VOCABULARY) and not tokenizer.all_special_tokens
    assert set(tokenizer(TEXT)) == {"input_ids", "attention_mask"}
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert written["model_input_names"] == ["input_ids", "attention_mask"]  # not a default in 4.57
    with pytest.raises(Exception, match="UNK"):
        tokenizer("z")


def test_greedy_text_is_the_same_in_transformers(transformers, tmp_path):
    saved = make_checkpoint()
    folder = export(tmp_path, saved)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in ("a", TEXT[:20]):
        inputs = tokenizer(prompt, return_tensors="pt")
        new = saved.config.model.block_size - len(prompt)
        output = theirs.generate(**inputs, do_sample=False, max_new_tokens=new)
        generation = Generation(checkpoints.build_model(saved), Sampler(1, [0], temperature=0.0))
        generation.append(CharTokenizer(VOCABULARY).encode(prompt)[None])
        ours = [int(generation.step()[0]) for _ in range(new)]
        assert tokenizer.decode(output[0]) == prompt + CharTokenizer(VOCABULARY).decode(ours)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_model_comes_back_to_the_last_bit(shape, tmp_path):
    *sizes, bias, tied = shape
    saved = make_checkpoint(*sizes, bias=bias, tied=tied, dropout=0.1, attention_dropout=0.2)
    back = bridge(export(tmp_path, saved), tmp_path / "back")
    found = checkpoints.load(back / "best.safetensors")
    assert found.config == saved.config and found.vocabulary == saved.vocabulary
    assert same_tensors(found.tensors, saved.tensors)


def test_what_transformers_writes_comes_back_to_the_last_bit(transformers, tmp_path):
    saved = make_checkpoint(tied=False)
    folder, again = export(tmp_path, saved), tmp_path / "again"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(again)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(again)
    found = checkpoints.load(bridge(again, tmp_path / "back") / "best.safetensors")
    assert found.config == saved.config and found.vocabulary == saved.vocabulary
    assert same_tensors(found.tensors, saved.tensors)


def test_biases_that_transformers_trained_come_back(transformers, tmp_path):
    folder, trained = export(tmp_path, make_checkpoint()), tmp_path / "trained"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    theirs.save_pretrained(trained)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(trained)
    found = checkpoints.load(bridge(trained, tmp_path / "back") / "best.safetensors")
    assert found.config.model.bias and found.config.model.tied
    ids = torch.arange(len(VOCABULARY))[None]
    with torch.no_grad():
        ours = checkpoints.build_model(found).eval()(ids)
        assert (theirs(ids).logits - ours).abs().max() < 1e-5 * max(1, ours.abs().max())


def test_tied_weights_are_those_of_the_embedding_as_in_transformers(tmp_path):
    """With tie_word_embeddings, transformers ignores an lm_head in the file."""
    saved = make_checkpoint(tied=True)
    folder = export(tmp_path, saved)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.ones(len(VOCABULARY), 16)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    found = checkpoints.load(bridge(folder, tmp_path / "back") / "best.safetensors")
    assert found.config.model.tied and same_tensors(found.tensors, saved.tensors)


def test_the_weights_are_a_file_that_safetensors_reads(tmp_path):
    folder = export(tmp_path, make_checkpoint())
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "transformer.h.1.mlp.c_proj.bias" in file.keys()  # noqa: SIM118, no mapping


# ---------------------------------------------------------------------------------- what is refused

NOT_CLASSIC = {
    "positions": ("rope", "positions 'rope' (GPT-2: 'learned')"),
    "token_shifts": (2, "token_shifts 2 (GPT-2: 0)"),
    "ngram_embeddings": (4, "ngram_embeddings 4 (GPT-2: 0)"),
    "norm": ("rmsnorm", "norm 'rmsnorm' (GPT-2: 'layernorm')"),
    "mlp": ("swiglu", "mlp 'swiglu' (GPT-2: 'gelu')"),
    "qk_norm": (True, "qk_norm true (GPT-2: false)"),
    "logit_softcap": (15.0, "logit_softcap 15.0 (GPT-2: 0.0)"),
}


@pytest.mark.parametrize("name", NOT_CLASSIC)
def test_a_setting_that_gpt2_does_not_have_is_named(name, tmp_path):
    value, words = NOT_CLASSIC[name]
    write_run(tmp_path / "run", make_checkpoint(**{name: value}))
    message = refusal(tmp_path / "run", tmp_path / "hf", 2)
    assert words in message and message.count("GPT-2: ") == 1


def test_all_settings_in_the_way_are_named_at_once(tmp_path):
    write_run(
        tmp_path / "run", make_checkpoint(**{n: value for n, (value, _) in NOT_CLASSIC.items()})
    )
    message = refusal(tmp_path / "run", tmp_path / "hf", 2)
    assert all(words in message for _, words in NOT_CLASSIC.values())


def test_every_setting_of_the_model_is_exported_or_refused():
    """A new choice of ModelConfig must enter the list of what GPT-2 has, or the exported files."""
    exported = {"bias", "tied"}
    assert huggingface.CLASSIC.keys() | exported == CHOICES.keys()


@pytest.mark.parametrize("name", ["nanogpt_cpu", "nanogpt_gpu"])
def test_the_configs_that_the_message_recommends_can_be_exported(name):
    config = load([f"configs/{name}.yaml"]).config
    huggingface.check_classic(name, config.model)


@pytest.mark.parametrize("n_inner", [None, 64])
def test_the_width_of_the_mlp_may_be_given(n_inner, tmp_path):
    folder = export(tmp_path, make_checkpoint())
    change_json(folder / "config.json", n_inner=n_inner)
    bridge(folder, tmp_path / "back")


def test_a_folder_that_holds_anything_of_a_model_is_left_alone(tmp_path):
    folder = export(tmp_path, make_checkpoint())
    for name in os.listdir(folder):
        other = tmp_path / f"other {name}"
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(UserError, match="already holds"):
            bridge(tmp_path / "run", other)
        assert os.listdir(other) == [name] and (other / name).read_text() == "mine"
    with pytest.raises(UserError, match="already holds a run"):
        bridge(tmp_path / "run", tmp_path / "run")
    assert run_dir.holds_run(tmp_path / "run") and not (tmp_path / "run" / "config.json").exists()


def test_what_is_no_run_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "none", tmp_path / "hf", 4)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def vocab(ids):
    return {"model": {"type": "WordLevel", "vocab": ids, "unk_token": "?"}}


WRONG_FILES = {  # file, changes, words
    "another model": ("config.json", {"model_type": "llama"}, "model_type 'llama'; allowed: mod"),
    "gelu_new": ("config.json", {"activation_function": "gelu_new"}, "allowed: activation_func"),
    "epsilon": ("config.json", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06"),
    "a wide MLP": ("config.json", {"n_inner": 17}, "n_inner 17"),
    "scaling": ("config.json", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx true"),
    "sizes": ("config.json", {"n_embd": 18}, "transformer.wte.weight is float32"),
    "no size": ("config.json", {"n_layer": None}, "n_layer must be an integer"),
    "null": ("config.json", {"n_embd": None, "n_inner": 64}, "n_inner 64"),
    "a list": ("config.json", {"n_embd": [16], "n_inner": [16] * 4}, "n_inner a list"),
    "a text": ("config.json", {"n_head": "2"}, "n_head must be an integer"),
    "a huge model": ("config.json", {"n_layer": 1000, "n_embd": 65536}, "its weights have"),
    "a huge context": ("config.json", {"n_positions": 2**20}, "its weights have"),
    "byte pairs": ("tokenizer.json", {"model": {"type": "BPE"}}, "not a tokenizer of single"),
    "lower case": ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "not a tokenizer of"),
    "special tokens": ("tokenizer.json", {"added_tokens": [{"id": 0}]}, "not a tokenizer of"),
    "words": ("tokenizer.json", vocab({"the": 0}), "not single characters: 'the'"),
    "no vocab": ("tokenizer.json", vocab(None), "it has no vocab"),
    "a fraction": ("tokenizer.json", vocab({"a": 0.5}), "must be 0, 1, 2"),
    "true": ("tokenizer.json", vocab({"a": False}), "must be 0, 1, 2"),
    "few": ("tokenizer.json", vocab({"a": 0}), "the vocabulary 1 characters"),
    "a surrogate": (
        "tokenizer.json",
        vocab({c: i for i, c in enumerate([*VOCABULARY[1:], "\ud800"])}),
        "invalid vocabulary",
    ),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_model_that_is_not_ours_is_refused(name, tmp_path):
    file, changes, words = WRONG_FILES[name]
    folder = export(tmp_path, make_checkpoint())
    change_json(folder / file, **changes)
    assert words in refusal(folder, tmp_path / "back", 4)


# ------------------------------------------------------------------------------------ hostile files

HOSTILE_JSON = {
    "nothing": b"",
    "text": b"First Citizen:\n" * 100,
    "no object": b"[1, 2]",
    "deep": b"[" * 10**6,
    "deep objects": b'{"a":' * 10**5,
    "a name twice": b'{"model_type": "gpt2", "model_type": "gpt2"}',
    "a long integer": b'{"n_layer": ' + b"9" * 10**6 + b"}",
    "no number": b'{"n_layer": NaN}',
    "not UTF-8": b'{"n_layer": "\xff"}',
    "many parts": b'{"a": [' + b"0," * 10**6 + b"0]}",
    "a large file": b" " * (2**24 + 1),
}


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_hostile_json_is_refused(name, file, tmp_path):
    resource = pytest.importorskip("resource")
    folder = export(tmp_path, make_checkpoint())
    (folder / file).write_bytes(HOSTILE_JSON[name])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(folder, tmp_path / "back", 4).startswith(f"{folder / file}: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KB


def header(tensors):
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


HOSTILE_WEIGHTS = {
    "nothing": b"",
    "a pickle": b"\x80\x02cos\nsystem\nX\x04\0\0\0exit\x85R.",
    "a huge header": (2**62).to_bytes(8, "little") + b"{}",
    "no tensors": header({}),
    "a huge tensor": header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    "no dtype": header({"a": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}) + b"\0",
    "two in one place": header(
        {n: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for n in "ab"}
    )
    + b"\0",
}


@pytest.mark.parametrize("name", HOSTILE_WEIGHTS)
def test_hostile_weights_are_refused(name, tmp_path):
    folder = export(tmp_path, make_checkpoint())
    (folder / "model.safetensors").write_bytes(HOSTILE_WEIGHTS[name])
    refusal(folder, tmp_path / "back", 4)


def test_truncated_files_are_refused(tmp_path):
    folder = export(tmp_path, make_checkpoint())
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        content = (folder / file).read_bytes()
        for length in range(0, len(content) - 1, len(content) // 20):
            (folder / file).write_bytes(content[:length])
            refusal(folder, tmp_path / "back", 4)
        (folder / file).write_bytes(content)
    bridge(folder, tmp_path / "back")


def test_links_in_a_loop_pipes_and_folders_are_refused(tmp_path):
    folder, back = export(tmp_path, make_checkpoint()), tmp_path / "back"
    for file in ("tokenizer.json", "model.safetensors", "config.json"):
        path = folder / file
        content = path.read_bytes()
        path.unlink()
        if file != "config.json":  # which makes a folder a model
            assert "no such file" in refusal(folder, back, 4)
            path.symlink_to(file)
            assert "symbolic link" in refusal(folder, back, 4)
            path.unlink()
        os.mkfifo(path)
        assert "not a regular file" in refusal(folder, back, 4)
        path.unlink()
        path.mkdir()
        assert "not a regular file" in refusal(folder, back, 4)
        path.rmdir()
        path.write_bytes(content)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path):
    folder = export(tmp_path, make_checkpoint())
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["transformer.wpe.weight"][3, 2] = value
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "not finite: transformer.wpe.weight" in refusal(folder, tmp_path / "back", 4)
