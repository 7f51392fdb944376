"""Chats: templates, tools, and what models write of thoughts and calls. What a request cannot ask
for is a `Refusal`, which names the field."""
