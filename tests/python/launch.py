"""Starts one of the scripts of this folder on several ranks."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def run(script, ranks, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(ranks), HERE / script, *map(str, arguments)], env=environment, timeout=300, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-6000:]
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: fine" in done.stdout, done.stdout[-6000:]
