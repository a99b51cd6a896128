"""The model run with a selection really applied: perplexity, next-token distributions, retrieval, against dense.

Read run.py first: it goes through documents and cells. likelihood.py, needles.py and retrieval.py measure one of each;
tables.py keeps what they find, summary.py averages it.
"""
