"""All settings, each declared once with its type, default, range and meaning.

Config files, command lines, `--help` and checkpoints all use these frozen dataclasses, so a new
setting is one line here. Nothing here imports torch, so a wrong setting is reported at once.

The default architecture and optimizer are those of the main recipe, configs/shakespeare.yaml. That
file only sets a text, sizes, lengths, and `auto` for values that depend on the run.
"""

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass

from common.console import ConfigError
from common.messages import did_you_mean, quoted
from configs.fields import LocalPath, Source, fields_of, normal_escapes, parse_value, setting

# the keys of the tables in model/attention.py and training/device.py, repeated here to avoid
# importing torch
LAYOUTS = ("heads", "separate", "fused", "interleaved", "stacked", "flattened")
KERNELS = ("loop", "bmm", "batched", "sdpa")
AUTO = ("auto",)
DEVICES = (*AUTO, "cuda", "mps", "cpu")
DTYPES = ("float32", "bfloat16")
MAX_SEED = 2**32 - 1
DEFAULT_TEMPERATURE = 0.7  # of samples


@dataclass(frozen=True)
class DataConfig:
    """The text to train on."""

    sources: tuple[Source, ...] = setting(
        ("data/plays",),
        'file, folder of .txt files, "notes/**/*.md" or https://...#sha256=HEX; several are joined',
    )
    fallback: Source = setting("", "text to train on if a download fails")
    encoding: str = setting("utf-8", "encoding of files without a byte order mark")
    val_sources: tuple[Source, ...] = setting((), "text to validate on (none = a part of sources)")
    # the end of each file, or items of a list
    val_fraction: float = setting(0.1, "fraction held out", more_than=0, less_than=1, fixed=True)
    max_val_chars: int = setting(250_000, "validate on so many (0 = all)", at_least=0, fixed=True)
    separator: str = setting("", 'lists: what ends an item, such as "\\n" for names', fixed=True)
    answer_after: str = setting("", 'with separator: what ends a question, such as "="', fixed=True)

    def __post_init__(self):
        # a newline and \n are stored the same way, so that they compare equal
        for name in ("separator", "answer_after"):
            object.__setattr__(self, name, normal_escapes(getattr(self, name)))
        if self.answer_after and not self.separator:
            raise ConfigError(
                f"answer_after {quoted(self.answer_after)} needs items that end: set separator "
                'too, such as --separator="\\n"'
            )
        try:
            "".encode(self.encoding)
        except (LookupError, UnicodeError) as error:  # utf8x, rot13; undefined
            allowed = "utf-8, utf-16-le, cp1252, gb18030 or cp932"
            raise ConfigError(f"encoding: {error}; use for example {allowed}") from None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, and its implementation."""

    layout: str = setting("fused", "weight layout (docs/attention.md)", LAYOUTS)
    kernel: str = setting("sdpa", "attention kernel (docs/attention.md)", (*AUTO, *KERNELS))
    n_layer: int = setting(4, "number of blocks", at_least=1, fixed=True)
    n_head: int = setting(4, "number of attention heads per block", at_least=1, fixed=True)
    n_embd: int = setting(128, "width of the model, a multiple of n_head", at_least=1, fixed=True)
    block_size: int = setting(64, "context length, in characters", at_least=1, fixed=True)
    positions: str = setting("rope", "position encoding", ("learned", "rope"), fixed=True)
    # 2: a position sees a trigram before any attention
    n_previous: int = setting(2, "embed N previous characters too", at_least=0, fixed=True)
    norm: str = setting("layernorm", "normalization", ("layernorm", "rmsnorm"), fixed=True)
    # relu2: cheaper than GELU
    activation: str = setting("relu2", "of the MLP", ("gelu", "relu2", "swiglu"), fixed=True)
    bias: bool = setting(False, "biases in linear layers and LayerNorm", fixed=True)
    # tying saves little: V is small
    tie_weights: bool = setting(False, "tie lm_head to the token embedding", fixed=True)
    # allows high learning rates
    qk_norm: bool = setting(True, "RMS-normalize queries and keys", fixed=True)
    dropout: float | str = setting(
        0.0, "dropout on embeddings and branches (auto = by epochs)", AUTO, at_least=0, less_than=1
    )
    attention_dropout: float = setting(0.0, "dropout on attention weights", at_least=0, less_than=1)
    logit_softcap: float = setting(15.0, "limit of the logits (0 = off)", at_least=0, fixed=True)
    # zero: each block starts as the identity
    residual_init: str = setting("zero", "a branch's last matrix", ("scaled", "zero"), fixed=True)

    def __post_init__(self):
        # the heads share the features; rope rotates pairs of them, so a head has an even number
        pair, rule = (2, "2 * n_head, for rope") if self.positions == "rope" else (1, "n_head")
        width, unit = self.n_embd, pair * self.n_head
        if width % unit:
            below = width - width % unit
            nearest = [f"n_embd {near}" for near in (below, below + unit) if near]
            heads = [n for n in range(1, min(unit, width) + 1) if width % (pair * n) == 0]
            heads.sort(key=lambda n: abs(n - self.n_head))
            nearest = " or ".join(nearest + [f"n_head {n}" for n in heads[:1]])
            raise ConfigError(f"n_embd {width} must be a multiple of {unit} ({rule}): {nearest}")


@dataclass(frozen=True)
class TrainConfig:
    """Training, evaluation and logging."""

    batch_size: int = setting(12, "text windows per micro-batch, all ranks", at_least=1)
    gradient_accumulation_steps: int = setting(1, "micro-batches per step", at_least=1)
    max_iters: int = setting(2000, "number of optimization steps", at_least=1)
    # Muon needs fewer steps than AdamW alone
    optimizer: str = setting("muon", "of the blocks' matrices", ("adamw", "muon"), fixed=True)
    # high: with Muon, AdamW trains only embeddings, head and vectors
    learning_rate: float = setting(0.02, "peak rate of AdamW (without Muon: 1e-3)", more_than=0)
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon", more_than=0)
    min_lr_ratio: float = setting(0.0, "final learning rate / peak", at_least=0, at_most=1)
    beta1: float = setting(0.9, "beta1 of AdamW", at_least=0, less_than=1)
    beta2: float = setting(0.99, "beta2 of AdamW", at_least=0, less_than=1)
    # more would average over gradients of outdated weights
    muon_momentum: float = setting(0.9, "momentum of Muon", at_least=0, less_than=1)
    weight_decay: float = setting(0.1, "weight decay, on matrices and embeddings", at_least=0)
    grad_clip: float = setting(1.0, "clip the gradient norm (0 = off)", at_least=0)
    # wsd: constant, then a linear cooldown
    schedule: str = setting("wsd", "rate after the warm-up", ("cosine", "wsd", "constant"))
    # shares of the run, which were best in shakespeare.yaml
    warmup_ratio: float = setting(1 / 70, "warm-up steps / max_iters", at_least=0, at_most=1)
    cooldown_ratio: float = setting(6 / 7, "cooldown steps / max_iters", at_least=0, at_most=1)
    patience: int = setting(0, "stop after N evaluations that are no better (0 = off)", at_least=0)
    eval_interval: int | str = setting(
        "auto", "steps between evaluations (auto = max_iters / 10, at least 10)", AUTO, at_least=1
    )
    log_interval: int = setting(10, "steps between logged values", at_least=1)
    sample_chars: int = setting(200, "length of logged samples (0 = none)", at_least=0)


@dataclass(frozen=True)
class Config:
    """The run as a whole."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    out_dir: LocalPath = setting("auto", "run folder (auto = out/NAME for configs/NAME.yaml)")
    seed: int = setting(1337, "random seed", at_least=0, at_most=MAX_SEED, fixed=True)
    device: str = setting("auto", "device (auto = cuda if there is one, else cpu)", DEVICES)
    dtype: str = setting("auto", "dtype of matrix products (auto = fastest)", (*AUTO, *DTYPES))
    compile: bool = setting(False, "torch.compile: slow to start, then faster")


