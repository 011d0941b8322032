"""Mutations: breaks of the product that would cost a user something; do the tests notice each?

    python -m tests.mutations [NAME ...] [--record FILE]

Each mutation is applied to a copy of the tree, in which the tests of the mutated module then run
until one fails. The list was written from the product and its README, without a look at the tests;
mutations.txt has the results.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds for the tests of one mutation


class Mutation(NamedTuple):
    """A break: `old`, which occurs exactly once in `file`, becomes `new`.

    `harm` is what a user would lose; `tests` are the modules in tests/ that should notice, the
    likeliest first. A hard mutation breaks only a rare case, or leaves everything plausible.
    """

    name: str
    harm: str
    file: str
    tests: str
    old: str
    new: str
    hard: bool = False


# fmt: off
MUTATIONS = (
    # ------------------------------------------------------------------------------------- model/
    Mutation("next_token_visible", "a model that sees what it predicts: losses are a fiction",
        "model/attention.py", "test_attention",
        "return mask.triu(S - T + 1)",
        "return mask.triu(S - T + 2)"),
    Mutation("sdpa_mask_upper_left", "wrong text when a prompt is appended to a filled cache",
        "model/attention.py", "test_attention test_generation",
        "if mask is None and causal and T != S:",
        "if mask is None and causal and T > S:", hard=True),
    Mutation("cached_tokens_at_position_0", "with RoPE, other text with the cache than without",
        "model/attention.py", "test_attention test_generation",
        "start = 0 if cache is None else cache.length",
        "start = 0"),
    Mutation("stacked_moments_are_weights", "layout stacked saves its weights as moments",
        "model/attention.py", "test_layouts test_optimizers",
        "weights = [tensor_of(weight)[h].T for weight in self.weights]",
        "weights = [weight[h].T for weight in self.weights]", hard=True),
    Mutation("every_fourth_never_dropped", "dropout regularizes less than it says",
        "model/dropout.py", "test_gpt test_attention",
        ".random_(-(2**63), None)",
        ".random_()", hard=True),
    Mutation("embeddings_dropped_when_evaluating", "noisy losses and texts with dropout",
        "model/gpt.py", "test_gpt test_evaluation",
        "return dropout(x, self.config.dropout, self.training)",
        "return dropout(x, self.config.dropout)"),
    Mutation("window_moves_early", "a whole context is never used when generating",
        "model/generate.py", "test_generation",
        "hops = math.ceil((n - block_size) / hop)",
        "hops = math.ceil((n - block_size + 1) / hop)"),
    Mutation("top_p_keeps_one_more", "--top_p lets through a character beyond the nucleus",
        "model/generate.py", "test_generation",
        "dropped = cumulative <= (1.0 - p) * cumulative[:, -1:]",
        "dropped = cumulative < (1.0 - p) * cumulative[:, -1:]", hard=True),
    Mutation("sample_seeds_shared", "sample 2 of seed 7 is sample 1 of seed 8",
        "model/generate.py", "test_generation test_sample test_page",
        "np.random.PCG64((seed, i))",
        "np.random.PCG64((seed + i, 0))", hard=True),
    Mutation("decoder_shifts_wrap_around", "after a short prompt, another model's text",
        "model/decode.py", "test_generation",
        "range(1, min(config.token_shifts, position) + 1)",
        "range(1, config.token_shifts + 1)", hard=True),
    Mutation("ngrams_without_continuation_counts", "the n-gram model predicts worse",
        "benchmarks/ngrams.py", "test_ngrams",
        "ngrams, counts = np.unique(ngrams % vocab_size ** (n - 1), return_counts=True)",
        "ngrams, counts = np.unique(self._encode(ids[None], n - 1), return_counts=True)",
        hard=True),
    # -------------------------------------------------------------------------------------- data/
    Mutation("every_epoch_in_the_same_order", "no new shuffle and no new offsets after an epoch",
        "data/batches.py", "test_batches",
        "key = splitmix(self._seed, epoch)",
        "key = splitmix(self._seed, epoch * np.uint64(0))"),
    Mutation("window_overruns_its_segment", "now and then, validation text is trained on",
        "data/batches.py", "test_batches",
        "np.clip(first_cut + n * b, 0, predictions)",
        "np.clip(first_cut + n * b, 0, predictions + 1)", hard=True),
    Mutation("evaluation_windows_overlap", "the exact loss omits some characters",
        "data/batches.py", "test_batches test_evaluation",
        "starts[segment] + number * block_size, lengths",
        "starts[segment] + number * (block_size - 1), lengths"),
    Mutation("training_text_ends_one_late", "the first validation character is trained on",
        "data/corpus.py", "test_corpus",
        "train = join(file[:cut] for",
        "train = join(file[: cut + 1] for", hard=True),
    Mutation("vocabulary_is_sorted_again", "added characters change the old ids",
        "data/corpus.py", "test_new_characters test_corpus",
        'return CharTokenizer((vocabulary or "") + "".join(missing))',
        'return CharTokenizer("".join(sorted({*(vocabulary or ""), *missing})))'),
    Mutation("utf_32_read_as_utf_16", "a UTF-32 text has a NUL after every character",
        "data/text.py", "test_text",
        '    codecs.BOM_UTF32_LE: "utf-32",\n    codecs.BOM_UTF32_BE: "utf-32",\n'
        '    codecs.BOM_UTF16_LE: "utf-16",\n',
        '    codecs.BOM_UTF16_LE: "utf-16",\n    codecs.BOM_UTF32_LE: "utf-32",\n'
        '    codecs.BOM_UTF32_BE: "utf-32",\n'),
    Mutation("carriage_returns_kept", "line ends of Windows are two characters",
        "configs/fields.py", "test_text",
        'text.replace("\\r\\n", "\\n").replace("\\r", "\\n")',
        'text.replace("\\r", "\\n")'),
    Mutation("digest_ignores_file_order", "a resume accepts files in another order",
        "data/text.py", "test_text test_resume test_changed_settings",
        'b"".join(digest.digest() for digest in digests)',
        'b"".join(sorted(digest.digest() for digest in digests))', hard=True),
    Mutation("id_256_wraps_to_0", "with exactly 257 characters, the last one becomes the first",
        "data/tokenizer.py", "test_tokenizer test_corpus",
        "np.min_scalar_type(len(codes) - 1)",
        "np.min_scalar_type(max(0, len(codes) - 2))", hard=True),
    Mutation("items_start_unlearned", "the first character of a generated name is a guess",
        "data/items.py", "test_items",
        "segments = tuple((start - 1, end) for",
        "segments = tuple((start, end) for"),
    Mutation("question_counts_for_the_loss", "the loss of answers includes the end of the question",
        "data/items.py", "test_items",
        "targets[start : start + len(self.question(item))] = IGNORED",
        "targets[start : start + len(self.question(item)) - 1] = IGNORED"),
    # ---------------------------------------------------------------------------------- training/
    Mutation("micro_batches_weigh_the_same", "accumulation with padding is not the larger batch",
        "training/step.py", "test_lists test_batches",
        "tokens = sum(map(run.batches.predictions, micro_batches))",
        "tokens = run.batches.predictions(first) * len(micro_batches)", hard=True),
    Mutation("no_clipping", "train.grad_clip has no effect",
        "training/step.py", "test_changed_settings",
        "max_norm = train.grad_clip or math.inf",
        "max_norm = math.inf"),
    Mutation("same_dropout_every_step", "dropout removes the same features all the time",
        "training/step.py", "test_changed_settings",
        "step_seed(run.config.seed, progress.step, self.world.rank)",
        "step_seed(run.config.seed, 0, self.world.rank)", hard=True),
    Mutation("cooldown_ends_early", "the last step of a trapezoid has no learning rate left",
        "training/schedule.py", "test_schedule",
        "fraction_left = (train.max_iters - step) /",
        "fraction_left = (train.max_iters - step - 1) /"),
    Mutation("muon_without_nesterov", "a slightly worse loss with Muon",
        "training/optimizers.py", "test_optimizers",
        'updates[parameter] = parameter.grad.lerp(state["momentum"], momentum)',
        'updates[parameter] = state["momentum"].clone()', hard=True),
    Mutation("muon_without_row_norms", "a slightly worse loss with Muon",
        "training/optimizers.py", "test_optimizers",
        "            batch = F.normalize(batch, dim=-1)  # rows of norm 1 (MuonEq-R)\n",
        "", hard=True),
    Mutation("only_rank_0_asks_to_stop", "a signal to another rank is lost, and with it the save",
        "training/distributed.py", "test_ranks",
        "self.stop.global_request = int(requests.max())",
        "self.stop.global_request = int(requests[0])", hard=True),
    Mutation("nan_is_the_best_loss", "after one NaN, no evaluation is the best any more",
        "training/state.py", "test_evaluation test_failures",
        "finite = math.isfinite(val_loss) and math.isfinite(train_loss)",
        "finite = True", hard=True),
    # ----------------------------------------------------------- run/, and common/files
    Mutation("prev_is_lost", "a damaged last.safetensors has nothing to fall back to",
        "common/files.py", "test_files test_run_folder test_checkpoint",
        "_replace(old, previous)",
        "old.unlink()"),
    Mutation("prev_replaced_first", "a kill may leave a damaged checkpoint alone",
        "common/files.py", "test_files test_run_folder test_checkpoint",
        "        _replace(new, path)\n        if old:\n            _replace(old, previous)\n",
        "        if old:\n            _replace(old, previous)\n        _replace(new, path)\n",
        hard=True),
    Mutation("no_fsync", "an empty checkpoint after a power failure",
        "common/files.py", "test_files test_run_folder test_checkpoint",
        "    file.flush()\n    os.fsync(file.fileno())",
        "    file.flush()", hard=True),
    Mutation("digest_of_the_first_megabyte", "a damaged byte in a large checkpoint loads silently",
        "run/file_format.py", "test_file_format test_checkpoint",
        "sha256.update(memoryview(content)[DIGEST.stop :])",
        "sha256.update(memoryview(content)[DIGEST.stop : 2**20])", hard=True),
    Mutation("last_before_best", "a kill between both leaves a best loss that was never saved",
        "run/folder.py", "test_run_folder test_checkpoint test_failures",
        """\
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
            if as_last:
                files.write_atomic(self.folder / LAST, content, previous=self.folder / PREV)
                self.saved_progress = replace(run.progress)
