"""What runs tell who looks on: ranges, timeline, step log, metrics."""