@dataclass(frozen=True)
class StartOptions:
    """The options that start or resume a run, and are not for config files."""

    print_config: bool = setting(False, "print the settings of a new run as YAML and exit")
    resume: bool = setting(False, "resume the run in out_dir, or start one if there is none")
    overwrite: bool = setting(False, "replace the run in out_dir, if there is one")
    init_from: LocalPath | None = setting(None, "checkpoint to start from: weights and vocabulary")
    minutes: float | None = setting(None, "train for so many minutes, in all", more_than=0)


@dataclass(frozen=True)
class SampleConfig:
    """Options of sample.py."""

    ckpt: LocalPath = setting("", "run folder or checkpoint file (required)")
    prompt: str = setting("", "text to continue (\\n = newline)")
    num_samples: int = setting(1, "number of samples", at_least=1)
    sample: int | None = setting(None, "draw only sample N of this seed", at_least=1)
    max_new_tokens: int = setting(500, "characters to generate per sample", at_least=0)
    temperature: float | str = setting(
        "auto", f"0 = greedy (auto = {DEFAULT_TEMPERATURE:g}; 0 for answers)", AUTO, at_least=0
    )
    top_k: int = setting(0, "sample from the k likeliest (0 = off)", at_least=0)
    top_p: float = setting(1.0, "sample from this total probability", more_than=0, at_most=1)
    min_p: float = setting(0.0, "drop below this share of the likeliest", at_least=0, less_than=1)
    stop: tuple[str, ...] = setting((), "end with this string; may be repeated")
    novel: Source | None = setting(None, "show what is copied from this text; lists: new items")
    seed: int = setting(1337, "random seed", at_least=0, at_most=MAX_SEED)
    interactive: bool = setting(False, "a conversation: you type a line, the model continues")
    score: Source | None = setting(None, "print only the model's loss on the text in this file")
    html: LocalPath | None = setting(None, "write only this file: the model as a web page")
    device: str = setting("auto", "device (auto = cuda if there is one, else cpu)", DEVICES)
    dtype: str = setting("float32", "dtype of the weights; with --score, of autocast", DTYPES)
    layout: str | None = setting(None, "another weight layout", LAYOUTS)
    kernel: str | None = setting(None, "another attention kernel", (*AUTO, *KERNELS))
    cache: bool = setting(True, "KV cache: faster, and in float32 the same text")


