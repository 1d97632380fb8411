"""A head that drafts all positions in one forward (P-EAGLE, arXiv 2602.01469), with a small sequential part behind it.

EAGLE-3's layer reads the target's features and the newest token, as it does there, and beside them a row for each
further position, which has a learned vector in place of what is not known yet. What the rows say is independent of
what is drafted before; a recurrent state of a few numbers, a step a drafted token, ties them together again, as in
DSpark's sequential head: it moves the scores of the tokens that each row finds likeliest.
"""
