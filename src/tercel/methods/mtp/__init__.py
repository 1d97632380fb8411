"""The MTP modules of newer checkpoints as a draft head: multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

A module reads the embedding of a token and, of the token before it, what the module before it gave (the first one: the
target's last hidden state, after the final norm); one decoder layer of the target's own kind makes of them what its
output layer tells the next token by. `families.py` has the names that checkpoints store them under.
"""
