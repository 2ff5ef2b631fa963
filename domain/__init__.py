"""Values every other package shares: requests, fleets, lengths, events, outcomes."""
