"""argv: dtype, transposed, folder. Compares what mindspore_one.py wrote with PyTorch's."""

import sys

import numpy as np
import torch

import mindspore_case
from hyper_parallel.custom_ops.experimental import hyper_mega_moe

dtype, transposed, folder = getattr(torch, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
a = mindspore_case.arrays(transposed)
leaves = [torch.from_numpy(a[name]).to(dtype if name != "weights" else torch.float32).requires_grad_()
          for name in ("x", "weights", "up", "down", "shared_up", "shared_down")]
x, weights, *parameters = leaves
up, down, shared_up, shared_down = (w.transpose(1, 2) if transposed else w for w in parameters)
y = hyper_mega_moe(x, torch.from_numpy(a["ids"]), weights, up, down, shared_up_proj_weight=shared_up,
                   shared_down_proj_weight=shared_down)
y.backward(torch.from_numpy(a["dy"]).to(dtype))
wanted = [t.detach().float().numpy() for t in (y, *(leaf.grad for leaf in leaves))]
got = np.load(f"{folder}/got.npz")
for i, array in enumerate(wanted):
    assert np.array_equal(got[f"arr_{i}"], array), i
print("fine")
