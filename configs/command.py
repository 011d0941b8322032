"""The command lines of train.py and sample.py: config files, options and --help.

All of this is checked before torch is imported, which takes seconds: a mistake is reported at once.

A config file is a flat list of lines `key: value`, and `--key=value` on the command line overrides
it. Both are only collected as strings. `parse_value` parses each by the type of its setting, so
both get the same answer, and YAML's guesses (`010`, `on`, `1:30`) play no part.
"""

import dataclasses
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from common.console import ConfigError, prepare_console, print_text
from common.files import expand_home, files_of_run, holds_run, resolve_bundled, runs_near
from common.messages import did_you_mean, quoted
from configs.fields import describe_allowed, error_context, fields_of, parse_escapes, parse_value
from configs.schema import (
    ARCHITECTURE,
    FIELDS,
    FIXED,
    TRAIN_SECTIONS,
    Config,
    SampleConfig,
    StartOptions,
    find_setting,
    from_flat,
    to_flat,
)

TRAIN_USAGE = """\
python train.py CONFIG|RUN_FOLDER [--key=value ...]

  python train.py configs/shakespeare.yaml
  python train.py configs/mytext.yaml --sources=book.txt
  python train.py out/shakespeare                 # resume this run
  torchrun --nproc_per_node=2 train.py configs/shakespeare.yaml

In a config file, --key=value is a line `key: value`."""
SAMPLE_USAGE = """\
python sample.py --ckpt=FILE|FOLDER [--key=value ...]

  python sample.py --ckpt out/shakespeare --prompt "ROMEO:"
  python sample.py --ckpt out/shakespeare --num_samples=3 --temperature=0.6"""
NOTES = "--key value is --key=value, a dash in a name is an underscore, --compile is --compile=true"
# options that do not apply to `train.py RUN_FOLDER`
FOR_NEW_RUNS = ("print_config", "overwrite", "init_from", "minutes", "out_dir")
CONTRADICTIONS = (  # of each row, only one option may be given
    ("resume", "overwrite"), ("minutes", "max_iters"), ("minutes", "eval_interval"),
    ("interactive", "html", "score", "novel"), ("sample", "num_samples"),
)  # fmt: skip
MAX_FAULTS = 5  # wrong settings of a file that are reported at once


@dataclass(frozen=True)
class TrainCommand(StartOptions):
    """A command line of train.py: a config file or a run folder, and the options.

    Paths are as they were typed; only in `folder`, which is out_dir, ~ is the home folder.
    """

    config_file: str = ""  # "" if a run folder was named
    out_dir: str = ""
    folder: Path = Path()
    mode: Literal["new", "resumed", "fine-tuned"] = "new"
    settings_in_file: Mapping[str, object] = dataclasses.field(default_factory=dict)
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)  # options
    config: Config | None = None  # of a new run; other modes need the checkpoint: build_settings
    began: float = dataclasses.field(default_factory=time.monotonic)  # before torch is imported

    def build_settings(self, saved: Config | None = None) -> Config:
        """Return the settings of the run; raise ConfigError if they contradict.

        `saved` are those of the checkpoint that the run starts from. A resumed run keeps them, a
        new one only takes its architecture from them. Options change what may change.
        """
        values, where, kept = self.settings_in_file, self.config_file, set()
        then = to_flat(saved or Config())
        if self.mode == "resumed":
            values, where, kept = then, self.out_dir, FIXED
        elif self.mode == "fine-tuned":
            values, where = values | {n: then[n] for n in ARCHITECTURE}, self.init_from
            # with rope, no weights depend on the length of the context
            kept = ARCHITECTURE - ({"block_size"} if saved.model.positions == "rope" else set())

        overrides = self.overrides | {"out_dir": self.out_dir}
        if "sources" in overrides:  # a text that was named has no stand-in
            overrides = {"fallback": ""} | overrides
        with error_context(f"{where}{' and the options' if self.overrides else ''}"):
            settings = from_flat(values | overrides)

        now = to_flat(settings)
        changes = [f"--{n}={now[n]} (it has {then[n]})" for n in sorted(kept) if now[n] != then[n]]
        if changes:
            changes = ", ".join(changes)
            raise ConfigError(f"{where}: cannot change: {changes}; omit it, or train a new model")
        # batch i begins at window i * batch_size of the epochs: another size would skip text
        windows = then["batch_size"] * then["gradient_accumulation_steps"]
        new_windows = now["batch_size"] * now["gradient_accumulation_steps"]
        if self.mode == "resumed" and windows != new_windows:
            size = math.gcd(now["batch_size"], windows)
            raise ConfigError(
                f"batch_size * gradient_accumulation_steps must stay {windows}, or the run would "
                f"skip text: --batch_size={size} --gradient_accumulation_steps={windows // size}"
            )
        return settings


