"""The HTTP server: OpenAI's protocol in front of a coordinator's replicas."""
