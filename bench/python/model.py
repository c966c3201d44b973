"""A whole small transformers model: hyper_mega_moe against transformers' own experts implementations.

    python bench/python/model.py [--tokens 1,16,128] [--json FILE]

Qwen3-MoE with 2 layers of width 1024, 32 experts of inner width 512, 8 a token, bf16. T tokens of one sequence: a
forward without gradients, and a training step. `ratio` in the file is the best other peer's median over this one's.
"""

import argparse
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel.integrations.transformers  # registers the name
from measure import Table

OURS = "hyper_mega_moe"


def forward(model):
    def run(ids):
        with torch.no_grad():
            model(ids)
    return run


def step(model):
    def run(ids):
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()
    return run


def switched(model, implementation, function):
    """All share one model: weights are in memory once."""
    def run(ids):
        model.set_experts_implementation(implementation)
        function(ids)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,16,128")
    parser.add_argument("--seconds", type=float, default=3, help="for each peer and size")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = AutoConfig.for_model("qwen3_moe", vocab_size=4096, hidden_size=1024, num_hidden_layers=2,
                                  num_attention_heads=8, num_key_value_heads=4, head_dim=128, num_experts=32,
                                  moe_intermediate_size=512, num_experts_per_tok=8, intermediate_size=1024,
                                  pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    table = Table(options.json, OURS)
    for tokens in map(int, options.tokens.split(",")):
        for what, made in (("forward", forward), ("step", step)):
            if what == "step" and tokens < 2:
                continue  # no next token to learn
            peers = {name: switched(model, name, made(model)) for name in (OURS, "eager", "grouped_mm", "batched_mm")}
            table.run(what, tokens, peers, options.seconds, lambda: torch.randint(1, 4096, (1, tokens)))


main()
