"""Long runs: rounds, checkpoints, devices, the progress bar. Independent of chains."""
