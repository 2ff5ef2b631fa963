"""Any OpenAI-compatible URL: no metrics, and its model list is its health check."""

from __future__ import annotations

from backends.adapters.table import Adapter

OPENAI = Adapter(name="openai", metrics_path="", health_path="/v1/models")
