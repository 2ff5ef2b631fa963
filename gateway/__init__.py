"""The HTTP shell around the decision core: OpenAI routes, relay, monitor, metrics, logs."""
