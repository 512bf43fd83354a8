"""What every room uses: pytrees, validation of arguments, sums, parts of a state."""
