"""Run by torchrun, by test_transformers.py: expert parallelism through transformers' own configuration.

Every rank compares its part with a model that one process has whole. argv: a folder with a saved model.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hyper_parallel.integrations.transformers  # the two names exist from here on


def load(folder, **more):
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="hyper_mega_moe", **more)


def main(folder):
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = load(folder)
    split = load(folder, distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks,
                                                              ep_implementation="hyper_mega_moe"))
    experts = {name: module for name, module in split.named_modules() if name.endswith("mlp.experts")}
    assert len(experts) == 2
    ids = torch.randint(3, 128, (2 * ranks, 16), generator=torch.Generator().manual_seed(5))
    mine = ids[2 * rank:2 * rank + 2]
    with torch.no_grad():
        assert torch.equal(split(mine).logits, whole(mine).logits), f"rank {rank}: logits differ"
    split(mine, labels=mine).loss.backward()
    for part in range(ranks):
        (whole(ids[2 * part:2 * part + 2], labels=ids[2 * part:2 * part + 2]).loss / ranks).backward()
    compared = 0
    grads = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        got, expected = parameter.grad, grads[name].grad
        got = got.full_tensor() if isinstance(got, DTensor) else got
        scale = expected.abs().max().item()
        # what FSDP averages, experts sum or average, as transformers has it for its own all_to_all
        ratio = (got * expected).sum().item() / (expected * expected).sum().item()
        assert (got - expected * ratio).abs().max().item() <= 1e-4 * scale * ratio, f"{name}: ratio {ratio}"
        assert min(abs(ratio - 1), abs(ratio - ranks)) < 1e-3, f"{name}: ratio {ratio}"
        compared += "experts" in name
    assert compared >= 4
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} of {ranks}: fine\n")


main(sys.argv[1])
