"""All layers of a step of one row in one kernel, whose programs stay until the last layer."""
