"""Fused layers: one matrix under a name of its own that stands for several layers, its shards.

API:
    FUSED_LAYERS                       fused name -> the alternative lists of shard names, of common model families
    fused_table(extra) -> dict         the same with entries of a user's
    shard_paths(path, table)           fused path -> (shard paths of one alternative, ...)

A pattern may name the fused layer or all of its shards, whichever of the two the model has. Names are last parts of
module paths; `FUSED_LAYERS` grows by the key `packed_modules_mapping` of a configuration, which is what vLLM calls it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

Shards = tuple[str, ...]

_QKV = ("q_proj", "k_proj", "v_proj")

FUSED_LAYERS: Mapping[str, tuple[Shards, ...]] = MappingProxyType(
    {
        # Llama, Mistral, Qwen, Gemma, Phi-3, OLMo, GLM
        "qkv_proj": (_QKV,),
        "kv_proj": (("k_proj", "v_proj"),),
        "gate_up_proj": (("gate_proj", "up_proj"),),
        # Baichuan, MPT, Phi, Falcon, BLOOM, GPT-NeoX: fused in the checkpoint
        "W_pack": (_QKV,),
        "Wqkv": (_QKV, ("Wq", "Wk", "Wv")),
        "query_key_value": (("query", "key", "value"), _QKV),
        # InternLM2, Llama's own checkpoints, Mixtral's experts
        "wqkv": (("wq", "wk", "wv"),),
        "w13": (("w1", "w3"),),
        # BERT, ViT
        "qkv": (("q", "k", "v"), ("query", "key", "value")),
        # DeepSeek V2 and V3
        "fused_qkv_a_proj": (("q_a_proj", "kv_a_proj_with_mqa"),),
        # Diffusion transformers: Flux, SD3, Qwen-Image, Wan, HunyuanVideo
        "to_qkv": (("to_q", "to_k", "to_v"),),
        "to_kv": (("to_k", "to_v"),),
        "add_qkv_proj": (("add_q_proj", "add_k_proj", "add_v_proj"),),
        "to_added_qkv": (("add_q_proj", "add_k_proj", "add_v_proj"),),
    }
)
"""Fused names of common model families, each with the lists of shards that it may stand for."""


def fused_table(extra: Sequence[tuple[str, Shards]] = ()) -> dict[str, tuple[Shards, ...]]:
    """The table with the entries of a user's, which replace those of the same name; one without shards removes it."""
    table = dict(FUSED_LAYERS)
    for name, shards in extra:
        table.pop(name, None)
        if shards:
            table[name] = (shards,)
    return table
