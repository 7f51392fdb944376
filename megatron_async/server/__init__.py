"""The HTTP server: OpenAI's protocol in front of a coordinator's replicas, and the page at `/`.

Nothing here imports torch. The coordinator and its messages are in `serving/`. The guide is
docs/server.md.
"""
