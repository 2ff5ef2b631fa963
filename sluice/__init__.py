"""Command line and root settings; the only package that sees both gateway and training."""
