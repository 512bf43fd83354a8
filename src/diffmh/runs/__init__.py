"""Long runs: rounds, checkpoints, devices, the progress bar. It knows nothing of chains."""
