"""Score and select in one op, with the scores kept under a bound at any length."""
