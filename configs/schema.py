"""Every setting once: name, type, default, range and meaning, in frozen dataclasses that hold no
wrong value.

The YAML files, both command lines, `--help` and the checkpoints are read by way of these fields, so
a new setting is one line here. Nothing here needs torch: a wrong setting is answered at once.
"""

import codecs
import os
import re
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass

from common.errors import ConfigError
from configs.fields import Checked, did_you_mean, setting, shown

LAYOUTS = ("heads", "separate", "fused", "interleaved", "stacked", "unrolled")
KERNELS = ("loop", "bmm", "batched", "sdpa")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("float32", "bfloat16", "float16")
SEEDS = "[0, 4294967295]"
MAX_ANGLES = 2**23  # of rotary positions: a table that the settings alone make, and no file holds


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text to learn from."""

    sources: tuple[str, ...] = setting(
        ("data/plays",),
        "texts in order of preference, of which the first that can be had is used: "
        "a file, a folder of .txt files, a pattern such as 'books/**/*.md', or "
        "https://...#sha256=<64 hex digits>",
    )
    encoding: str = setting(
        "utf-8", "encoding of files without a byte order mark; any that Python knows"
    )
    newlines: str = setting(
        "keep", "line ends: as they are, or each one \\n", choices=("keep", "unix")
    )
    min_count: int = setting(
        1, "characters that occur fewer times than this are read as U+FFFD", "[1, 1e9]"
    )
    val_sources: tuple[str, ...] = setting(
        (), "texts to validate on, as sources; none: a part of each file of sources"
    )
    val_fraction: float = setting(0.1, "share of each file, at its end, to validate on", "(0, 1)")

    def __post_init__(self):
        super().__post_init__()
        self._check_encoding()
        for source in self.sources + self.val_sources:
            pinned = re.fullmatch(r"https://[^/#\s]+/[^#\s]*#sha256=[0-9a-f]{64}", source)
            if "://" in source and not pinned:
                raise ConfigError(
                    f"sources: {shown(source)} is no download that can be checked; allowed: "
                    "https://...#sha256=<64 hex digits>; add its SHA-256, or download it and give "
                    "the file"
                )

    def _check_encoding(self):
        try:
            "\n".encode(self.encoding)  # refuses what Python knows by that name and is of no text
            known = codecs.lookup(self.encoding)
        except (LookupError, UnicodeError):
            known = None
        if not known or not known.incrementaldecoder or known.name in ("utf-16", "utf-32"):
            raise ConfigError(
                f"encoding: {shown(self.encoding)} cannot be that of a file without a byte order "
                f"mark; allowed: "
                "those of Python, such as utf-8, utf-16-le, cp1252, gb18030, shift-jis; a file "
                "with a mark needs none"
            )


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The network: all that, with the vocabulary, decides its shape and function."""

    attention: str = setting("fused", "where the weights of attention live", choices=LAYOUTS)
    kernel: str = setting("sdpa", "how the heads attend", choices=KERNELS)
    n_layer: int = setting(4, "blocks, one above the other", "[1, 1000]")
    n_head: int = setting(4, "attention heads in a block", "[1, 65536]")
    n_embd: int = setting(128, "width: numbers per character between the blocks", "[1, 65536]")
    block_size: int = setting(64, "context: how many characters the model sees", "[1, 1048576]")
    positions: str = setting(
        "learned", "how a place in the text is told", choices=("learned", "rope")
    )
    token_shifts: int = setting(
        0, "how many characters before it are added to each one's embedding", "[0, 64]"
    )
    norm: str = setting(
        "layernorm", "normalisation before each branch", choices=("layernorm", "rmsnorm")
    )
    mlp: str = setting(
        "gelu", "activation of the feed-forward branch", choices=("gelu", "relu2", "swiglu")
    )
    bias: bool = setting(False, "biases in linear layers and norms")
    tied: bool = setting(True, "the output weights are the token embedding")
    qk_norm: bool = setting(False, "queries and keys are normalised")
    dropout: float = setting(0.0, "share dropped from the embedding and each branch", "[0, 1)")
    attention_dropout: float | str = setting(
        "auto", "share of attention dropped; auto: the same as dropout", "[0, 1)", choices=("auto",)
    )
    logit_softcap: float = setting(
        0.0, "logits bend towards this limit, by tanh; 0: off", "[0, 1000]"
    )
    residual_init: str = setting(
        "scaled",
        "last matrix of each branch at the start: normal, 0.02 / sqrt(2 n_layer), or zero",
        choices=("scaled", "zero"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.n_embd % self.n_head:
            divisors = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            nearest = sorted(divisors, key=lambda n: (abs(n - self.n_head), -n))[:2]
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; "
                f"nearest: {', '.join(map(str, nearest))}"
            )
        if self.positions == "rope" and self.n_embd // self.n_head % 2:
            raise ConfigError(
                f"positions rope turns pairs of numbers, but a head has "
                f"{self.n_embd // self.n_head} "
                f"(n_embd {self.n_embd} / n_head {self.n_head}); choose an even size, or positions "
                f"learned"
            )
        angles = self.block_size * (self.n_embd // self.n_head)
        if self.positions == "rope" and angles > MAX_ANGLES:
            raise ConfigError(
                f"positions rope prepares block_size {self.block_size} * head size "
                f"{self.n_embd // self.n_head} = "
                f"{angles:,} angles; allowed: {MAX_ANGLES:,}; reduce block_size, or choose "
                f"positions learned"
            )


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How the weights are learned, and how often that is looked at."""

    batch_size: int = setting(
        12, "windows in a micro-batch, of all processes together", "[1, 1000000]"
    )
    gradient_accumulation_steps: int = setting(1, "micro-batches in an iteration", "[1, 1000000]")
    max_iters: int = setting(2000, "iterations in all", "[1, 1e9]")
    optimizer: str = setting(
        "adamw", "muon: matrices by Muon, the rest by AdamW", choices=("adamw", "muon")
    )
    learning_rate: float = setting(1e-3, "AdamW's rate at its peak", "(0, 10]")
    muon_learning_rate: float = setting(0.02, "Muon's rate at its peak", "(0, 10]")
    min_lr_ratio: float = setting(0.1, "the rate at the end, as a share of the peak", "[0, 1]")
    beta1: float = setting(0.9, "AdamW's memory of the gradient", "[0, 1)")
    beta2: float = setting(0.99, "AdamW's memory of the squared gradient", "[0, 1)")
    muon_momentum: float = setting(0.95, "Muon's memory of the gradient", "[0, 1)")
    weight_decay: float = setting(0.1, "pull of the matrices towards zero", "[0, 100]")
    grad_clip: float = setting(1.0, "longest gradient; 0: off", "[0, 1e6]")
    schedule: str = setting(
        "cosine", "course of the rate", choices=("cosine", "trapezoid", "constant")
    )
    warmup_iters: int = setting(100, "first iterations, over which the rate rises", "[0, 1e9]")
    cooldown_iters: int | str = setting(
        "auto",
        "trapezoid: last iterations, over which it falls; auto: 40 %",
        "[0, 1e9]",
        choices=("auto",),
    )
    ema: float = setting(0.0, "decay of the moving average of the weights; 0: off", "[0, 1)")
    on_nonfinite: str = setting(
        "stop",
        "at a loss or gradient that is not finite: end the run, or leave the step out",
        choices=("stop", "skip"),
    )
    patience: int = setting(
        0, "evaluations without a better loss before it stops; 0: off", "[0, 1e9]"
    )
    eval_interval: int = setting(250, "iterations between evaluations", "[1, 1e9]")
    save_interval: int | str = setting(
        "auto", "iterations between saves; auto: eval_interval", "[1, 1e9]", choices=("auto",)
    )
    log_interval: int = setting(10, "iterations between lines of the log", "[1, 1e9]")
    log: str = setting(
        "pictures",
        "TensorBoard gets scalars and samples, or pictures as well",
        choices=("scalars", "pictures"),
    )
    sample_chars: int = setting(
        200, "length of the sample at each evaluation; 0: none", "[0, 1000000]"
    )

    @property
    def cooldown(self) -> int:
        """Iterations over which a trapezoid's rate falls: `cooldown_iters`, with auto
        worked out.
        """
        return round(0.4 * self.max_iters) if self.cooldown_iters == "auto" else self.cooldown_iters

    def __post_init__(self):
        super().__post_init__()
        cooldown = self.cooldown if self.schedule == "trapezoid" else 0
        if self.warmup_iters + cooldown > self.max_iters:
            falling = f" + cooldown_iters {cooldown}" if cooldown else ""
            fixed = cooldown and self.cooldown_iters != "auto"
            remedy = "set cooldown_iters to auto" if fixed else "shorten the warm-up"
            raise ConfigError(
                f"warmup_iters {self.warmup_iters}{falling} is more than max_iters "
                f"{self.max_iters}; "
                f"{remedy} or train for longer"
            )


@dataclass(frozen=True)
class Config(Checked):
    """The run as a whole; complete and checked."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    out_dir: str = setting("auto", "folder of the run; auto: out/<name of the config file>")
    seed: int = setting(1337, "start of all that is random", SEEDS)
    device: str = setting(
        "auto", "where to compute; auto: cuda, else mps, else cpu", choices=DEVICES
    )
    dtype: str = setting(
        "auto",
        "precision of the matrix products; auto: bfloat16 where it is fast",
        choices=("auto", *DTYPES),
    )
    compile: bool = setting(False, "torch.compile: slow to start, faster after")


@dataclass(frozen=True)
class SampleConfig(Checked):
    """The arguments of sample.py, complete and checked."""

    ckpt: str = setting(MISSING, "checkpoint file, or the folder of a run; required")
    prompt: str = setting(
        "",
        "text to go on from; FILE:path reads it from a file, - from standard input",
        aliases=("start",),
    )
    num_samples: int = setting(1, "how many texts", "[1, 1e12]")
    max_new_tokens: int = setting(500, "characters to add to the prompt", "[0, 1e12]")
    temperature: float = setting(
        0.8, "below 1 safer, above 1 wilder; 0: always the likeliest", "[0, 1e6]"
    )
    top_k: int = setting(
        0, "choose among the k likeliest, and those equal to the last of them; 0: off", "[0, 1e9]"
    )
    top_p: float = setting(
        1.0, "choose among the likeliest that make up this probability; 1: off", "(0, 1]"
    )
    min_p: float = setting(
        0.0, "leave out what is below this share of the likeliest; 0: off", "[0, 1)"
    )
    stop: tuple[str, ...] = setting(
        (), "end a text where this appears in it, and leave that out; may be repeated"
    )
    unknown: str = setting(
        "error",
        "characters that the model never saw: refuse the text, or leave them out",
        choices=("error", "skip"),
    )
    seed: int = setting(1337, "start of all that is random", SEEDS)
    interactive: bool = setting(
        False, "a conversation: what you type is added to the text, and the model goes on"
    )
    score: str | None = setting(None, "only tell how well the model predicts the text in this file")
    stats: bool = setting(False, "characters per second, to standard error")
    window: str = setting(
        "stepped",
        "what the model sees of a text longer than its context: stepped keeps between half of it "
        "and all; "
        "exact keeps all, and computes it afresh for every character",
        choices=("stepped", "exact"),
    )
    device: str = setting(
        "auto", "where to compute; auto: cuda, else mps, else cpu", choices=DEVICES
    )
    dtype: str = setting("float32", "precision of the weights", choices=DTYPES)
    attention: str = setting(
        "saved", "layout to convert the weights to", choices=("saved", *LAYOUTS)
    )
    kernel: str = setting("saved", "how the heads attend", choices=("saved", *KERNELS))
    cache: bool = setting(
        True,
        "keep keys and values of the text so far: the same text, sooner",
        aliases=("no-cache",),
    )

    def __post_init__(self):
        super().__post_init__()
        others = {
            "num_samples": self.num_samples > 1,
            "prompt=-": self.prompt == "-",
            "score": self.score,
        }
        for other, given in others.items():
            if self.interactive and given:
                raise ConfigError(
                    f"--interactive and --{other} contradict each other; give one of them"
                )


def to_dict(config: Config) -> dict:
    """Plain nested data, as a checkpoint stores it; `from_dict` makes an equal Config of it."""
    return asdict(config)


def flat_settings(config: Config) -> dict[str, object]:
    """Return every setting by its full name, except the paths of the run and its text."""
    flat = {}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            flat[name] = value
    paths = ("out_dir", "data.sources", "data.val_sources")
    return {name: value for name, value in flat.items() if name not in paths}


def from_dict(mapping: object, section: type = Config):
    """The Config (or a section of it, or a SampleConfig) of plain nested data; defaults for the
    rest.
    """
    if not isinstance(mapping, dict):
        raise ConfigError(f"a config must be a mapping, but is {shown(mapping)}")
    known = {each.name: each for each in fields(section)}
    for key in mapping:
        if key not in known:
            hint = did_you_mean(
                shown(key), {name: name for name in known}, f"allowed: {', '.join(known)}"
            )
            raise ConfigError(f"unknown key {shown(key)}; {hint}")
    for name, each in known.items():
        if name not in mapping and each.default is MISSING:
            raise ConfigError(
                f"--{name} is missing; write --{name}=VALUE: {each.metadata['meaning']}"
            )
    inner = {
        key: from_dict(mapping[key], known[key].type)
        for key in mapping
        if is_dataclass(known[key].type)
    }
    return section(**mapping | inner)


def estimate_parameters(model: ModelConfig, vocab_size: int = 0) -> int:
    """Parameters of a model within a few per cent, before it is built: 12 C^2 a block, and the
    embeddings.
    """
    tables = (1 if model.tied else 2) + model.token_shifts
    rows = tables * vocab_size + model.block_size * (model.positions == "learned")
    return 12 * model.n_layer * model.n_embd**2 + rows * model.n_embd


def check_memory(model: ModelConfig) -> None:
    """Refuse a model whose weights, gradients and two moments (16 bytes a parameter) exceed the
    memory.
    """
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return  # a system that does not tell
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parameters = estimate_parameters(model)
    if 16 * parameters > memory:
        raise ConfigError(
            f"a model of {parameters:,} parameters needs {16 * parameters / 1e9:,.0f} GB to train, "
            f"and this machine has {memory / 1e9:,.0f} GB; reduce n_layer, n_embd or block_size"
        )
