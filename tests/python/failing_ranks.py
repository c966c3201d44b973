"""Started by test_failure.py as two ranks: rank 1 ends in the way that argv says; rank 0 must hear of it at once."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from hyper_parallel import expert_parallel_group
from hyper_parallel.custom_ops.experimental import hyper_mega_moe

way = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
x, ids, weights = torch.randn(8, 64), torch.randint(0, 8, (8, 2)), torch.rand(8, 2)
up, down = torch.randn(4, 64, 96), torch.randn(4, 48, 64)
with expert_parallel_group(dist.group.WORLD):
    for call in range(200):
        if rank == 1 and call == 100:
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "raises":
                raise KeyError("a bug of the user's")
            sys.exit(0)
        try:
            hyper_mega_moe(x, ids, weights, up, down)
        except RuntimeError as error:
            print(f"call {call}: {error}")
            sys.exit(3)
