"""From values and decisions to the time loop: a chain and its derivative."""