# ----------------------------------------------------------------------------------------- train.py


def parse_train(argv: Sequence[str] | None = None) -> TrainCommand:
    """Parse and check the arguments of train.py: a config file or run folder, and options.

    `argv` defaults to the arguments of the process. Exits after --help and --print_config. From
    here on, an error is printed as one line and ends in its exit code.
    """
    prepare_console()
    positionals, options = parse_options(argv, TRAIN_USAGE, TRAIN_SECTIONS)
    if len(positionals) != 1:
        raise ConfigError(
            "train.py takes one config file or run folder, such as configs/shakespeare.yaml, "
            f"but is given {quoted(tuple(positionals)) if positionals else 'none'}; an option is "
            "--key=value, such as --compile=true; several texts are --sources=A --sources=B; a "
            "pattern needs quotes; see python train.py --help"
        )

    (path,) = positionals
    is_run = bool(files_of_run(expand_home(path)))
    if is_run and (wrong := [name for name in FOR_NEW_RUNS if name in options]):
        raise ConfigError(
            f"--{wrong[0]} does not apply to a run folder: a run keeps its place and its "
            "length (but see --max_iters); a config file starts a new run"
        )
    in_file = {} if is_run else read_config(path)
    out_dir = path if is_run else (in_file | options).get("out_dir", "auto")
    if out_dir == "auto":
        out_dir = f"out/{Path(path).stem}"
    folder = expand_home(out_dir)
    start = {name: options.pop(name) for name in fields_of(StartOptions) if name in options}
    if start.get("print_config"):
        mode = "new"
    elif (is_run or start.get("resume")) and holds_run(folder):
        mode = "resumed"
    else:
        mode = "fine-tuned" if start.get("init_from") else "new"
    config_file = "" if is_run else path
    command = TrainCommand(
        **start, config_file=config_file, out_dir=out_dir, folder=folder, mode=mode,
        settings_in_file=in_file, overrides=options,
    )  # fmt: skip

    if command.mode == "new":  # other modes have settings in a checkpoint
        command = dataclasses.replace(command, config=command.build_settings())
    if command.print_config:
        print_text(to_yaml(command.config))
        raise SystemExit(0)
    return command


# ---------------------------------------------------------------------------------------- sample.py


def parse_sample_options(argv: Sequence[str] | None = None) -> SampleConfig:
    """Parse and check the arguments of sample.py; `argv` and errors are as in `parse_train`."""
    prepare_console()
    positionals, values = parse_options(argv, SAMPLE_USAGE, (SampleConfig,))
    if positionals:
        raise ConfigError(
            f"unexpected argument {quoted(positionals[0])}; a checkpoint is given as --ckpt=PATH, "
            'a prompt as --prompt="TEXT"; see python sample.py --help'
        )
    if not values.get("ckpt"):
        raise ConfigError("--ckpt is missing; write --ckpt=PATH: a run folder or checkpoint file")
    # both have escapes: --stop="\n\n"
    values["prompt"] = parse_escapes(values.get("prompt", ""))
    values["stop"] = tuple(map(parse_escapes, values.get("stop", ())))
    return SampleConfig(**values)


# ------------------------------------------------------------------------------------------ options


def parse_options(
    argv: Sequence[str] | None, usage: str, sections: Sequence[type]
) -> tuple[list[str], dict[str, object]]:
    """Return the arguments that are not options, and the values of the options by name.

    An option is --key=value, --key value, or --key alone for true. If it is repeated, the last one
    wins; a list option collects its values. With --help, prints the help and exits.
    """
    settings = fields_of(*sections)
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_text(help_text(usage, sections))
        raise SystemExit(0)

    positionals, values, rest = [], {}, iter(argv)
    for word in rest:
        if not word.startswith("-"):
            positionals.append(word)
            continue
        option, equals, text = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        default = find_setting(name, settings, "--").default
        if not equals:
            text = "true" if isinstance(default, bool) else next(rest, "-")
            if text.startswith("-"):
                write = f"write {option}=VALUE, also for a VALUE that begins with -"
                raise ConfigError(f"{option}: its value is missing; {write}")
        value = parse_value(settings[name], text)
        values[name] = values.get(name, ()) + value if isinstance(default, tuple) else value

    for names in CONTRADICTIONS:
        given = [f"--{name}" for name in names if values.get(name) not in (None, False, "auto")]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} contradict each other; give one of them")
    return positionals, values


