"""Trained methods beside EAGLE-3, a file each: how its heads learn (a `Lesson`), and how drafts are made of them.

What stands here is found by name: heads through `draft/kinds.py`, lessons through `METHODS` of `train/config.py`,
proposers through `decode/proposers.py`.
"""
