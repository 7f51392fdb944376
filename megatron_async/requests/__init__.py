"""What a request is: what it asks, what it says, who waits for it."""
