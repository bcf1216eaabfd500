"""Attacks: does what seems forgotten come back?

probes    what is asked about the forget rows, and how recall is scored
quantise  rounding the weights to few bits (arXiv 2410.16454)
relearn   a little fine-tuning, against a model never trained on the forget set
prompt    answer prefixes, paraphrases, examples in the context
registry  attacks that ask whether a text was learned, a file each in ``membership``
members   those that are asked for, judged, and their file
results   files and tables of the others
"""
