"""Several ranks make the run that one process makes: the same steps, one voice, one decision to
stop.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from common.errors import ConfigError, ResourceError
from common.signals import Stop
from configs.schema import ModelConfig
from data.batches import Split, evaluation_windows
from model.gpt import GPT
from tests.campaigns.common import (
    ENVIRONMENT,
    ROOT,
    SMALL,
    at_step,
    contents,
    loadable,
    same,
    scalars,
    small,
    step_of,
    train,
)
from tests.campaigns.ranks import in_float64, ranks, torchrun
from tests.campaigns.signals import send_at
from training import distributed, runtime
from training.distributed import SINGLE_PROCESS, VARIABLES, World
from training.evaluate import loss_sums_by_position

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
STEPS = 50
EQUAL = ["--dropout=0", f"--max_iters={STEPS}", "--eval_interval=25", "--positions=rope"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The small run by two ranks; what they said is in 10, 11 (standard output of each),
    20 and 21.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [*small(folder), f"--out_dir={folder / 'run'}"]
    assert [code for code, *_ in ranks(folder, words, words)] == [0, 0]
    return folder


def among(size: int, rank: int = 0) -> World:
    """This process as torchrun would have it, on one machine."""
    told = dict(zip(VARIABLES, (rank, size, rank, size, 1), strict=True))
    return World(
        Stop(), {"TORCHELASTIC_RUN_ID": "x"} | {name: str(value) for name, value in told.items()}
    )


# --------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("each, within", [(None, 1e-5), (in_float64, 1e-12)])
def test_two_ranks_take_the_steps_of_one_process(optimizer, each, within, tmp_path):
    options = [*small(tmp_path), *EQUAL, f"--optimizer={optimizer}"]
    found = []
    for size in (1, 2):
        words = [*options, f"--out_dir={tmp_path / f'{size}'}"]
        assert [code for code, *_ in ranks(tmp_path / "said", *[words] * size, each=each)] == [
            0
        ] * size
        progress = contents(tmp_path / f"{size}" / "last.safetensors")["progress"]
        found.append([*progress["recent_losses"], progress["best_loss"]])
    one, two = found
    assert len(one) == len(two) == STEPS + 1
    assert 0 < max(abs(a - b) for a, b in zip(one, two, strict=True)) < within


def test_padding_does_not_change_the_weight_of_a_prediction_whichever_rank_has_it(tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    play = (ROOT / "data/plays/admiral.txt").read_text(encoding="utf-8")
    for i, length in enumerate((300, 5, 9, 12, 16, 3, 2)):  # block_size is 16
        (books / f"{i}.txt").write_text(play[100 * i :][:length], encoding="utf-8")
    options = [*SMALL, *EQUAL, f"--data.sources={books}", "--max_iters=10"]
    found = []
    for size, batch, parts in ((1, 4, 2), (2, 4, 2), (1, 8, 1)):
        options += [f"--batch_size={batch}", f"--gradient_accumulation_steps={parts}"]
        words = [*options, f"--out_dir={tmp_path / f'{size}{batch}'}"]
        codes = [code for code, *_ in ranks(tmp_path / "said", *[words] * size, each=in_float64)]
        assert codes == [0] * size
        progress = contents(tmp_path / f"{size}{batch}" / "last.safetensors")["progress"]
        found.append(progress["recent_losses"])
    assert len(found[0]) == 10
    assert np.abs(np.diff(found, axis=0)).max() < 1e-12


def evaluated(folder: Path, ranks: World) -> None:
    """Write down the exact loss of an untrained model over a random text, and in how many batches
    it was had.
    """
    ids = np.random.default_rng(0).integers(0, 7, 5001).astype(np.uint8)
    where = runtime.select_runtime("cpu", "float32", ranks)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8), 7)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    nats, count = loss_sums_by_position(
        model, evaluation_windows(Split(ids, ((0, 5001),)), 8, 64), where
    ).sum(axis=1)
    (folder / f"loss{ranks.size}{ranks.rank}").write_text(f"{float(nats / count)!r} {len(calls)}")


def evaluate_and_train(folder: Path, _: int) -> None:
    meet = World.init_process_group

    def met(self, device):
        meet(self, device)
        evaluated(folder, self)

    World.init_process_group = met


def test_an_evaluation_by_two_ranks_gives_the_figure_of_one(tmp_path):
    words = [*small(tmp_path), "--max_iters=1", "--warmup_iters=0", f"--out_dir={tmp_path / 'run'}"]
    ranks(tmp_path, words, words, each=partial(evaluate_and_train, tmp_path))
    evaluated(tmp_path, SINGLE_PROCESS)
    found = [(tmp_path / f"loss{name}").read_text().split() for name in ("10", "20", "21")]
    (one, first, second), batches = zip(*found, strict=True)
    assert batches == ("10", "5", "5")
    assert first == second and abs(float(first) - float(one)) < 1e-14


def count_sums(folder: Path, rank: int) -> None:
    """Write down how often gradients are averaged."""
    init = DistributedDataParallel.__init__

    def counted(self, *arguments, **options):
        init(self, *arguments, **options)
        group = self.process_group

        def hook(_, bucket):
            with open(folder / f"sums{rank}", "a") as file:
                file.write("x")
            work = torch.distributed.all_reduce(
                bucket.buffer().div_(group.size()), group=group, async_op=True
            )
            return work.get_future().then(lambda done: done.value()[0])

        self.register_comm_hook(None, hook)

    DistributedDataParallel.__init__ = counted


def test_gradients_are_averaged_once_a_step_however_many_parts_it_has(tmp_path):
    words = [
        *small(tmp_path),
        "--gradient_accumulation_steps=4",
        "--max_iters=4",
        "--warmup_iters=0",
    ]
    words += [f"--out_dir={tmp_path / 'run'}"]
    assert [
        code for code, *_ in ranks(tmp_path, words, words, each=partial(count_sums, tmp_path))
    ] == [0, 0]
    before_the_first_step = 1
    assert [len((tmp_path / f"sums{rank}").read_text()) for rank in (0, 1)] == [
        4 + before_the_first_step
    ] * 2


def test_each_rank_drops_other_units(undisturbed):
    assert len({runtime.step_seed(1, step, rank) for step in range(9) for rank in range(9)}) == 81


# ------------------------------------------------------------------------------ one voice, one file


def test_the_first_alone_writes_and_speaks(undisturbed):
    said = [(undisturbed / name).read_text() for name in ("10", "11", "20", "21")]
    assert said[0].count("step 24:") == 1 and "2 processes on 1 machine(s)" in said[0]
    assert not any(said[1:])
    assert len(list((undisturbed / "run").glob("*tfevents*"))) == 2  # one describes the run
    assert [step for step, _ in scalars(undisturbed / "run")["train/loss"]] == list(range(1, 25))


def test_a_checkpoint_does_not_tell_the_number_of_ranks(undisturbed, tmp_path):
    assert train(*small(tmp_path), f"--out_dir={tmp_path / 'run'}")[0] == 0
    one, two = (
        contents(folder / "last.safetensors") for folder in (tmp_path / "run", undisturbed / "run")
    )
    assert {name: t.shape for name, t in one["tensors"].items()} == {
        name: t.shape for name, t in two["tensors"].items()
    }
    assert one["environment"] | {"world_size": 2} == two["environment"]


def patient(_: int) -> None:
    """Leave the word to the first even on a machine that stands still for a while."""
    distributed.GRACE_SECONDS = 120.0


@pytest.mark.parametrize(
    "changes, code, error",
    [
        ([["--n_laier=3"], ["--n_laier=3"]], 2, r"error: .*n_laier.*"),
        (
            [["--batch_size=3"], ["--batch_size=3"]],
            2,
            r"error: batch_size 3 .* divisible by the 2 processes; nearest above: 4",
        ),
        (
            [["--n_layer=1"], ["--n_layer=2"]],
            2,
            r"error: process 1 of .*model.n_layer 1 -> 2.*same command",
        ),
        (
            [["--data.sources=data/plays/admiral.txt"], []],
            2,
            r"error: process 1 of .*data.sha256 \w{64} -> \w{64}.*",
        ),
        ([[], ["--data.sources=nowhere"]], 3, r"error: data.sources: .*nowhere.*"),
    ],
)
def test_what_is_wrong_is_said_once_and_ends_all(changes, code, error, tmp_path):
    words = [*SMALL, f"--out_dir={tmp_path / 'run'}"]
    (first, _, said), (second, _, nothing) = ranks(
        tmp_path, *([*words, *change] for change in changes), each=patient
    )
    assert first == code and second and not nothing  # torchrun may end the second before it knows
    assert re.fullmatch(error + "\n", said) and not list((tmp_path / "run").glob("*.safetensors"))


def test_a_folder_with_a_run_is_refused_once(undisturbed, tmp_path):
    words = [*small(undisturbed), f"--out_dir={undisturbed / 'run'}"]
    (code, _, said), (_, _, nothing) = ranks(tmp_path, words, words)
    assert code == 2 and "already holds a run" in said and said.count("\n") == 1 and not nothing


def test_more_ranks_than_gpus_are_refused_with_their_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ResourceError, match=r"3 processes .* its 2 GPUs; .*--nproc_per_node=2"
    ) as caught:
        runtime.select_runtime("auto", "float32", among(3))
    assert caught.value.exit_code == 5


def test_the_rows_of_all_ranks_are_the_batch():
    rows = list(range(12))
    assert (
        [row for rank in range(4) for row in rows[among(4, rank).batch_slice(12)]]
        == rows
        == rows[SINGLE_PROCESS.batch_slice(12)]
    )
    with pytest.raises(ConfigError):
        among(5).batch_slice(12)


def listening(folder: Path, rank: int) -> None:
    """At the first step, write down the interface that was chosen and the addresses at which this
    process listens.
    """

    def look():
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        tables = [
            Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")
        ]
        rows = [line.split() for table in tables for line in table]
        mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
        (folder / f"sockets{rank}").write_text(
            " ".join([os.environ.get("GLOO_SOCKET_IFNAME", "any"), *mine])
        )

    at_step(pytest.MonkeyPatch(), 0, look)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_on_one_machine_the_ranks_listen_on_the_loopback_interface_alone(tmp_path):
    words = [*small(tmp_path), "--max_iters=1", "--warmup_iters=0", f"--out_dir={tmp_path / 'run'}"]
    assert [
        code for code, *_ in ranks(tmp_path, words, words, each=partial(listening, tmp_path))
    ] == [0, 0]
    assert re.fullmatch(
        r"lo( 0100007F:\w{4})+", (tmp_path / "sockets1").read_text()
    )  # in the first is the store, too


# ---------------------------------------------------------------------------- stopping and going on


def signalled(phase: str, call: int, hit: int, rank: int) -> None:
    if rank == hit:
        send_at(phase, "SIGTERM", call)


@pytest.mark.parametrize(
    "phase, call, hit", [("step", 9, 1), ("evaluate", 2, 1), ("sample", 2, 0), ("save", 5, 0)]
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_nothing_is_lost(
    phase, call, hit, undisturbed, tmp_path
):
    words = [*small(tmp_path), f"--out_dir={tmp_path / 'run'}", "--resume"]
    stopped = ranks(tmp_path, words, words, each=partial(signalled, phase, call, hit))
    assert [code for code, *_ in stopped] == [143, 143]
    assert f"torchrun --nproc_per_node=2 train.py {tmp_path / 'run'}/config.yaml" in stopped[0][1]
    assert 0 < step_of(tmp_path / "run") < 24
    assert [code for code, *_ in ranks(tmp_path, words, words)] == [0, 0]
    assert same(undisturbed / "run", tmp_path / "run")


def dying(rank: int) -> None:
    if rank == 1:
        at_step(pytest.MonkeyPatch(), 10, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_when_a_rank_is_killed_the_other_ends_and_the_run_goes_on_to_the_same_end(
    undisturbed, tmp_path
):
    words = [*small(tmp_path), f"--out_dir={tmp_path / 'run'}", "--resume"]
    began = time.monotonic()
    (first, _, error), (second, *_) = ranks(tmp_path, words, words, each=dying)
    assert (first, second) == (5, -signal.SIGKILL) and time.monotonic() - began < 30
    assert re.search(
        r"error: another process of this run has ended.*the last checkpoint is .*; try: torch",
        error,
    )
    there, good = loadable(tmp_path / "run")
    assert there == good == 3 and not list((tmp_path / "run").glob("*.tmp.*"))
    assert [code for code, *_ in ranks(tmp_path, words, words)] == [0, 0]
    assert same(undisturbed / "run", tmp_path / "run")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a launcher is slow to start")
def test_torchrun_passes_sigterm_on_and_one_process_goes_on_with_what_two_have_begun(tmp_path):
    words = [
        *small(tmp_path),
        f"--out_dir={tmp_path / 'run'}",
        "--max_iters=2000",
        "--warmup_iters=0",
    ]
    process = torchrun(2, *words)
    next(line for line in process.stdout if line.startswith("first loss"))
    time.sleep(0.3)
    process.terminate()
    said = process.communicate(timeout=240)[0]
    assert (
        said.count("stopping: finishing this step") == said.count("stopped and saved at step") == 1
    )
    step = step_of(tmp_path / "run")
    assert 0 < step < 2000
    code, said = train(*words, "--resume", f"--max_iters={step + 3}")
    assert code == 0 and step_of(tmp_path / "run") == step + 3
    (line,) = (line for line in said.splitlines() if line.startswith("resuming"))
    assert "; world_size 2 -> 1" in line and line.endswith(
        "so it is not the same run to the last bit"
    )


# ------------------------------------------------------------------------------------ the launcher


WRONG = {  # what is in the environment beside TORCHELASTIC_RUN_ID, and what the answer names
    "RANK is missing": {},
    "RANK is 'one'": {"RANK": "one"},
    "RANK is '-1'": {"RANK": "-1"},
    "RANK is '1e0'": {"RANK": "1e0"},
    "LOCAL_RANK is missing": {"RANK": "0", "WORLD_SIZE": "1"},
    "RANK=2, WORLD_SIZE=2": dict(zip(VARIABLES, "20211", strict=True)) | {"WORLD_SIZE": "2"},
    "WORLD_SIZE=0": dict(zip(VARIABLES, "00011", strict=True)),
    r"RANK is '\\x1b\[2J": {"RANK": "\x1b[2J" * 10**5},
}


@pytest.mark.parametrize("words", WRONG)
def test_variables_of_torchrun_that_cannot_be_are_named_with_exit_2(words):
    with pytest.raises(ConfigError, match=words) as caught:
        World(Stop(), {"TORCHELASTIC_RUN_ID": "x"} | WRONG[words])
    assert caught.value.exit_code == 2 and len(str(caught.value)) < 400


def test_an_address_that_is_missing_is_named_with_exit_2(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(VARIABLES, "01011", strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR .*; start it with torchrun"):
        among(1).init_process_group(torch.device("cpu"))


THREADS = """
import os, sys, threading
from common.signals import Stop
from pathlib import Path
import torch
from model.gpt import GPT
from configs.schema import ModelConfig
from training.distributed import World

def threads():
    names = (Path(f"/proc/self/task/{id}/comm").read_text() for id in os.listdir("/proc/self/task"))
    return sorted(name.strip() for name in names)

before = threads()
with Stop() as stop, World(stop, os.environ) as world:
    world.init_process_group(torch.device("cpu"))
    network = world.wrap_ddp(GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 5))
    during = threads()
    del network
print(len(during) - len(before), *(set(threads()) - set(before)))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads in /proc")
def test_no_thread_of_gloo_outlives_the_group():
    environment = dict(zip(VARIABLES, "01011", strict=True))
    environment |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    started, *left = done.stdout.split()
    assert int(started) > 0 and left == []
