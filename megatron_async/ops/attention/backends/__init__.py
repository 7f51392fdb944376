"""Prefill attention with one interface: its backends, and the choice among them."""

from __future__ import annotations
