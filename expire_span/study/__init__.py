"""Studies of memory: experiments that end in one page and one file of numbers each."""
