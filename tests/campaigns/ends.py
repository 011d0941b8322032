"""Campaign: short runs of two ranks must exit without an error.

    python -m tests.campaigns.ends [--full]

A thread of the process group that outlives it would crash about one run in a hundred while Python
shuts down, after everything was saved. The ranks get the environment that torchrun gives them, but
are forks of a process that has imported torch, which saves seconds; each ends as a script does, by
the interpreter's own shutdown. Two runs at a time keep two cores busy.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.campaigns.common import ENVIRONMENT, ROOT, merged, run_campaign, small_run_args, step_of
from tests.campaigns.ranks import free_port, rank_environment

STEPS = 2
RANKS = 2
SERVER = """
import json, os, sys
import torch.fx.experimental.symbolic_shapes  # what takes time, but not torch.distributed.nn
from common.errors import run_script
from checkpointing import run_dir
from dashboard import logger, report
from train import main
from training import evaluate, step

for line in sys.stdin:  # a run: [output file, environment of each rank, arguments]
    output, environments, arguments = json.loads(line)
    pids = []
    for environment in environments:
        pids.append(os.fork())
        if pids[-1] == 0:
            for stream in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            os.environ |= environment
            sys.argv = ["train.py", *arguments]
            sys.exit(run_script(main))
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    print(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]), flush=True)
"""


class Server:
    """A process that has imported torch and runs one list of ranks after another."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, out_dir: Path, options: list[str]) -> None:
        """Start the ranks of a run, which write their output to a file beside its folder."""
        port = free_port()
        environments = [rank_environment(rank, RANKS, port) for rank in range(RANKS)]
        arguments = [*options, f"--out_dir={out_dir}"]
        job = json.dumps([f"{out_dir}.txt", environments, arguments])
        print(job, file=self.process.stdin, flush=True)

    def exit_codes(self) -> list[int]:
        """Wait for the exit codes of the ranks of the run; a signal's is negative."""
        return json.loads(self.process.stdout.readline())


def campaign(full: bool) -> str:
    total = 1000 if full else 4
    servers = [Server(), Server()]
    with tempfile.TemporaryDirectory() as name:
        options = merged([*small_run_args(Path(name)), f"--max_iters={STEPS}", "--warmup_iters=0"])
        for number in range(total + len(servers)):
            server = servers[number % len(servers)]
            if number >= len(servers):
                ended = Path(name) / str(number - len(servers))
                codes, output = server.exit_codes(), Path(f"{ended}.txt").read_text()
                assert codes == [0] * RANKS and "terminate called" not in output, (codes, output)
                assert step_of(ended) == STEPS, output
            if number < total:
                server.start(Path(name) / str(number), options)
    for server in servers:
        server.process.communicate(timeout=60)
    return f"{total} of {total} runs of {RANKS} ranks ended without an error"


if __name__ == "__main__":
    run_campaign(campaign)
