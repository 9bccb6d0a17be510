"""What a round did: traces."""
