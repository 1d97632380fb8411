"""The attack campaign: thousands of wrong, broken and hostile inputs, each given to `tercel` as a user would.

    python -m attack --json out/attack.json --write docs/reliability.md     all kinds, then the table
    python -m attack --only gguf:17 --seed 0                                one input again, with all it printed

What an input may do and what it may not stands in `verdicts.py`; how it is held in a process of its own, with limits
of memory, time and disk, in `forks.py`. An input is named by its kind and number and made anew from the seed, so that
one that failed can always be had again.
"""
