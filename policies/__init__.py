"""The decision core, its admission, queue and ledger, and the scorers that rank routes."""
