"""What each engine calls its load, and how to tell engines apart by asking a bare URL."""
