"""Reading JAX's programs: the only folder that depends on JAX internals."""
