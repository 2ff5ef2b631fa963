"""What travels between gateway and engine, as readers and writers that own no socket."""
