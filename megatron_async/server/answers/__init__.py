"""From tokens to the JSON of an answer."""
