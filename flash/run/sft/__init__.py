"""Supervised fine-tuning, `flash sft`: rows become batches (`rows`, `course`), ranks train them (`rank`), and a launch
keeps the ranks going (`launch`). There is no hub and no engine; the trainer and the run directory are those of any run.
"""
