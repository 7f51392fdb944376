"""Chats: templates, tools, and what models write of thoughts and calls."""
