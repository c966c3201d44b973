"""Small random models of several families, and how to make them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "mixtral": dict(COMMON, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": dict(COMMON, intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3,
                      head_dim=16, decoder_sparse_step=1, norm_topk_prob=True),
    "olmoe": dict(COMMON, intermediate_size=48, num_experts=8, num_experts_per_tok=2),
    "deepseek_v3": dict(COMMON, intermediate_size=96, num_key_value_heads=4, moe_intermediate_size=48,
                        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
                        n_shared_experts=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
                        v_head_dim=16),
    "gpt_oss": dict(COMMON, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2, head_dim=16,
                    sliding_window=32),
}


def make(family, implementation, dtype=torch.float32, **changes):
    """A model whose weights depend on the family alone."""
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2 if parameter.dim() == 3 else 0.1, generator=generator)
    return model.to(dtype)
