"""Shared by all folders: pytrees, validation of arguments, sums, parts of a state."""
