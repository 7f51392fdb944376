"""From the JSON body of a request to what the engine is asked. What cannot be is a `Refusal`, which
names the field, its value and what is allowed."""
