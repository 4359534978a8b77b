"""Model types through which the rows of one flattened row were seen to stay apart under our attention."""

from __future__ import annotations

# Source: measured: tiny random models of every causal LM of transformers 5.23 through verify_isolation (CPU,
# float32); tests/trainers/test_causal_lms.py holds it. Every run checks its own model again.
_TYPES = (
    "afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 "
    "deepseek_v3 diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text "
    "gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_oss gpt_bigcode gpt_neox granite "
    "granitemoe granitemoeshared helium hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe "
    "kolibri1 laguna llama llama4_text longcat_flash mellum minimax_m2 minimax_m3_vl_text ministral3 "
    "mistral mixtral nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe "
    "qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 youtu "
)
PACKING_TESTED_MODELS = frozenset(_TYPES.split())
