"""Checkpoints behind one small interface over Orbax."""
