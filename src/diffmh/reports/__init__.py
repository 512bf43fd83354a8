"""From a run's outcome to the printed report."""
