"""Whatever generates tokens, real or simulated, and the bytes between it and the gateway."""
