"""Expert parallel with DTensor: tokens and experts sharded over the ranks.

    torchrun --nproc-per-node 2 examples/python/02_dtensor.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_parallel.custom_ops.experimental import hyper_mega_moe

T, H, I, E, K = 64, 256, 128, 8, 2

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
torch.manual_seed(0)  # every rank makes the same tensors and keeps its part
full = [torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K), torch.randn(E, H, 2 * I) * 0.05,
        torch.randn(E, I, H) * 0.05]
x, ids, weights, up, down = (distribute_tensor(t, mesh, [Shard(0)]) for t in full)
for leaf in (x, weights, up, down):
    leaf.requires_grad_()

y = hyper_mega_moe(x, ids, weights, up, down)  # one call: dispatch, experts, combine
y.to_local().square().sum().backward()

same = torch.equal(y.full_tensor(), hyper_mega_moe(*full))
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks: y is {tuple(y.shape)}, {y.placements}; d_up_proj {up.grad.placements}")
    print("one rank or several:", "the same bits" if same else "OTHER BITS")
assert same
dist.destroy_process_group()
