"""Mutations: breaks of the product that would cost a user something; do the tests notice each?

    python -m tests.mutations [NAME ...]

Each mutation is applied to a copy of the tree, in which the tests of the mutated module then run
until one fails. The list was written from the product and its README, without a look at the tests;
mutations.txt has the results. tests/slow/test_mutations.py checks that the list fits the product.
"""

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

    `harm` is what a user would lose; `tests` are the modules that should notice, the
    likeliest first.
    """

    name: str
    harm: str
    file: str
    tests: str
    old: str
    new: str


# two statements, for another order
SAVE_BEST = """\
            if self.unsaved_best is not None:
                files.write_atomic(self.folder / BEST, self.unsaved_best)
                self.unsaved_best = None
"""
SAVE_LAST = """\
            if as_last:
                files.write_atomic(self.folder / LAST, to_bytes(checkpoint))
                self.saved_progress = checkpoint.progress
"""

# fmt: off
MUTATIONS = (
    # ------------------------------------------------------------------------------------- model/
    Mutation("next_token_visible", "a model that sees what it predicts: losses are a fiction",
        "model/attention.py", "test_attention",
        "return mask.triu(S - T + 1)", "return mask.triu(S - T + 2)"),
    Mutation("sdpa_mask_upper_left", "wrong text when a prompt is appended to a filled cache",
        "model/attention.py", "test_attention test_generate",
        "if mask is None and (T == S or not causal):", "if mask is None:"),
    Mutation("cached_tokens_at_position_0", "with RoPE, other text with the cache than without",
        "model/attention.py", "test_attention test_generate",
        "start = 0 if cache is None else cache.length", "start = 0"),
    Mutation("attention_moments_are_weights", "attention saves its weights as moments",
        "model/parameters.py", "test_layouts test_optimizers",
        "parts = [(of(parameter), part) for parameter, part in split.parts(tensor)]",
        "parts = [(parameter, part) for parameter, part in split.parts(tensor)]"),
    Mutation("every_fourth_never_dropped", "dropout regularizes less than it says",
        "model/dropout.py", "test_gpt test_attention",
        ".random_(-(2**63), None)", ".random_()"),
    Mutation("window_moves_early", "a whole context is never used when generating",
        "model/generate.py", "test_generate",
        "hops = math.ceil((n - block_size) / hop)", "hops = math.ceil((n - block_size + 1) / hop)"),
    Mutation("sample_seeds_shared", "sample 2 of seed 7 is sample 1 of seed 8",
        "model/generate.py", "test_generate test_sample",
        "np.random.PCG64((seed, i))", "np.random.PCG64((seed + i, 0))"),
    Mutation("rotary_turns_back", "imported models and the pages turn the other way",
        "model/rotary.py", "test_attention",
        "torch.cat([-sin, sin], dim=1)", "torch.cat([sin, -sin], dim=1)"),
    Mutation("lens_one_block_late", "the logit lens shows what the block before would say",
        "model/inspect.py", "test_gpt",
        "streams.append(stream)", "streams.append(inputs[0])"),
    Mutation("heads_in_another_order", "stored and imported models write nonsense",
        "model/parameters.py", "test_convert test_stored",
        "for parameter, part in splits[name].parts(tensor):",
        "for parameter, part in splits[name].parts(tensor.flip(tensor.dim() > 3)):"),
    # -------------------------------------------------------------------------------------- data/
    Mutation("every_epoch_in_the_same_order", "no new shuffle and no new offsets after an epoch",
        "data/batches.py", "test_batches",
        "np.random.RandomState((self._seed, epoch))", "np.random.RandomState((self._seed, 0))"),
    Mutation("window_overruns_its_segment", "now and then, validation text is trained on",
        "data/batches.py", "test_batches",
        "np.clip(cuts, 0, self._predictions[segment, None])",
        "np.clip(cuts, 0, self._predictions[segment, None] + 1)"),
    Mutation("evaluation_windows_overlap", "the exact loss omits some characters",
        "data/batches.py", "test_batches test_evaluate",
        "starts[segment] + n * block_size", "starts[segment] + n * (block_size - 1)"),
    Mutation("training_text_ends_one_late", "the first validation character is trained on",
        "data/corpus.py", "test_corpus",
        "train = join(ids[:cut] for", "train = join(ids[: cut + 1] for"),
    Mutation("vocabulary_is_sorted_again", "added characters change the old ids",
        "data/corpus.py", "test_new_characters test_corpus",
        'return CharTokenizer((vocabulary or "") + "".join(missing))',
        'return CharTokenizer("".join(sorted({*(vocabulary or ""), *missing})))'),
    Mutation("utf_32_read_as_utf_16", "a UTF-32 text has a NUL after every character",
        "data/encodings.py", "test_text",
        '    codecs.BOM_UTF32_LE: "utf-32",\n    codecs.BOM_UTF32_BE: "utf-32",\n'
        '    codecs.BOM_UTF16_LE: "utf-16",\n',
        '    codecs.BOM_UTF16_LE: "utf-16",\n    codecs.BOM_UTF32_LE: "utf-32",\n'
        '    codecs.BOM_UTF32_BE: "utf-32",\n'),
    Mutation("carriage_returns_kept", "line ends of Windows are two characters",
        "configs/fields.py", "test_text",
        'text.replace("\\r\\n", "\\n").replace("\\r", "\\n")', 'text.replace("\\r", "\\n")'),
    Mutation("items_start_unlearned", "the first character of a generated name is a guess",
        "data/items.py", "test_items",
        "segments = tuple((start - 1, end) for", "segments = tuple((start, end) for"),
    Mutation("question_counts_for_the_loss", "the loss of answers includes the end of the question",
        "data/items.py", "test_items",
        "targets[start : start + len(self.question(item))] = IGNORED",
        "targets[start : start + len(self.question(item)) - 1] = IGNORED"),
    Mutation("validation_text_in_the_training_text", "a far too low loss is given without a word",
        "data/summary.py", "test_summary",
        "if leaked := count_leaked_passages(train, val):",
        "if leaked := 0 * count_leaked_passages(train, val):"),
    # ---------------------------------------------------------------------------------- training/
    Mutation("micro_batches_weigh_the_same", "accumulation with padding is not the larger batch",
        "training/step.py", "test_step test_lists",
        "predictions = sum(np.count_nonzero(y != IGNORED) for _, y in micro_batches)",
        "predictions = np.count_nonzero(micro_batches[0][1] != IGNORED) * len(micro_batches)"),
    Mutation("same_dropout_every_step", "dropout removes the same features all the time",
        "training/step.py", "test_changed_settings",
        "np.random.SeedSequence((run.settings.seed, progress.step, world.rank))",
        "np.random.SeedSequence((run.settings.seed, 0, world.rank))"),
    Mutation("cooldown_ends_early", "the last step of a trapezoid has no learning rate left",
        "training/schedule.py", "test_schedule",
        "fraction_left = (train.max_iters - step) /",
        "fraction_left = (train.max_iters - step - 1) /"),
    Mutation("muon_without_nesterov", "a slightly worse loss with Muon",
        "training/optimizers.py", "test_optimizers",
        'updates[parameter] = parameter.grad.lerp(state["momentum"], self.momentum)',
        'updates[parameter] = state["momentum"].clone()'),
    Mutation("nan_is_the_best_loss", "after one NaN, no evaluation is the best any more",
        "training/state.py", "test_failures",
        "finite = math.isfinite(val_loss) and math.isfinite(train_loss)", "finite = True"),
    Mutation("only_rank_0_asks_to_stop", "a signal to another rank is lost, and with it the save",
        "training/distributed.py", "test_ranks",
        "return self._reduce(values, distributed.ReduceOp.MAX)",
        "return self._reduce([n * self.is_main for n in values], distributed.ReduceOp.MAX)"),
    Mutation("padding_counts_as_right", "an exact match where the answer is wrong",
        "training/evaluate.py", "test_lists",
        "segments[~matches.all(1).numpy()]", "segments[~matches.any(1).numpy()]"),
    Mutation("minutes_without_evaluations", "a run with --minutes takes longer than that",
        "training/duration.py", "test_duration",
        "(seconds - evaluations * timing.evaluation) / timing.step",
        "seconds / timing.step"),
    Mutation("bfloat16_on_every_cpu", "on most laptops, training takes twice the time",
        "training/device.py", "test_device",
        'return bool(capabilities.get("avx512_bf16")) and "Intel" not in cpu_info("vendor_id")',
        "return True"),
    Mutation("dropout_of_long_runs_alone", "a run of many epochs memorizes the text",
        "training/state.py", "test_auto",
        "max(p for e, p in DROPOUT_BY_EPOCHS if epochs >= e)",
        "max(p for e, p in DROPOUT_BY_EPOCHS if epochs >= 2 * e)"),
    # ------------------------------------------------------- storage/, and common/files
    Mutation("no_fsync", "an empty checkpoint after a power failure",
        "common/files.py", "test_files test_run_folder test_checkpoint",
        "            os.fsync(file.fileno())\n", ""),
    Mutation("digest_without_tensors", "a damaged byte in a checkpoint loads silently",
        "storage/checkpoint.py", "test_checkpoint",
        "sha256.update(tensors[name].contiguous().numpy())",
        "sha256.update(name.encode())"),
    Mutation("last_before_best", "a kill between both leaves a best loss that was never saved",
        "storage/folder.py", "test_run_folder test_checkpoint test_failures",
        SAVE_BEST + SAVE_LAST, SAVE_LAST + SAVE_BEST),
    Mutation("old_run_replaced_unasked", "a second start destroys the run of the first",
        "train.py", "test_run_folder",
        "        if holds_run(folder):\n", "        if False:\n"),
    Mutation("moved_folder_loses_the_run", "if the folder is renamed, the trained weights are lost",
        "storage/folder.py", "test_failures",
        "if not self.folder.is_dir():", "if False:"),
    Mutation("saved_only_at_the_end", "a killed run has no last.safetensors",
        "storage/folder.py", "test_run_folder test_resume",
        "as_last = (final or self._is_due())", "as_last = final"),
    Mutation("best_gets_worse", "after a damaged last, worse weights replace the best ones",
        "storage/folder.py", "test_best",
        "as_best = as_best and progress.best_loss <= self.best_loss", "as_best = as_best"),
    Mutation("bias_decays", "the biases of attention are pulled towards 0, and orthogonalized",
        "model/parameters.py", "test_optimizers",
        'if kind == "weight" else ()', 'if kind == "weight" else (3, shape[1], shape[2])'),
    Mutation("adamw_restarts_its_count", "after each resume AdamW makes steps of the wrong size",
        "storage/checkpoint.py", "test_resume",
        "    adamw.step_counts.fill_(checkpoint.progress.step)\n", ""),
    Mutation("scale_of_the_last_evaluation", "weights are saved with the logit_scale of others",
        "storage/checkpoint.py", "test_auto",
        "    run.update_logit_scale()\n", ""),
    Mutation("micro_batches_skip_text", "a resume with another batch_size never reads some text",
        "storage/differences.py", "test_resume",
        "if now.batch_size * now.gradient_accumulation_steps != windows:", "if False:"),
    Mutation("architecture_may_change", "a resume with other sizes ends in a traceback",
        "storage/differences.py", "test_changed_settings",
        "for name in then.keys() & now.keys() & FIXED",
        'for name in then.keys() & now.keys() & {"optimizer"}'),
    Mutation("infinite_weights_are_loaded", "a checkpoint with NaN trains on, and is saved",
        "storage/checkpoint.py", "test_checkpoint",
        "if not_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]"
        ":",
        "if not_finite := []:"),
    # ----------------------------------------------------------------------------------- configs/
    Mutation("last_duplicate_key_wins", "of two lines with one key, one is silently ignored",
        "configs/command.py", "test_command",
        "if key in lines:", "if False:"),
    Mutation("open_intervals_closed", "dropout=1.0 is accepted, and everything is dropped",
        "configs/fields.py", "test_command",
        '"less_than": lt', '"less_than": le'),
    Mutation("names_of_others_unknown", "who types --lr is told of log, not of learning_rate",
        "configs/schema.py", "test_command test_schema",
        "did_you_mean(meant if meant in known else key, ",
        "did_you_mean(key, "),
    Mutation("resume_takes_the_file", "--resume ends a run of --minutes at the length of the file",
        "configs/command.py", "test_resume test_changed_settings",
        "options = self.options | {",
        "options = self.settings_in_file | self.options | {"),
    # ------------------------------------------------------------------------------------ common/
    Mutation("controls_are_printed", "a file name clears the terminal",
        "common/words.py", "test_console test_command test_sample",
        r'CONTROL = "[\0-\x1f', r'CONTROL = "[\0-\x1a'),
    Mutation("locale_decides", "on Windows, a redirected sample in Russian is full of escapes",
        "common/console.py", "test_console test_sample",
        'else "utf-8"', 'else None'),
    Mutation("two_writers", "two runs write to one folder",
        "storage/folder.py", "test_run_folder",
        "        lock.acquire()\n", "        pass\n"),
    Mutation("nohup_is_undone", "a run under nohup ends when the connection does",
        "common/stop.py", "test_stop",
        " and signal.getsignal(number) != signal.SIG_IGN:", ":"),
    Mutation("head_is_an_error", "`sample.py | head` fails",
        "common/console.py", "test_console test_sample",
        "return 141", "return 1"),
    Mutation("ranks_share_rows", "four GPUs compute the same quarter of the batch",
        "training/distributed.py", "test_ranks",
        "slice(self.rank * rows, (self.rank + 1) * rows)", "slice(0, rows)"),
    # ----------------------------------------------------------------------------------- storage/
    Mutation("events_stay_after_a_kill", "TensorBoard shows the steps after a checkpoint twice",
        "storage/log.py", "test_log",
        "purge_step=self.first_step + 1", "purge_step=None"),
    # -------------------------------------------------------------------------------------- page/
    Mutation("page_keeps_stale_caches", "an edited text gets the probabilities of the old one",
        "page/model.js", "test_model_js",
        "window[position] === this.window[position]) position++;",
        "position < this.window.length) position++;"),
    Mutation("page_ends_at_a_tag", "a prompt with </script> breaks the page",
        "page/export.py", "test_page",
        r'json.dumps(data, allow_nan=False).replace("<", "\\u003c")',
        "json.dumps(data, allow_nan=False)"),
    # ------------------------------------------------------------------------- train.py, sample.py
    Mutation("resume_with_any_text", "a changed text is trained on without a word",
        "train.py", "test_changed_settings test_resume",
        "expected = (checkpoint.text.sha256, checkpoint.text.val_sha256)",
        "expected = (None, None)"),
    Mutation("imported_keys_and_values_swapped", "a model of nanoGPT writes nonsense",
        "convert.py", "test_convert",
        "tensor = tensor.unflatten(0, (3, n_head, -1))",
        "tensor = tensor.unflatten(0, (3, n_head, -1))[[0, 2, 1]]"),
    Mutation("a_pickle_is_run", "a file from the net does what it likes",
        "convert.py", "test_convert",
        'map_location="cpu", weights_only=True)', 'map_location="cpu", weights_only=False)'),
    Mutation("sample_counted_from_0", "--sample=3 prints sample 4",
        "sample.py", "test_sample",
        "index = (options.sample or 1) - 1  # counted from 0", "index = options.sample or 0"),
)
# fmt: on


def path_of(module: str) -> Path:
    """Return the path of a test module, relative to the project."""
    path = Path("tests", f"{module}.py")
    return path if (ROOT / path).exists() else Path("tests", "slow", f"{module}.py")


def try_out(mutation: Mutation) -> str:
    """Run the tests on a mutated copy; return the result, the seconds and the test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        left_out = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True)
        mutated = Path(folder, mutation.file)
        content = mutated.read_text("utf-8").replace(mutation.old, mutation.new)
        mutated.write_text(content, "utf-8")
        tests = [str(path_of(name)) for name in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
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
    for mutation in MUTATIONS:
        if mutation.name in sys.argv[1:] or len(sys.argv) == 1:
            print(f"{mutation.name:<36}{try_out(mutation)}", flush=True)
