"""Behind one door, for speed alone: programs as we read them, chains last, words, rounding."""
