"""Reading JAX's programs: the only room that touches what JAX may change."""
