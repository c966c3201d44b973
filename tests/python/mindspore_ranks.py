"""Run by msrun: every rank compares its part with one process that has everything."""

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import init
from mindspore.mint.distributed import get_rank, get_world_size

import mindspore_case
from hyper_parallel import expert_parallel_group
from hyper_parallel.custom_ops.experimental import hyper_mega_moe

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
init("mccl")
rank, ranks = get_rank(), get_world_size()
a = mindspore_case.arrays(False)
cut = [0, 9, 26]
mine, local = slice(cut[rank], cut[rank + 1]), slice(rank * 4, rank * 4 + 4)


def step(tokens, experts, group):
    x, ids, weights, dy = (Tensor(a[name][tokens].copy()) for name in ("x", "ids", "weights", "dy"))
    up, down = (Tensor(a[name][experts].copy()) for name in ("up", "down"))

    def loss(x, weights, up, down):
        if group is None:
            y = hyper_mega_moe(x, ids, weights, up, down)
        else:
            with expert_parallel_group(group):
                y = hyper_mega_moe(x, ids, weights, up, down)
        return (y * dy).sum(), y

    (_, y), grads = ms.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, up, down)
    return [t.asnumpy() for t in (y, *grads)]


whole = step(slice(None), slice(None), None)
part = step(mine, local, "mccl_world_group")
for i, (got, wanted, where) in enumerate(zip(part, whole, (mine, mine, mine, local, local))):
    assert np.array_equal(got, wanted[where]), f"rank {rank}: {i} differs"
print(f"rank {rank} of {ranks}: fine", flush=True)
