"""llama.cpp's own server. It shows no KV use and no latency; `/props` tells slots and context.

It has no cache salt. `cache_prompt: false` is not one: such a request reads nothing that was left
in its slot, but leaves its own prompt there for the next one to find, and loses its own reuse.
"""

from __future__ import annotations

from backends.adapters.table import Adapter

LLAMACPP = Adapter(
    name="llamacpp",
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    kv_used=("llamacpp:kv_cache_usage_ratio",),  # shown by older builds only
    props_path="/props",
    owned_by=("llamacpp", "llama.cpp"),
    prefix="llamacpp:",
)
