"""What runs tell who looks on: ranges, timeline, metrics."""
