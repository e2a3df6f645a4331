"""What studies, analyses and compares: experiments on top of the library."""
