"""How long, how fast, how good: fills estimate columns, decides nothing."""
