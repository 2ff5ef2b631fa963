"""vLLM. `gpu_cache_usage_perc` is the older name of `kv_cache_usage_perc`.

`cache_salt` goes into the hash of a prompt's first block, so only requests of one salt share any
(vLLM's documentation, "Automatic Prefix Caching").
"""

from __future__ import annotations

from backends.adapters.table import Adapter

VLLM = Adapter(
    name="vllm",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    cache_blocks=("vllm:cache_config_info", "block_size", "num_gpu_blocks"),
    owned_by=("vllm",),
    prefix="vllm:",
    cache_salt="cache_salt",
)
