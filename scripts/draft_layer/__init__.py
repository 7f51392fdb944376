"""Parts of `scripts/train_draft_layer.py`."""
