"""Studies of memory: experiments, each of which writes one page (report.html) and one file of numbers (study.json)."""
