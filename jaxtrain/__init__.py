"""A JAX/Flax training stack: an exact train step, trusted checkpoints, a planner. Import submodules by name."""
