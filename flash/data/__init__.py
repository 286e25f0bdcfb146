"""Rows of data sets, for `flash sft` and for environments: files become rows (`tables`), and rows of all common shapes
become conversations, prompts and answers of one form (`shapes`). Errors name the file, the row, counted from 1, and the
cure.
"""
