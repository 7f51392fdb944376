"""Prefill attention with one interface: a file for each backend, and the choice among them."""

from __future__ import annotations