""",
        """\
            if as_last:
                files.write_atomic(self.folder / LAST, content, previous=self.folder / PREV)
                self.saved_progress = replace(run.progress)
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
""", hard=True),
    Mutation("old_run_replaced_unasked", "a second start destroys the run of the first",
        "run/folder.py", "test_run_folder",
        "if holds_run(folder) and not overwrite and not is_in(source, folder):",
        "if holds_run(folder) and overwrite is None and not is_in(source, folder):"),
    Mutation("own_settings_replaced", "a config.yaml that a person wrote is overwritten",
        "run/folder.py", "test_run_folder",
        "if path.exists() and not path.read_bytes().startswith(WRITTEN_BY):",
        "if False:"),
    Mutation("best_of_another_split_kept", "a best loss on easier text blocks every later best",
        "run/checkpoint.py", "test_changed_settings test_checkpoint test_resume",
        "(text.sha256, config.data.val_fraction)",
        "(text.sha256,)", hard=True),
    # ----------------------------------------------------------------------------------- configs/
    Mutation("last_duplicate_key_wins", "of two lines with one key, one is silently ignored",
        "configs/command.py", "test_command",
        "if key in lines:",
        "if False:"),
    Mutation("open_intervals_closed", "model.dropout=1.0 is accepted, and everything is dropped",
        "configs/fields.py", "test_command",
        '"less_than": operator.lt',
        '"less_than": operator.le'),
    # ------------------------------------------------------------------------------------ common/
    Mutation("controls_are_printed", "a file name clears the terminal",
        "common/console.py", "test_console test_command test_sample",
        r'CONTROL = "[\0-\x1f',
        r'CONTROL = "[\0-\x1a'),
    Mutation("locale_decides", "on Windows, a redirected sample in Russian is full of escapes",
        "common/console.py", "test_console test_sample",
        'else "utf-8"',
        'else None'),
    Mutation("two_writers", "two runs write to one folder",
        "run/folder.py", "test_run_folder",
        "        lock.acquire()\n",
        "        pass\n"),
    Mutation("nohup_is_undone", "a run under nohup ends when the connection does",
        "common/stop.py", "test_stop",
        " and signal.getsignal(number) != signal.SIG_IGN:",
        ":", hard=True),
    Mutation("head_is_an_error", "`sample.py | head` fails",
        "common/console.py", "test_console test_sample",
        "return 141",
        "return 1"),
    Mutation("unbounded_reads", "a wrong file fills the memory",
        "common/files.py", "test_files test_failures",
        "if size > max_bytes:",
        "if False:"),
    Mutation("ranks_share_rows", "four GPUs compute the same quarter of the batch",
        "training/distributed.py", "test_ranks",
        "slice(self.rank * rows, (self.rank + 1) * rows)",
        "slice(0, rows)"),
    # --------------------------------------------------------------------------------------- run/
    Mutation("events_stay_after_a_kill", "TensorBoard shows the steps after a checkpoint twice",
        "run/log.py", "test_log",
        "purge_step=self.first_step + 1",
        "purge_step=None"),
    Mutation("evaluation_lost_at_resume", "TensorBoard forgets the evaluation of the saved step",
        "run/log.py", "test_log",
        "purge_step=self.first_step + 1",
        "purge_step=self.first_step", hard=True),
    Mutation("log_only_in_memory", "a kill loses two minutes of curves, which no resume repeats",
        "run/log.py", "test_log",
        "            writer.flush()\n",
        ""),
    Mutation("metrics_stay_after_a_kill", "metrics.csv has a row of a step that is made again",
        "run/log.py", "test_log",
        "int(row[1]) <= step]",
        "int(row[1]) <= step + 1]", hard=True),
    Mutation("samples_are_markdown", "generated text can end its code block",
        "run/log.py", "test_log",
        r'escaped = [escape(line, keep="\t") for line in lines]',
        "escaped = list(lines)", hard=True),
    # -------------------------------------------------------------------------------------- page/
    Mutation("page_keeps_stale_caches", "an edited text gets the probabilities of the old one",
        "page/model.js", "test_page",
        "window[position] === this.window[position]) position++;",
        "position < this.window.length) position++;", hard=True),
    Mutation("page_ends_at_a_tag", "a prompt with </script> breaks the page",
        "page/export.py", "test_page",
        r'json.dumps(data, allow_nan=False).replace("<", "\\u003c")',
        "json.dumps(data, allow_nan=False)", hard=True),
    # ------------------------------------------------------------------------- train.py, sample.py
    Mutation("resume_with_any_text", "a changed text is trained on without a word",
        "train.py", "test_changed_settings test_resume",
        "sha256s=(same_text.sha256, same_text.val_sha256),",
        "sha256s=(None, None),"),
    Mutation("saved_only_at_the_end", "a killed run has no last.safetensors",
        "train.py", "test_resume test_run_folder",
        "last = done or run.save_due",
        "last = done"),
    Mutation("sample_counted_from_0", "--sample=3 prints sample 4",
        "sample.py", "test_sample",
        "number = (options.sample or 1) - 1  # counted from 0",
        "number = options.sample or 0"),
)
# fmt: on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is given")
    parser.add_argument("--record", metavar="FILE", default=os.devnull, help="append results to it")
    options = parser.parse_args()
    known = {mutation.name: mutation for mutation in MUTATIONS}
    texts = {file: (ROOT / file).read_text("utf-8") for _, _, file, *_ in MUTATIONS}
    if misfits := [each.name for each in MUTATIONS if texts[each.file].count(each.old) != 1]:
        sys.exit(f"the product has not exactly one text that these replace: {', '.join(misfits)}")
    for name in options.names or known:
        line = f"{name:<36}{try_out(known[name])}"
        print(line, flush=True)
        with open(options.record, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def try_out(mutation: Mutation) -> str:
    """Run the tests on a mutated copy; return the result, the seconds and the test that failed."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
        content = (ROOT / mutation.file).read_text("utf-8")
        Path(folder, mutation.file).write_text(content.replace(mutation.old, mutation.new), "utf-8")
        tests = [f"tests/{name}.py" for name in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        began = time.monotonic()
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"unfinished{LIMIT:5} s"
        seconds = time.monotonic() - began
    if done.returncode == 0:
        return f"survived  {seconds:4.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout.decode(), re.MULTILINE)
    return f"died      {seconds:4.0f} s  {failed[1] if failed else done.stdout}"


if __name__ == "__main__":
    main()
