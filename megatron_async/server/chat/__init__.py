"""How chats are written for a model, and read from it."""
