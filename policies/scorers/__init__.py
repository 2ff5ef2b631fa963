"""Policies: each a compiled array kernel over (requests x routes), higher is better."""
