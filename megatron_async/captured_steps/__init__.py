"""Whole steps as captured graphs: which padded shapes have one (`graph_shapes.py`), and capturing,
timing and finding them (`step_graphs.py`).

The work that a graph replays is in `text_generation_controllers/`; which shape a step gets is asked
by `contexts/`. docs/captured_steps.md tells the whole story.
"""