def help_text(usage: str, sections: Sequence[type]) -> str:
    """Return the answer to --help: each setting with its meaning, what is allowed, and default."""
    lines = [f"usage: {usage}"]
    for section in sections:
        lines += ["", section.__doc__]
        for name, field in fields_of(section).items():
            words = [field.metadata["meaning"]]
            if field.metadata["choices"] or field.metadata["limits"]:
                words.append(describe_allowed(field))
            if field.default not in (None, "", ()):
                default = field.default  # a float with few digits
                default = f"{default:g}" if isinstance(default, float) else quoted(default)
                words.append(f"default {default}")
            line = f"  --{name:<24} {'; '.join(words)}"
            lines += textwrap.wrap(line, width=100, subsequent_indent=" " * 29)
    return "\n".join([*lines, "", NOTES, ""])


# ------------------------------------------------------------------------------------- config files


def read_config(path: str) -> dict[str, object]:
    """Return the checked settings in a config file by name.

    Raises ConfigError with a line for each of the first MAX_FAULTS wrong settings.
    """
    with error_context(path):
        settings, lines, faults = {}, {}, []
        for key, line, value in _yaml_entries(_read_config_file(path)):
            try:
                if key in lines:
                    raise ConfigError(f"duplicate key {quoted(key)}, as in line {lines[key]}")
                settings[key] = parse_value(find_setting(key, FIELDS), value)
            except ConfigError as error:
                faults.append(f"line {line}: {error}")
            lines[key] = line
        if faults:
            raise ConfigError(*faults[:MAX_FAULTS])
        return settings


def _yaml_entries(content: str | bytes) -> Iterator[tuple[str, int, object]]:
    """Yield the key, the line and the value of each setting in YAML.

    A value is a string, a list or None; no object is constructed, whatever tags and aliases say.
    """
    import yaml  # here, so that a missing package is reported in one line

    form = "each setting is a line `key: value`, not indented, with a space after the colon"
    try:
        root = yaml.compose(content, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        if "escape" in error.problem:
            form = "backslashes need single quotes"
        line = error.problem_mark.line + 1
        raise ConfigError(f"line {line}: not YAML ({error.problem}); {form}") from None
    except Exception as error:  # not UTF-8; others too, such as an OverflowError for "\Uffffffff"
        raise ConfigError(f"not YAML in UTF-8: {' '.join(str(error).split())}; {form}") from None
    if root and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"has no settings; {form}")

    for key_node, node in root.value if root else ():  # None: an empty file
        value = _scalar_text(node)
        if node.id == "sequence":
            value = list(map(_scalar_text, node.value))
        elif node.id == "mapping":
            value = [None]  # which is no setting's value
        # no-break spaces are no indentation to YAML
        key = str(_scalar_text(key_node)).strip()
        yield key, key_node.start_mark.line + 1, value


def _scalar_text(node) -> str | None:
    """Return the text of a YAML node; None for `~`, null and nothing, and for what is no text."""
    return node.value if node.id == "scalar" and not node.tag.endswith(":null") else None


def to_yaml(config: Config) -> str:
    """Return the complete settings as YAML that `read_config` reads back."""
    import yaml

    dump = partial(yaml.safe_dump, to_flat(config), sort_keys=False, width=100)
    text = dump(allow_unicode=True)
    # non-ASCII characters as they are, unless one is invisible
    return text if text.replace("\n", "").isprintable() else dump(allow_unicode=False)


def _read_config_file(path: str) -> bytes:
    """Return the content of a config file; a relative path may also start at the code's folder."""
    file = resolve_bundled(expand_home(path))
    if not file.is_file():  # a typo, a folder, or the name of a recipe without .yaml
        configs = sorted([*file.glob("*.yaml"), *resolve_bundled(Path("configs")).glob("*.yaml")])
        names = {Path(path).name: str(path) for path in [*configs, *runs_near(file)]}
        hint = did_you_mean(file.name, names, f"allowed: {', '.join(names.values())}")
        raise ConfigError(f"is no config and no run folder; {hint}")
    if file.suffix not in (".yaml", ".yml"):
        text = f"configs/mytext.yaml --sources={path}"
        raise ConfigError(f"is no .yaml file; a run is named by its folder, a text by {text}")
    return file.read_bytes()
