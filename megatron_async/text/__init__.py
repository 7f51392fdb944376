"""From text to tokens and back: tokenizer, stop words, grammars."""
