"""Text from files to packed rows to host batches; no jax of its own."""
