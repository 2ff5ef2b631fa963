"""llama.cpp's own server. It shows no KV use and no latency; `/props` tells slots and context."""

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
