"""Starts the scripts of this folder: alone, or on several ranks."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1",
               "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _run(command, **more):
    done = subprocess.run([str(word) for word in command], env=ENVIRONMENT, timeout=300, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def _all_fine(output, ranks):
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: fine" in output, output[-6000:]


def python(script, *arguments):
    with tempfile.TemporaryDirectory() as folder:  # MindSpore writes files about what went wrong
        assert "fine" in _run([sys.executable, HERE / script, *arguments], cwd=folder)


def run(script, ranks, *arguments):
    """Under torchrun."""
    _all_fine(_run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
                    HERE / script, *arguments]), ranks)


def msrun(script, ranks):
    """Under MindSpore's own launcher."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        _run([pathlib.Path(sys.executable).parent / "msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks}",
              "--master_addr=127.0.0.1", f"--master_port={port}", f"--log_dir={folder}", "--join=True", HERE / script],
             cwd=folder)
        _all_fine("".join(path.read_text() for path in pathlib.Path(folder).glob("worker_*.log")), ranks)


def pair(script, *arguments):
    """Two ranks without a launcher that would end one for the other. Exit status and output of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                       "WORLD_SIZE": "2"}
        ranks.append(subprocess.Popen([sys.executable, HERE / script, *arguments], env=environment, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        output = ranks[0].communicate(timeout=60)[0]  # far below the 100 s that waits may take
        ranks[1].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    return ranks[0].returncode, output
