"""The functions that users call beside expectations: draws, paths, optimisers, warm-up, checks."""
