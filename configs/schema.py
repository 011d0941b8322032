"""All settings, each declared once with its type, default, range and meaning.

Config files, command lines, `--help` and checkpoints all use these frozen dataclasses, so a new
setting is one line here. Nothing here imports torch, so a wrong setting is reported at once.
"""

import codecs
import os
import re
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass

from common.errors import ConfigError, did_you_mean
from configs.fields import Checked, brief, setting, unescape, with_escapes

# an address of a text: URL, name of its folder, name of the file, SHA-256
ADDRESS = re.compile(
    r"(https://[^\s#]+/(\w[\w.-]*)/(\w[\w.-]*))#sha256=([0-9a-f]{64})", re.IGNORECASE
)
LAYOUTS = ("heads", "separate", "fused", "interleaved", "stacked", "unrolled")
KERNELS = ("loop", "bmm", "batched", "sdpa")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("float32", "bfloat16")
# names in nanoGPT, Hugging Face, PyTorch and others -> the setting here
OTHER_NAMES = {
    "lr": "learning_rate", "muon_lr": "muon_learning_rate", "min_lr": "min_lr_ratio",
    "wd": "weight_decay", "max_grad_norm": "grad_clip", "clip_grad_norm": "grad_clip",
    "adam_beta1": "beta1", "adam_beta2": "beta2", "lr_scheduler_type": "schedule",
    "warmup": "warmup_iters", "warmup_steps": "warmup_iters", "steps": "max_iters",
    "max_steps": "max_iters", "iters": "max_iters", "epochs": "max_iters",
    "num_train_epochs": "max_iters", "eval_steps": "eval_interval", "save_steps": "save_interval",
    "logging_steps": "log_interval", "early_stopping_patience": "patience",
    "per_device_train_batch_size": "batch_size", "bs": "batch_size",
    "accumulation_steps": "gradient_accumulation_steps", "context_length": "block_size",
    "seq_len": "block_size", "n_ctx": "block_size", "n_positions": "block_size",
    "max_position_embeddings": "block_size", "d_model": "n_embd", "hidden_size": "n_embd",
    "embed_dim": "n_embd", "num_layers": "n_layer", "num_hidden_layers": "n_layer",
    "depth": "n_layer", "num_heads": "n_head", "nhead": "n_head", "num_attention_heads": "n_head",
    "dropout_rate": "dropout", "activation": "mlp", "tie_word_embeddings": "tied",
    "dataset": "sources", "torch_compile": "compile", "checkpoint": "ckpt", "model_path": "ckpt",
    "max_length": "max_new_tokens", "max_tokens": "max_new_tokens", "length": "max_new_tokens",
    "n_samples": "num_samples", "num_return_sequences": "num_samples", "topk": "top_k",
    "topp": "top_p",
}  # fmt: skip
SEEDS = "[0, 4294967295]"
MAX_BATCHED_CONTEXT = 1024  # for kernel auto: batched stores all T^2 attention weights
# for dropout auto: (epochs, dropout probability of a run of that many epochs or more)
DROPOUT_BY_EPOCHS = ((0, 0.0), (6, 0.1), (8, 0.2), (16, 0.3))
# for logit_scale auto: what each epoch takes off 1, and the lower limit
LOGIT_SCALE_DROP, MIN_LOGIT_SCALE = 0.03, 0.8
DEFAULT_TEMPERATURE = 0.7  # of samples
MAX_ROTARY_ANGLES = 2**23  # bounds the memory for the tables of RoPE


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text to train on."""

    sources: tuple[str, ...] = setting(
        ("data/plays",),
        "texts in order of preference; the first one available is used: a file, a folder of .txt "
        "files, a pattern such as 'books/**/*.md', or https://...#sha256=<64 hex digits>",
    )
    encoding: str = setting(
        "utf-8", "encoding of files without a byte order mark; any Python text codec"
    )
    min_count: int = setting(
        1,
        "map characters that occur fewer times than this to U+FFFD; with --init_from, map instead "
        "those that the checkpoint's vocabulary lacks",
        "[1, 1e9]",
    )
    val_sources: tuple[str, ...] = setting(
        (), "validation texts, in the format of sources; none: the end of each source file"
    )
    val_fraction: float = setting(
        0.1,
        "fraction of each file, at its end, to validate on; of the distinct items of a list, those "
        "with the lowest SHA-256",
        "(0, 1)",
    )
    separator: str = setting(
        "",
        "text that ends an item of a list, with the escapes of --prompt: \\n for names, \\n\\n for "
        "recipes; each item is learned alone; none: the text is one piece",
    )
    answer_after: str = setting(
        "",
        "with separator: text that ends the question of an item, such as =; only what follows "
        "counts for the loss",
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("separator", "answer_after"):  # one spelling, however it was written
            object.__setattr__(self, name, with_escapes(unescape(getattr(self, name))))
        if self.answer_after and not self.separator:
            raise ConfigError(
                f"answer_after {brief(self.answer_after)} needs items that end: set separator too, "
                "such as '\\n'"
            )
        self._check_encoding()
        for source in self.sources + self.val_sources:
            if "://" in source and not ADDRESS.fullmatch(source):
                raise ConfigError(
                    f"sources: {brief(source)} is not a verifiable download; allowed: "
                    "https://HOST/FOLDER/FILE#sha256=<64 hex digits>; add its SHA-256, or download "
                    "it and give the file"
                )

    def _check_encoding(self):
        try:
            "\n".encode(self.encoding)  # refuses codecs that are not for text
            codec = codecs.lookup(self.encoding)
        except (LookupError, UnicodeError):
            codec = None
        if not codec or not codec.incrementaldecoder or codec.name in ("utf-16", "utf-32"):
            raise ConfigError(
                f"encoding: {brief(self.encoding)} does not work without a byte order mark; use a "
                "Python text codec such as utf-8, utf-16-le, cp1252, gb18030 or shift-jis; a file "
                "with a byte order mark needs none"
            )


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The model: its architecture, and how it is computed. The vocabulary comes from the text."""

    attention: str = setting("fused", "weight layout of the attention", choices=LAYOUTS)
    kernel: str = setting(
        "sdpa",
        "attention kernel; auto: batched in bfloat16 on a CPU up to a context of "
        f"{MAX_BATCHED_CONTEXT:,}, otherwise sdpa",
        choices=("auto", *KERNELS),
    )
    n_layer: int = setting(4, "number of blocks", "[1, 512]")
    n_head: int = setting(4, "number of attention heads per block", "[1, 65536]")
    n_embd: int = setting(128, "embedding size: the width of the residual stream", "[1, 65536]")
    block_size: int = setting(64, "context length, in characters", "[1, 1048576]")
    positions: str = setting("rope", "position encoding", choices=("learned", "rope"))
    token_shifts: int = setting(
        2,
        "number of previous characters, each embedded by a table of its own and added to the token "
        "embedding",
        "[0, 64]",
    )
    norm: str = setting(
        "layernorm", "normalization before each branch", choices=("layernorm", "rmsnorm")
    )
    mlp: str = setting(
        "relu2", "activation function of the MLP", choices=("gelu", "relu2", "swiglu")
    )
    bias: bool = setting(False, "biases in linear layers and LayerNorm")
    tied: bool = setting(False, "tie the output matrix (lm_head) to the token embedding")
    qk_norm: bool = setting(True, "RMS-normalize queries and keys")
    dropout: float | str = setting(
        0.0,
        "dropout probability, on embeddings and residual branches; auto: the more epochs, the "
        "higher: " + ", ".join(f"{p:g} from {epochs}" for epochs, p in DROPOUT_BY_EPOCHS),
        "[0, 1)",
        choices=("auto",),
    )
    attention_dropout: float = setting(0.0, "dropout probability, on attention weights", "[0, 1)")
    logit_softcap: float = setting(
        15.0, "soft-cap logits at this value: cap * tanh(logits / cap); 0: off", "[0, 1000]"
    )
    logit_scale: float | str = setting(
        1.0,
        "multiply the logits by this number, except in training: below 1, the model is less "
        f"confident; auto: max({MIN_LOGIT_SCALE:g}, 1 - {LOGIT_SCALE_DROP:g} * planned epochs)",
        "(0, 10]",
        choices=("auto",),
    )
    residual_init: str = setting(
        "zero",
        "initialization of each branch's last matrix: scaled: N(0, (0.02 / sqrt(2 n_layer))^2); "
        "zero: each block starts as the identity",
        choices=("scaled", "zero"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.n_embd % self.n_head:
            divisors = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            nearest = sorted(divisors, key=lambda n: (abs(n - self.n_head), -n))[:2]
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; "
                f"nearest n_head: {', '.join(map(str, nearest))}"
            )
        head_size = self.n_embd // self.n_head
        if self.positions == "rope" and head_size % 2:
            raise ConfigError(
                f"positions rope rotates pairs of features, but the head size is {head_size} "
                f"(n_embd {self.n_embd} / n_head {self.n_head}); choose an even head size, "
                "or positions learned"
            )
        angles = self.block_size * head_size
        if self.positions == "rope" and angles > MAX_ROTARY_ANGLES:
            raise ConfigError(
                f"positions rope needs a table of block_size {self.block_size} * head size "
                f"{head_size} = {angles:,} angles; allowed: {MAX_ROTARY_ANGLES:,}; "
                "reduce block_size, or choose positions learned"
            )


@dataclass(frozen=True)
class TrainConfig(Checked):
    """Training, evaluation and logging."""

    batch_size: int = setting(
        12, "windows of text per micro-batch, in total over all processes", "[1, 1000000]"
    )
    gradient_accumulation_steps: int = setting(1, "micro-batches per step", "[1, 1000000]")
    max_iters: int = setting(2000, "number of iterations (optimization steps)", "[1, 1e9]")
    optimizer: str = setting(
        "muon",
        "muon: Muon for the matrices in the blocks, AdamW for the rest",
        choices=("adamw", "muon"),
    )
    learning_rate: float = setting(0.02, "peak learning rate of AdamW", "(0, 10]")
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon", "(0, 10]")
    min_lr_ratio: float = setting(
        0.0, "learning rate at the end, as a fraction of the peak", "[0, 1]"
    )
    beta1: float = setting(0.9, "AdamW beta1: decay rate of the first moment", "[0, 1)")
    beta2: float = setting(0.99, "AdamW beta2: decay rate of the second moment", "[0, 1)")
    muon_momentum: float = setting(0.9, "momentum of Muon", "[0, 1)")
    weight_decay: float = setting(
        0.1, "decoupled weight decay, on matrices and embeddings", "[0, 100]"
    )
    grad_clip: float = setting(1.0, "clip the gradient norm to this value; 0: off", "[0, 1e6]")
    schedule: str = setting(
        "trapezoid", "learning-rate schedule", choices=("cosine", "trapezoid", "constant")
    )
    warmup_iters: int | str = setting(
        "auto", "iterations of linear warm-up; auto: max_iters / 70", "[0, 1e9]", choices=("auto",)
    )
    cooldown_iters: int | str = setting(
        "auto",
        "trapezoid: iterations of linear cooldown, at the end; auto: 6/7 of max_iters",
        "[0, 1e9]",
        choices=("auto",),
    )
    patience: int = setting(
        0, "stop early after this many evaluations without a better loss; 0: off", "[0, 1e9]"
    )
    eval_interval: int | str = setting(
        "auto",
        "iterations between evaluations; auto: max_iters / 10",
        "[1, 1e9]",
        choices=("auto",),
    )
    save_interval: int | str = setting(
        "auto",
        "iterations between checkpoints; auto: at each evaluation, and every five minutes",
        "[1, 1e9]",
        choices=("auto",),
    )
    log_interval: int = setting(10, "iterations between logged values", "[1, 1e9]")
    log: str = setting(
        "pictures",
        "what TensorBoard gets: scalars and samples, or pictures as well",
        choices=("scalars", "pictures"),
    )
    sample_chars: int = setting(
        200, "characters of the sample at each evaluation; 0: none", "[0, 1000000]"
    )

    def __post_init__(self):
        super().__post_init__()
        names = ["warmup_iters"] + ["cooldown_iters"] * (self.schedule == "trapezoid")
        numbers = {name: getattr(self, name) for name in names if getattr(self, name) != "auto"}
        if sum(numbers.values()) > self.max_iters:
            lengths = " + ".join(f"{name} {number}" for name, number in numbers.items())
            auto = " ".join(f"--{name}=auto" for name in numbers)
            raise ConfigError(
                f"{lengths} is more than max_iters {self.max_iters}; "
                f"set {auto}, or train for longer"
            )


@dataclass(frozen=True)
class Config(Checked):
    """The run as a whole."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    out_dir: str = setting("auto", "folder of the run; auto: out/<name of the config file>")
    seed: int = setting(1337, "seed of all random numbers", SEEDS)
    device: str = setting("auto", "device; auto: cuda, else mps, else cpu", choices=DEVICES)
    dtype: str = setting(
        "auto",
        "dtype of matrix products; auto: bfloat16 where it is fast",
        choices=("auto", *DTYPES),
    )
    compile: bool = setting(False, "use torch.compile: slow to start, then faster")


@dataclass(frozen=True)
class SampleConfig(Checked):
    """Options of sample.py."""

    ckpt: str = setting(MISSING, "checkpoint file, or run folder; required")
    prompt: str = setting(
        "",
        "text to continue (\\n: newline); FILE:path reads a file, - standard input",
        aliases=("start",),
    )
    num_samples: int = setting(1, "number of samples", "[1, 1e12]")
    sample: int | None = setting(None, "draw only sample N of this seed", "[1, 1e12]")
    max_new_tokens: int = setting(500, "characters to generate per sample", "[0, 1e12]")
    temperature: float | str = setting(
        "auto",
        f"lower: more conservative; 0: greedy; auto: {DEFAULT_TEMPERATURE:g}, or 0 for answers",
        "[0, 1e6]",
        choices=("auto",),
    )
    top_k: int = setting(0, "sample from the k likeliest characters; 0: off", "[0, 1e9]")
    top_p: float = setting(
        1.0, "nucleus sampling: from the likeliest with this total probability; 1: off", "(0, 1]"
    )
    min_p: float = setting(
        0.0, "drop characters below this fraction of the highest probability", "[0, 1)"
    )
    stop: tuple[str, ...] = setting(
        (), "end a sample where the model writes this text; may be repeated", repeatable=True
    )
    novel: str | None = setting(None, "lists: print only items that are not in this file")
    unknown: str = setting(
        "error",
        "characters that the vocabulary lacks: refuse the text, or skip them",
        choices=("error", "skip"),
    )
    seed: int = setting(1337, "seed of all random numbers", SEEDS)
    interactive: bool = setting(False, "take turns: you type a line, the model continues")
    score: str | None = setting(None, "print only the model's loss on the text in this file")
    html: str | None = setting(None, "write only this file: the model as a web page")
    device: str = setting("auto", "device; auto: cuda, else mps, else cpu", choices=DEVICES)
    dtype: str = setting(
        "float32", "dtype of the weights (with --score: of autocast)", choices=DTYPES
    )
    attention: str = setting("saved", "weight layout of the attention", choices=("saved", *LAYOUTS))
    kernel: str = setting("saved", "attention kernel", choices=("saved", *KERNELS))
    cache: bool = setting(
        True, "use the KV cache: faster, and in float32 the same text", aliases=("no_cache",)
    )

    def __post_init__(self):
        super().__post_init__()
        modes = [name for name in ("novel", "interactive", "score", "html") if getattr(self, name)]
        if len(modes) > 1:
            raise ConfigError(f"--{modes[0]} and --{modes[1]} contradict each other; give one")


def suggest_setting(key: str, names: dict[str, str], otherwise: str) -> str:
    """Return `did you mean X?` for an unknown key; names from other projects are recognized.

    `names` maps the names of settings to what is printed for them.
    """
    meant = OTHER_NAMES.get(key.rpartition(".")[2])
    hint = did_you_mean(meant if meant in names else key, names, otherwise)
    if meant == "learning_rate" in names:
        hint += f" (with optimizer muon, also {names['muon_learning_rate']})"
    if meant == "max_iters" in names and "epochs" in key:
        hint += " (max_iters counts steps, not epochs)"
    return hint


def to_dict(config: Config) -> dict:
    """Return a config as plain nested data, as checkpoints store it."""
    return asdict(config)


def flat_settings(config: Config) -> dict[str, object]:
    """Return every setting by its full name, except the paths of the run and its text."""
    flat = {}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    paths = ("out_dir", "data.sources", "data.val_sources")
    return {name: value for name, value in flat.items() if name not in paths}


def from_dict(mapping: object, section: type = Config):
    """Build a Config, or another section, from plain nested data; defaults fill in the rest."""
    if not isinstance(mapping, dict):
        raise ConfigError(f"must be a mapping of names to values, but is {brief(mapping)}")
    known = {field.name: field for field in fields(section)}
    for key in mapping:
        if key not in known:
            names = {name: name for name in known}
            hint = did_you_mean(brief(key), names, f"allowed: {', '.join(known)}")
            raise ConfigError(f"unknown key {brief(key)}; {hint}")
    for name, field in known.items():
        if name not in mapping and field.default is MISSING:
            meaning = field.metadata["meaning"]
            raise ConfigError(f"--{name} is missing; write --{name}=VALUE: {meaning}")
    values = {
        key: from_dict(value, known[key].type) if is_dataclass(known[key].type) else value
        for key, value in mapping.items()
    }
    return section(**values)


def estimate_parameters(model: ModelConfig, vocab_size: int = 0) -> int:
    """Estimate the parameters within a few percent: 12 n_embd^2 per block, plus the embeddings."""
    tables = (1 if model.tied else 2) + model.token_shifts
    rows = tables * vocab_size + model.block_size * (model.positions == "learned")
    return 12 * model.n_layer * model.n_embd**2 + rows * model.n_embd


def check_memory(model: ModelConfig) -> None:
    """Raise ConfigError if weights, gradients and two moments (16 bytes/parameter) do not fit."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return  # the memory size is unknown here
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parameters = estimate_parameters(model)
    if 16 * parameters > memory:
        raise ConfigError(
            f"a model of {parameters:,} parameters needs {16 * parameters / 1e9:,.0f} GB to train, "
            f"and this machine has {memory / 1e9:,.0f} GB; reduce n_layer, n_embd or block_size"
        )
