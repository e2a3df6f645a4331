"""Two questions that readers of the paper ask, answered by experiment: `expire-span study questions`."""