TRAIN_SECTIONS = (StartOptions, Config, DataConfig, ModelConfig, TrainConfig)
FIELDS = fields_of(*TRAIN_SECTIONS[1:])  # of a run: in files and checkpoints
FIXED = {name for name, field in FIELDS.items() if field.metadata["fixed"]}
ARCHITECTURE = FIXED & fields_of(ModelConfig).keys()
OTHER_NAMES = {  # in other projects, where they are too different to be recognized as typos
    "lr": "learning_rate", "steps": "max_iters", "epochs": "max_iters", "context": "block_size",
    "seq_len": "block_size", "width": "n_embd", "d_model": "n_embd", "hidden_size": "n_embd",
    "dataset": "sources", "text": "sources",
}  # fmt: skip


def find_setting(name: str, known: Mapping[str, Field], prefix: str = "") -> Field:
    """Return the setting with a name; raise ConfigError with the nearest name.

    `prefix` stands before a name: `--` of an option.
    """
    if name not in known:
        names = {n: f"{prefix}{n} ({field.metadata['meaning']})" for n, field in known.items()}
        hint = did_you_mean(OTHER_NAMES.get(name, name), names, "--help lists all")
        raise ConfigError(f"unknown setting {quoted(prefix + name)}; {hint}")
    return known[name]


def flatten(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a Config by name, from its parts as `asdict` and JSON have them."""
    values = {}
    for name, value in settings.items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def to_flat(config: Config) -> dict[str, object]:
    """Return every setting by its name."""
    return flatten(asdict(config))


def from_flat(values: Mapping[str, object]) -> Config:
    """Build a Config from settings by name, which are checked; defaults fill in."""
    values = {n: parse_value(find_setting(n, FIELDS), value) for n, value in values.items()}

    def build(section: type, **parts):
        names = fields_of(section).keys() & values.keys()
        return section(**{name: values[name] for name in names}, **parts)

    return build(Config, data=build(DataConfig), model=build(ModelConfig), train=build(TrainConfig))
