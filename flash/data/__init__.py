"""Rows of data sets, for `flash sft` and for environments.

`tables` reads files as rows. `shapes` converts rows of all common shapes to conversations, prompts and answers of one
form. Error messages name the file, the row, counted from 1, and the remedy.
"""
