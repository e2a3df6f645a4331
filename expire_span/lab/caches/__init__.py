"""Judging caches of a pretrained model beside each other: perplexity, questions, and rules to compare with."""
