"""From text to tokens and back: tokenizers, stop words, grammars.

Chat templates are in `server/chat/`. What a token id means on the device is in `ops/sampling/`.
"""
