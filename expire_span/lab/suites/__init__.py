"""Suites of questions about long contexts: what a cache still knows after it was compressed, scored as the field does."""
