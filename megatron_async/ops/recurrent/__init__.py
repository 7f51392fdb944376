"""Recurrent layers, whose state has a fixed size: Mamba-2 (Dao and Gu 2024) and Gated DeltaNet
(Yang, Kautz and Hatamizadeh 2024)."""
