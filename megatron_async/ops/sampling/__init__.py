"""From logits to tokens: filters, penalties, masks, noise, log probs."""
