"""Models for Hugging Face's transformers: the same logits, ids and text there."""

import dataclasses
import json
import os

import pytest
import safetensors
import torch

from checkpointing import checkpoint as checkpoints
from checkpointing import run_dir
from common.errors import UserError
from configs.command import parse_train
from configs.schema import LAYOUTS, ModelConfig
from convert import huggingface
from convert.nanogpt import write_run
from data.tokenizer import CharTokenizer
from model import gpt
from model.generate import Generation, Sampler
from model.gpt import GPT, MLP
from tests.conftest import printed
from tests.variants import CHOICES, checkpoint_of, noisy

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


def make_checkpoint(n_layer=2, n_head=2, n_embd=16, block_size=64, model=None, **others):
    """Return the checkpoint of a model with random weights, large enough to matter."""
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
    config = model or ModelConfig(**sizes, **others)
    return checkpoint_of(noisy(GPT(config, len(VOCABULARY))), VOCABULARY)


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
    assert not folder.exists()
    return printed(caught.value)


# --------------------------------------------------------------------------------- in transformers


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
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
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


@pytest.mark.parametrize("attention, expected", [("auto", 0.1), (0.2, 0.2)])
def test_training_in_transformers_has_the_dropout_of_the_run(attention, expected, tmp_path):
    folder = export(tmp_path, make_checkpoint(dropout=0.1, attention_dropout=attention))
    config = json.loads((folder / "config.json").read_text())
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    assert [config[name] for name in names] == [0.1, 0.1, expected]


# ---------------------------------------------------------------------------------- what is refused

NOT_GPT2 = {
    "positions": ("rope", "positions 'rope' (GPT-2: 'learned')"),
    "token_shifts": (2, "token_shifts 2 (GPT-2: 0)"),
    "norm": ("rmsnorm", "norm 'rmsnorm' (GPT-2: 'layernorm')"),
    "mlp": ("swiglu", "mlp 'swiglu' (GPT-2: 'gelu')"),
    "qk_norm": (True, "qk_norm true (GPT-2: false)"),
    "logit_softcap": (15.0, "logit_softcap 15.0 (GPT-2: 0.0)"),
    "logit_scale": (0.8, "logit_scale 0.8 (GPT-2: 1.0)"),
}


@pytest.mark.parametrize("names", [*([name] for name in NOT_GPT2), list(NOT_GPT2)], ids="-".join)
def test_all_settings_that_gpt2_does_not_have_are_named_at_once(names, tmp_path):
    settings = {name: NOT_GPT2[name][0] for name in names}
    write_run(tmp_path / "run", make_checkpoint(**settings))
    message = refusal(tmp_path / "run", tmp_path / "hf", 2)
    assert all(NOT_GPT2[name][1] in message for name in names)
    assert message.count("GPT-2: ") == len(names)


def test_a_parameter_that_gpt2_does_not_have_is_named(tmp_path, monkeypatch):
    """A gate on the MLP, as in CONTRIBUTING, before `GPT2_ARCHITECTURE` knows its setting."""

    class GatedMLP(MLP):
        def __init__(self, config):
            super().__init__(config)
            self.output_gate = torch.nn.Linear(config.n_embd, 1, bias=False)

    monkeypatch.setattr(gpt, "MLP", GatedMLP)
    write_run(tmp_path / "run", make_checkpoint())
    message = refusal(tmp_path / "run", tmp_path / "hf", 2)
    assert "the parameters blocks.0.mlp.output_gate, blocks.1.mlp.output_gate; allowed: " in message


def test_every_setting_of_the_model_is_exported_or_refused():
    """A new choice of ModelConfig must enter the list of what GPT-2 has, or the exported files."""
    exported = {"bias", "tied"}
    assert huggingface.GPT2_ARCHITECTURE.keys() | exported == CHOICES.keys() | {"logit_scale"}


@pytest.mark.parametrize("name", ["nanogpt_cpu", "nanogpt_gpu"])
def test_the_configs_that_the_message_recommends_are_exported(name, tmp_path):
    config = parse_train([f"configs/{name}.yaml"]).config.model
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
    write_run(tmp_path / "run", make_checkpoint(model=dataclasses.replace(config, **sizes)))
    assert bridge(tmp_path / "run", tmp_path / "hf")


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
