"""A Hugging Face model, switched over with one line: the same tokens, and how much sooner.

    python examples/python/03_transformers.py [--layers N] [--experts E]
"""

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.integrations.transformers import enable

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--experts", type=int, default=32)
options = parser.parse_args()

config = AutoConfig.for_model("qwen3_moe", vocab_size=4096, hidden_size=1024, num_hidden_layers=options.layers,
                              num_attention_heads=8, num_key_value_heads=4, head_dim=128, num_experts=options.experts,
                              moe_intermediate_size=512, num_experts_per_tok=8, intermediate_size=1024, pad_token_id=0)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
prompt = torch.randint(5, 4096, (1, 256))


def best(function, times=5):
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return min(taken) * 1e3


def measure():
    with torch.no_grad():
        prefill = best(lambda: model(prompt))
        decode = best(lambda: model.generate(prompt[:, :8], max_new_tokens=16, min_new_tokens=16, do_sample=False),
                      3) / 16
        tokens = model.generate(prompt[:, :8], max_new_tokens=16, do_sample=False)
    model.zero_grad()
    step = best(lambda: model(prompt, labels=prompt).loss.backward(), 3)
    return prefill, decode, step, tokens


theirs = measure()
enable(model)  # the one line
ours = measure()
for name, a, b in zip(("prefill of 256 tokens", "each generated token", "training step"), theirs, ours):
    print(f"{name:22} {a:9.1f} ms, with hyper_mega_moe {b:9.1f} ms: {a / b:.2f} x")
same = (theirs[3] == ours[3]).float().mean().item()
print(f"greedy tokens that are the same: {same:.0%} (random weights in bf16; in float32 all are)")
