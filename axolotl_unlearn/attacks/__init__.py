"""Attacks: does what seems forgotten come back?

probes    what is asked about the forget rows, and how recall is scored
quantise  rounding the weights to few bits (arXiv 2410.16454)
relearn   a little fine-tuning, against a model never trained on the forget set
prompt    answer prefixes, paraphrases, examples in the context
inside    hidden states and gradients at texts that were known (arXiv 1812.00910)
results   files, tables and curves of all of them
"""
